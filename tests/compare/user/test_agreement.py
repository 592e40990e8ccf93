"""`xlafuse.explain([f, g], ..., check=True)`: functions of both frameworks, and whether their results agree."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from examples import INDUCTOR, XLA

import xlafuse
from xlafuse.compare.sources.explained import Explained
from xlafuse.compare.user import agreement

torch = pytest.importorskip("torch")
# jax is imported in functions: once a test module has imported it, tests/xlafuse could not set its environment.
pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")


def jax_norm(x: Any, weight: Any) -> Any:
    import jax

    y = x.astype(jax.numpy.float32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def torch_norm(x: Any, weight: Any) -> Any:
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def torch_mean_of_nothing(x: Any, weight: Any) -> Any:
    return x * weight * math.nan


def jax_pair(x: Any, weight: Any) -> Any:
    return {"b": x + weight, "a": x}


def torch_pair(x: Any, weight: Any) -> Any:
    return {"a": x * 2, "b": x + weight}


def checked(first: Any, second: Any, *args: Any) -> agreement.Agreement:
    frameworks = {name: "torch" if "torch" in name else "jax" for name in (first.__name__, second.__name__)}
    (found,) = agreement.check(
        {function.__name__: (frameworks[function.__name__], function) for function in (first, second)}, args, {}
    )
    return found


def rows(kind: str) -> tuple[Any, Any]:
    import jax

    if kind == "numpy":
        return np.ones((4, 64), np.float32) * 3, np.ones(64, np.float32)
    if kind == "jax":
        return jax.numpy.full((4, 64), 3, "bfloat16"), jax.numpy.ones(64, "bfloat16")
    if kind == "torch":
        return torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(64, dtype=torch.bfloat16)
    return jax.ShapeDtypeStruct((4, 64), "bfloat16"), torch.empty(64, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("kind", ["numpy", "jax", "torch", "shapes"])
def test_equal_functions_agree_on_arguments_of_any_framework(kind: str) -> None:
    args = rows(kind)
    assert checked(jax_norm, torch_norm, *args).agrees
    assert checked(torch_norm, jax_norm, *args).agrees


@pytest.mark.parametrize("other", [torch_mean_of_nothing, torch_pair], ids=["nan", "one of two outputs"])
def test_other_results_disagree(other: Any) -> None:
    first = jax_pair if other is torch_pair else jax_norm
    found = checked(first, other, *rows("shapes"))
    assert not found.agrees and "DISAGREE" in str(found)


LARGE = np.zeros((1 << 13, 1 << 14), np.float32), np.zeros(1 << 14, np.float32)


@pytest.mark.parametrize(
    ("other", "args", "reason"),
    [
        (torch_pair, None, "returns arrays of"),
        (lambda x, weight: x.missing, None, "does not run on the CPU: AttributeError"),
        (torch_norm, LARGE, r"give smaller arguments: check=\("),
    ],
    ids=["outputs", "error", "large"],
)
def test_functions_that_cannot_be_compared(other: Any, args: Any, reason: str) -> None:
    with pytest.raises(agreement.NotChecked, match=reason):
        checked(jax_norm, other, *(args or rows("numpy")))


def test_one_function_cannot_be_checked() -> None:
    with pytest.raises(xlafuse.ExplainError, match="several functions"):
        xlafuse.explain(jax_norm, *rows("numpy"), check=True)


def test_joined_results_keep_their_checks() -> None:
    check = agreement.Agreement("b", "a", 0.0, 0.1)
    assert (Explained({"a": XLA}) | Explained({"b": INDUCTOR}, (), (check,))).agreement == (check,)


@pytest.mark.parametrize("error", [0.0, 1.0, math.nan])
def test_every_view_shows_the_check_and_the_stages(error: float) -> None:
    check = agreement.Agreement("b", "a", error, 0.1)
    found = Explained({"a": XLA, "b": INDUCTOR}, (), (check,))
    assert str(check) in " ".join(str(found).split())
    page = found._repr_html_()
    assert str(check) in page and all(row.label in page for row in found.align().rows)
    assert found.to_json()["agreement"][0]["agrees"] is (error == 0.0)
