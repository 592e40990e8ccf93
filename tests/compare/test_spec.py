"""Blocks as data: names, cases, and the bytes that no implementation can avoid."""

from __future__ import annotations

import pytest

from compare.blocks import BLOCKS
from compare.spec import Block, Case


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_a_block_is_consistent(block: Block) -> None:
    axes = {axis for t in block.inputs for axis in t.axes}
    names = [t.name for t in (*block.inputs, *block.outputs)]
    assert len(names) == len(set(names))
    assert set(block.backward_needs) <= set(names)
    assert bool(block.backward_needs) == ("train" in block.directions)
    assert set(block.slices) <= axes
    assert len({i.name for i in block.implementations}) == len(block.implementations)
    assert len({s.name for s in block.shapes}) == len(block.shapes)
    for shape in block.shapes:
        assert set(shape.sizes) == axes, shape.name
    for suite in ("quick", "full", "check"):
        cases = block.cases(suite)
        assert cases and len({c.id for c in cases}) == len(cases)
    assert {c.id for c in block.cases("quick")} <= {c.id for c in block.cases("full")}
    assert {c.direction for c in block.cases("quick")} == set(block.directions)


def test_compulsory_bytes_of_softmax() -> None:
    case = Case("softmax", "x", {"rows": 3, "columns": 5}, "bfloat16", "train")
    # forward reads x and writes y; backward reads dy and y and writes dx
    assert BLOCKS["softmax"].bytes_compulsory(case) == {"forward": 2 * 2 * 15, "backward": 3 * 2 * 15}


def test_compulsory_bytes_of_vector_add() -> None:
    case = Case("vector_add", "x", {"elements": 7}, "float16", "fwd")
    block = BLOCKS["vector_add"]
    assert block.bytes_compulsory(case) == {"forward": 3 * 2 * 7}
    assert block.part_flops(case)["forward"] / block.bytes_compulsory(case)["forward"] == pytest.approx(1 / 6)


def test_attention_flops_are_half_the_square() -> None:
    sizes = {"batch": 2, "heads": 3, "sequence": 8, "head_dim": 16}
    case = Case("attention", "x", sizes, "bfloat16", "train")
    flops = BLOCKS["attention"].part_flops(case)
    assert flops["forward"] == 2 * 3 * (2 * 2 * 8 * 8 * 16) / 2
    assert flops["backward"] == 2.5 * flops["forward"]


def test_a_case_survives_json() -> None:
    for block in BLOCKS.values():
        for case in block.cases("full"):
            assert Case.from_json(case.to_json()) == case
