"""TorchInductor and Triton for a GPU that is not there: its own code, down to the cubin, on a machine without one.

    from triton_side import deviceless
    deviceless.activate(properties)             # before torch is imported, in a process of its own
    specs = {"x": ((4096, 1024), "bfloat16"), "weight": ((1024,), "bfloat16")}
    captured = deviceless.compile_inductor(apply, specs, {"eps": 1e-6}, train=True, max_autotune=False)

Nothing runs, so nothing is tuned: a Triton kernel with several candidate configurations is compiled for the first and
says "not autotuned"; with one, it says "compiled" and is what a device would run. A looped reduction counts as "not
autotuned" even with one candidate: a device that finds it short of registers tries smaller blocks. A GEMM with a
size off 16 bytes is left unpadded and "not autotuned": a device measures whether it pays to pad the operands, which
adds kernels that copy them. In max-autotune mode every GEMM becomes Inductor's first Triton template, and a reduction
over rows and columns at once (the backward of a norm) is split as in the default mode; both are "not autotuned".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from triton_side.deviceless._fake_cuda import Unsupported, activate, active_properties, sdpa_choice

if TYPE_CHECKING:
    import torch

    from triton_side.calls.dispatch import Recorded
    from triton_side.inductor.compiler import Captured

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
    """The mode under which tensors on the fake GPU can be made and traced. Raises RuntimeError before `activate`."""
    active_properties()
    from triton_side.inductor import _private as private

    return private.fake_tensor_mode()


def fake_inputs(specs: Mapping[str, Spec], requires_grad: bool) -> dict[str, torch.Tensor]:
    """Contiguous fake tensors on the fake GPU, one per name, from (shape, dtype). Call it under `fake_mode()`."""
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
    """What Inductor emits for `apply(inputs, **attributes)` on `activate`'s GPU, with all Triton kernels compiled.

    train: all float inputs require grad; the forward graph saves what backward needs, and backward is compiled too.
    sdpa: the kernel that scaled_dot_product_attention picks on that GPU at these shapes ("flash", "efficient", "cudnn"
        or "math"), which `torch._fused_sdp_choice` tells there. Inductor also turns some plain attentions into that
        function. Without `sdpa`, reaching the function is an error, unless `torch.nn.attention.sdpa_kernel` leaves one
        backend.
    """
    active_properties()
    import torch

    from triton_side.inductor import _private as private
    from triton_side.inductor import compiler

    torch.compiler.reset()  # nothing compiled for a GPU that is not there is ever called again
    compiled = compiler.compile(apply, max_autotune=max_autotune)
    with compiler.recording(measured=False) as captured, sdpa_choice(sdpa), fake_mode():
        inputs = fake_inputs(input_specs, requires_grad=train)
        with private.compiling_only(), warnings.catch_warnings():
            # torch 2.11 looks at the inputs' alignment before the call that is not made.
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
    """The operations and hand-written kernels that `apply(inputs, **attributes)` launches, the kernels compiled for
    `activate`'s GPU; if `train`, also those of backward (a gradient of ones for every output).
    """
    active_properties()
    from triton_side.calls import dispatch

    with fake_mode():
        inputs = fake_inputs(input_specs, requires_grad=train)
        call = partial(apply, **attributes)
        return dispatch.record_call(call, inputs, train=train, compile_only=True)
