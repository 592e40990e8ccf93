import kernel_properties as properties
import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, random

from xlafuse.triton_side.kernels import embedding
from xlafuse.triton_side.kernels.embedding import EmbeddingConfig

NARROW = EmbeddingConfig(tokens=2, columns=16, num_warps=1, rows=3)


def draw_ids(rows: int, tokens: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> torch.Tensor:
    """Return ids, half of them of one row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, rows, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = rows // 2
    return ids.to(device=DEVICE, dtype=dtype)


def configured(config: EmbeddingConfig | None, module=embedding) -> properties.Launch:
    """Return a function of table, contiguous ids and dy -> y, dtable."""
    return lambda table, ids, dy: (module.forward(table, ids, config), module.backward(ids, dy, len(table), config))


def trained(table: torch.Tensor, ids: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return properties.trained(lambda table: embedding.apply({"table": table, "ids": ids})["y"], table, dy=dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 131, 70), (71, 20, 3), (3, 2100, 2)])
def test_agrees_with_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, columns, tokens = shape
    table, dy = random(rows, columns, dtype=dtype), random(tokens, columns, dtype=dtype, seed=1)
    assert not properties.embedding(trained, table, draw_ids(rows, tokens), dy)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 255, 256, 700])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_the_order_is_stable(tokens: int, dtype: torch.dtype) -> None:
    assert not properties.sorted_by_id(embedding.sort_by_id, draw_ids(5, tokens, dtype))
    assert not properties.sorted_by_id(embedding.sort_by_id, draw_ids(2**31 - 1, tokens, dtype))


def test_all_tokens_on_one_row() -> None:
    table, dy = random(40, 33), random(70, 33, seed=1)
    for row in (0, 31, 32, 39):  # at both ends of a program's rows
        ids = torch.full((70,), row, dtype=torch.int32, device=DEVICE)
        assert not properties.embedding(configured(None), table, ids, dy)


def test_any_configuration_gives_the_same_bits() -> None:
    table, ids, dy = random(10, 33), draw_ids(10, 40), random(40, 33, seed=1)
    _, dtable = configured(NARROW)(table, ids, dy)
    _, other = configured(EmbeddingConfig(tokens=2, columns=32, num_warps=1, rows=8))(table, ids, dy)
    assert torch.equal(dtable, other)


def test_tokens_of_a_row_are_summed_in_float32() -> None:
    """In float16, 2048 + 1 is 2048."""
    ids, dy = torch.ones(131, dtype=torch.int32, device=DEVICE), torch.ones(131, 3, dtype=torch.float16, device=DEVICE)
    dy[0] = 2048
    assert embedding.backward(ids, dy, rows=3).tolist() == [[0.0] * 3, [2178.0] * 3, [0.0] * 3]
