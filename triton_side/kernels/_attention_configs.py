"""How the attention kernels are tiled and compiled, by dtype, head_dim and what the tensors' strides allow."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from triton_side.kernels._tiles import fits_descriptor, product_precision

HEAD_DIMS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is tiled and compiled: `block_q` rows of queries by `block_kv` of keys and values.

    The dk, dv kernel keeps the keys and walks the queries, the forward and the dq kernel the other way round, and that
    for dbias keeps both. descriptors: the walked tiles, and the forward's q, come through TMA tensor descriptors
    instead of per-element pointers.
    """

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int
    descriptors: bool


@dataclass(frozen=True)
class Operands:
    """What a configuration is chosen by.

    precision: of float32 products. descriptors: what the kernel reads tile by tile can be read through TMA. shared:
    heads of q share heads of k and v. windowed: a window cuts off keys, so that there is a third loop. packed: a
    program finds its sequence first. biased: tiles of a bias are read as well.
    """

    dtype: torch.dtype
    head_dim: int
    precision: str
    descriptors: bool
    shared: bool = False
    windowed: bool = False
    packed: bool = False
    biased: bool = False

    @property
    def ieee(self) -> bool:
        return self.dtype == torch.float32 and self.precision == "ieee"


def forward_config(of: Operands) -> TileConfig:
    """Tiles of the forward kernel, which reads q, k and v tile by tile.

    float32 tiles, and those for a head_dim of 256, are as large as registers allow without spills (cuobjdump, sm_90),
    smaller under a bias: IEEE products run on the ordinary cores and hold whole operand rows in registers. 16-bit tiles
    are the fastest of a sweep on an H200 (Triton 3.6, batch 4, 32 heads, sequence 4096): TFLOP/s 478 for head_dim 128
    and 411 for 64, against 463 and 378 for each with the other's tiles. Warp specialisation gave 489 at best and NaN in
    other tilings, so it is not used.
    """
    if of.ieee:
        block_q = 64 if of.head_dim <= 64 else 32
        narrow = of.head_dim == 256 or (of.head_dim == 128 and (of.windowed or of.biased))
        return TileConfig(block_q, 16 if narrow else 32, num_warps=8, num_stages=1, descriptors=False)
    if of.dtype == torch.float32:
        if of.head_dim == 256:
            return TileConfig(32, 32, num_warps=8, num_stages=1, descriptors=False)
        return TileConfig(128, 32, num_warps=8, num_stages=2, descriptors=False)
    if of.head_dim <= 64:
        return TileConfig(128, 64, num_warps=8, num_stages=3, descriptors=False)
    if of.head_dim == 256:
        return TileConfig(128, 32 if of.biased else 64, num_warps=8, num_stages=2, descriptors=of.descriptors)
    return TileConfig(64, 64, num_warps=4, num_stages=3, descriptors=of.descriptors)


def dk_dv_config(of: Operands) -> TileConfig:
    """Tiles of the kernel for dk and dv, which reads q and dout tile by tile.

    16-bit tiles are the fastest of the sweep of `forward_config`: TFLOP/s of the four products 527 for head_dim 128
    (483 with 128 rows of keys) and 440 for 64 (401 and 432 with 64 rows of queries; through pointers 474 once and 375
    later). For 128 they spill 24 bytes of registers; through pointers they would spill 160, so those keep 128 rows of
    keys and 8 warps. Where heads are shared, a window is cut, sequences are packed or a bias is read, they would spill
    24 to 240; the tiles taken there, and those for 256, are from compiled code alone, and spill nothing (256 with
    shared heads and a sequence that 32 does not divide: 8 bytes, packed: 24).
    """
    if of.ieee:
        block = 32 if of.head_dim <= 64 else 16
        return TileConfig(block, block, num_warps=8, num_stages=1, descriptors=False)
    if of.dtype == torch.float32 and of.head_dim == 256:
        return TileConfig(16, 16 if of.biased else 32, num_warps=8, num_stages=1, descriptors=False)
    if of.dtype == torch.float32:
        block_kv = 64 if of.head_dim <= 64 else 32
        warps = 8 if of.biased and of.head_dim == 128 else 4
        return TileConfig(32, block_kv, num_warps=warps, num_stages=1, descriptors=False)
    if of.head_dim <= 64:
        return TileConfig(32 if of.descriptors else 64, 64, num_warps=4, num_stages=3, descriptors=of.descriptors)
    if of.head_dim == 256:
        return TileConfig(16 if of.biased else 32, 64, num_warps=8, num_stages=2, descriptors=False)
    if of.shared or of.windowed or of.packed or of.biased:
        block_q = 64 if of.descriptors and not of.windowed else 32
        return TileConfig(block_q, 64, num_warps=8, num_stages=2, descriptors=of.descriptors)
    if not of.descriptors:
        return TileConfig(64, 128, num_warps=8, num_stages=2, descriptors=False)
    return TileConfig(64, 64, num_warps=4, num_stages=2, descriptors=True)


def dq_config(of: Operands) -> TileConfig:
    """Tiles of the kernel for dq, which reads k and v tile by tile.

    16-bit tiles are from the sweep of `forward_config`: TFLOP/s of the three products 555 for head_dim 128 (572 with
    128 x 32, 8 warps, 3 stages, which for 64 has 426) and 576 for 64 (564 through descriptors). Those for 256 are from
    compiled code alone, without spills.
    """
    if of.ieee:
        block = 32 if of.head_dim <= 64 else 16
        return TileConfig(block, block, num_warps=8, num_stages=2 if of.head_dim == 256 else 1, descriptors=False)
    if of.dtype == torch.float32 and of.head_dim == 256:
        return TileConfig(32, 32, num_warps=8, num_stages=1, descriptors=False)
    if of.dtype == torch.float32:
        warps = 8 if of.biased and of.head_dim == 128 else 4
        return TileConfig(64, 32, num_warps=warps, num_stages=1, descriptors=False)
    if of.head_dim <= 64:
        return TileConfig(64, 64, num_warps=4, num_stages=3, descriptors=False)
    if of.head_dim == 256 and of.biased:
        return TileConfig(64, 32, num_warps=8, num_stages=2, descriptors=of.descriptors)
    if of.head_dim == 256 and of.descriptors:
        return TileConfig(64, 64, num_warps=8, num_stages=2, descriptors=True)
    if of.head_dim == 256:
        return TileConfig(128, 32, num_warps=8, num_stages=2, descriptors=False)
    return TileConfig(64, 64, num_warps=4, num_stages=2, descriptors=of.descriptors)


def dbias_config(of: Operands) -> TileConfig:
    """Tiles of the kernel for dbias, which keeps one of them and walks the batch.

    From compiled code alone: the largest that spill nothing, but TF32 of a head_dim of 256, which spills 88 bytes at
    most.
    """
    if of.ieee:
        return TileConfig(32, 32, 8, 1, False) if of.head_dim <= 64 else TileConfig(16, 16, 4, 1, False)
    if of.dtype == torch.float32 and of.head_dim == 256:
        return TileConfig(16, 16, num_warps=8, num_stages=1, descriptors=False)
    if of.dtype == torch.float32:
        warps = 4 if of.head_dim <= 64 else 8
        return TileConfig(64, 32, num_warps=warps, num_stages=1, descriptors=False)
    if of.head_dim == 256:
        return TileConfig(64, 64, num_warps=8, num_stages=1, descriptors=False)
    return TileConfig(128, 64, num_warps=8, num_stages=2, descriptors=False)


def chosen(
    choose: Callable[[Operands], TileConfig], *read_in_tiles: torch.Tensor, shared: bool = False,
    windowed: bool = False, packed: bool = False, biased: bool = False,
) -> TileConfig:
    """What `choose` says of tensors of which the kernel reads one tile after the other."""
    first = read_in_tiles[0]
    descriptors = all(map(fits_descriptor, read_in_tiles))
    precision = product_precision(first.dtype)
    return _chosen(choose, first.dtype, first.shape[-1], precision, descriptors, shared, windowed, packed, biased)


@lru_cache
def _chosen(choose: Callable[[Operands], TileConfig], *of: Any) -> TileConfig:
    return choose(Operands(*of))
