"""The boxes, groups and folds of a drawing, as the browser lays them out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graph_builder import graph, kernel

from xlafuse.compare.graph import formats
from xlafuse.compare.graph.analyse.totals import declared_bytes
from xlafuse.compare.graph.model import FusionGraph, Kernel
from xlafuse.compare.report.page import page
from xlafuse.compare.report.page.drawing import drawing
from xlafuse.compare.sources.result import Result

STATIC = Path(page.__file__).parent / "static"
NORM = kernel("n", "reduction", "norm:mean@1", "x", "h")
MOST_BANDS, UNFOLDED = 20, 16  # of static/drawing-layout.js


def distinct(number: int) -> Kernel:
    """Return a kernel for the operation of a line of its own."""
    return kernel(f"n{number}", "reduction", f"norm:mean@{number}", "x", "h")


@pytest.fixture(scope="module")
def script(browser: Any) -> Iterator[Any]:
    """A page with the scripts of the layout."""
    it = browser.new_page()
    names = ("make.js", "drawing-layout.js")
    scripts = "".join(f"<script>{(STATIC / name).read_text()}</script>" for name in names)
    it.set_content(f"<!doctype html><script>window.xlafuse = {{}}</script>{scripts}")
    yield it
    it.close()


@pytest.fixture(scope="module")
def layouts(script: Any) -> Callable[[FusionGraph], list[dict[str, Any]]]:
    def laid(shown: FusionGraph) -> list[dict[str, Any]]:
        data = drawing.of_case([Result("xla", 1, Path("run"), lambda: shown)])
        found: list[dict[str, Any]] = script.evaluate(
            "data => xlafuse.drawn.layouts(data, xlafuse.drawn.columnsOf(data))", data
        )
        return found

    return laid


def test_neighbouring_low_cost_stages_are_grouped(layouts: Any) -> None:
    """A kernel of a group keeps its operations; its stages are those of the data."""
    one = [kernel(f"k{i}", "elementwise", f"s{i}:mul@{i}", f"b{i}", f"b{i + 1}") for i in range(MOST_BANDS + 4)]
    kernels = [replace(each, device_time_us=900.0 if i == 10 else 1.0) for i, each in enumerate(one)]
    together, apart = layouts(graph(*kernels))
    assert [band["label"] for band in together["bands"]] == ["s0 … s9", "s10", f"s11 … s{MOST_BANDS + 3}"]
    assert len(apart["bands"]) == MOST_BANDS + 4
    assert [len(fold["members"]) for fold in together["columns"][0]["folds"]] == [MOST_BANDS + 4 - UNFOLDED]
    assert apart["columns"][0]["folds"] == []
    last = together["columns"][0]["kernels"][-1]
    assert last["pieces"] == [[0, 2, 2]] and last["ops"] == {"2": "mul"} and last["stages"] == {"23": "mul"}


def test_long_columns_fold_low_cost_kernels(layouts: Any) -> None:
    many = [replace(distinct(i), device_time_us=1.0) for i in range(UNFOLDED + 3)]
    (laid,) = layouts(graph(replace(NORM, device_time_us=500.0), *many))
    (fold,) = laid["columns"][0]["folds"]
    assert len(fold["members"]) == 4 and 0 not in fold["members"]
    assert fold["text"] == "4.00 µs, 32.0 kB"


def test_one_kernel_stands_for_those_of_the_same_work_in_every_layer(layouts: Any) -> None:
    """By their time together they come before a kernel that is longer than one of them."""
    layers = [replace(NORM, name=f"n{i}", device_time_us=10.0) for i in range(6)]
    others = [replace(distinct(i + 2), device_time_us=30.0) for i in range(UNFOLDED)]
    (laid,) = layouts(graph(*layers, *others))
    (fold,) = laid["columns"][0]["folds"]
    assert fold["members"] == [1, 2, 3, 4, 5, UNFOLDED + 5]
    assert [each["times"] for each in laid["columns"][0]["kernels"][:7]] == [6, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("time", [0.0004, 0.025, 1.005, 8.5, 12.345, 123.45, 61413.0, None])
def test_totals_of_a_fold_are_those_of_the_terminal(layouts: Any, time: float | None) -> None:
    few = [replace(distinct(i), device_time_us=time) for i in range(UNFOLDED + 2)]
    made = graph(replace(NORM, device_time_us=9e5), *few)
    fold = layouts(made)[0]["columns"][0]["folds"][0]
    folded = [(made.kernels or ())[i] for i in fold["members"]]
    words = [] if time is None else [formats.microseconds(sum(each.device_time_us or 0 for each in folded))]
    assert fold["text"] == ", ".join([*words, formats.size(sum(declared_bytes(each) or 0 for each in folded))])


@pytest.mark.parametrize("size", [0, 999, 1000, 1125, 106_500, 107_500, 999_499, 999_500, 2_147_483_648, 10**15])
def test_sizes_are_those_of_the_terminal(script: Any, size: int) -> None:
    assert script.evaluate("size => xlafuse.size(size)", size) == formats.size(size)


def test_short_columns_fold_nothing(layouts: Any) -> None:
    (laid,) = layouts(graph(*[distinct(i) for i in range(UNFOLDED)]))
    assert laid["columns"][0]["folds"] == []


def test_boxes_of_a_track_share_at_most_a_band_at_their_ends(script: Any) -> None:
    rng = random.Random(0)
    for _ in range(200):
        held = [sorted(rng.sample(range(8), rng.randint(0, 4))) for _ in range(rng.randint(1, 12))]
        placed = script.evaluate("held => xlafuse.drawn.pieces(held)", held)
        for bands, own in zip(held, placed, strict=True):
            covered = {band for _, first, last in own for band in range(first, last + 1)}
            assert covered >= set(bands) and bool(covered) == bool(bands)
        boxes = [piece for own in placed for piece in own]
        for n, (track, _, last) in enumerate(boxes):
            for other, first, end in boxes[n + 1 :]:
                assert track != other or last <= first or end < boxes[n][1]


def test_boxes_are_split_if_that_needs_fewer_tracks(script: Any) -> None:
    assert script.evaluate("xlafuse.drawn.pieces([[0, 3], [1, 2]])") == [[[0, 0, 0], [0, 3, 3]], [[0, 1, 2]]]
    assert script.evaluate("xlafuse.drawn.pieces([[0, 3]])") == [[[0, 0, 3]]]
