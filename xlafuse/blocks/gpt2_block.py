"""A layer of GPT-2 (Radford et al., 2019) as a flax nnx module with a part for each stage.

Explicit seeds give the dropout masks.

    x1 = x + dropout(out(attention(qkv(norm(x)))) + b_o)       y = x1 + dropout(down(gelu(up(norm(x1)))) + b_down)
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xlafuse.blocks import attention, dropout_residual_norm, layernorm, linear_gelu

Attend = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]

# The place of each weight in the module.
PATHS = {
    "attention_norm_weight": ("attention_norm", "weight"), "attention_norm_bias": ("attention_norm", "bias"),
    "w_qkv": ("qkv", "kernel"), "b_qkv": ("qkv", "bias"), "w_o": ("out", "kernel"),
    "b_o": ("attention_residual", "bias"), "mlp_norm_weight": ("attention_residual", "weight"),
    "mlp_norm_bias": ("attention_residual", "shift"), "w_up": ("up", "kernel"), "b_up": ("up", "bias"),
    "w_down": ("down", "kernel"), "b_down": ("mlp_residual", "bias"),
}


class LayerNorm(nnx.Module):
    """`layernorm` with its learned weight and bias."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight, self.bias, self.eps = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return layernorm.apply({"x": x, "weight": self.weight[...], "bias": self.bias[...]}, eps=self.eps)["y"]


class LinearGelu(nnx.Module):
    """A linear layer followed by GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel, self.bias = nnx.Param(jnp.zeros((inputs, outputs))), nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear_gelu.apply({"x": x, "weight": self.kernel[...], "bias": self.bias[...]})["y"]


class Residual(nnx.Module):
    """residual + dropout(x + bias), the end of each half of the layer."""

    def __init__(self, width: int, p: float) -> None:
        self.bias, self.p = nnx.Param(jnp.zeros(width)), p

    def __call__(self, x: jax.Array, residual: jax.Array, seed: jax.Array) -> jax.Array:
        return dropout_residual_norm.dropped_sum(x, self.bias[...], residual, seed, self.p)


class NormedResidual(nnx.Module):
    """`dropout_residual_norm`: the same with a LayerNorm."""

    def __init__(self, width: int, p: float, eps: float) -> None:
        self.bias, self.shift = nnx.Param(jnp.zeros(width)), nnx.Param(jnp.zeros(width))
        self.weight = nnx.Param(jnp.ones(width))
        self.p, self.eps = p, eps

    def __call__(self, x: jax.Array, residual: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the sum and its norm."""
        learned = {"bias": self.bias[...], "weight": self.weight[...], "shift": self.shift[...]}
        inputs = {"x": x, "residual": residual, "seed": seed, **learned}
        outputs = dropout_residual_norm.apply(inputs, p=self.p, eps=self.eps)
        return outputs["h"], outputs["y"]


class Gpt2Block(nnx.Module):
    """The layer; `attend` maps q, k and v [batch, heads, sequence, head_dim] to `out` of their shape."""

    def __init__(
        self, width: int, heads: int, head_dim: int, hidden: int, *, p: float, eps: float, attend: Attend,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.attend = heads, attend
        self.attention_norm = LayerNorm(width, eps)
        self.qkv = nnx.Linear(width, 3 * heads * head_dim, rngs=rngs)
        self.out = nnx.Linear(heads * head_dim, width, use_bias=False, rngs=rngs)
        self.attention_residual = NormedResidual(width, p, eps)
        self.up = LinearGelu(width, hidden)
        self.down = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)
        self.mlp_residual = Residual(width, p)

    def __call__(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        """Return the layer's output: `x` [batch, sequence, width], `seed` [2, 2] int32 -> y, of x's shape.

        `seed` has one key for each of the two dropouts.
        """
        batch, sequence, width = x.shape
        tokens = x.reshape(-1, width)
        attention_seed, mlp_seed = seed[0], seed[1]
        with jax.named_scope("attention_norm"):
            h = self.attention_norm(tokens)
        with jax.named_scope("qkv"):
            qkv = self.qkv(h)
        by_head = qkv.reshape(batch, sequence, 3 * self.heads, -1).swapaxes(1, 2)
        q, k, v = jnp.split(by_head, 3, axis=1)
        with jax.named_scope("attention"):
            attended = self.attend({"q": q, "k": k, "v": v})["out"]
        with jax.named_scope("out"):
            projected = self.out(attended.swapaxes(1, 2).reshape(batch * sequence, -1))
        with jax.named_scope("attention_residual"):
            tokens, h = self.attention_residual(projected, tokens, attention_seed)
        with jax.named_scope("up"):
            activated = self.up(h)
        with jax.named_scope("down"):
            down = self.down(activated)
        with jax.named_scope("mlp_residual"):
            tokens = self.mlp_residual(down, tokens, mlp_seed)
        return tokens.reshape(x.shape)


def run_layer(
    x: jax.Array, params: Mapping[str, jax.Array], seed: jax.Array, *, heads: int, p: float, eps: float,
    attend: Attend = attention.apply,
) -> jax.Array:
    """Call a `Gpt2Block` with the weights `params` on x; the keys of PATHS are their names."""
    head_dim, hidden = params["w_o"].shape[0] // heads, params["w_up"].shape[1]
    graph = _graph(x.shape[-1], heads, head_dim, hidden, p=p, eps=eps, attend=attend)
    weights: Any = {path: nnx.Param(params[name]) for name, path in PATHS.items()}
    y: jax.Array = nnx.merge(graph, nnx.from_flat_state(weights))(x, seed)
    return y


@cache
def _graph(*sizes: int, **settings: Any) -> Any:
    """Return the module without its weights; they are never allocated."""
    return nnx.graphdef(nnx.eval_shape(lambda: Gpt2Block(*sizes, rngs=nnx.Rngs(0), **settings)))


def apply(
    inputs: dict[str, jax.Array], *, heads: int, p: float, eps: float, attend: Attend = attention.apply
) -> dict[str, jax.Array]:
    """Return the layer's output.

    `x` [batch, sequence, width], norms' weights and biases, `b_o`, `b_down` [width], `w_qkv` [width, 3 heads head_dim],
    `b_qkv`, `w_o` [heads head_dim, width], `w_up` [width, hidden], `b_up`, `w_down` [hidden, width], `seed` [2, 2] ->
    `y`, of x's shape.

    Columns of w_qkv are the queries' heads, then the keys', then the values'. Everything is stored in x's dtype;
    products accumulate in float32 on a GPU; norms, dropout's scale and softmax are float32.
    """
    return {"y": run_layer(inputs["x"], inputs, inputs["seed"], heads=heads, p=p, eps=eps, attend=attend)}


def apply_cudnn(inputs: dict[str, jax.Array], **attributes: Any) -> dict[str, jax.Array]:
    """Return the same with cuDNN's attention."""
    return apply(inputs, **attributes, attend=attention.apply_cudnn)
