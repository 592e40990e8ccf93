"""Ten pairs in JAX. An optimization barrier keeps XLA from fusing, if no option does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .case import Array, Case

_Barrier = Callable[[jax.Array], jax.Array]
_LARGE: Array = ((8192, 8192), "bfloat16")
_LARGE_F32: Array = ((8192, 8192), "float32")
_FITS_L2: Array = ((2048, 2048), "bfloat16")
_TINY: Array = ((64, 256), "bfloat16")
_ROW: Array = ((8192,), "bfloat16")
_PRODUCT: tuple[Array, ...] = (((8192, 1024), "bfloat16"), ((1024, 8192), "bfloat16"), _ROW)
_TRITON = {"xla_gpu_triton_gemm_any": True, "xla_gpu_cublas_fallback": False}
_CUBLASLT = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_cublaslt": True}


def _barrier(x: jax.Array) -> jax.Array:
    found: jax.Array = jax.lax.optimization_barrier(x)
    return found


def _none(x: jax.Array) -> jax.Array:
    return x


def _elementwise(b: _Barrier) -> Callable[..., Any]:
    return lambda x: jnp.exp(b(jnp.tanh(x) * x)) + x


def _chain(b: _Barrier) -> Callable[..., Any]:
    return lambda x: jnp.tanh(b(jnp.sin(b(jnp.tanh(b(jnp.sin(x)))))))


def _reduction_prologue(b: _Barrier) -> Callable[..., Any]:
    return lambda x: b(jnp.exp(x)).sum(-1)


def _rmsnorm(b: _Barrier) -> Callable[..., Any]:
    def rmsnorm(x: jax.Array, weight: jax.Array) -> jax.Array:
        mean = b(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True))
        return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype) * weight

    return rmsnorm


def _softmax(b: _Barrier) -> Callable[..., Any]:
    def softmax(x: jax.Array) -> jax.Array:
        powers = b(jnp.exp(x - b(x.max(-1, keepdims=True))))
        return powers / b(powers.sum(-1, keepdims=True))

    return softmax


def _layernorm(b: _Barrier) -> Callable[..., Any]:
    def layernorm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        centred = y - y.mean(-1, keepdims=True)
        scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return b(scaled.astype(x.dtype)) * weight + bias

    return layernorm


def _product(b: _Barrier, activation: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    return lambda x, weight, bias: activation(b(x @ weight) + bias)


def _two_readers(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    read = jnp.tanh(x) * x
    return jnp.exp(read), read * read + 1


def _pair(make: Callable[[_Barrier], Callable[..., Any]]) -> dict[str, Any]:
    return {"unfused": make(_barrier), "fused": make(_none)}


CASES: tuple[Case, ...] = (
    Case("jax-elementwise-large", "large", (_LARGE,), **_pair(_elementwise)),
    Case("jax-elementwise-l2", "fits L2", (_FITS_L2,), **_pair(_elementwise)),
    Case("jax-elementwise-tiny", "tiny", (_TINY,), **_pair(_chain)),
    Case("jax-reduction-prologue", "large", (_LARGE_F32,), **_pair(_reduction_prologue)),
    Case("jax-rmsnorm", "large", (_LARGE, _ROW), **_pair(_rmsnorm)),
    Case("jax-softmax", "large", (_LARGE_F32,), **_pair(_softmax)),
    Case("jax-layernorm", "large", (_LARGE, _ROW, _ROW), **_pair(_layernorm)),
    Case(
        "jax-product-relu", "large", _PRODUCT, unfused_options=_TRITON, fused_options=_TRITON,
        **_pair(lambda b: _product(b, jax.nn.relu)),
    ),
    Case(
        "jax-product-gelu", "large", _PRODUCT, unfused_options=_CUBLASLT, fused_options=_CUBLASLT,
        **_pair(lambda b: _product(b, jax.nn.gelu)),
    ),
    Case(
        "jax-two-readers", "large", (_LARGE,), _two_readers, _two_readers,
        unfused_options={"xla_disable_hlo_passes": "multi_output_fusion"},
    ),
)
