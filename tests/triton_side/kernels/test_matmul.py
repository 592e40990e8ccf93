import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, mutant, random

from triton_side.kernels import matmul
from triton_side.kernels.matmul import MatmulConfig

CONFIGS = [
    MatmulConfig(16, 32, 16, num_warps=4, num_stages=1, group_m=1, descriptors=False, persistent=False, flatten=False),
    MatmulConfig(32, 16, 32, num_warps=4, num_stages=2, group_m=3, descriptors=False),
    MatmulConfig(16, 32, 32, num_warps=4, num_stages=2, group_m=2),
    MatmulConfig(32, 16, 16, num_warps=4, num_stages=2, flatten=False, warp_specialize=True),
]


def stored(matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    return matrix.T.contiguous().T if transposed else matrix


def agrees(got: torch.Tensor, *terms: torch.Tensor) -> bool:
    """terms: alternating factors of products, and a residual where their number is odd."""

    def plain(*terms: torch.Tensor) -> torch.Tensor:
        *factors, residual = terms if len(terms) % 2 else (*terms, None)
        total = sum(a @ b for a, b in zip(factors[::2], factors[1::2], strict=True))
        return total if residual is None else total + residual

    return is_accurate(got, plain(*terms), plain(*(term.double() for term in terms)))


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
    # Not covered exactly by any tile, yet 16-byte rows in every storage.
    m, k, n = (56, 40, 72) if config.descriptors else (53, 41, 67)
    a, a2 = (stored(random(m, k, dtype=torch.float16, seed=seed), a_transposed) for seed in (0, 1))
    b, b2 = (stored(random(k, n, dtype=torch.float16, seed=seed), b_transposed) for seed in (2, 3))
    residual = random(m, n, dtype=torch.float16, seed=4)
    got = matmul.launch_matmul(a, b, config, residual=residual, second=(a2, b2))
    assert agrees(got, a, b, a2, b2, residual)


def test_strides() -> None:
    a, b = random(40, 90)[:, ::2], random(45, 1, seed=1).expand(45, 33)
    assert agrees(matmul.matmul(a, b), a, b)
    a, b = random(41, 50)[1:, 3:48], random(45, 33, seed=1)
    assert agrees(matmul.matmul(a, b, random(33, 40, seed=2).T), a, b, random(33, 40, seed=2).T)


def test_every_output_tile_is_visited_once() -> None:
    """In groups of rows, the last one lower than the others."""
    assert agrees(matmul.launch_matmul(a := random(70, 16), b := random(16, 90, seed=1), CONFIGS[1]), a, b)


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    c = matmul.matmul(random(m, k), random(k, n))
    assert c.shape == (m, n) and (c == 0).all()


def test_what_descriptors_can_read() -> None:
    fits = matmul.operands_fit_descriptors
    x = random(64, 64, dtype=torch.float16)
    assert fits(x, x.T, x[3:, :40], x[:, 8:16])
    assert not fits(x, x[:, 1:33])
    assert not fits(x[:, ::2])
    assert not fits(random(64, 60, dtype=torch.float16))
    assert fits(random(64, 60))


def test_rejects() -> None:
    with pytest.raises(ValueError, match=r"must fit, got a \[3, 4\], b \[3, 4\]; transpose"):
        matmul.matmul(random(3, 4), random(3, 4))
    with pytest.raises(ValueError, match=r"residual \[3, 4\]"):
        matmul.matmul(random(3, 4), random(4, 3), random(3, 4))
    with pytest.raises(ValueError, match=r"b must be \[rows, columns\]"):
        matmul.matmul(random(3, 4), random(2, 4, 3))


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP_M)", "GROUP_M"),
        ("c = tl.dot(x, y, c,", "c = tl.dot(x, y, "),
        ("if residual_ptr is not None:", "if False:"),
        ("a2, row, at, m, k", "a, row, at, m, k"),
        ("residual_ptr, row, column", "residual_ptr, row, row"),
    ],
)
def test_comparison_catches(sound: str, broken: str, tmp_path) -> None:
    a, a2, b, b2 = random(53, 41), random(53, 41, seed=1), random(41, 67, seed=2), random(41, 67, seed=3)
    residual = random(53, 67, seed=4)
    launch = mutant(matmul, sound, broken, tmp_path).launch_matmul
    assert not agrees(launch(a, b, CONFIGS[1], residual=residual, second=(a2, b2)), a, b, a2, b2, residual)
