"""Implementations that are wrong in one way each; the tests show that each way is noticed."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from xlafuse.triton_side.calls import cuda_program

Tensors = dict[str, torch.Tensor]
_cached: dict[int, torch.Tensor] = {}


def right(inputs: Tensors) -> Tensors:
    return {"y": inputs["x"].float().softmax(-1).to(inputs["x"].dtype)}


def wrong_scale(inputs: Tensors) -> Tensors:
    """Off by one part in two thousand."""
    return {"y": right(inputs)["y"] * 1.0005}


def not_a_number(inputs: Tensors) -> Tensors:
    y = right(inputs)["y"].clone()
    y.view(-1)[-1] = float("nan")
    return {"y": y}


def unwritten_element(inputs: Tensors) -> Tensors:
    """The last element is left as the allocator gave it."""
    y = torch.empty_like(inputs["x"])
    y.view(-1)[:-1] = right(inputs)["y"].view(-1)[:-1]
    return {"y": y}


def cached_result(inputs: Tensors) -> Tensors:
    """Computes once for each input buffer."""
    key = inputs["x"].data_ptr()
    if key not in _cached:
        _cached[key] = right(inputs)["y"]
    return {"y": _cached[key]}


def changes_input(inputs: Tensors) -> Tensors:
    y = right(inputs)["y"]
    inputs["x"].view(-1)[0] += 1
    return {"y": y}


def missing_output(inputs: Tensors) -> Tensors:
    return {"z": right(inputs)["y"]}


def wrong_shape(inputs: Tensors) -> Tensors:
    return {"y": right(inputs)["y"][:1]}


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * dy  # without the row's mean


class _CachedGradient(_HalfGradient):
    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        if dy.data_ptr() not in _cached:
            _cached[dy.data_ptr()] = y * (dy - (y * dy).sum(-1, keepdim=True))
        return _cached[dy.data_ptr()]


def cached_gradient(inputs: Tensors) -> Tensors:
    """Computes its gradient once for each buffer of the output's gradient."""
    return {"y": _CachedGradient.apply(inputs["x"])}


def wrong_gradient(inputs: Tensors) -> Tensors:
    return {"y": _HalfGradient.apply(inputs["x"])}


def side_stream(inputs: Tensors) -> Tensors:
    """Right in the end, but the current stream is not made to wait for the stream that does the work."""
    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return right(inputs)


def joined_side_stream(inputs: Tensors) -> Tensors:
    """As above, and the current stream waits: what a caller may rely on."""
    outputs = side_stream(inputs)
    torch.cuda.current_stream().wait_stream(_side_stream())
    return outputs


def late_thread(inputs: Tensors) -> Tensors:
    """Right in the end, but another thread of the host launches the work after the call has returned."""
    y, stream = torch.empty_like(inputs["x"]), torch.cuda.current_stream()

    def compute() -> None:
        time.sleep(0.002)
        with torch.no_grad(), torch.cuda.stream(stream):
            y.copy_(right(inputs)["y"])

    threading.Thread(target=compute).start()
    return {"y": y}


def keeps_l2(inputs: Tensors) -> Tensors:
    """Right, but asks for its input to stay in L2, and leaves that as it is."""
    from cuda.bindings import driver

    x = inputs["x"]
    window, attribute = driver.CUaccessPolicyWindow(), driver.CUstreamAttrValue()
    window.base_ptr, window.num_bytes, window.hitRatio = x.data_ptr(), x.nbytes, 1.0
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
    attribute.accessPolicyWindow = window
    driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 1 << 20)
    key = driver.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    driver.cuStreamSetAttribute(torch.cuda.current_stream().cuda_stream, key, attribute)
    return right(inputs)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def raises(inputs: Tensors) -> Tensors:
    raise ValueError("no such kernel")


def breaks_device(inputs: Tensors) -> Tensors:
    """Imitate an illegal access without a GPU: this call fails, and every later one that waits."""
    from xlafuse.compare.workers.pytorch import worker

    def synchronize(*_: Any) -> None:
        raise RuntimeError("pretended CUDA error: an illegal memory access was encountered")

    pytest.MonkeyPatch().setattr(worker.TorchBackend, "synchronize", synchronize)
    synchronize()
    return {}


def killed(inputs: Tensors) -> Tensors:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def segfault(inputs: Tensors) -> Tensors:
    """Reads address 0."""
    ctypes.string_at(0)
    return {}


def leaves(inputs: Tensors) -> Tensors:
    """Ends the process as if all were well."""
    os._exit(0)


def hangs(inputs: Tensors) -> Tensors:
    while True:
        time.sleep(0.01)


def out_of_memory(inputs: Tensors) -> Tensors:
    """A petabyte on the inputs' device."""
    return {"y": torch.empty(1 << 48, device=inputs["x"].device)}


def prints_megabytes(inputs: Tensors) -> Tensors:
    """Through Python and past it, as native code prints; the answer is right."""
    print("x" * (1 << 20))
    os.write(1, b"y" * (1 << 20))
    return right(inputs)


def triton_error(inputs: Tensors) -> Tensors:
    import faulty_kernels

    return faulty_kernels.refused(inputs)


def inductor_error(inputs: Tensors) -> Tensors:
    """Inductor meets a Triton kernel of the user's that does not compile."""
    import faulty_kernels

    return faulty_kernels.refused(inputs)


def nvrtc_error(inputs: Tensors) -> Tensors:
    source = str(Path(__file__).with_name("faulty.cu"))
    kernel = cuda_program.compile_kernel(source, "refused<float>", "sm_90")
    cuda_program.launch(kernel, 1, (32, 1), (), inputs["x"].device)
    return {}


def illegal_access(inputs: Tensors) -> Tensors:
    import faulty_kernels

    return faulty_kernels.writes_far_away(inputs)


def endless_kernel(inputs: Tensors) -> Tensors:
    import faulty_kernels

    return faulty_kernels.never_ends(inputs)
