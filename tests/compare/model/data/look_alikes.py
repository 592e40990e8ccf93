"""Functions that only look like a block of the suite. `make_layers.py` compiles them into look_alikes.tar.xz."""

import jax
import jax.numpy as jnp

ROWS, COLUMNS, HEADS, HEAD_DIM, CLASSES, HIDDEN = 512, 256, 8, 32, 1024, 1024


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


MATRIX, VECTOR, IDS = array(ROWS, COLUMNS), array(COLUMNS), array(ROWS, dtype=jnp.int32)
HEADED = array(2, HEADS, ROWS, HEAD_DIM)
UP, DOWN = array(COLUMNS, HIDDEN), array(HIDDEN, COLUMNS)


def softmax_of_no_product(x):
    return jax.nn.softmax(x, axis=-1) * x


def silu_without_products(x):
    return x * jax.nn.sigmoid(x)


def gelu_without_products(x):
    return jax.nn.gelu(x)


def divided_by_mean_square(x, w):
    return x / (jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def unit_vectors(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def batch_norm(x, w, b):
    mean, variance = jnp.mean(x, 0), jnp.var(x, 0)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w + b


def instance_norm(x, w):
    mean, variance = jnp.mean(x, (2, 3), keepdims=True), jnp.var(x, (2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w[None, :, None, None]


def standard_deviation(x):
    return jnp.sqrt(jnp.mean(jnp.square(x - jnp.mean(x, -1, keepdims=True)), -1) + 1e-5)


def counts_of_pairs(a, b):
    return jax.nn.one_hot(a, 64).T @ jax.nn.one_hot(b, 64)


def exponentials_without_maximum(x, ids):
    return jnp.log(jnp.sum(jnp.exp(x), -1)) - jnp.take_along_axis(x, ids[:, None], -1)[:, 0]


def log_sum_of_exponentials(x):
    return jax.nn.logsumexp(x, -1)


def learnt_memory(x, keys, values):
    return jax.nn.softmax(x @ keys, -1) @ values


def linear_attention(q, k, v):
    return (q @ k.swapaxes(-1, -2) * HEAD_DIM**-0.5) @ v


def sigmoid_attention(q, k, v):
    return jax.nn.sigmoid(q @ k.swapaxes(-1, -2)) @ v


def kernel_regression(q, k, v):
    weights = jnp.exp(q @ k.swapaxes(-1, -2))
    return weights @ v / weights.sum(-1, keepdims=True)


def gated_tanh(x, a, b, down):
    return (jax.nn.sigmoid(x @ a) * jnp.tanh(x @ b)) @ down


def complex_product(a, b, c, d):
    return a * jnp.cos(c) - b * jnp.sin(d), a * jnp.sin(d) + b * jnp.cos(c)


def added_waves(x):
    angles = jnp.arange(ROWS)[:, None] / 10000 ** (jnp.arange(COLUMNS // 2) / COLUMNS)
    return x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def sorted_rows(x, score):
    return x[jnp.argsort(score)]


def rows_of_labels_in_a_product(x, y, ids):
    return (x @ y)[ids]


def momentum(p, m, g):
    m = 0.9 * m + g
    return p - 0.1 * m, m


def rms_propagation(p, v, g):
    v = 0.9 * v + 0.1 * g * g
    return p - 0.01 * g / (jnp.sqrt(v) + 1e-8), v


def clipped_by_norm(g):
    return g * jnp.minimum(1.0, 1 / jnp.sqrt(jnp.sum(g * g) + 1e-6))


def best_of_a_product(x, w):
    return jax.lax.top_k(x @ w, 4)


def squeezed_and_excited(x, a, b):
    return x * jax.nn.sigmoid(jax.nn.silu(x.mean(0, keepdims=True) @ a) @ b)


LOOK_ALIKES = {
    softmax_of_no_product: (MATRIX,),
    silu_without_products: (MATRIX,),
    gelu_without_products: (MATRIX,),
    divided_by_mean_square: (MATRIX, VECTOR),
    unit_vectors: (MATRIX,),
    batch_norm: (MATRIX, VECTOR, VECTOR),
    instance_norm: (array(8, 64, 32, 32), array(64)),
    standard_deviation: (MATRIX,),
    counts_of_pairs: (IDS, IDS),
    exponentials_without_maximum: (array(ROWS, CLASSES), IDS),
    log_sum_of_exponentials: (array(ROWS, CLASSES),),
    learnt_memory: (array(4, ROWS, COLUMNS), UP, DOWN),
    linear_attention: (HEADED, HEADED, HEADED),
    sigmoid_attention: (HEADED, HEADED, HEADED),
    kernel_regression: (HEADED, HEADED, HEADED),
    gated_tanh: (MATRIX, UP, UP, DOWN),
    complex_product: (MATRIX, MATRIX, MATRIX, MATRIX),
    added_waves: (MATRIX,),
    sorted_rows: (MATRIX, array(ROWS)),
    rows_of_labels_in_a_product: (MATRIX, UP, IDS),
    momentum: (MATRIX, MATRIX, MATRIX),
    rms_propagation: (MATRIX, MATRIX, MATRIX),
    clipped_by_norm: (MATRIX,),
    best_of_a_product: (MATRIX, array(COLUMNS, 64)),
    squeezed_and_excited: (MATRIX, array(COLUMNS, 64), array(64, COLUMNS)),
}
