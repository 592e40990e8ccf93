"""The reference's generator: its authors' test vectors, equal masks everywhere, and their statistics."""

from __future__ import annotations

import numpy as np
import pytest

from xlafuse.compare.spec import threefry

torch = pytest.importorskip("torch")

# Random123 1.14, tests/kat_vectors: threefry2x32 13, counter, key, words.
PI = ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344))
KNOWN = [
    ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
    ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0xFD36D048, 0x2D17272C)),
    (*PI, (0xBA3E4725, 0xF27D669E)),
]
ROWS, COLUMNS = 512, 1024
SEED = np.array([7, -9], np.int32)


def uniforms(rows: int, columns: int, seed: np.ndarray = SEED) -> np.ndarray:
    return threefry.uniforms(np, np.empty((rows, columns)), seed)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words) -> None:
    arrays = tuple(np.array([word], np.int64) for word in counter)
    assert tuple(int(word[0]) for word in threefry.threefry_2x32(key, arrays)) == words


def test_only_the_low_32_bits_of_a_key_count() -> None:
    counter = np.arange(5), np.arange(5)
    unsigned = threefry.threefry_2x32((2**32 - 9, 7), counter)
    np.testing.assert_array_equal(unsigned, threefry.threefry_2x32((np.int32(-9), np.int32(7)), counter))


def test_numpy_torch_and_the_plain_blocks_draw_the_same() -> None:
    jnp = pytest.importorskip("jax.numpy")
    from xlafuse.blocks import threefry as in_jax
    from xlafuse.triton_side.blocks import threefry as in_torch

    expected, seed = uniforms(37, 11), torch.from_numpy(SEED)
    assert expected.dtype == np.int64 and expected.min() >= 0 and expected.max() < 65536
    np.testing.assert_array_equal(threefry.uniforms(torch, torch.empty(37, 11, dtype=torch.float16), seed), expected)
    np.testing.assert_array_equal(in_torch.uniforms(37, 11, seed), expected)
    np.testing.assert_array_equal(in_jax.uniforms(37, 11, jnp.asarray(SEED)), expected)


def test_an_element_s_number_depends_on_its_position_only() -> None:
    np.testing.assert_array_equal(uniforms(5, 13)[:2, :6], uniforms(2, 6))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements_is_p(p: float) -> None:
    threshold, scale = threefry.dropout_constants(p)
    rate = threshold / 65536
    assert 0 <= rate - p < 2**-16 and (1 - rate) * scale == pytest.approx(1, rel=1e-15)
    dropped = uniforms(ROWS, COLUMNS) < threshold
    deviation = (rate * (1 - rate) / dropped.size) ** 0.5
    assert abs(dropped.mean() - rate) < 4 * deviation
    # Every row's and every column's mean lies within 5 deviations.
    for axis, count in ((0, ROWS), (1, COLUMNS)):
        assert np.abs(dropped.mean(axis=axis) - rate).max() < 5 * (rate * (1 - rate) / count) ** 0.5


def test_neighbours_rows_and_seeds_are_independent() -> None:
    """Correlations of n independent pairs have the deviation 1/sqrt(n)."""
    drawn = uniforms(ROWS, COLUMNS)
    others = [(drawn, uniforms(ROWS, COLUMNS, SEED + np.array(step))) for step in ([1, 0], [0, 1])]
    right = [(drawn[:, :-lag], drawn[:, lag:]) for lag in (1, 2, 3, 4, 8)]
    below = [(drawn[:-lag], drawn[lag:]) for lag in (1, 2, 4)]
    for a, b in (*others, *right, *below):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / a.size**0.5
        both = ((a < 8192) & (b < 8192)).mean()
        assert abs(both - 1 / 64) < 4 * (1 / 64 / a.size) ** 0.5
