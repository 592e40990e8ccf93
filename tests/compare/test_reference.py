"""The float64 references: NumPy and PyTorch agree, gradients agree with finite differences, bits come from the seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from compare import arrays  # noqa: E402
from compare.blocks import BLOCKS  # noqa: E402
from compare.spec import Block, Case  # noqa: E402
from compare.workers import reference  # noqa: E402

SMALL = {
    "vector_add": {"elements": 5},
    "gelu": {"rows": 2, "columns": 3},
    "softmax": {"rows": 2, "columns": 4},
    "rmsnorm": {"rows": 2, "columns": 4},
    "matmul": {"m": 2, "k": 3, "n": 4},
    "linear_gelu": {"m": 2, "k": 3, "n": 4},
    "swiglu_mlp": {"tokens": 2, "width": 3, "hidden": 4},
    "attention": {"batch": 2, "heads": 2, "sequence": 3, "head_dim": 2},
}


def small_case(block: Block) -> Case:
    return Case(block.name, "small", SMALL[block.name], "float32", block.directions[-1])


def drawn(block: Block) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    case = small_case(block)
    inputs = {t.name: arrays.draw(case, t, 0).astype(np.float64) for t in block.inputs}
    cotangents = {t.name: arrays.draw(case, t, 1).astype(np.float64) for t in block.outputs}
    return inputs, cotangents


def as_torch(group: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(reference.device()) for name, array in group.items()}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_numpy_and_torch_evaluate_one_formula(block: Block) -> None:
    inputs, _ = drawn(block)
    expected = block.reference(np, inputs, **block.attributes)
    found = reference.evaluate(block, as_torch(inputs), {}, torch.float64)
    assert set(found) == set(expected) == {t.name for t in block.outputs}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].cpu().numpy(), values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [b for b in BLOCKS.values() if "train" in b.directions], ids=lambda b: b.name)
def test_gradients_agree_with_finite_differences(block: Block) -> None:
    inputs, cotangents = drawn(block)
    found = reference.evaluate(block, as_torch(inputs), as_torch(cotangents), torch.float64)

    def loss(values: dict[str, np.ndarray]) -> float:
        outputs = block.reference(np, values, **block.attributes)
        return float(sum((outputs[n] * cotangents[n]).sum() for n in outputs))

    step = 1e-6
    for name, array in inputs.items():
        expected = np.empty_like(array)
        for position in np.ndindex(array.shape):
            up, down = ({**inputs, name: array.copy()} for _ in range(2))
            up[name][position] += step
            down[name][position] -= step
            expected[position] = (loss(up) - loss(down)) / (2 * step)
        np.testing.assert_allclose(found[f"d_{name}"].cpu().numpy(), expected, rtol=1e-6, atol=1e-7)


def test_attention_reference_is_causal() -> None:
    block = BLOCKS["attention"]
    inputs, _ = drawn(block)
    before = block.reference(np, inputs)["out"]
    inputs["k"][..., -1, :] += 1.0
    after = block.reference(np, inputs)["out"]
    np.testing.assert_array_equal(before[..., :-1, :], after[..., :-1, :])
    assert not np.allclose(before[..., -1, :], after[..., -1, :])


def test_the_same_seed_draws_the_same_bits_and_another_does_not() -> None:
    block = BLOCKS["rmsnorm"]
    case = Case("rmsnorm", "long", {"rows": 3, "columns": arrays._CHUNK // 2 + 7}, "float32", "fwd")
    x, weight = block.inputs
    np.testing.assert_array_equal(arrays.draw(case, x, 0), arrays.draw(case, x, 0))
    assert not np.array_equal(arrays.draw(case, x, 0), arrays.draw(case, x, 1))
    drawn = arrays.draw(case, x, 0)
    assert not np.array_equal(drawn[0], drawn[1])
    assert abs(drawn.std() - 1) < 0.01 and abs(drawn.mean()) < 0.01
    assert abs(arrays.draw(case, weight, 0).mean() - 1) < 0.01


def test_stored_bits_are_the_inputs(tmp_path: Path) -> None:
    case = Case("softmax", "odd", {"rows": 3, "columns": 5}, "bfloat16", "train")
    scales = reference.produce(case, 0, tmp_path)
    assert set(scales) == {"y", "d_x"}
    stored = torch.from_numpy(np.load(arrays.path_of(tmp_path, "input", "x"))).view(torch.bfloat16)
    drawn = torch.from_numpy(arrays.draw(case, BLOCKS["softmax"].inputs[0], 0))
    torch.testing.assert_close(stored, drawn.bfloat16(), rtol=0, atol=0)
    y = np.load(arrays.path_of(tmp_path, "output", "y"))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, torch.softmax(stored.double(), -1).numpy(), rtol=1e-12)
    assert np.isfinite([s["independent_error"] for s in scales.values()]).all()
