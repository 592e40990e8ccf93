"""Compile layers of flax, equinox, haiku, optax and plain JAX for an H200 that is not there, and keep their HLO.

    PYTHONPATH=. python tests/compare/model/data/make_layers.py

needs jax 0.11.2, flax, optax, equinox and dm-haiku. It writes layers.tar.xz and look_alikes.tar.xz beside itself.
"""

import io
import tarfile
from functools import partial
from importlib import import_module
from pathlib import Path

from xlafuse.compile.environment import configure_environment

configure_environment(deviceless=True)

import equinox as eqx  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import linen, nnx  # noqa: E402
from look_alikes import LOOK_ALIKES  # noqa: E402

from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compile import compiler  # noqa: E402

HERE = Path(__file__).parent
PACK = HERE.parents[3] / "compare" / "targets" / "h200" / "xla" / "gpu_target_config-0.11.pbtxt"
BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN, CLASSES, EXPERTS = 4, 512, 256, 8, 1024, 4096, 8
TOKENS, HALF = BATCH * SEQUENCE, jnp.bfloat16
LAYERS = {}


def array(*shape, dtype=HALF):
    return jax.ShapeDtypeStruct(shape, dtype)


X, X32 = array(BATCH, SEQUENCE, WIDTH), array(BATCH, SEQUENCE, WIDTH, dtype=jnp.float32)
IDS = array(BATCH, SEQUENCE, dtype=jnp.int32)
Q, KV = array(BATCH, SEQUENCE, HEADS, 64), array(BATCH, SEQUENCE, 2, 64)
EXPERT_UP, EXPERT_DOWN = array(EXPERTS, WIDTH, 512), array(EXPERTS, 512, WIDTH)
MIXTURE = (array(TOKENS, WIDTH), array(WIDTH, EXPERTS), EXPERT_UP, EXPERT_UP, EXPERT_DOWN)


def layer(*args):
    def kept(function):
        LAYERS[function.__name__] = function, args
        return function

    return kept


def nnx_layer(name, make, *args):
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    LAYERS[name] = (lambda state, *args: nnx.merge(graph, state)(*args)), (state, *args)


def linen_layer(name, module, *args):
    state = jax.eval_shape(lambda *args: module.init(jax.random.key(0), *args), *args)
    LAYERS[name] = module.apply, (state, *args)


def haiku_layer(name, function, *args):
    transformed = hk.without_apply_rng(hk.transform(function))
    state = jax.eval_shape(lambda *args: transformed.init(jax.random.key(0), *args), *args)
    LAYERS[name] = transformed.apply, (state, *args)


def equinox_layer(name, make, call, *args):
    arrays, static = eqx.partition(eqx.filter_eval_shape(make), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    LAYERS[name] = (lambda arrays, *args: call(eqx.combine(arrays, static), *args)), (arrays, *args)


def rows(module, x):
    return jax.vmap(jax.vmap(module))(x)


def causal():
    return jnp.tril(jnp.ones((SEQUENCE, SEQUENCE), bool))


# Attention


class CausalAttention(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.MultiHeadDotProductAttention(HEADS, dtype=HALF)(x, x, mask=linen.make_causal_mask(x[..., 0]))


nnx_layer("nnx_attention", lambda rngs: nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs, dtype=HALF), X)
linen_layer("linen_attention_causal", CausalAttention(), X)
equinox_layer(
    "equinox_attention_causal", lambda: eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0)),
    lambda module, x: jax.vmap(lambda y: module(y, y, y, mask=causal()))(x), X32,
)
haiku_layer(
    "haiku_attention_causal",
    lambda x: hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init_scale=1.0, model_size=WIDTH)(
        x, x, x, mask=causal()[None, None]
    ), X32,
)


@layer(Q, KV, KV)
def jax_nn_grouped_window(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(127, 0))


@layer(Q, Q, Q, array(1, HEADS, SEQUENCE, SEQUENCE))
def jax_nn_bias(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


@layer(Q, Q, Q)
def jax_nn_cudnn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


@layer(Q, KV, KV)
def gemma_capped_grouped(q, k, v):
    q = (q * 64**-0.5).reshape(BATCH, SEQUENCE, 2, 4, 64)
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(BATCH, SEQUENCE, HEADS, SEQUENCE)
    logits = jnp.where(causal()[None, :, None, :], 50 * jnp.tanh(logits / 50), -2.3e38)
    weights = jax.nn.softmax(logits, -1).astype(HALF).reshape(BATCH, SEQUENCE, 2, 4, SEQUENCE)
    return jnp.einsum("BTKGS,BSKH->BTKGH", weights, v)


@layer(Q, Q, Q)
def einsum_attention(q, k, v):
    positions = jnp.arange(SEQUENCE)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0
    scores = jnp.where(positions[:, None] >= positions[None], scores.astype(jnp.float32), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(HALF), v)


@layer(Q, Q, Q)
def einsum_attention_window(q, k, v):
    distance = jnp.arange(SEQUENCE)[:, None] - jnp.arange(SEQUENCE)[None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 8.0
    scores = jnp.where((distance >= 0) & (distance < 100), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(HALF), v)


@layer(Q, Q, Q)
def einsum_attention_train(q, k, v):
    def loss(q, k, v):
        return einsum_attention(q, k, v).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


@layer(Q, Q, Q, Q)
def einsum_attention_gradient(q, k, v, d_out):
    return jax.vjp(einsum_attention, q, k, v)[1](d_out)


@layer(*[array(BATCH, HEADS, SEQUENCE, 64)] * 3)
def matmul_attention_divided_last(q, k, v):
    scores = q @ k.swapaxes(-1, -2) * 0.125 + jnp.where(causal(), 0.0, -1e9).astype(HALF)
    exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
    return (exponentials @ v) / exponentials.sum(-1, keepdims=True)


@layer(Q, KV, KV, array(SEQUENCE, 64), array(SEQUENCE, 64))
def rotate_half_attention(q, k, v, cos, sin):
    def turned(x):
        first, second = jnp.split(x, 2, -1)
        return (x * cos[:, None] + jnp.concatenate([-second, first], -1) * sin[:, None]).astype(HALF)

    return jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)


@layer(Q, IDS)
def maxtext_rope(x, positions):
    angles = positions[..., None, None] / 10000 ** (jnp.arange(32) / 32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(HALF)


# Norms

nnx_layer("nnx_rmsnorm", lambda rngs: nnx.RMSNorm(WIDTH, rngs=rngs, dtype=HALF), X)
nnx_layer("nnx_layernorm", lambda rngs: nnx.LayerNorm(WIDTH, rngs=rngs, dtype=HALF), X)
linen_layer("linen_rmsnorm", linen.RMSNorm(dtype=HALF), X)
linen_layer("linen_layernorm", linen.LayerNorm(dtype=HALF), X)
haiku_layer("haiku_rmsnorm", lambda x: hk.RMSNorm(-1)(x), X32)
haiku_layer("haiku_layernorm", lambda x: hk.LayerNorm(-1, True, True)(x), X32)
equinox_layer("equinox_rmsnorm", lambda: eqx.nn.RMSNorm(WIDTH), rows, X32)
equinox_layer("equinox_layernorm", lambda: eqx.nn.LayerNorm(WIDTH), rows, X32)


@layer(X, array(WIDTH))
def gemma_rmsnorm(x, weight):
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (scaled * (1 + weight.astype(jnp.float32))).astype(HALF)


class DropoutAndNorm(linen.Module):
    @linen.compact
    def __call__(self, x, residual):
        h = residual + linen.Dropout(0.1, deterministic=False)(x)
        return linen.LayerNorm(dtype=HALF)(h), h


def dropout_and_norm(state, key, x, residual):
    return DropoutAndNorm().apply(state, x, residual, rngs={"dropout": jax.random.wrap_key_data(key)})


KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
LAYERS["linen_dropout_norm"] = dropout_and_norm, (
    jax.eval_shape(lambda x: DropoutAndNorm().init(KEYS, x, x), X), array(2, dtype=jnp.uint32), X, X,
)


# Feed-forward layers


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(WIDTH, dtype=HALF)(linen.gelu(linen.Dense(HIDDEN, dtype=HALF)(x)))


class Swiglu(nnx.Module):
    def __init__(self, rngs):
        options = {"use_bias": False, "rngs": rngs, "dtype": HALF}
        self.gate, self.up = nnx.Linear(WIDTH, HIDDEN, **options), nnx.Linear(WIDTH, HIDDEN, **options)
        self.down = nnx.Linear(HIDDEN, WIDTH, **options)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


linen_layer("linen_mlp", Mlp(), X)
nnx_layer("nnx_swiglu", Swiglu, X)
haiku_layer("haiku_mlp", lambda x: hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(HIDDEN)(x))), X32)
equinox_layer(
    "equinox_mlp",
    lambda: eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, activation=jax.nn.gelu, key=jax.random.key(0)), rows, X32,
)


@layer(X, array(2, WIDTH, HIDDEN), array(HIDDEN, WIDTH))
def gemma_geglu(x, up, down):
    both = jnp.einsum("btd,ndf->nbtf", x, up)
    return (jax.nn.gelu(both[0]) * both[1]) @ down


@layer(X, array(WIDTH, HIDDEN), array(WIDTH, HIDDEN), array(HIDDEN, WIDTH))
def swiglu_train(*args):
    def loss(x, gate, up, down):
        return ((jax.nn.silu(x @ gate) * (x @ up)) @ down).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*args)


@layer(*MIXTURE)
def moe_dense(x, router, gate, up, down):
    best, experts = jax.lax.top_k((x @ router).astype(jnp.float32), 2)
    shares = (jax.nn.one_hot(experts, EXPERTS) * jax.nn.softmax(best, -1)[..., None]).sum(1)
    hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, gate)) * jnp.einsum("td,edf->etf", x, up)
    return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", hidden, down), shares.astype(HALF))


@layer(*MIXTURE)
def moe_dispatch(x, router, gate, up, down):
    best, experts = jax.lax.top_k((x @ router).astype(jnp.float32), 2)
    chosen = jax.nn.one_hot(experts, EXPERTS)
    taken = chosen.sum(1)
    slots = (jnp.cumsum(taken, 0) - 1) * taken
    dispatch = jax.nn.one_hot(slots.astype(jnp.int32), 512, dtype=HALF) * taken[..., None].astype(HALF)
    given = jnp.einsum("tec,td->ecd", dispatch, x)
    made = (jax.nn.silu(given @ gate) * (given @ up)) @ down
    shares = (chosen * jax.nn.softmax(best, -1)[..., None]).sum(1).astype(HALF)
    return jnp.einsum("tec,ecd->td", dispatch * shares[..., None], made)


@layer(*MIXTURE)
def moe_ragged(x, router, gate, up, down):
    best, experts = jax.lax.top_k((x @ router).astype(jnp.float32), 2)
    order, counts = jnp.argsort(experts.reshape(-1)), jnp.bincount(experts.reshape(-1), length=EXPERTS)
    given = x[order // 2]
    hidden = jax.nn.silu(jax.lax.ragged_dot(given, gate, counts)) * jax.lax.ragged_dot(given, up, counts)
    shares = jax.nn.softmax(best, -1).reshape(-1)[order][:, None].astype(HALF)
    return jnp.zeros_like(x).at[order // 2].add(jax.lax.ragged_dot(hidden, down, counts) * shares)


# Layers in a scan


def norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * weight).astype(HALF)


def decoder_layer(x, weights):
    h = norm(x, weights["norm1"])
    q, k, v = ((h @ weights[name]).reshape(BATCH, SEQUENCE, HEADS, 32) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ weights["out"]
    h = norm(x, weights["norm2"])
    return x + (jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"])) @ weights["down"], None


SQUARES, NORMS = ("q", "k", "v", "out"), ("norm1", "norm2")
DECODER = {name: array(6, WIDTH, WIDTH) for name in SQUARES} | {name: array(6, WIDTH) for name in NORMS} | {
    "gate": array(6, WIDTH, HIDDEN), "up": array(6, WIDTH, HIDDEN), "down": array(6, HIDDEN, WIDTH),
}


def scan_train(decoder_layer):
    def loss(x, weights):
        return jax.lax.scan(decoder_layer, x, weights)[0].astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1))


LAYERS["scanned_decoder_train"] = scan_train(decoder_layer), (X, DECODER)
LAYERS["scanned_checkpointed_decoder_train"] = scan_train(jax.checkpoint(decoder_layer)), (X, DECODER)

# The suite's own blocks in JAX

for suite_block in ("attention_bias", "decoder_block", "gpt2_block", "lm_step"):
    block = BLOCKS[suite_block]
    case = block.cases("quick", block.shapes[:1])[0]
    LAYERS[f"suite_{suite_block}"] = (
        partial(import_module(f"xlafuse.blocks.{suite_block}").apply, **block.attributes_of(case)),
        ({tensor.name: array(*tensor.shape(case.sizes), dtype=tensor.dtype_in(case)) for tensor in block.inputs},),
    )

# Tables, losses, optimizers

nnx_layer("nnx_embed", lambda rngs: nnx.Embed(CLASSES, WIDTH, rngs=rngs, dtype=HALF), IDS)
linen_layer("linen_embed", linen.Embed(CLASSES, WIDTH, dtype=HALF), IDS)
haiku_layer("haiku_embed", lambda ids: hk.Embed(CLASSES, WIDTH)(ids), IDS)
equinox_layer("equinox_embedding", lambda: eqx.nn.Embedding(CLASSES, WIDTH, key=jax.random.key(0)), rows, IDS)


def loss_of_tokens(x, weight, labels):
    logits = (x @ weight).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@layer(X, array(WIDTH, CLASSES), IDS)
def optax_cross_entropy_train(x, weight, labels):
    return jax.value_and_grad(loss_of_tokens, argnums=(0, 1))(x, weight, labels)


@layer(array(BATCH, SEQUENCE, CLASSES, dtype=jnp.float32), IDS)
def optax_one_hot_cross_entropy(logits, labels):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()


@layer(array(TOKENS, CLASSES), array(TOKENS, dtype=jnp.int32))
def plain_cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[:, None], 1).mean()


PARAMETERS = {"a": array(WIDTH, HIDDEN, dtype=jnp.float32), "b": array(HIDDEN, dtype=jnp.float32)}
ADAMW = optax.adamw(1e-3)


@layer(PARAMETERS, jax.eval_shape(ADAMW.init, PARAMETERS), PARAMETERS)
def optax_adamw(parameters, state, gradients):
    changes, state = ADAMW.update(gradients, state, parameters)
    return optax.apply_updates(parameters, changes), state


@layer(*[array(WIDTH, HIDDEN, dtype=jnp.float32)] * 3, array(WIDTH, HIDDEN))
def plain_adam(parameter, mean, variance, gradient):
    gradient = gradient.astype(jnp.float32)
    mean, variance = 0.9 * mean + 0.1 * gradient, 0.95 * variance + 0.05 * gradient * gradient
    return parameter - 1e-3 * (mean / 0.5 / (jnp.sqrt(variance / 0.6) + 1e-8) + 0.1 * parameter), mean, variance


def main():
    target = compiler.Target(PACK.read_text())
    look_alikes = {function.__name__: (function, args) for function, args in LOOK_ALIKES.items()}
    for archive, functions in (("layers", LAYERS), ("look_alikes", look_alikes)):
        with tarfile.open(HERE / f"{archive}.tar.xz", "w:xz") as packed:
            for name, (function, args) in functions.items():
                text = compiler.compile(function, args, target=target).hlo_text.replace(f"{HERE}/", "").encode()
                member = tarfile.TarInfo(f"{name}.txt")
                member.size = len(text)
                packed.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    main()
