"""Dropout masks from the counter-based generator Threefry-2x32-13.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. A key and a position give the same bits in every
kernel, so no mask is stored. One call gives the numbers of four neighbours in a row. They stay in one thread, because
the words are interleaved in registers.
"""

import triton
import triton.language as tl

PARITY = tl.constexpr(0x1BD11BDA)


@triton.jit
def _mix(first, second, BITS: tl.constexpr):
    first += second
    second = ((second << BITS) | (second >> (32 - BITS))) ^ first
    return first, second


@triton.jit
def threefry_2x32(key, key2, first, second):
    """Return two random words for each counter (first, second) under (key, key2); all uint32.

    Twelve rounds, with a word of the key added after every four, and a thirteenth round.
    """
    key3 = key ^ key2 ^ PARITY
    first, second = first + key, second + key2
    for done in tl.static_range(4, 13, 4):
        if done % 8 == 4:
            first, second = _mix(first, second, 13)
            first, second = _mix(first, second, 15)
            first, second = _mix(first, second, 26)
            first, second = _mix(first, second, 6)
        else:
            first, second = _mix(first, second, 17)
            first, second = _mix(first, second, 29)
            first, second = _mix(first, second, 16)
            first, second = _mix(first, second, 24)
        key, key2, key3 = key2, key3, key
        first, second = first + key, second + key2 + done // 4
    return _mix(first, second, 17)


@triton.jit
def uniforms(seed_ptr, row, COLUMNS: tl.constexpr):
    """Return [ROWS, COLUMNS] of integers from 0 to 65535, uint32, for row [ROWS, 1].

    Column c gets 16 of the 64 bits of counter (c // 4, row): the (c % 4)-th, counted from the lowest. COLUMNS is at
    least 4; the seed is two words of int32.
    """
    key = tl.load(seed_ptr).to(tl.uint32, bitcast=True)
    key2 = tl.load(seed_ptr + 1).to(tl.uint32, bitcast=True)
    row = row.to(tl.uint32)
    group = tl.arange(0, COLUMNS // 4)[None, :].to(tl.uint32)
    word, word2 = threefry_2x32(key, key2, group + tl.zeros_like(row), row + tl.zeros_like(group))
    words = tl.interleave(word, word2)
    return tl.interleave(words & 0xFFFF, words >> 16)
