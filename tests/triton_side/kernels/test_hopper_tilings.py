"""The choice between tiles of 128 and of 256 queries, for a GPU of 132 multiprocessors."""

import pytest

from xlafuse.triton_side.kernels.hopper.attention_forward import FULL_TILES, TILES, choose_tiling


@pytest.mark.parametrize(
    ("heads", "sequence", "large"),
    [
        # Whole rounds of tiles.
        (64, 2048, True), (64, 4096, True), (16, 16384, True), (33, 6144, True), (132, 256, True),
        (133, 256, False),  # two rounds, the second of one tile; three of 128 queries
        (16, 1024, False),  # 64 tiles of 256 queries for 132 multiprocessors
        (264, 128, False), (264, 300, False),  # tiles of 256 queries would be half empty
        (1, 2, False),
    ],
)
def test_large_tiles_where_their_rounds_end_first(heads: int, sequence: int, large: bool) -> None:
    expected = FULL_TILES[64] if large else TILES[64]
    assert choose_tiling(64, True, heads, sequence, 132) == expected


def test_masked_packed_and_wide_heads_have_two_consumers() -> None:
    assert choose_tiling(64, False, 64, 4096, 132).consumers == 2
    assert all(choose_tiling(head_dim, True, 64, 4096, 132).consumers == 2 for head_dim in (128, 256))
