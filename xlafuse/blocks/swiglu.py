"""SwiGLU: y = silu(gate) * up with silu(x) = x sigmoid(x) (Shazeer, arXiv:2002.05202)."""

import jax


def apply(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return silu(gate) * up: `gate`, `up` [rows, columns] -> `y`, of the same shape, computed in their dtype."""
    gate = inputs["gate"]
    with jax.named_scope("silu"):
        activated = gate * jax.nn.sigmoid(gate)
    with jax.named_scope("multiply"):
        return {"y": activated * inputs["up"]}
