"""A decoder layer of Llama (Touvron et al., arXiv:2302.13971) with grouped queries (Ainslie et al., arXiv:2305.13245).

It is a flax nnx module with a part for each stage:

    x1 = x + out(attention(rope(qkv(attention_norm(x)))))       y = x1 + down(silu(gate(h)) * up(h)),  h = mlp_norm(x1)
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xlafuse.blocks import attention, rope
from xlafuse.blocks.rmsnorm import rmsnorm

Attend = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]

# The place of each weight in the module.
PATHS = {
    "attention_norm": ("attention_norm", "weight"), "w_qkv": ("qkv", "kernel"), "w_o": ("out", "kernel"),
    "mlp_norm": ("mlp_norm", "weight"), "w_gate": ("gate", "kernel"), "w_up": ("up", "kernel"),
    "w_down": ("down", "kernel"),
}


class RMSNorm(nnx.Module):
    """`rmsnorm` with its learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rmsnorm(x, self.weight[...], self.eps)


class DecoderBlock(nnx.Module):
    """The layer.

    `attend` maps q [batch, heads, sequence, head_dim], k and v [batch, kv_heads, ...] to `out`, of q's shape.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int, *, eps: float, theta: float,
        attend: Attend, rngs: nnx.Rngs,
    ) -> None:
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.heads, self.kv_heads, self.head_dim, self.theta, self.attend = heads, kv_heads, head_dim, theta, attend
        self.attention_norm = RMSNorm(width, eps)
        self.qkv = linear(width, (heads + 2 * kv_heads) * head_dim)
        self.out = linear(heads * head_dim, width)
        self.mlp_norm = RMSNorm(width, eps)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the layer's output: `x` [batch, sequence, width], `positions` [batch, sequence] -> y, of x's shape."""
        with jax.named_scope("attention_norm"):
            h = self.attention_norm(x)
        with jax.named_scope("qkv"):
            qkv = self.qkv(h)
        q, k, v = self._heads_of(qkv)
        with jax.named_scope("rope"):
            turned = rope.apply({"q": q, "k": k, "positions": positions}, theta=self.theta)
        with jax.named_scope("attention"):
            attended = self.attend({"q": turned["q_out"], "k": turned["k_out"], "v": v})["out"]
        with jax.named_scope("out"):
            projected = self.out(attended.swapaxes(1, 2).reshape(*x.shape[:2], -1))
        with jax.named_scope("attention_residual"):
            x = x + projected
        with jax.named_scope("mlp_norm"):
            h = self.mlp_norm(x)
        with jax.named_scope("gate"):
            gate = self.gate(h)
        with jax.named_scope("up"):
            up = self.up(h)
        with jax.named_scope("act"):
            activated = gate * jax.nn.sigmoid(gate) * up
        with jax.named_scope("down"):
            down = self.down(activated)
        with jax.named_scope("mlp_residual"):
            return x + down

    def _heads_of(self, qkv: jax.Array) -> list[jax.Array]:
        """Return q, k and v, each [batch, its heads, sequence, head_dim]."""
        by_head = qkv.reshape(*qkv.shape[:2], -1, self.head_dim).swapaxes(1, 2)
        return jnp.split(by_head, (self.heads, self.heads + self.kv_heads), axis=1)


def run_layer(
    x: jax.Array, params: Mapping[str, jax.Array], positions: jax.Array, *, heads: int, kv_heads: int, eps: float,
    theta: float, attend: Attend = attention.apply,
) -> jax.Array:
    """Call a `DecoderBlock` with the weights `params` on x; the keys of PATHS are their names."""
    width, head_dim = x.shape[-1], params["w_qkv"].shape[-1] // (heads + 2 * kv_heads)
    hidden = params["w_gate"].shape[-1]
    graph = _graph(width, heads, kv_heads, head_dim, hidden, eps=eps, theta=theta, attend=attend)
    weights: Any = {path: nnx.Param(params[name]) for name, path in PATHS.items()}
    y: jax.Array = nnx.merge(graph, nnx.from_flat_state(weights))(x, positions)
    return y


@cache
def _graph(*sizes: int, **settings: Any) -> Any:
    """Return the module without its weights; they are never allocated."""
    return nnx.graphdef(nnx.eval_shape(lambda: DecoderBlock(*sizes, rngs=nnx.Rngs(0), **settings)))


def apply(
    inputs: dict[str, jax.Array], *, heads: int, kv_heads: int, eps: float, theta: float,
    attend: Attend = attention.apply,
) -> dict[str, jax.Array]:
    """Return the layer's output.

    `x` [batch, sequence, width], `positions` [batch, sequence], `attention_norm`, `mlp_norm` [width], `w_qkv` [width,
    (heads + 2 kv_heads) head_dim], `w_o` [heads head_dim, width], `w_gate`, `w_up` [width, hidden], `w_down` [hidden,
    width] -> `y`, of x's shape.

    Columns of w_qkv are the queries' heads, then the keys', then the values'. Everything is stored in x's dtype;
    products accumulate in float32 on a GPU; norms, rotation and softmax are float32.
    """
    y = run_layer(
        inputs["x"], inputs, inputs["positions"], heads=heads, kv_heads=kv_heads, eps=eps, theta=theta, attend=attend
    )
    return {"y": y}


def apply_cudnn(inputs: dict[str, jax.Array], **attributes: Any) -> dict[str, jax.Array]:
    """Return the same with cuDNN's attention."""
    return apply(inputs, **attributes, attend=attention.apply_cudnn)
