"""Code of a JAX user: plain functions, a module with attention, a train step with scan and remat."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def rmsnorm(x, weight, *, eps=1e-6):
    with jax.named_scope("norm"):
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + eps)).astype(x.dtype) * weight


def normed_gelu(x, weight):
    hidden = rmsnorm(x, weight)
    with jax.named_scope("activation"):
        return gelu(hidden)


def normed_gelu_apart(x, weight):
    hidden = jax.lax.optimization_barrier(rmsnorm(x, weight))
    with jax.named_scope("activation"):
        return gelu(hidden)


def tree(inputs, mode, *, scale=None):
    product = inputs["a"] @ inputs["rest"][0]
    return {"out": product if mode == "product" else product + scale}


def mismatched(x):
    return x @ x  # raises for what is not square


def sorted_all(x):
    return jnp.sort(x)


def sorted_few(x):
    return jnp.sort(x[:64])


def attention_of_cudnn(q):
    return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")


class Attention(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(heads, width, rngs=rngs, decode=False)

    def __call__(self, x, *, mask=None):
        with jax.named_scope("norm"):
            hidden = self.norm(x)
        with jax.named_scope("attention"):
            return x + self.attend(hidden, mask=mask)

    def only_norm(self, x):
        return self.norm(x)


class Counting(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def attention():
    return Attention(64, 4, rngs=nnx.Rngs(0))


def loss(params, x, y):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layer(hidden, weights):
        with jax.named_scope("layer"):
            return hidden + gelu(hidden @ weights["up"]) @ weights["down"], None

    hidden, _ = jax.lax.scan(layer, x, params)
    return jnp.mean((hidden - y).astype(jnp.float32) ** 2)


@partial(jax.jit, donate_argnums=0, static_argnames=("clip",))
def train_step(params, x, y, rate, *, clip=True):
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    if clip:
        gradients = jax.tree.map(lambda g: jnp.clip(g, -1, 1), gradients)
    return jax.tree.map(lambda p, g: p - (rate * g).astype(p.dtype), params, gradients), value


def train_inputs(width=64, hidden=128, layers=3, tokens=32):
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    params = {"up": struct(layers, width, hidden), "down": struct(layers, hidden, width)}
    return (params, struct(tokens, width), struct(tokens, width), 1e-3), {"clip": True}
