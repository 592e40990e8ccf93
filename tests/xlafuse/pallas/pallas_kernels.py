"""Helpers of the tests of Pallas kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xlafuse.compare.spec.case import Case


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
