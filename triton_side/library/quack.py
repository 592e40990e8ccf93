"""quack's CuTe kernels (quack-kernels, https://github.com/Dao-AILab/quack), an optional package: tested with 0.6.5.

This module calls quack's forward and backward functions from its own autograd functions, because quack's LayerNorm has
none and the others bypass PyTorch's dispatcher (see `_operation`). They compute in float32.

These kernels of quack are not used:

- cross_entropy and linear_cross_entropy: they have neither label smoothing nor z-loss.
- rope: its positions count up from an offset per sequence (`seqlen_offsets`); ours are arbitrary.
- dropout_residual_norm: it adds a residual before RMSNorm only, and has no dropout.
- matmul, matmul_fp8, linear, linear_residual, linear_gelu, swiglu_mlp, moe: its products (`gemm_interface`) time
  configurations at the first call of a shape, without the lock of `compare/workers/autotune_lock.py`. Without
  autotuning, the comparison with autotuned kernels would be unfair. They are untested here.
"""

from collections.abc import Mapping
from typing import Any

import torch
from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
from quack.softmax import softmax_bwd, softmax_fwd
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.library._operation import operation


def rmsnorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight [columns] -> y."""
    return {"y": _RMSNorm.apply(inputs["x"], inputs["weight"], eps, _differentiated(inputs))}


def layernorm(inputs: Mapping[str, Tensor], *, eps: float) -> dict[str, Tensor]:
    """x [rows, columns], weight, bias [columns] -> y; weight and bias are converted to float32, as quack requires."""
    weight, bias = inputs["weight"].float(), inputs["bias"].float()
    return {"y": _LayerNorm.apply(inputs["x"], weight, bias, eps, _differentiated(inputs))}


def softmax(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [rows, columns] -> y; a row must have a multiple of 16 bytes."""
    return {"y": _Softmax.apply(inputs["x"])}


def _differentiated(inputs: Mapping[str, Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs.values())


@operation("quack_rmsnorm")
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, save: bool) -> list[Tensor]:
    y, _, rstd = rmsnorm_fwd(x, weight, eps=eps, store_rstd=save)
    return [y, rstd] if save else [y]


@operation("quack_rmsnorm_backward")
def _rmsnorm_backward(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor) -> list[Tensor]:
    dx, dweight, _, _ = rmsnorm_bwd(x, weight, dy, rstd)
    return [dx, dweight]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, save: bool) -> Tensor:
        y, *saved = _rmsnorm(x, weight, eps, save)
        ctx.save_for_backward(x, weight, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        return *_rmsnorm_backward(x, weight, dy.contiguous(), rstd), None, None


@operation("quack_layernorm")
def _layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, save: bool) -> list[Tensor]:
    if save:
        return list(layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True))
    return [layernorm_fwd(x, weight, bias, eps)]


@operation("quack_layernorm_backward")
def _layernorm_backward(x: Tensor, weight: Tensor, dy: Tensor, rstd: Tensor, mean: Tensor) -> list[Tensor]:
    return list(layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, save: bool) -> Tensor:
        y, *saved = _layernorm(x, weight, bias, eps, save)
        ctx.save_for_backward(x, weight, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd, mean = ctx.saved_tensors
        return *_layernorm_backward(x, weight, dy.contiguous(), rstd, mean), None, None


@operation("quack_softmax")
def _softmax(x: Tensor) -> Tensor:
    return softmax_fwd(x)


@operation("quack_softmax_backward")
def _softmax_backward(dy: Tensor, y: Tensor) -> Tensor:
    return softmax_bwd(dy, y)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _softmax(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return _softmax_backward(dy.contiguous(), y)
