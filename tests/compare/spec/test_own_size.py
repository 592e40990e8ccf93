"""Sizes of the user's own: the main shape with other axes, and with the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.own_size import own_shape, shape_with

OWN = [
    ("attention", {"sequence": 12288, "heads": 24}, {"kv_heads": 24, "sequence": 12288, "batch": 2}),
    ("attention", {"heads": 24, "kv_heads": 8}, {"kv_heads": 8, "heads": 24}),
    ("decoder_block", {"heads": 16}, {"kv_heads": 8, "qkv": 32 * 128, "attended": 2048, "sequence": 4096}),
    ("moe", {"experts": 16}, {"used": 16}),
    ("decode_attention_paged", {"batch": 2}, {"pages": 1024}),
    ("gelu", {"rows": 7}, {"rows": 7, "columns": 14336}),
]


@pytest.mark.parametrize(("block", "axes", "expected"), OWN)
def test_other_sizes_follow(block: str, axes: Mapping[str, int], expected: Mapping[str, int]) -> None:
    shape = own_shape(BLOCKS[block], axes)
    assert {axis: shape.sizes[axis] for axis in expected} == expected
    assert shape.sizes.keys() == BLOCKS[block].shapes[0].sizes.keys()


@pytest.mark.parametrize(("block", "axes", "expected"), OWN)
def test_a_recorded_shape_is_recognized(block: str, axes: Mapping[str, int], expected: Mapping[str, int]) -> None:
    shape = own_shape(BLOCKS[block], axes)
    assert shape_with(BLOCKS[block], shape.sizes) == shape


@pytest.mark.parametrize("name", ["decode_attention", "decode_attention_paged"])
def test_a_size_that_the_main_shape_lacks_adds_an_axis(name: str) -> None:
    block, main = BLOCKS[name], BLOCKS[name].shapes[0]
    shape = own_shape(block, {"queries": 4})
    assert shape.name == "queries-4" and shape.sizes == {**main.sizes, "queries": 4}
    assert shape_with(block, shape.sizes) == shape
    assert own_shape(block, {"queries": 1}) is main
    assert own_shape(block, {"queries": 4, "batch": 2}).name == "batch-2-queries-4"
    with pytest.raises(UsageError, match="at least 1"):
        own_shape(block, {"queries": 0})


def test_different_sizes_have_different_names() -> None:
    chosen = [{"heads": 24}, {"heads": 24, "kv_heads": 8}, {"sequence": 24}, {"heads": 8, "sequence": 24}, {"heads": 8}]
    names = [own_shape(BLOCKS["attention"], axes).name for axes in chosen]
    assert len({*names}) == len(chosen) and not any(character in name for name in names for character in "/, ")


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda block: block.name)
def test_the_main_sizes_are_the_main_shape(block) -> None:  # type: ignore[no-untyped-def]
    main = block.shapes[0]
    assert own_shape(block, {}) is main
    assert shape_with(block, main.sizes) is main


@pytest.mark.parametrize(
    ("block", "axes", "named"),
    [
        ("attention", {"seq": 1}, "sequence"), ("decoder_block", {"qkv": 6144}, "follows"),
        ("rope", {"heads": 15}, "8"), ("gelu", {"rows": 0}, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(block: str, axes: Mapping[str, int], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        own_shape(BLOCKS[block], axes)
