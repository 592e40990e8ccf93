"""A graph in a terminal: complete, within its columns, and harmless whatever the names in it are."""

from __future__ import annotations

import pytest
from examples import EAGER, INDUCTOR, STRANGE, XLA

from compare.graph import formats, show, show_align, show_diff, show_why
from compare.graph.align import align
from compare.graph.diff import diff
from compare.graph.model import Access, Buffer, FusionGraph, Kernel


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").replace("├──", " ").replace("└──", " ").split())


@pytest.mark.parametrize("graph", [XLA, INDUCTOR, EAGER, STRANGE], ids=["xla", "inductor", "eager", "strange"])
@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal_nor_moves_its_cursor(graph: FusionGraph, width: int) -> None:
    text = show.text(graph, width)
    assert max(map(len, text.splitlines())) <= width
    assert not [c for c in text if ord(c) < 32 and c != "\n" or c in "\x7f\x9b\u202e"]


@pytest.mark.parametrize("width", [40, 80])
def test_every_other_view_is_as_harmless(width: int) -> None:
    graphs = [STRANGE, XLA]
    views = [
        show.kernel(STRANGE, 0, width=width), show.stage(STRANGE, "st<i>age", [0], width=width),
        show_why.tree(STRANGE, 1e12, "h200"), show_diff.tree("a\x1b[2J", diff(*graphs), *graphs),
        show_align.table(["a\x1b[2J", "b"], graphs, align(graphs)),
    ]
    for view in views:
        text = show.render(view, width)
        assert max(map(len, text.splitlines())) <= width
        assert not [c for c in text if ord(c) < 32 and c != "\n" or c in "\x7f\x9b\u202e"]


def test_kernels_operations_lines_and_costs() -> None:
    text = flat(show.text(XLA))
    for part in (
        "swiglu_mlp/llama-8b/bf16/train/xla", "xla for h200, jax 0.11.2", "forward: 6 kernels bytes share µs share",
        "1. input_convert_reduce_fusion 50.3 MB 4% 11.4 1%", "reduction · reads 16.8 MB, writes 33.6 MB · device",
        "norm/mean_square convert_element_type xlafuse/blocks/rmsnorm.py:10",
        "mul, reduce_sum xlafuse/blocks/rmsnorm.py:11", "3. custom-call.1 193 MB 14% 304 22%", "backward: 2 kernels",
        "not autotuned", "saved for backward: 2 buffers, 117 MB", "silu bf16[2048,14336] 58.7 MB",
    ):
        assert part in text, part


def test_markup_in_names_is_text() -> None:
    assert "[bold]x[/bold]" in show.text(STRANGE)


def test_what_is_not_known_is_not_made_up() -> None:
    text = flat(show.text(STRANGE))
    assert "reads ?, writes ?" in text
    assert "launches depend on data" in text
    assert "1 thing could not be read" in text
    assert "µs" not in text


def test_operations_without_kernels() -> None:
    text = flat(show.text(EAGER))
    assert "2 operations" in text
    assert "cube aten.mul gelu.py:3" in text
    assert "kernel" in text and "forward" not in text


def test_of_a_large_graph_the_costly_kernels_are_shown_and_the_others_counted() -> None:
    many = 500
    kernels = tuple(
        Kernel(f"k{i}", "elementwise", inputs=(Access("x", 1000 if i == 250 else 1),)) for i in range(many)
    )
    graph = FusionGraph("large", "xla", kernels, (Buffer("x", (1000,), "s8", 1000, "input"),))
    text = flat(show.text(graph))
    assert "251. k250" in text
    hidden = sum(int(words.split()[-1]) for words in text.split(" kernels of less cost; --all shows them")[:-1])
    assert hidden == many - show.MOST_KERNELS
    assert "500. k499" in flat(show.render(show.overview(graph, every=True)))


def test_one_kernel() -> None:
    text = flat(show.render(show.kernel(XLA, 1)))
    for part in (
        "2. loop_convert_multiply_fusion", "profilers call it loop_convert_multiply_fusion",
        "x_f32 f32[2048,4096] 33.6 MB intermediate, from 1", "h bf16[2048,4096] 16.8 MB intermediate, to 3, 4",
        "input_convert_reduce_fusion (producer): reduction: not fusing a reduction into its consumer",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abc", 3, "abc"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 4, "ab…h"), ("", 9, "unnamed"), ("a\x1bb", 9, "a b")],
)
def test_names_are_shortened_in_the_middle(text: str, width: int, short: str) -> None:
    assert formats.name(text, width) == short


@pytest.mark.parametrize(
    ("line", "short"), [("a.py:1", "a.py:1"), ("/home/someone/project/mlp.py:26", "…/project/mlp.py:26"),
                        ("averylongfilename_without_folders.py:7", "…me_without_folders.py:7")],
)
def test_places_keep_their_end(line: str, short: str) -> None:
    assert formats.place(line, 24) == short


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (8192, "8.19 kB"), (999_999, "1.00 MB"), (58720256, "58.7 MB"), (None, "?"),
     (117440512, "117 MB"), (1.5e12, "1.50 TB")],
)
def test_sizes(count: float | None, text: str) -> None:
    assert formats.size(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(1, 2, "50%"), (1, 1000, "<1%"), (0, 9, "0%"), (1, 0, ""), (None, 9, "")]
)
def test_shares(part: float | None, whole: float, text: str) -> None:
    assert formats.share(part, whole) == text
