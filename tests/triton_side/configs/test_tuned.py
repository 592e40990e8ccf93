"""The choice of a configuration: a table's entry for its class, else the rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from xlafuse.triton_side.configs import table as tables
from xlafuse.triton_side.configs import tuned
from xlafuse.triton_side.configs.table import Entry, Gpu, Table, TableError
from xlafuse.triton_side.kernels import layernorm, matmul, rmsnorm
from xlafuse.triton_side.kernels.shared.launch import RowConfig
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

H200 = Gpu("NVIDIA H200", (9, 0), 132, 232448)
FACTS = (8192, 4096, 2)
CLASS = {"rows": 8192, "columns": 4096, "element_bytes": 2}
ONE_TILE_EACH = RowConfig(4, 4096, 16, 1, 2048)
RESIDENT = RowConfig(1, 4096, 8, 3, 396)

Use = Callable[..., None]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """A function that lets kernels run on a GPU, with an H200's table of one entry."""

    def forget() -> None:
        tuned.current_table.cache_clear()
        for choose in tuned.TUNED.values():
            choose.cache_clear()

    def use(
        config: Any, gpu: Gpu = H200, kernel: str = "rmsnorm.configure_forward", shape_class: Any = CLASS,
        shared_bytes: int = 0,
    ) -> None:
        table = Table("NVIDIA H200", (9, 0), 132, "3.6.0")
        fields = config if isinstance(config, dict) else asdict(config)
        table.put(kernel, shape_class, Entry(fields, shared_bytes, 1.0, 2.0))
        table.write(tmp_path / "h200.json")
        monkeypatch.setattr(tuned, "gpu", lambda: gpu)
        monkeypatch.setattr(tables, "FOLDER", tmp_path)
        forget()

    yield use
    monkeypatch.undo()
    forget()


def rule(*facts: int) -> RowConfig:
    return rmsnorm.configure_forward.__wrapped__(*facts)


def test_an_entry_replaces_the_rule_for_its_class_alone(use: Use) -> None:
    use(RESIDENT)
    assert rmsnorm.configure_forward(*FACTS, 132) == RESIDENT != rule(*FACTS, 132)
    for other in ((4096, 4096, 2), (8193, 4096, 2), (8192, 4095, 2), (8192, 4096, 4)):
        assert rmsnorm.configure_forward(*other, 132) == rule(*other, 132)


def test_a_known_gpu_is_not_warned_about(use: Use) -> None:
    use(RESIDENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rmsnorm.configure_forward(*FACTS, 132)


def test_a_rule_that_uses_another_rule_does_not_use_that_ones_entries(use: Use) -> None:
    use(RESIDENT, shape_class=CLASS | {"columns": 16384})
    long_rows = (8192, 16384, 2)  # layernorm's rule takes rmsnorm's for these
    assert rmsnorm.configure_forward(*long_rows, 132) == RESIDENT
    assert layernorm.configure_forward(*long_rows, 132) == rule(*long_rows, 132)


@pytest.mark.parametrize("rows", [4097, 5000, 8191, 8192])
def test_fewer_rows_of_a_class_get_fewer_programs(use: Use, rows: int) -> None:
    use(ONE_TILE_EACH)
    assert rmsnorm.configure_forward(rows, 4096, 2, 132) == replace(ONE_TILE_EACH, programs=-(-rows // 4))
    use(RESIDENT)
    assert rmsnorm.configure_forward(rows, 4096, 2, 132) == RESIDENT


def test_an_unknown_gpu_scales_resident_programs_and_is_warned_about_once(use: Use) -> None:
    gpu = Gpu("NVIDIA H100 PCIe", (9, 0), 114, 232448)
    use(RESIDENT, gpu)
    with pytest.warns(UserWarning, match="xlafuse tune") as caught:
        assert rmsnorm.configure_forward(*FACTS, 114) == replace(RESIDENT, programs=342)
        rmsnorm.configure_forward(1, 1, 2, 114)
        matmul.matmul_config(torch.bfloat16, "ieee", True, 64, 64, 64, False)
    assert len(caught) == 1
    use(ONE_TILE_EACH, gpu)
    with pytest.warns(UserWarning, match="xlafuse tune"):
        assert rmsnorm.configure_forward(*FACTS, 114) == ONE_TILE_EACH


def test_an_entry_with_more_shared_memory_than_the_gpu_has_does_not_count(use: Use) -> None:
    small = Gpu("NVIDIA RTX 4090", (8, 9), 128, 101376)
    with pytest.warns(UserWarning, match="xlafuse tune"):
        use(RESIDENT, small, shared_bytes=101376)
        assert rmsnorm.configure_forward(*FACTS, 128) == replace(RESIDENT, programs=384)
    with pytest.warns(UserWarning, match="xlafuse tune"):
        use(RESIDENT, small, shared_bytes=101377)
        assert rmsnorm.configure_forward(*FACTS, 128) == rule(*FACTS, 128)


def test_a_product_is_found_by_its_dtype(use: Use) -> None:
    tiles = MatmulConfig(64, 256, 64, 4, 4)
    storage = {"descriptors": True, "transposed": False}
    shape_class = {"dtype": "bfloat16", "precision": "ieee", "m": 128, "n": 4096, "k": 64} | storage
    use(tiles, kernel="matmul.matmul_config", shape_class=shape_class)
    assert matmul.matmul_config(torch.bfloat16, "ieee", True, 100, 4096, 64, False) == tiles
    assert matmul.matmul_config(torch.bfloat16, "ieee", True, 100, 4096, 64, True) != tiles
    assert matmul.matmul_config(torch.float16, "ieee", True, 100, 4096, 64, False) != tiles
    assert matmul.matmul_config(torch.bfloat16, "ieee", False, 100, 4096, 64, False) != tiles


def test_an_entry_of_another_configuration_is_an_error(use: Use) -> None:
    use({"block": 1024})
    with pytest.raises(TableError, match=r"h200\.json.*rmsnorm\.configure_forward.*xlafuse tune"):
        rmsnorm.configure_forward(*FACTS, 132)


def test_no_table_means_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "gpu", lambda: None)
    tuned.current_table.cache_clear()
    rmsnorm.configure_forward.cache_clear()
    assert rmsnorm.configure_forward(*FACTS, 132) == rule(*FACTS, 132)
    assert tuned.table_in_use() is None
    tuned.current_table.cache_clear()


def test_a_record_can_tell_one_version_of_a_table_from_another(use: Use) -> None:
    use(RESIDENT)
    first = tuned.table_in_use()
    use(ONE_TILE_EACH)
    second = tuned.table_in_use()
    assert first and second and first != second and "h200" in first


def test_an_override_ends_with_its_context(use: Use) -> None:
    use(RESIDENT)
    with tuned.overridden(lambda name, facts, config: replace(config, num_warps=1)):
        assert rmsnorm.configure_forward(*FACTS, 132).num_warps == 1
    with tuned.overridden(lambda name, facts, config: None):
        assert rmsnorm.configure_forward(*FACTS, 132) == RESIDENT
    assert rmsnorm.configure_forward(*FACTS, 132) == RESIDENT
