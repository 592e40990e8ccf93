"""GEGLU: y = gelu(gate) * up with GELU in its tanh form (Shazeer, arXiv:2002.05202)."""

import jax

from xlafuse.blocks import gelu


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`gate`, `up` [rows, columns] -> `y`, same shape; every operation written out and in their dtype."""
    activated = gelu.apply({"x": inputs["gate"]})["y"]  # in the stage "gelu"
    with jax.named_scope("multiply"):
        return {"y": activated * inputs["up"]}
