"""Checks of a kernel's tensors, and the width of the loads that their alignment permits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

CPP_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
VECTOR_BYTES = 16
MAX_COLUMNS = 2**30  # column indices are 32-bit, and run past the end by up to one tile


def check(operation: str, **tensors: torch.Tensor) -> None:
    """Check that all tensors are on one CUDA device and have one shape and one dtype that the kernels support.

    Raises:
        TypeError: not a tensor, a dtype other than float32, float16 or bfloat16, or several dtypes.
        ValueError: not on a CUDA device, several devices, or several shapes.
    """
    check_dtype_and_device(operation, **tensors)
    _check_alike("shape", ValueError, operation, tensors)


def check_dtype_and_device(operation: str, **tensors: torch.Tensor) -> None:
    """Check as `check` does, but allow several shapes."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{operation}: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device.type != "cuda":
            raise ValueError(
                f"{operation}: {name} must be on a CUDA device, got {tensor.device}; move it with .to('cuda')"
            )
        if tensor.dtype not in CPP_TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CPP_TYPES)
            raise TypeError(f"{operation}: {name} must be {known}, got {tensor.dtype}; convert it with .to(dtype)")
    _check_alike("dtype", TypeError, operation, tensors)
    _check_alike("device", ValueError, operation, tensors)


def _check_alike(
    attribute: str, error: type[Exception], operation: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    found = {name: getattr(tensor, attribute) for name, tensor in tensors.items()}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {tuple(v) if attribute == 'shape' else v}" for name, v in found.items())
        raise error(f"{operation}: all tensors must have one {attribute}, got {listed}; cast or expand first")


def check_rows(operation: str, **tensors: torch.Tensor) -> None:
    """Check as `check` does, and that the kernels can index the last axis.

    Raises:
        TypeError: as `check`.
        ValueError: as `check`, or no axis, or more than 2**30 columns.
    """
    check(operation, **tensors)
    for name, x in tensors.items():
        if x.ndim == 0 or x.shape[-1] > MAX_COLUMNS:
            raise ValueError(
                f"{operation}: {name} must have a last axis of at most {MAX_COLUMNS} elements, got {tuple(x.shape)}"
            )


def check_vectors(operation: str, x: torch.Tensor, **vectors: torch.Tensor) -> None:
    """Check as `check_dtype_and_device` does, and that each vector has one element for each column of x.

    Raises:
        TypeError, ValueError: as `check_dtype_and_device`.
        ValueError: another shape.
    """
    check_dtype_and_device(operation, x=x, **vectors)
    for name, vector in vectors.items():
        if vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{operation}: {name} must be [{x.shape[-1]}], one element for each column of x, "
                f"got {tuple(vector.shape)}"
            )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the first element lies on a 16-byte boundary.

    A fake tensor has no address. Its storage counts as aligned, because PyTorch's CUDA allocator aligns to 512 bytes.
    """
    if isinstance(tensor, FakeTensor):
        return tensor.storage_offset() * tensor.element_size() % VECTOR_BYTES == 0
    return tensor.data_ptr() % VECTOR_BYTES == 0


def lanes(*tensors: torch.Tensor, columns: int | None = None) -> int:
    """Return the number of elements per load: 16 bytes' worth if all tensors are 16-byte aligned, else 1.

    columns: the row length; if given, every row must be aligned, too.
    """
    size = tensors[0].element_size()
    rows_aligned = columns is None or columns * size % VECTOR_BYTES == 0
    return VECTOR_BYTES // size if rows_aligned and all(map(is_aligned, tensors)) else 1
