import pytest
import torch
from row_kernel_checks import random

from xlafuse.triton_side.kernels.shared.head_splits import choose_splits, head_splits, launch_sum_splits

MULTIPROCESSORS = 132  # of an H200


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("sequence", [1024, 2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
def test_heads_are_split_until_the_gpu_is_full_and_no_further(
    kv_heads: int, sequence: int, keys: int, causal: bool
) -> None:
    """kv_heads: of the batch: 1, 2, 4 or 8 in a batch of one or two."""
    sharing, tiles = 32, sequence // keys
    # Queries of a program's loop on average, as a share of those of the longest.
    mean = (tiles + 1) / (2 * tiles) if causal else 1

    def full(splits: int) -> bool:
        """Return whether the average multiprocessor has at least 95% of the work of the longest program."""
        return kv_heads * tiles * splits * mean / MULTIPROCESSORS > 0.95

    splits = head_splits(kv_heads, sharing, sequence, keys, causal, 0, MULTIPROCESSORS)
    assert sharing % splits == 0 and (full(splits) or splits == sharing)
    assert splits == 1 or not full(splits // 2)


@pytest.mark.parametrize(
    ("kv_heads", "sharing", "sequence", "keys", "causal", "window"),
    [
        (64, 1, 4096, 128, True, 0), (8, 4, 4096, 128, True, 1024), (8, 4, 8192, 128, True, 0),
        (8, 2, 2048, 64, True, 0), (8, 2, 16384, 128, True, 4096), (16, 8, 2048, 128, True, 0),
    ],
)
def test_shapes_that_fill_an_h200_have_none(kv_heads, sharing, sequence, keys, causal, window) -> None:
    assert head_splits(kv_heads, sharing, sequence, keys, causal, window, MULTIPROCESSORS) == 1


@pytest.mark.parametrize("sequence", [1, 16, 67, 128])
def test_short_sequences_have_none(sequence: int) -> None:
    """A second launch and the sums take longer than the loop over two heads."""
    assert head_splits(1, 2, sequence, 128, True, 0, MULTIPROCESSORS) == 1


def test_packed_sequences_have_none_and_a_given_number_is_kept() -> None:
    q, k = torch.zeros(1, 16, 1024, 64), torch.zeros(1, 1, 1024, 64)
    assert choose_splits(q, k, 128, True, 0, None) > 1
    assert choose_splits(q, k, 128, True, 0, torch.tensor([0, 1024], dtype=torch.int32)) == 1
    assert choose_splits(q, k, 128, True, 0, None, 2) == 2


@pytest.mark.parametrize(("splits", "head_dim"), [(2, 16), (3, 256), (5, 64)])
def test_sums(splits: int, head_dim: int) -> None:
    sums = tuple(random(2, 3 * splits, 37, head_dim, dtype=torch.float32, seed=seed) for seed in range(2))
    rows = torch.full((2, 37, 7, head_dim), torch.nan, dtype=torch.bfloat16, device=sums[0].device).transpose(1, 2)
    dk, dv, between = rows.split((3, 3, 1), dim=1)
    launch_sum_splits(sums, dk, dv)
    for found, each in zip((dk, dv), sums, strict=True):
        expected = each.unflatten(1, (3, splits)).sum(2)
        assert torch.allclose(found.float(), expected, rtol=2**-7, atol=1e-6)
    assert between.isnan().all()
