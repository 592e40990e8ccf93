"""Helpers of the tests of Pallas kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlafuse.compare.spec.case import Case
from xlafuse.compile._jax_private import interpreted_pallas

DUMPS = {"DUMP_PTX": "1", "DUMP_PTXAS": "1"}


def structs(case: Case, tensors: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a case's tensors."""
    return {t.name: jax.ShapeDtypeStruct(t.shape(case.sizes), jnp.dtype(t.dtype_in(case))) for t in tensors}


def kernels_of(function: Any, *arguments: Any) -> list[Any]:
    """Return the equations of a function's Pallas kernels."""
    found = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "mpmd_map":
                found.append(equation)
                continue
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def interpreted(**parameters: Any) -> Any:
    """Return a context in which Pallas' interpreter runs kernels; skip on a GPU."""
    if jax.default_backend() == "gpu":
        pytest.skip("the interpreter runs on a CPU; on a GPU, test_every_implementation runs the kernels")
    return interpreted_pallas(**parameters)


def step(apply: Any, inputs: dict[str, Any], cotangents: dict[str, Any]) -> dict[str, Any]:
    """Return the outputs, and the gradient of each input x as d_x."""
    outputs, vjp = jax.vjp(apply, inputs)
    (gradients,) = vjp(cotangents)
    return outputs | {f"d_{name}": gradient for name, gradient in gradients.items()}


def largest_error(values: Any, reference: Any, dtype: str) -> float:
    """Return the largest error, in units of the dtype's precision at the largest value of its row."""
    scale = np.abs(reference).max(axis=-1, keepdims=True) + reference.std()
    error = np.abs(np.asarray(values).astype(np.float64) - reference) / scale
    return float(error.max() / float(jnp.finfo(dtype).eps))


def dump_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Mosaic write each kernel's code to `folder`."""
    for option, value in {**DUMPS, "DUMP_TO": str(folder)}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_{option}", value)


def dumped_code(folder: Path) -> dict[str, str]:
    """Return the PTX of each kernel, all of which copy by TMA and keep their values in registers."""
    found = {path.stem: path.read_text() for path in folder.glob("*.ptx")}
    for name, ptx in found.items():
        assert "cp.async.bulk.tensor" in ptx
        report = (folder / f"{name}.ptxas").read_text()
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        assert "serialized" not in report  # products that wait for each other
    return found
