"""Pre-norm SwiGLU MLP with residual (Shazeer, arXiv:2002.05202), as in Llama.

y = x + (silu(h @ gate_weight) * (h @ up_weight)) @ down_weight with h = rmsnorm(x, norm_weight).
"""

import jax

from xlafuse.blocks.rmsnorm import rmsnorm


def apply(inputs: dict[str, jax.Array], *, eps: float) -> dict[str, jax.Array]:
    """Return the MLP's output.

    `x` [tokens, width], `norm_weight` [width], `gate_weight`, `up_weight` [width, hidden], `down_weight` [hidden,
    width] -> `y` [tokens, width]. Products accumulate in float32 on a GPU and are stored in x's dtype; the norm is
    computed in float32 (see rmsnorm).
    """
    x = inputs["x"]
    with jax.named_scope("norm"):
        h = rmsnorm(x, inputs["norm_weight"], eps)
    with jax.named_scope("gate"):
        gate = h @ inputs["gate_weight"]
    with jax.named_scope("up"):
        up = h @ inputs["up_weight"]
    with jax.named_scope("act"):
        activated = gate * jax.nn.sigmoid(gate) * up
    with jax.named_scope("down"):
        down = activated @ inputs["down_weight"]
    with jax.named_scope("residual"):
        return {"y": x + down}
