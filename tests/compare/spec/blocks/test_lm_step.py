"""The reference of a training step: its loss in NumPy, its gradients by finite differences, and its tolerances."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.numerics import (  # noqa: E402
    input_arrays,
    reference,
)
from xlafuse.compare.numerics.tolerance import Scale  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS, lm_step  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402

STEP = BLOCKS["lm_step"]
SMALL = lm_step.sizes(
    layers=2, batch=1, sequence=4, width=4, heads=2, kv_heads=1, head_dim=2, hidden=3, vocabulary=5, distinct=3, step=7
)


def test_loss_agrees_with_numpy_and_moments_with_finite_differences() -> None:
    case = Case("lm_step", "small", SMALL, "float32", "fwd")
    inputs = {
        t.name: input_arrays.draw(case, t, 0).astype(np.float64 if t.differentiable else np.int64)
        for t in STEP.inputs
    }
    given = {name: torch.from_numpy(np.asarray(array)).to(reference.device()) for name, array in inputs.items()}
    found = reference.evaluate(case, given, {}, torch.float64)
    assert set(found) == {t.name for t in STEP.outputs}
    attributes = STEP.attributes_of(case)
    beta1 = attributes.pop("optimizer")["beta1"]

    def loss(values: dict[str, np.ndarray]) -> float:
        return float(lm_step.loss_of(np, values, **attributes))

    np.testing.assert_allclose(float(found["loss"]), loss(inputs), rtol=1e-12)
    for name in (t.name for t in lm_step.PARAMETERS):
        gradient = (found[f"new_mu_{name}"].cpu().numpy() - beta1 * inputs[f"mu_{name}"]) / (1 - beta1)
        direction = np.random.default_rng(0).standard_normal(gradient.shape)
        up, down = ({**inputs, name: inputs[name] + step * direction} for step in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient * direction).sum(), (loss(up) - loss(down)) / 2e-6, rtol=1e-5, atol=1e-8)


def test_moments_stay_float32_in_the_independent_evaluation() -> None:
    """Rounded to bfloat16 they would allow errors of a percent."""
    case = Case("adamw", "x", {"elements": 300, "step": 10}, "bfloat16", "fwd")
    inputs, _ = reference._draw(case, 0)
    exact = reference.evaluate(case, inputs, {}, torch.float64)
    errors = reference._independent_errors(case, inputs, {}, exact)
    assert all(error < 2.0**-19 for error in errors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_a_tenth_too_large_exceeds_a_moment_s_tolerance(dtype: torch.dtype) -> None:
    """This holds for every parameter, though a bfloat16 parameter hides small changes."""
    case = next(c for c in STEP.cases("check") if c.dtype == str(dtype).removeprefix("torch."))
    inputs, _ = reference._draw(case, 0)
    exact = reference.evaluate(case, inputs, {}, torch.float64)
    errors = reference._independent_errors(case, inputs, {}, exact)
    beta1 = STEP.attributes["optimizer"]["beta1"]
    for name in (f"new_mu_{t.name}" for t in lm_step.PARAMETERS):
        wrong = 0.1 * (exact[name] - beta1 * inputs[name.removeprefix("new_")].double())
        rms = reference._rms(exact[name])
        tolerance = Scale(rms, float(exact[name].abs().max()), errors[name]).tolerance(2.0**-23)
        assert float(wrong.abs().max()) / rms > tolerance, name
