"""Gated linear units: y = activation(gate) * up, element by element, forward and backward.

    y = a(gate) up        dgate = dy up a'(gate)        dup = dy a(gate)

Shazeer, "GLU variants improve Transformer", arXiv:2002.05202. Shapes: gate, up, y and their gradients have one shape,
taken as flat. bfloat16, float16 or float32 in and out; fp32 inside. The forward pass saves gate and up; the backward
pass reads gate, up and dy once each.

A unit has two kernels, which pass its activation as functions of (x, ACCURATE): `value` returns a(x), and
`value_and_slope` returns a(x) and a'(x). ACCURATE: the result is stored in fp32, which shows an error of two ulps.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, check_tensors, launch_elementwise
from xlafuse.triton_side.kernels.shared.tiles import round_to_tf32


@triton.jit
def forward_block(
    gate_ptr, up_ptr, y_ptr, elements, value: tl.constexpr, BLOCK: tl.constexpr, TF32: tl.constexpr = False
):
    """Compute y for one program's block of elements. TF32: round it for a product that reads it."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    # Unless `elements` is a multiple of 16, a mask prevents 16-byte accesses. Only the last block is masked.
    if start + BLOCK <= elements:
        _forward(gate_ptr, up_ptr, y_ptr, offset, None, value, TF32)
    else:
        _forward(gate_ptr, up_ptr, y_ptr, offset, offset < elements, value, TF32)


@triton.jit
def _forward(gate_ptr, up_ptr, y_ptr, offset, mask, value: tl.constexpr, TF32: tl.constexpr):
    gate = tl.load(gate_ptr + offset, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=mask).to(tl.float32)
    y = value(gate, y_ptr.dtype.element_ty == tl.float32) * up
    _store(y_ptr + offset, y, mask, TF32)


@triton.jit
def backward_block(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, y_ptr, elements, value_and_slope: tl.constexpr, BLOCK: tl.constexpr,
    TF32: tl.constexpr = False,
):
    """Compute dgate and dup for one program's block of elements, and y again unless y_ptr is None.

    swiglu_mlp computes y again, because it does not save y. TF32: round the results for products that read them.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        _backward(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, y_ptr, offset, None, value_and_slope, TF32)
    else:
        _backward(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, y_ptr, offset, offset < elements, value_and_slope, TF32)


@triton.jit
def _backward(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, y_ptr, offset, mask, value_and_slope: tl.constexpr, TF32: tl.constexpr
):
    gate = tl.load(gate_ptr + offset, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=mask).to(tl.float32)
    dy = tl.load(dy_ptr + offset, mask=mask).to(tl.float32)
    activated, slope = value_and_slope(gate, dgate_ptr.dtype.element_ty == tl.float32)
    _store(dgate_ptr + offset, dy * up * slope, mask, TF32)
    _store(dup_ptr + offset, dy * activated, mask, TF32)
    if y_ptr is not None:
        _store(y_ptr + offset, activated * up, mask, TF32)


@triton.jit
def _store(pointers, value, mask, TF32: tl.constexpr):
    if TF32:
        value = round_to_tf32(value)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@tuned
def configure(element_bytes: int) -> FlatConfig:
    """Four warps and one 16-byte load of each operand a thread, as measured for vector_add.

    vector_add has the three streams of the forward pass; the backward pass has two more. Neither was measured here.
    """
    return FlatConfig(block=128 * 16 // element_bytes, num_warps=4)


def forward(
    kernel: Any, gate: torch.Tensor, up: torch.Tensor, config: FlatConfig | None = None, **constants: Any
) -> torch.Tensor:
    """Launch a unit's forward kernel on contiguous gate and up; y has their shape and dtype."""
    y = torch.empty_like(gate)
    launch_elementwise(kernel, config or configure(gate.element_size()), gate, up, y, **constants)
    return y


def backward(
    kernel: Any, gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, config: FlatConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a unit's backward kernel on contiguous gate, up and dy; dgate and dup have their shape and dtype."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    launch_elementwise(kernel, config or configure(gate.element_size()), gate, up, dy, dgate, dup)
    return dgate, dup


class _GatedUnit(torch.autograd.Function):
    """Save gate and up. The backward pass reads them and dy once and writes dgate and dup."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, forward_kernel: Any, backward_kernel: Any
    ) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.backward_kernel = backward_kernel
        return forward(forward_kernel, gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *backward(ctx.backward_kernel, gate, up, dy.contiguous()), None, None


def gated_unit(gate: torch.Tensor, up: torch.Tensor, forward_kernel: Any, backward_kernel: Any) -> torch.Tensor:
    """Return the unit of the two kernels, differentiable once.

    Args:
        gate, up: two tensors of one shape, dtype (bfloat16, float16, float32) and device; non-contiguous ones are
            copied.

    Returns:
        A new contiguous tensor of their shape and dtype.

    Raises:
        ValueError: shapes or devices differ, or the tensors are not on a GPU.
        TypeError: dtypes differ or are not supported.
    """
    check_tensors(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(
            f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}; "
            "broadcast them first with torch.broadcast_tensors"
        )
    return _GatedUnit.apply(gate, up, forward_kernel, backward_kernel)
