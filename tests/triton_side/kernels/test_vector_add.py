import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, random

from xlafuse.triton_side.kernels import vector_add
from xlafuse.triton_side.kernels.shared.launch import FlatConfig


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 7, 1024, 2048, 2049, 10007])
def test_same_bits_as_torch(elements: int, dtype: torch.dtype) -> None:
    x, y = random(elements, dtype=dtype), random(elements, dtype=dtype, seed=1)
    out = vector_add.apply({"x": x, "y": y})["out"]
    assert torch.equal(out, x + y)


def test_any_configuration_gives_the_same() -> None:
    x, y = random(1000), random(1000, seed=1)
    assert torch.equal(vector_add.vector_add(x, y, config=FlatConfig(block=64, num_warps=1)), x + y)


def test_accepts_inputs_that_require_a_gradient() -> None:
    x = random(10).requires_grad_()
    assert not vector_add.apply({"x": x, "y": x})["out"].requires_grad


@pytest.mark.gpu
def test_rejects_cpu_tensors() -> None:
    x = torch.ones(4)
    with pytest.raises(ValueError, match="must be on a GPU"):
        vector_add.vector_add(x, x)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    x = torch.ones(2**31 + 24, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = 3
    out = vector_add.vector_add(x, x)
    assert out[2**31 - 1] == 2 and out[2**31] == 2 and out[-1] == 6
