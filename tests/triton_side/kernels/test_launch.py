"""What launchers compute on the host, for every kernel alike."""

import itertools

import pytest
import torch
import triton

from triton_side.kernels import _tiles
from triton_side.kernels._launch import cdiv, next_power_of_2
from triton_side.kernels._tiles import fits_descriptor


def test_numbers_are_those_of_triton() -> None:
    numbers = [*range(1, 1100), 2**31 - 1, 2**31, 2**31 + 1, 2**40 + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    pairs = list(itertools.product([0, 1, 127, 128, 129, 2**40 + 1], [1, 7, 128]))
    assert [cdiv(a, b) for a, b in pairs] == [triton.cdiv(a, b) for a, b in pairs]


def test_no_rows_need_a_tile_of_one() -> None:
    assert next_power_of_2(0) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_a_descriptor_takes_what_16_bytes_divide(dtype: torch.dtype) -> None:
    storage = torch.empty(4096, dtype=dtype)
    found = {True: 0, False: 0}
    for offset, outer, row, column in itertools.product([0, 3, 8, 32], [64, 100, 128], [1, 6, 8, 16], [1, 2]):
        matrix = storage.as_strided((2, 3, 4), (outer, row, column), offset)
        aligned = all(number * dtype.itemsize % 16 == 0 for number in (offset, outer, row))
        assert fits_descriptor(matrix) == (aligned and column == 1)
        found[fits_descriptor(matrix)] += 1
    assert min(found.values()) > 0
    with _tiles.without_descriptors():
        assert not fits_descriptor(storage.view(64, 64))
