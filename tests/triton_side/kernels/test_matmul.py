from dataclasses import replace

import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import matmul
from xlafuse.triton_side.kernels.shared.counters import zero_counters
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

CONFIGS = [
    MatmulConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=1, descriptors=False),
    MatmulConfig(32, 16, 32, num_warps=4, num_stages=2, group_m=3, descriptors=False),
    MatmulConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=2),
]


SPLIT = MatmulConfig(16, 32, 16, num_warps=4, num_stages=2, descriptors=False)
MOST_TILES = 4  # of the split products below


def stored(matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    return matrix.T.contiguous().T if transposed else matrix


def agrees(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    residual = torch.zeros_like(got) if residual is None else residual
    return is_accurate(got, a @ b + residual, a.double() @ b.double() + residual.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 37, 67), (1, 64, 48), (64, 1, 129), (96, 128, 136)])
def test_agrees_with_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b, residual = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1), random(m, n, dtype=dtype, seed=2)
    assert agrees(matmul.matmul(a, b), a, b)
    assert agrees(matmul.matmul(a, b, residual), a, b, residual)


@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_and_storage_agrees(config: MatmulConfig, a_transposed: bool, b_transposed: bool) -> None:
    # No tile covers them exactly, yet rows are multiples of 16 bytes in every storage.
    m, k, n = (56, 40, 72) if config.descriptors else (53, 41, 67)
    for dtype in (torch.float16, torch.float32):
        a, b = stored(random(m, k, dtype=dtype), a_transposed), stored(random(k, n, dtype=dtype, seed=1), b_transposed)
        residual = random(m, n, dtype=dtype, seed=2)
        assert agrees(matmul.launch_matmul(a, b, config, residual=residual), a, b, residual)


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 41, 67), (16, 200, 40), (5, 16, 96), (3, 0, 5)])
def test_programs_that_share_the_inner_axis_agree(m: int, k: int, n: int, splits: int) -> None:
    """The last splits may have no step. Every launch leaves its counters at zero for the next one."""
    a, b, residual, bias = random(m, k), random(k, n, seed=1), random(m, n, seed=2), random(n, seed=3)
    config = replace(SPLIT, splits=splits)
    got = [matmul.launch_matmul(a, b, config, residual, bias=bias) for _ in range(3)]
    assert agrees(got[0], a, b, residual + bias)
    assert all(torch.equal(got[0], again) for again in got)
    if a.is_cuda:
        torch.cuda.synchronize()
    assert not zero_counters(a, MOST_TILES).any()


@pytest.mark.parametrize("b_transposed", [False, True])
def test_shared_tiles_of_any_storage_agree_in_float16(b_transposed: bool) -> None:
    a, b = random(16, 96, dtype=torch.float16), stored(random(96, 67, dtype=torch.float16, seed=1), b_transposed)
    assert agrees(matmul.launch_matmul(a, b, replace(SPLIT, splits=4)), a, b)


def test_gelu_applies_once_to_shared_tiles() -> None:
    a, b, bias = random(16, 96), random(96, 40, seed=1), random(40, seed=2)
    y, pre = matmul.launch_bias_gelu(a, b, bias, replace(SPLIT, splits=4), save=True)
    assert pre is not None and agrees(pre, a, b, bias.expand(16, 40))
    torch.testing.assert_close(y, torch.nn.functional.gelu(pre, approximate="tanh"))


@pytest.mark.gpu
def test_a_cuda_graph_of_shared_tiles_is_replayed() -> None:
    a, b = random(16, 96), random(96, 40, seed=1)
    config = replace(SPLIT, splits=4)
    matmul.launch_matmul(a, b, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = matmul.launch_matmul(a, b, config)
    for seed in range(2, 5):
        a.copy_(random(16, 96, seed=seed))
        graph.replay()
        assert agrees(c, a, b)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "programs"), [(4096, 4096, 128), (4096, 14336, 128), (14336, 4096, 112), (16384, 4096, 128)]
)
def test_few_rows_use_most_multiprocessors(n: int, k: int, programs: int, transposed: bool) -> None:
    config = matmul.matmul_config(torch.bfloat16, "ieee", True, 16, n, k, transposed)
    assert config.splits * -(-n // config.block_n) == programs
    assert config.splits == (2 if n == 4096 and not transposed else 1)


@pytest.mark.parametrize("n", range(1024, 4096, 512))
def test_few_programs_are_split_to_two_a_multiprocessor(n: int) -> None:
    config = matmul.matmul_config(torch.bfloat16, "ieee", True, 5, n, 16384, False)
    assert 132 * 3 // 4 < config.splits * -(-n // config.block_n) <= 2 * 132


def test_a_short_inner_axis_is_not_split() -> None:
    assert matmul.matmul_config(torch.bfloat16, "ieee", True, 16, 768, 768, False).splits == 1
    assert matmul.matmul_config(torch.bfloat16, "ieee", True, 65, 768, 8192, False).splits == 1


@pytest.mark.parametrize(("k", "step"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64)])
def test_a_step_of_a_short_sum_is_hardly_longer_than_the_sum(k: int, step: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        config = matmul.matmul_config(dtype, "ieee", True, 4096, 14336, k, False)
        assert config.block_k == step and config.descriptors
    for other in ((torch.float32, "ieee", True), (torch.bfloat16, "ieee", False)):
        rule = matmul.many_rows_config(*other)
        assert matmul.matmul_config(*other, 4096, 14336, k, False) == rule


def test_the_rule_is_told_how_b_is_stored() -> None:
    a, b = random(16, 64, dtype=torch.float16), random(64, 64, dtype=torch.float16)
    for right, columns in ((b, 64), (stored(b, True), 32)):
        assert matmul.choose_config(matmul.matmul_config, a, right).block_n == columns


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 16, 31])
@pytest.mark.parametrize("config", [CONFIGS[1], CONFIGS[2]], ids=str)
def test_a_product_also_sums_the_rows_of_b(config: MatmulConfig, rows: int, transposed: bool) -> None:
    """Several tiles below each other read the same columns, and the last columns fill no tile."""
    if config.descriptors and rows not in (1, 16):
        pytest.skip("descriptors take rows of whole 16 bytes")
    a, b = random(rows, 72, dtype=torch.float16).T, stored(random(rows, 136, dtype=torch.float16, seed=1), transposed)
    b = b.mul(4).round()  # sums of small integers are exact
    sums = torch.full((136,), torch.nan, dtype=torch.float16, device=b.device)
    c = matmul.launch_matmul(a, b, config, b_sums=sums)
    assert agrees(c, a, b) and torch.equal(sums, b.sum(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (17, 37, 67), (40, 64, 136)])
def test_gradients_agree_with_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b, residual = random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1), random(m, n, dtype=dtype, seed=2)
    dc = random(m, n, dtype=dtype, seed=3)
    _, da, db, dresidual = with_gradients(matmul.matmul, a, b, residual, dy=dc)
    assert agrees(da, dc, b.T) and agrees(db, a.T, dc) and torch.equal(dresidual, dc)


def test_gradients_of_any_storage() -> None:
    a, b, transposed = (stored(random(*shape, seed=i), True) for i, shape in enumerate([(17, 24), (24, 40), (17, 40)]))
    for dc in (transposed, random(1, 40, seed=3).expand(17, 40), random(1, 1).expand(17, 40)):
        _, da, db = with_gradients(matmul.matmul, a, b, dy=dc)
        assert agrees(da, dc, b.T) and agrees(db, a.T, dc)


def test_the_block() -> None:
    a, b = random(5, 8), random(8, 7, seed=1)
    assert agrees(matmul.apply({"a": a, "b": b})["c"], a, b)


def test_every_output_tile_is_visited_once() -> None:
    """Groups of rows are visited in turn; the last group has fewer rows."""
    assert agrees(matmul.launch_matmul(a := random(70, 16), b := random(16, 90, seed=1), CONFIGS[1]), a, b)


def test_which_matrices_descriptors_can_read() -> None:
    fits = matmul.operands_fit_descriptors
    x = random(64, 64, dtype=torch.float16)
    assert fits(x, x.T, x[3:, :40], x[:, 8:16])
    assert not fits(x, x[:, 1:33])
    assert not fits(x[:, ::2])
    assert not fits(random(64, 60, dtype=torch.float16))
    assert fits(random(64, 60))


def test_rejects_a_residual_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"residual \[3, 4\]"):
        matmul.matmul(random(3, 4), random(4, 3), random(3, 4))
