"""The layout of a case's inputs in PyTorch's memory; a stored case without a layout is contiguous."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.numerics import reference  # noqa: E402
from xlafuse.compare.spec.block import Block  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402
from xlafuse.compare.workers.pytorch.worker import TorchBackend  # noqa: E402

SIZES = {"m": 3, "k": 5, "n": 2}


@pytest.mark.parametrize(("layout", "strides"), [("contiguous", [(5, 1), (2, 1)]), ("transposed", [(1, 3), (1, 5)])])
def test_inputs_have_the_case_s_layout_and_the_drawn_values(layout: str, strides: list[tuple], tmp_path: Path) -> None:
    case = Case("matmul", "x", SIZES, "float32", "train", layout=layout)
    drawn, _ = reference.store_inputs(case, 0, tmp_path / "0")
    backend = TorchBackend()
    given = backend.inputs(tmp_path / "0", case)
    assert [given[name].stride() for name in "ab"] == strides
    assert all(torch.equal(given[name], drawn[name].to(given[name].device)) for name in "ab")
    assert all(given[name].is_leaf and given[name].requires_grad for name in "ab")
    assert backend.changed_inputs(given, tmp_path / "0", case) == []
    again, _ = reference.store_inputs(case, 1, tmp_path / "1")
    second = backend.inputs(tmp_path / "1", case)
    assert second["a"] is given["a"] and torch.equal(second["a"], again["a"].to(given["a"].device))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda block: block.name)
def test_drawn_inputs_are_contiguous(block: Block, tmp_path: Path) -> None:
    """The rows of moe's router came from a transposed matrix, and PyTorch's programs read it column by column."""
    case = next(case for case in block.cases("check") if case.layout == "contiguous")
    drawn, cotangents = reference.store_inputs(case, 0, tmp_path / "0")
    assert [name for name, tensor in (drawn | cotangents).items() if not tensor.is_contiguous()] == []


def test_a_vector_has_one_layout(tmp_path: Path) -> None:
    case = Case("rmsnorm", "x", {"rows": 3, "columns": 5}, "bfloat16", "fwd", layout="transposed")
    reference.store_inputs(case, 0, tmp_path / "0")
    given = TorchBackend().inputs(tmp_path / "0", case)
    assert given["x"].stride() == (1, 3) and given["weight"].stride() == (1,)


def test_a_case_stores_its_layout() -> None:
    found = {case.layout for block in BLOCKS.values() for case in block.cases("check")}
    assert found == {"contiguous", "transposed"}
    for case in (case for block in BLOCKS.values() for case in block.cases("check")):
        assert Case.from_json(case.to_json()) == case
    plain = Case("matmul", "x", SIZES, "float32", "fwd")
    assert Case.from_json({k: v for k, v in plain.to_json().items() if k != "layout"}) == plain
