"""What the kernels built on matrix products share: tile loads, tensor descriptors, precision of float32 products."""

import torch
import triton
import triton.language as tl

DESCRIPTOR_ALIGNMENT = 16  # bytes; CUDA driver API, cuTensorMapEncodeTiled: globalAddress and globalStrides


@triton.jit
def load_rows(
    source, stride_row, stride_column, start, rows,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, DESCRIPTOR: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + BLOCK of a [rows, WIDTH] matrix, zero past its end.

    `source` is a descriptor with blocks [BLOCK, WIDTH], or a pointer to the matrix. Without CHECK the caller knows that
    the rows exist; a descriptor checks always.
    """
    if DESCRIPTOR:
        return source.load([start, 0])
    else:
        row = tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        pointers = source + tl.cast(start, tl.int64) * stride_row + (row * stride_row + column * stride_column)
        if CHECK:
            return tl.load(pointers, mask=row < rows - start, other=0.0)
        else:
            return tl.load(pointers)


def fits_descriptor(matrix: torch.Tensor) -> bool:
    """Whether TMA can read tiles of the last two axes: neighbours in memory along the last, all else 16-byte aligned.

    The start of the storage is taken as aligned, which PyTorch's allocators guarantee, so that no address is read.
    """
    offsets = (matrix.storage_offset(), *matrix.stride()[:-1])
    return matrix.stride(-1) == 1 and all(o * matrix.element_size() % DESCRIPTOR_ALIGNMENT == 0 for o in offsets)


def provide_descriptor_memory(device: torch.device) -> None:
    """Give Triton memory for the descriptors that the next kernel of this thread builds on the device.

    To be called before each launch: Triton keeps its allocator per context, and autograd's backward has a thread of its
    own.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)


def product_precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: float32 follows torch.get_float32_matmul_precision(), 16-bit products are exact.

    "highest" is IEEE, "high" is TF32. Raises ValueError for "medium" (bfloat16 products), which no kernel here has.
    """
    if dtype != torch.float32:
        return "ieee"
    setting = torch.get_float32_matmul_precision()
    precisions = {"highest": "ieee", "high": "tf32"}
    if setting not in precisions:
        raise ValueError(
            f"float32 products are IEEE ('highest') or TF32 ('high'), got float32_matmul_precision {setting!r}; "
            "call torch.set_float32_matmul_precision('high') or ('highest')"
        )
    return precisions[setting]
