import pytest
import torch
from row_kernel_checks import random

from xlafuse.triton_side.kernels.shared.head_splits import choose_splits, head_splits, launch_sum_splits

MULTIPROCESSORS = 132  # of an H200


# Backward on an H200 in us by number of splits (tools/benchmarks/attention.py --splits), of shapes given as kv_heads in
# the whole batch, sharing, sequence, keys of a program, causal and window.
MEASURED = {
    (2, 16, 2048, 64, True, 0): {1: 1597, 2: 859, 4: 563, 8: 529, 16: 566},
    (2, 16, 8192, 64, True, 0): {1: 9592, 2: 8050, 4: 7605, 8: 7338, 16: 7585},
    (2, 16, 16384, 64, True, 0): {1: 31713, 2: 31168, 4: 29613, 8: 28358, 16: 28702},
    (2, 16, 2048, 128, True, 0): {1: 1004, 2: 527, 4: 295, 8: 195, 16: 222},
    (16, 8, 2048, 128, True, 0): {1: 825, 2: 733, 4: 795, 8: 800},
    (16, 8, 8192, 128, True, 0): {1: 9792, 2: 9473, 4: 9556, 8: 9527},
    (16, 8, 8192, 128, False, 0): {1: 18640, 2: 18657, 4: 18817, 8: 19365},
    (16, 8, 8192, 128, True, 128): {1: 607, 2: 692, 4: 776, 8: 977},
    (8, 4, 8192, 128, True, 0): {1: 2183, 2: 2200, 4: 2272},
    (8, 4, 4096, 128, True, 1024): {1: 367, 2: 385, 4: 406},
    (8, 4, 4096, 128, True, 0): {1: 370, 2: 399, 4: 425},
    (32, 4, 1024, 128, True, 0): {1: 232, 2: 263, 4: 300},
    (8, 4, 1024, 128, True, 0): {1: 179, 2: 219, 4: 224},
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_the_splits_are_nearly_the_fastest_that_were_measured(shape: tuple[int, int, int, int, bool, int]) -> None:
    times = MEASURED[shape]
    assert times[head_splits(*shape, MULTIPROCESSORS)] <= 1.07 * min(times.values())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sequence", [1024, 2048, 4096, 8192, 16384, 32768])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
def test_splits_divide_the_heads_and_fill_the_gpu(kv_heads: int, sequence: int, causal: bool) -> None:
    sharing, programs = 32, kv_heads * sequence // 128
    splits = head_splits(kv_heads, sharing, sequence, 128, causal, 0, MULTIPROCESSORS)
    assert sharing % splits == 0 and (programs * splits > 0.9 * MULTIPROCESSORS or splits == sharing)


@pytest.mark.parametrize(
    ("kv_heads", "sharing", "sequence", "keys", "causal", "window"),
    [(64, 1, 4096, 128, True, 0), (8, 2, 2048, 64, True, 0), (8, 2, 16384, 128, True, 4096)],
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
