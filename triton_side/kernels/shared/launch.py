"""Argument checks, device facts and launch configurations that all launchers use."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Triton chooses compiler or interpreter when a kernel is decorated, so this is fixed at import too.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_NO_CONTEXT = nullcontext()

# The interpreter runs programs one after another on the CPU. A few are enough to exercise a persistent grid.
INTERPRETED_MULTIPROCESSORS = 16


@dataclass(frozen=True)
class FlatConfig:
    """Launch configuration of a kernel whose programs take `block` elements, a power of two."""

    block: int
    num_warps: int


@dataclass(frozen=True)
class RowConfig:
    """Launch configuration of a kernel that works on whole rows of a matrix.

    A program takes tiles of `block_rows` x `block_columns` (powers of two), `programs` apart. If a tile is narrower
    than the row, the launcher selects the looped kernel, which reads each row twice. `num_stages` > 1 prefetches that
    many tiles less one into shared memory; 1 loads straight into registers.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_stages: int
    programs: int

    @cached_property
    def whole_rows(self) -> dict[str, int]:
        """The arguments of a kernel that holds whole rows."""
        return {"ROWS": self.block_rows, **self.looped}

    @cached_property
    def looped(self) -> dict[str, int]:
        """The arguments of a looped kernel."""
        return {"COLUMNS": self.block_columns, "STAGES": self.num_stages, "num_warps": self.num_warps}


# Triton's own cdiv and next_power_of_2 cost the host 2.6 us a call (3.7.1, one core of a shared machine), because its
# compiler uses them too. These cost 0.1 and 0.25 us; torch.empty costs 3.6.
def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def check_tensors(**tensors: torch.Tensor) -> None:
    """Raise unless all tensors lie on one GPU (any one device in the interpreter) in one supported dtype.

    Raises:
        ValueError: a tensor is not on a GPU, or the devices differ.
        TypeError: the dtype is not bfloat16, float16 or float32, or the dtypes differ.
    """
    name, first = next(iter(tensors.items()))
    device, dtype = first.device, first.dtype
    if not (first.is_cuda or INTERPRETED):
        raise ValueError(
            f"{name} must be on a GPU, got a tensor on {device}; move it with .cuda(), or set "
            "TRITON_INTERPRET=1 before importing to run on the CPU through Triton's interpreter"
        )
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {dtype}; cast it with .to(...)")
    for other_name, other in tensors.items():
        if other.device != device:
            raise ValueError(
                f"all tensors must be on one device, got {name} on {device} and {other_name} on "
                f"{other.device}; move {other_name} with .to({name}.device)"
            )
        if other.dtype != dtype:
            raise TypeError(
                f"all tensors must have one dtype, got {name} in {dtype} and {other_name} in "
                f"{other.dtype}; cast {other_name} with .to({name}.dtype)"
            )


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is [rows, columns]."""
    if tensor.ndim != 2:
        raise ValueError(
            f"{name} must be [rows, columns], got shape {tuple(tensor.shape)}; "
            f"flatten the leading axes with {name}.reshape(-1, {name}.shape[-1])"
        )


def check_vector(name: str, tensor: torch.Tensor, matrix: torch.Tensor) -> None:
    """Raise ValueError unless the tensor has one element for each column of the matrix."""
    if tensor.shape != matrix.shape[1:]:
        raise ValueError(
            f"{name} must be [columns] = [{matrix.shape[1]}] for x of shape {tuple(matrix.shape)}, got "
            f"{tuple(tensor.shape)}; pass one {name} for each column"
        )


def with_unit_column_stride(x: torch.Tensor) -> torch.Tensor:
    """Return x itself if its last stride is 1, else a contiguous copy.

    The kernels take any other strides. Another column stride would prevent 16-byte loads, which costs more than a copy.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors, which sizes persistent grids; a constant in the interpreter."""
    if INTERPRETED:
        return INTERPRETED_MULTIPROCESSORS
    return _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_per_tile(rows: int, block_columns: int, multiprocessors: int, elements: int = 4096) -> int:
    """Return the rows, a power of two, of a tile of `elements`; fewer if multiprocessors would have no tile."""
    return max(1, min(elements // block_columns, next_power_of_2(rows // (4 * multiprocessors))))


def launch_elementwise(kernel: Any, config: FlatConfig, *tensors: torch.Tensor, **constants: Any) -> None:
    """Launch `kernel`(*tensors, elements) on contiguous tensors of one size, unless they are empty."""
    elements = tensors[0].numel()
    if elements == 0:
        return
    with device_of(tensors[0]):
        kernel[(cdiv(elements, config.block),)](
            *tensors, elements, BLOCK=config.block, num_warps=config.num_warps, **constants
        )


def device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Make x's GPU current, because Triton launches on the current device whatever the tensors' device."""
    # Even where it changes nothing, `torch.cuda.device` takes 4 us (torch 2.11 beside an H200).
    if not x.is_cuda or _gpus() == 1 or x.get_device() == torch.cuda.current_device():
        return _NO_CONTEXT
    return torch.cuda.device(x.device)


@cache
def _gpus() -> int:
    return torch.cuda.device_count()
