"""Threefry-2x32-13, the random number generator of dropout masks.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011. Random words are a function of a key and a
counter, so a mask is recomputed and never stored. Thirteen rounds are the fewest that the authors found to pass all
tests of BigCrush. Their default of twenty is a margin that dropout does not need; it costs half as much arithmetic
again in a memory-bound block.

The arithmetic is int64, which NumPy and PyTorch share; 32-bit words are values from 0 to 2^32 - 1.
"""

from __future__ import annotations

import math
from typing import Any

ROUNDS = 13
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
_WORD = 2**32 - 1


def threefry_2x32(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two random words for each counter.

    counter: int64 arrays that broadcast. key: integers of any kind; the low 32 bits of their two's complement count.
    A key word is added after every fourth round, and none after the thirteenth.
    """
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    first, second = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for done in range(1, ROUNDS + 1):
        rotation = ROTATIONS[(done - 1) % 8]
        first = (first + second) & _WORD
        second = ((second << rotation) & _WORD | second >> (32 - rotation)) ^ first
        if done % 4 == 0:
            first = (first + keys[done // 4 % 3]) & _WORD
            second = (second + keys[(done // 4 + 1) % 3] + done // 4) & _WORD
    return first, second


def uniforms(xp: Any, x: Any, seed: Any) -> Any:
    """Return an int64 integer from 0 to 65535 for each element of x [rows, columns]. seed: the key's two words.

    Counter (c // 4, r) gives 64 bits; column c of row r is their 16 bits number c % 4, the lowest first.
    """
    ones = xp.ones_like(x, dtype=xp.int64)
    row, group = xp.cumsum(ones[:, :1], 0) - 1, xp.cumsum(ones[:1, ::4], 1) - 1
    words = threefry_2x32((seed[0], seed[1]), (group, row))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return xp.stack(halves, -1).reshape(x.shape[0], -1)[:, : x.shape[1]]


def dropout_constants(p: float) -> tuple[int, float]:
    """Return (threshold, scale): an element is kept where its uniform is at least the threshold, and is then scaled.

    The threshold is p rounded up to 16 bits. The scale keeps each element's mean at its value.
    """
    threshold = math.ceil(p * 65536)
    return threshold, 65536 / (65536 - threshold)
