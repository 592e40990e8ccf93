"""The launches of a sort: known from a dump's thunks, else unknown."""

from pathlib import Path

import pytest

from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.model import FusionGraph, Launch
from xlafuse.compare.graph.render import text_view
from xlafuse.compare.sources.opening import open_source
from xlafuse.dumps import thunks
from xlafuse.hlo import gpu_program

SORT = """HloModule jit_f, is_scheduled=true

%less (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  ROOT %sort.4 = f32[1024]{0} sort(%x), dimensions={0}, to_apply=%less
}
"""


def _metadata(*kinds: str) -> str:
    return "".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "sort.4"\n    thunk_id: {number}\n  }}\n'
        f'  thunk_kind: "{kind}"\n}}\n' for number, kind in enumerate(kinds, start=1)
    )


def _dumped(folder: Path, *kinds: str) -> FusionGraph:
    (folder / "module_0001.jit_f.sm_9.0_gpu_after_optimizations.txt").write_text(SORT)
    if kinds:
        (folder / "module_0001.jit_f.thunk_metadata.txt").write_text(_metadata(*kinds))
    (source,) = open_source(folder).results
    return source.load()


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ((), "a sort of an unknown number of launches; bytes of one pass"),
        (("kCopy", "kCustomKernel"), "a sort in 1 copy and 1 kernel; bytes of one pass"),
        (("kCopy", "kKernel", "kKernel", "kMemset"), "a sort in 1 copy and 2 kernels and 1 kMemset; bytes of one pass"),
    ],
)
def test_a_sorts_launches_are_those_of_its_thunks_else_unknown(tmp_path: Path, kinds: tuple[str, ...], words: str):
    graph = _dumped(tmp_path, *kinds)
    ((kernel,),) = [graph.kernels or ()]
    assert (kernel.launches, kernel.least_launches) == (None, 1)
    assert words in text_view.facts(kernel)
    assert "launches depend on data" not in " ".join(text_view.facts(kernel))
    assert "sort_launches" not in text_view.render(text_view.kernel(graph, 0))
    declared = totals(graph).declared
    assert (declared.value, declared.unknown) == (8192, 1)


def test_a_sort_of_one_thunk_is_one_launch(tmp_path: Path) -> None:
    ((kernel,),) = [_dumped(tmp_path, "kCustomKernel").kernels or ()]
    assert kernel.launches == 1


def test_a_sort_of_another_platform_is_one_operation() -> None:
    ((kernel,),) = [from_hlo(gpu_program.parse(SORT), target="cpu").kernels or ()]
    assert kernel.launches == 1 and "sort_launches" not in kernel.facts


SEQUENCE = """\
001: kCopy         [source       | next=002 (1)] kCopy
004: kWhile        [prev=001 (1) | sink        ]
  body:
    002: kCustomKernel [source | next=003 (1)] sort_4 grid: [16, 2, 1] threads: [512, 1, 1]  shared_memory: 32 bytes
    003: kCustomKernel [prev=002 (1) | sink] sort_4__1 grid: [8, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
"""
PTX = """.extern .shared .align 16 .b8 global_smem[];
.visible .entry sort_4(
.reqntid 512, 1, 1
    .shared .align 4 .b8 tile_0[8192];
    .shared .align 4 .b32 tile_1[4];
"""


@pytest.mark.parametrize(("ptx", "shared"), [(PTX, 8192 + 16 + 32), ("", None)])
def test_a_kernels_launch_is_that_of_its_thunk(tmp_path: Path, ptx: str, shared: int | None) -> None:
    """A sort's first kernel counts. Static shared memory is in the PTX alone."""
    (tmp_path / "module_0001.jit_f.thunk_sequence.txt").write_text(SEQUENCE)
    if ptx:
        (tmp_path / "module_0001.jit_f.1.ptx").write_text(ptx)
    ((kernel,),) = [_dumped(tmp_path, "kCopy", "kCustomKernel", "kCustomKernel").kernels or ()]
    assert kernel.launch == Launch((16, 2, 1), (512, 1, 1), shared_bytes=shared)
    assert kernel.facts["sort_launches"] == {"kCopy": 1, "kCustomKernel": 2}


def test_a_dump_without_launches_states_none(tmp_path: Path) -> None:
    (tmp_path / "module_0001.jit_f.thunk_sequence.txt").write_text("001: kCustomKernel [source | sink] sort_4\n")
    ((kernel,),) = [_dumped(tmp_path, "kCustomKernel").kernels or ()]
    assert kernel.launch == Launch()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (".visible .entry a(\n.visible .entry b(\n  .shared .align 4 .b8 x[64];\n", {"a": 0, "b": 64}),
        ("  .shared .align 4 .b8 x[64];\n.visible .entry a(\n", {"a": 64}),
        # Either kernel may use it; alignment may add a gap.
        ("  .shared .align 4 .b8 x[64];\n.visible .entry a(\n.visible .entry b(\n", {"a": None, "b": None}),
        (".visible .entry a(\n  .shared .align 4 .b8 x[6];\n  .shared .align 16 .b8 y[32];\n", {"a": None}),
        (".visible .entry a(\n  .shared .align 8 .b64 x;\n", {"a": 8}),
        ("nonsense", {}),
    ],
)
def test_static_shared_memory(text: str, found: dict[str, int | None]) -> None:
    assert thunks.static_shared_bytes(text) == found
