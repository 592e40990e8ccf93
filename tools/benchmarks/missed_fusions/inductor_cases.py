"""Ten pairs in PyTorch. A graph break keeps Inductor from fusing, if no option does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .case import Array, Case

_Break = Callable[[], None]
_LARGE: Array = ((8192, 8192), "bfloat16")
_LARGE_F32: Array = ((8192, 8192), "float32")
_FITS_L2: Array = ((2048, 2048), "bfloat16")
_TINY: Array = ((64, 256), "bfloat16")
_ROW: Array = ((8192,), "bfloat16")
_PRODUCT: tuple[Array, ...] = (((8192, 1024), "bfloat16"), ((1024, 8192), "bfloat16"), _ROW)
_ONE_OPERATION = {"max_fusion_size": 1}
_NO_SIBLINGS = {"score_fusion_memory_threshold": 1 << 60}
# Inductor times a fused epilogue on a GPU, and may reject it. Without this timing it always fuses.
_TRITON = {
    "max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "benchmark_epilogue_fusion": False,
}


def _none() -> None:
    pass


def _elementwise(b: _Break) -> Callable[..., Any]:
    def elementwise(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * x
        b()
        return torch.exp(y) + x

    return elementwise


def _chain(b: _Break) -> Callable[..., Any]:
    def chain(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        b()
        x = torch.tanh(x)
        b()
        x = torch.sin(x)
        b()
        return torch.tanh(x)

    return chain


def _reduction_prologue(b: _Break) -> Callable[..., Any]:
    def reduction_prologue(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        b()
        return y.sum(-1)

    return reduction_prologue


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def _softmax(b: _Break) -> Callable[..., Any]:
    def softmax(x: torch.Tensor) -> torch.Tensor:
        largest = x.amax(-1, keepdim=True)
        b()
        powers = torch.exp(x - largest)
        b()
        total = powers.sum(-1, keepdim=True)
        b()
        return powers / total

    return softmax


def _layernorm(b: _Break) -> Callable[..., Any]:
    def layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, (x.shape[-1],))
        b()
        return y * weight + bias

    return layernorm


def _product_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.addmm(bias, x, weight), approximate="tanh")


def _product_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(bias, x, weight))


def _product_relu_of_cublaslt(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.aten._addmm_activation(bias, x, weight)
    return found


def _siblings(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.exp(x), torch.tanh(x)


def _pair(make: Callable[[_Break], Callable[..., Any]]) -> dict[str, Any]:
    return {"unfused": make(torch._dynamo.graph_break), "fused": make(_none)}


CASES: tuple[Case, ...] = (
    Case("torch-elementwise-large", "large", (_LARGE,), **_pair(_elementwise)),
    Case("torch-elementwise-l2", "fits L2", (_FITS_L2,), **_pair(_elementwise)),
    Case("torch-elementwise-tiny", "tiny", (_TINY,), **_pair(_chain)),
    Case("torch-reduction-prologue", "large", (_LARGE_F32,), **_pair(_reduction_prologue)),
    Case("torch-rmsnorm", "large", (_LARGE, _ROW), _rmsnorm, _rmsnorm, unfused_options=_ONE_OPERATION),
    Case("torch-softmax", "large", (_LARGE_F32,), **_pair(_softmax)),
    Case("torch-layernorm", "large", (_LARGE, _ROW, _ROW), **_pair(_layernorm)),
    Case("torch-product-relu", "large", _PRODUCT, _product_relu, _product_relu_of_cublaslt),
    Case(
        "torch-product-gelu", "large", _PRODUCT, _product_gelu, _product_gelu, products="triton",
        unfused_options={**_TRITON, "epilogue_fusion": False}, fused_options=_TRITON,
    ),
    Case("torch-siblings", "large", (_LARGE,), _siblings, _siblings, unfused_options=_NO_SIBLINGS),
)
