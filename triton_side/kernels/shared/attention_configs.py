"""Tile sizes and compile options of the attention kernels, by dtype, head_dim and strides."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.tiles import fits_descriptor, product_precision

HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes and compile options of a kernel: `block_q` rows of queries by `block_kv` of keys and values.

    The dk, dv kernel keeps a tile of keys and loops over queries. The forward and the dq kernel keep queries and loop
    over keys. The dbias kernel computes tiles of both.

    descriptors: TMA tensor descriptors, not per-element pointers, read the tiles of the loop and the forward's q.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    descriptors: bool


def attention_precision(dtype: torch.dtype, head_dim: int) -> str:
    """Return `product_precision`, except IEEE in place of three TF32 products for head_dim 256.

    Both halves of an operand that stays in registers take 256 of them there. Compiled for an H200, tiles of 32 rows
    spill up to 9 kB a thread, and tiles of 16 rows up to 0.2 kB.
    """
    precision = product_precision(dtype)
    return "ieee" if precision == "tf32x3" and head_dim == 256 else precision


def _is_ieee(dtype: torch.dtype, precision: str) -> bool:
    return dtype == torch.float32 and precision == "ieee"


@tuned
def forward_config(
    dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool, shared: bool, windowed: bool, packed: bool,
    biased: bool,
) -> TileConfig:
    """Return the tiles of the forward kernel, which reads q, k and v tile by tile.

    float32 tiles, and tiles for head_dim 256, are the largest that spill no registers (cuobjdump, sm_90). Under a bias
    they are smaller. IEEE products run on the ordinary cores and hold whole operand rows in registers.

    Three TF32 products take TF32's tiles; `xlafuse tune` found faster ones for head_dim 64 (docs/kernels/attention.md).
    They hold both halves of an operand in registers. Other tiles for 128 spill less where several warps compute the
    same products. Compiled for an H200 (Triton 3.7.1), a thread spills, in bytes:

        head_dim    forward      dk, dv       dq
        16, 32      0            0            0
        64          0            0 to 120     0
        128         56 to 152    80 to 560    264 to 640

    16-bit tiles are the fastest of a sweep on an H200 (Triton 3.6, batch 4, 32 heads, sequence 4096): 478 TFLOP/s for
    head_dim 128 and 411 for 64; with each other's tiles 463 and 378. Warp specialisation reached at most 489 and gave
    NaN for other tile sizes, so it is not used.
    """
    if _is_ieee(dtype, precision):
        block_q = 64 if head_dim <= 64 else 32
        narrow = head_dim == 256 or (head_dim == 128 and (windowed or biased))
        return TileConfig(block_q, 16 if narrow else 32, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        if head_dim == 256:
            return TileConfig(32, 32, num_warps=8, num_stages=1, descriptors=False)
        return TileConfig(128, 32, num_warps=8, num_stages=2, descriptors=False)
    if head_dim <= 64:
        return TileConfig(128, 64, num_warps=8, num_stages=3, descriptors=False)
    if head_dim == 256:
        block_kv = 32 if biased else 64
        return TileConfig(128, block_kv, num_warps=8, num_stages=2, descriptors=descriptors)
    return TileConfig(64, 64, num_warps=4, num_stages=3, descriptors=descriptors)


@tuned
def dk_dv_config(
    dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool, shared: bool, windowed: bool, packed: bool,
    biased: bool,
) -> TileConfig:
    """Return the tiles of the dk, dv kernel, which reads q and dout tile by tile.

    16-bit tiles are the fastest of the sweep that `forward_config` names. TFLOP/s of the four products:

        head_dim 128    527; with 128 rows of keys 483
        head_dim 64     440; with 64 rows of queries 401 and 432; through pointers 474 once and 375 later

    The tiles for 128 spill 24 bytes of registers. Through pointers they would spill 160, so pointers keep 128 rows of
    keys and 8 warps. With shared heads, a window, packed sequences or a bias they would spill 24 to 240.

    The tiles for these cases, and for head_dim 256, were chosen from compiled code, not timed. They spill nothing, with
    two exceptions for 256: shared heads with a sequence that 32 does not divide (8 bytes), and packed sequences (24).
    """
    if _is_ieee(dtype, precision):
        block = 32 if head_dim <= 64 else 16
        return TileConfig(block, block, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32 and head_dim == 256:
        return TileConfig(16, 16 if biased else 32, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        block_kv = 64 if head_dim <= 64 else 32
        warps = 8 if biased and head_dim == 128 else 4
        return TileConfig(32, block_kv, num_warps=warps, num_stages=1, descriptors=False)
    if head_dim <= 64:
        block_q = 32 if descriptors else 64
        return TileConfig(block_q, 64, num_warps=4, num_stages=3, descriptors=descriptors)
    if head_dim == 256:
        return TileConfig(16 if biased else 32, 64, num_warps=8, num_stages=2, descriptors=False)
    if shared or windowed or packed or biased:
        block_q = 64 if descriptors and not windowed else 32
        return TileConfig(block_q, 64, num_warps=8, num_stages=2, descriptors=descriptors)
    if not descriptors:
        return TileConfig(64, 128, num_warps=8, num_stages=2, descriptors=False)
    return TileConfig(64, 64, num_warps=4, num_stages=2, descriptors=True)


@tuned
def dq_config(
    dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool, shared: bool, windowed: bool, packed: bool,
    biased: bool,
) -> TileConfig:
    """Return the tiles of the dq kernel, which reads k and v tile by tile.

    16-bit tiles are from the sweep that `forward_config` names. TFLOP/s of the three products: 555 for head_dim 128 and
    576 for 64 (564 through descriptors). Tiles of 128 x 32 with 8 warps and 3 stages reach 572 for 128 and 426 for 64.
    The tiles for 256 were chosen from compiled code, not timed, and spill nothing.
    """
    if _is_ieee(dtype, precision):
        block = 32 if head_dim <= 64 else 16
        return TileConfig(block, block, num_warps=8, num_stages=2 if head_dim == 256 else 1, descriptors=False)
    if dtype == torch.float32 and head_dim == 256:
        return TileConfig(32, 32, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32:
        warps = 8 if biased and head_dim == 128 else 4
        return TileConfig(64, 32, num_warps=warps, num_stages=1, descriptors=False)
    if head_dim <= 64:
        return TileConfig(64, 64, num_warps=4, num_stages=3, descriptors=False)
    if head_dim == 256 and biased:
        return TileConfig(64, 32, num_warps=8, num_stages=2, descriptors=descriptors)
    if head_dim == 256 and descriptors:
        return TileConfig(64, 64, num_warps=8, num_stages=2, descriptors=True)
    if head_dim == 256:
        return TileConfig(128, 32, num_warps=8, num_stages=2, descriptors=False)
    return TileConfig(64, 64, num_warps=4, num_stages=2, descriptors=descriptors)


@tuned
def dbias_config(
    dtype: torch.dtype, head_dim: int, precision: str, descriptors: bool, shared: bool, windowed: bool, packed: bool,
    biased: bool,
) -> TileConfig:
    """Return the tiles of the dbias kernel, which loops over tiles of queries by keys and the batch.

    Tiles of head_dim 64 that TMA reads are the fastest that `xlafuse tune` found on an H200. The others were chosen
    from compiled code (Triton 3.7.1), not timed: the largest that spill nothing, except for float32 products on the
    tensor cores with head_dim 128 (at most 296 bytes a thread) and 256 (824).
    """
    if _is_ieee(dtype, precision):
        return TileConfig(32, 32, num_warps=8, num_stages=1, descriptors=False)
    if dtype == torch.float32 and head_dim > 64:
        return TileConfig(64, 32, num_warps=8, num_stages=1, descriptors=descriptors)
    if head_dim == 256:
        return TileConfig(64, 64, num_warps=8, num_stages=1, descriptors=descriptors)
    if head_dim == 128 or not descriptors:
        block_kv = 32 if dtype == torch.float32 else 64
        return TileConfig(128, block_kv, num_warps=8, num_stages=2, descriptors=descriptors)
    if precision == "tf32x3":
        return TileConfig(128, 64, num_warps=8, num_stages=3, descriptors=True)
    return TileConfig(64 if dtype == torch.float32 else 128, 64, num_warps=4, num_stages=2, descriptors=True)


def choose_attention_config(
    choose: Callable[..., TileConfig], *looped: torch.Tensor, shared: bool = False, windowed: bool = False,
    packed: bool = False, biased: bool = False,
) -> TileConfig:
    """Return the tiles that `choose`, such as `forward_config`, gives a kernel that loops over the tensors `looped`.

    shared: heads of q share heads of k and v. windowed: a window hides keys, which takes a third loop. packed: a
    program first finds its sequence. biased: the kernel also reads tiles of a bias. `choose` also gets the precision of
    float32 products, and whether TMA can read the tensors (`descriptors`).
    """
    dtype, head_dim = looped[0].dtype, looped[0].shape[-1]
    descriptors = all(map(fits_descriptor, looped))
    precision = attention_precision(dtype, head_dim)
    return choose(dtype, head_dim, precision, descriptors, shared, windowed, packed, biased)
