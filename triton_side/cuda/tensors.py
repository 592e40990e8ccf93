"""What the kernels of this folder accept, and how wide they may load it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

CPP_TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
VECTOR_BYTES = 16


def check(operation: str, **tensors: torch.Tensor) -> None:
    """All tensors are on one CUDA device, of one dtype that the kernels know, and of one shape.

    Raises:
        TypeError: not a tensor, a dtype other than float32, float16 or bfloat16, or several dtypes.
        ValueError: not on a CUDA device, several devices, or several shapes.
    """
    check_dtype_and_device(operation, **tensors)
    _check_alike("shape", ValueError, operation, tensors)


def check_dtype_and_device(operation: str, **tensors: torch.Tensor) -> None:
    """`check` for tensors of several shapes."""
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
) -> None:  # fmt: skip
    found = {name: getattr(tensor, attribute) for name, tensor in tensors.items()}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {tuple(v) if attribute == 'shape' else v}" for name, v in found.items())
        raise error(f"{operation}: all tensors must have one {attribute}, got {listed}; cast or expand first")


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the first element lies on a 16-byte boundary. A fake tensor has no address: its storage counts as
    aligned,
    as every storage of PyTorch's CUDA allocator is (to 512 bytes)."""
    if isinstance(tensor, FakeTensor):
        return tensor.storage_offset() * tensor.element_size() % VECTOR_BYTES == 0
    return tensor.data_ptr() % VECTOR_BYTES == 0


def lanes(*tensors: torch.Tensor, columns: int | None = None) -> int:
    """Elements per load: 16 bytes where every tensor, and with `columns` every row, is 16-byte aligned; else 1."""
    size = tensors[0].element_size()
    rows_aligned = columns is None or columns * size % VECTOR_BYTES == 0
    return VECTOR_BYTES // size if rows_aligned and all(map(is_aligned, tensors)) else 1
