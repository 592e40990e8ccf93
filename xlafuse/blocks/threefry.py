"""Threefry-2x32-13, a counter-based random generator (Salmon et al., Parallel Random Numbers, SC 2011).

jax.random has only the version with twenty rounds, with its own keys and shapes.
"""

import jax
import jax.numpy as jnp

_ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA

Words = tuple[jax.Array, jax.Array]


def threefry_2x32(key: Words, counter: Words) -> Words:
    """Return two random words for each counter; everything is uint32, and the counters broadcast."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for done in range(1, _ROUNDS + 1):
        bits = _ROTATIONS[(done - 1) % 8]
        first = first + second
        second = ((second << bits) | (second >> (32 - bits))) ^ first
        if done % 4 == 0:
            first = first + keys[done // 4 % 3]
            second = second + keys[(done // 4 + 1) % 3] + jnp.uint32(done // 4)
    return first, second


def uniforms(rows: int, columns: int, seed: jax.Array) -> jax.Array:
    """Return [rows, columns] of random integers from 0 to 65535, for the key `seed` [2], int32.

    Counter (c // 4, r) gives 64 bits. Column c of row r is their 16-bit part number c % 4, the lowest bits first.
    """
    key = jax.lax.bitcast_convert_type(seed, jnp.uint32)
    row = jnp.arange(rows, dtype=jnp.uint32)[:, None]
    group = jnp.arange(-(-columns // 4), dtype=jnp.uint32)[None, :]
    words = threefry_2x32((key[0], key[1]), (group, row))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return jnp.stack(halves, -1).reshape(rows, -1)[:, :columns]
