"""A JAX program declares as rounded sums exactly the gradients that its types sum over rows in the case's dtype."""

from __future__ import annotations

import re

import pytest

jax = pytest.importorskip("jax")

from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.spec.implementation import Implementation  # noqa: E402
from xlafuse.compile import directions  # noqa: E402

REDUCE = re.compile(r"stablehlo\.reduce\(.*applies stablehlo\.add across dimensions = \[([\d, ]+)\] : \(tensor<(\S+)>")


def cases() -> list[tuple[Case, Implementation]]:
    found = []
    for block in BLOCKS.values():
        small = [c for c in block.cpu_check_cases() if (c.direction, c.dtype) == ("train", "bfloat16")]
        rows = [i for i in block.implementations if i.name in ("xla", "xla-flax")]
        found += [(case, row) for case in small[:1] for row in rows]
    return found


def lowered(case: Case, row: Implementation) -> str:
    block = BLOCKS[case.block]
    inputs, cotangents = (
        {t.name: jax.ShapeDtypeStruct(t.shape(case.sizes), t.dtype_in(case)) for t in tensors}
        for tensors in (block.inputs, block.outputs)
    )
    forward, backward = directions.train_phases(row.load(), block.attributes_of(case))
    return str(jax.jit(lambda x, dy: backward(forward(x)[1], dy)).lower(inputs, cotangents).as_text())


def sums_over_rows(text: str) -> int:
    """Count sums in bfloat16 over all axes but the last; a second sum over an axis of size 1 adds nothing."""
    count = 0
    for axes, operand in REDUCE.findall(text):
        *shape, dtype = operand.split("x")
        reduced = [int(axis) for axis in axes.split(", ")]
        count += dtype == "bf16" and reduced == list(range(len(shape) - 1)) and {shape[a] for a in reduced} != {"1"}
    return count


@pytest.mark.parametrize(("case", "row"), cases(), ids=lambda each: getattr(each, "id", getattr(each, "name", None)))
def test_declarations_are_what_the_types_say(case: Case, row: Implementation) -> None:
    text = lowered(case, row)
    vectors = [name for name in row.rounded_sums if len(BLOCKS[case.block].tensor(name).axes) == 1]
    assert sums_over_rows(text) == len(vectors)
    if len(vectors) < len(row.rounded_sums):  # a matrix whose gradient is scattered
        assert re.search(r'"stablehlo\.scatter".*?stablehlo\.add.*?tensor<bf16>', text, re.DOTALL)
