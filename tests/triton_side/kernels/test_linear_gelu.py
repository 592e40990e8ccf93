import pytest
import torch
from row_kernel_checks import DTYPES, is_accurate, random, with_gradients

from xlafuse.triton_side.kernels import linear_gelu
from xlafuse.triton_side.kernels.linear_gelu import DpreConfig
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

NAMES = ("x", "weight", "bias")
DESCRIPTORS = MatmulConfig(32, 32, 32, num_warps=4, num_stages=2)
# Several tiles of rows a program, several of columns, and a program without a tile.
DPRE_CONFIGS = [
    DpreConfig(block_rows=4, block_columns=32, num_warps=1, num_stages=1, programs=3),
    DpreConfig(block_rows=1, block_columns=128, num_warps=4, num_stages=3, programs=20),
]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ weight + bias, approximate="tanh")


def tensors(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return x, weight, bias, dy."""
    weight = (random(k, n, seed=1) * max(k, 1) ** -0.5).to(dtype)
    return [random(m, k, dtype=dtype), weight, random(n, dtype=dtype, seed=2), random(m, n, dtype=dtype, seed=3)]


def agrees(function, *inputs: torch.Tensor, dy: torch.Tensor) -> bool:
    got = with_gradients(function, *inputs, dy=dy)
    low = with_gradients(plain, *inputs, dy=dy)
    reference = with_gradients(plain, *(x.double() for x in inputs), dy=dy.double())
    return all(is_accurate(*three) for three in zip(got, low, reference, strict=True))


def applied(*inputs: torch.Tensor) -> torch.Tensor:
    return linear_gelu.apply(dict(zip(NAMES, inputs, strict=True)))["y"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(17, 37, 67), (40, 64, 136)])
def test_agrees_with_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    *inputs, dy = tensors(m, k, n, dtype)
    assert agrees(applied, *inputs, dy=dy)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (1, 32, 48), (3, 2, 600)])
def test_few_rows(m: int, k: int, n: int) -> None:
    """Only in float32: the largest of a few 16-bit rounding errors is luck, for plain code as for ours."""
    *inputs, dy = tensors(m, k, n)
    assert agrees(applied, *inputs, dy=dy)


def test_agrees_through_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_gelu, "matmul_config", lambda *chosen: DESCRIPTORS)
    *inputs, dy = tensors(40, 64, 136, torch.float16)
    assert agrees(applied, *inputs, dy=dy)


@pytest.mark.parametrize("config", DPRE_CONFIGS, ids=str)
def test_any_configuration_of_the_elementwise_pass_agrees(config: DpreConfig) -> None:
    dy, pre = random(19, 131), random(19, 131, seed=1)
    (dpre, dbias), (default, default_dbias) = linear_gelu.launch_dpre(dy, pre, config), linear_gelu.launch_dpre(dy, pre)
    assert torch.equal(dpre, default)
    torch.testing.assert_close(dbias, default_dbias)
