"""Counters in GPU memory that a kernel's programs share, and that each launch leaves at zero for the next one."""

import functools

import torch
from torch._subclasses.fake_tensor import FakeTensor

from xlafuse.triton_side.calls.stages import preparation
from xlafuse.triton_side.kernels.shared.launch import next_power_of_2


def zero_counters(like: torch.Tensor, count: int) -> torch.Tensor:
    """Return at least `count` int32 zeros of the current stream. The launch must leave them at zero.

    A CUDA graph that is being captured gets its own, because it may be replayed beside launches of this stream.
    """
    count = next_power_of_2(count)
    if isinstance(like, FakeTensor):
        return torch.empty(count, dtype=torch.int32, device=like.device)
    if not like.is_cuda:
        return _counters_of(like.device, 0, count)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=like.device)
    return _counters_of(like.device, torch.cuda.current_stream(like.device).cuda_stream, count)


@functools.cache
def _counters_of(device: torch.device, stream: int, count: int) -> torch.Tensor:
    with preparation():
        return torch.zeros(count, dtype=torch.int32, device=device)
