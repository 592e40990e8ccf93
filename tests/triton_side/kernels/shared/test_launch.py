"""Launch helpers on the host, and the choice of configurations."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import triton

from xlafuse.triton_side.kernels.matmul import choose_config, matmul_config
from xlafuse.triton_side.kernels.shared import tiles
from xlafuse.triton_side.kernels.shared.attention_configs import choose_attention_config, forward_config
from xlafuse.triton_side.kernels.shared.launch import cdiv, next_power_of_2
from xlafuse.triton_side.kernels.shared.tiles import fits_descriptor


def test_cdiv_and_next_power_of_2_agree_with_triton() -> None:
    numbers = [*range(1, 1100), 2**31 - 1, 2**31, 2**31 + 1, 2**40 + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    pairs = list(itertools.product([0, 1, 127, 128, 129, 2**40 + 1], [1, 7, 128]))
    assert [cdiv(a, b) for a, b in pairs] == [triton.cdiv(a, b) for a, b in pairs]


def test_the_next_power_of_2_of_0_is_1() -> None:
    assert next_power_of_2(0) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_a_descriptor_needs_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    storage = torch.empty(4096, dtype=dtype)
    found = {True: 0, False: 0}
    for offset, outer, row, column in itertools.product([0, 3, 8, 32], [64, 100, 128], [1, 6, 8, 16], [1, 2]):
        matrix = storage.as_strided((2, 3, 4), (outer, row, column), offset)
        aligned = all(number * dtype.itemsize % 16 == 0 for number in (offset, outer, row))
        assert fits_descriptor(matrix) == (aligned and column == 1)
        found[fits_descriptor(matrix)] += 1
    assert min(found.values()) > 0
    with tiles.without_descriptors():
        assert not fits_descriptor(storage.view(64, 64))


def test_a_configuration_follows_the_precision_setting(precision: None) -> None:
    """The cache of configurations distinguishes precisions and storages."""
    q = torch.zeros(1, 1, 64, 64, dtype=torch.float32)
    a = torch.zeros(128, 128, dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("highest")
    with tiles.ieee_products():
        ieee = choose_attention_config(forward_config, q, q, q), choose_config(matmul_config, a.float(), a.float())
    assert choose_config(matmul_config, a.float(), a.float()) != ieee[1]
    torch.set_float32_matmul_precision("high")
    tf32 = choose_attention_config(forward_config, q, q, q), choose_config(matmul_config, a.float(), a.float())
    assert ieee[0] != tf32[0] and ieee[1] != tf32[1]
    assert choose_config(matmul_config, a, a).descriptors
    with tiles.without_descriptors():
        assert not choose_config(matmul_config, a, a).descriptors
    assert choose_config(matmul_config, a, a).descriptors


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
