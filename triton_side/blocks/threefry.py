"""Threefry-2x32-13 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) in wrapping int32.

GPUs add int32 at full rate, and PyTorch has no uint32 arithmetic.
"""

import torch
from torch import Tensor

_ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def _rotated(word: Tensor, bits: int) -> Tensor:
    return (word << bits) | ((word >> (32 - bits)) & ((1 << bits) - 1))


def threefry_2x32(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return two random words for each counter. All tensors are int32; the counters broadcast."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for done in range(1, _ROUNDS + 1):
        first = first + second
        second = _rotated(second, _ROTATIONS[(done - 1) % 8]) ^ first
        if done % 4 == 0:
            first = first + keys[done // 4 % 3]
            second = second + keys[(done // 4 + 1) % 3] + done // 4
    return first, second


def uniforms(rows: int, columns: int, seed: Tensor) -> Tensor:
    """Return integers from 0 to 65535, [rows, columns], for the key seed [2].

    Counter (c // 4, r) gives 64 bits. Column c of row r is their 16 bits number c % 4, the lowest first.
    """
    row = torch.arange(rows, dtype=torch.int32, device=seed.device)[:, None]
    group = torch.arange(-(-columns // 4), dtype=torch.int32, device=seed.device)[None, :]
    words = threefry_2x32((seed[0], seed[1]), (group, row))
    halves = [half for word in words for half in (word & 0xFFFF, (word >> 16) & 0xFFFF)]
    return torch.stack(halves, -1).reshape(rows, -1)[:, :columns]
