"""GEGLU: y = gelu(gate) * up with GELU in its tanh form (Shazeer, arXiv:2002.05202)."""

import jax

from xlafuse.blocks import gelu


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return gelu(gate) * up: `gate`, `up` [rows, columns] -> `y`, of the same shape, computed in their dtype."""
    activated = gelu.apply({"x": inputs["gate"]})["y"]  # in the stage "gelu"
    with jax.named_scope("multiply"):
        return {"y": activated * inputs["up"]}
