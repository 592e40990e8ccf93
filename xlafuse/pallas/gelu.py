"""GELU in its tanh form on arrays of a Pallas kernel: its value and its slope.

    y = x/2 (1 + t)    dy/dx = (1 + t)/2 + x/2 (1 - t^2) u'    t = tanh(u)
    u = sqrt(2/pi) (x + 0.044715 x^3)    u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)

Hendrycks and Gimpel, "Gaussian Error Linear Units", arXiv:1606.08415. Arrays are float32. The launch allows approximate
mathematics, so tanh is one instruction, `tanh.approx.f32`, with a relative error of 2^-11: as much as rounding to
float16 gives. An exponential and a division would take two.
"""

import jax
import jax.numpy as jnp

SQRT_2_OVER_PI = 0.7978845608028654
CUBIC = 0.044715


def gelu_value(x: jax.Array) -> jax.Array:
    return 0.5 * x * (1 + _tanh(x))


def gelu_slope(x: jax.Array) -> jax.Array:
    t = _tanh(x)
    inner = SQRT_2_OVER_PI + 3 * CUBIC * SQRT_2_OVER_PI * (x * x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x * (SQRT_2_OVER_PI + CUBIC * SQRT_2_OVER_PI * (x * x)))
