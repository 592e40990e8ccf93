"""Compile with TorchInductor and Triton for an absent GPU, down to the cubin that the GPU would run.

    from xlafuse.triton_side.deviceless import for_target
    for_target.activate(properties)             # before torch is imported, in a separate process
    specs = {"x": ((4096, 1024), "bfloat16"), "weight": ((1024,), "bfloat16")}
    captured = for_target.compile_inductor(apply, specs, {"eps": 1e-6}, train=True, max_autotune=False)

Nothing runs, so nothing is autotuned. A kernel's `provenance` says whether the GPU would run the same kernel:

- A Triton kernel with one configuration is "compiled": the GPU would run it. With several candidates it is compiled for
  the first and is "not autotuned". So is a looped reduction even with one candidate, because Inductor tries smaller
  blocks on a GPU if registers run short.
- A GEMM with a size that is no multiple of 16 bytes stays unpadded and is "not autotuned". On a GPU Inductor measures
  whether padding the operands pays, which adds kernels that copy them.
- In max-autotune mode every GEMM becomes Inductor's first Triton template. A reduction over rows and columns at once
  (the backward of a norm) is split as in the default mode. Both are "not autotuned".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from xlafuse.triton_side.deviceless._fake_cuda import Unsupported, activate, active_properties, sdpa_choice

if TYPE_CHECKING:
    import torch

    from xlafuse.triton_side.calls.dispatch import Recorded
    from xlafuse.triton_side.inductor.compiler import Captured

__all__ = [
    "Unsupported",
    "activate",
    "active_properties",
    "compile_inductor",
    "fake_inputs",
    "fake_mode",
    "record_call",
]

Spec = tuple[tuple[int, ...], "str | torch.dtype"]


def fake_mode() -> Any:
    """Return the mode in which fake-GPU tensors can be made and traced. Raises RuntimeError before `activate`."""
    active_properties()
    from xlafuse.triton_side.inductor import _private as private

    return private.fake_tensor_mode()


def fake_inputs(specs: Mapping[str, Spec], requires_grad: bool) -> dict[str, torch.Tensor]:
    """Return contiguous fake tensors on the fake GPU, by name, from (shape, dtype). Call it under `fake_mode()`."""
    active_properties()
    import torch

    def tensor(shape: tuple[int, ...], dtype: str | torch.dtype) -> torch.Tensor:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=requires_grad and dtype.is_floating_point)

    return {name: tensor(shape, dtype) for name, (shape, dtype) in specs.items()}


def compile_inductor(
    apply: Callable[..., Any],
    input_specs: Mapping[str, Spec],
    attributes: Mapping[str, Any],
    *,
    train: bool,
    max_autotune: bool,
    sdpa: str | None = None,
) -> Captured:
    """Compile `apply(inputs, **attributes)` with Inductor for `activate`'s GPU, including all Triton kernels.

    train: all float inputs require grad; the forward graph saves tensors for backward, and backward is compiled too.
    sdpa: the kernel that scaled_dot_product_attention picks on that GPU at these shapes ("flash", "efficient", "cudnn"
        or "math"); `torch._fused_sdp_choice` returns it there. Inductor also turns some plain attentions into that
        function. Without `sdpa`, reaching the function is an error, unless `torch.nn.attention.sdpa_kernel` leaves only
        one backend.
    """
    active_properties()
    import torch

    from xlafuse.triton_side.inductor import _private as private
    from xlafuse.triton_side.inductor import compiler

    torch.compiler.reset()  # code for an absent GPU is never called again
    compiled = compiler.compile(apply, mode="max-autotune-no-cudagraphs" if max_autotune else None)
    with compiler.recording(measured=False) as captured, sdpa_choice(sdpa), fake_mode():
        inputs = fake_inputs(input_specs, requires_grad=train)
        with private.compiling_only(), warnings.catch_warnings():
            # torch 2.11 checks the inputs' alignment before it would call the code.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            compiled(inputs, **attributes)
    return captured


def record_call(
    apply: Callable[..., Mapping[str, torch.Tensor]],
    input_specs: Mapping[str, Spec],
    attributes: Mapping[str, Any],
    *,
    train: bool,
) -> Recorded:
    """Return the operations and hand-written kernels that `apply(inputs, **attributes)` launches on `activate`'s GPU.

    The kernels are compiled for that GPU. If `train`, backward is recorded, too, with a gradient of ones for every
    output.
    """
    active_properties()
    from xlafuse.triton_side.calls import dispatch

    with fake_mode():
        inputs = fake_inputs(input_specs, requires_grad=train)
        call = partial(apply, **attributes)
        return dispatch.record_call(call, inputs, train=train, compile_only=True)
