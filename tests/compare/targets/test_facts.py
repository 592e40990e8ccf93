"""Packs of GPUs that nothing was recorded on: numbers have sources; descriptions and ceilings follow from them."""

from __future__ import annotations

import json
import re

import pytest

from xlafuse.compare import targets
from xlafuse.compare.sources.target_ceilings import origin, target_ceilings
from xlafuse.compare.targets import facts as of_facts
from xlafuse.compare.targets.facts import architecture

FROM_FACTS = [name for name in targets.names() if targets.load(name).facts]


def test_the_packs() -> None:
    assert {"a100-80gb", "b200", "l4", "rtx-4090"} <= {*FROM_FACTS}
    assert [name for name in targets.names() if targets.is_measured(name)] == ["h100", "h200"]


@pytest.mark.parametrize("name", FROM_FACTS)
def test_every_number_has_one_source(name: str) -> None:
    pack = targets.load(name)
    sources = json.loads((pack.folder / "provenance.json").read_text())["facts.json"]
    assert sorted(number for numbers in sources.values() for number in numbers) == sorted(pack.facts or {})
    assert all(len(source) > 30 for source in sources)


@pytest.mark.parametrize("name", targets.names())
def test_a_pack_without_facts_has_a_source_for_each_part(name: str) -> None:
    pack = targets.load(name)
    parts = json.loads((pack.folder / "provenance.json").read_text())
    assert parts and all(parts.values())
    assert pack.facts or {"ceilings.json", "tpu.json" if pack.tpu else "cuda_device_properties.json"} <= {*parts}


@pytest.mark.parametrize("name", FROM_FACTS)
def test_the_numbers_agree_with_each_other(name: str) -> None:
    facts = targets.load(name).facts
    assert facts is not None
    clocked = facts["memory_clock_khz"] * 1000 * 2 * facts["memory_bus_bits"] / 8
    assert clocked == pytest.approx(facts["bandwidth"], rel=0.01)
    fma = 2 * architecture(facts)["fpus"] * facts["multiprocessors"] * facts["clock_khz"] * 1000
    assert fma == pytest.approx(facts["products"]["float32-ieee"], rel=0.02)


def test_facts_of_the_h200_give_its_recorded_description() -> None:
    """The H200's own numbers, as facts, give the properties and the description that were recorded on it."""
    pack = targets.load("h200")
    device = pack.device_properties()
    facts = {
        "name": device["name"], "compute_capability": "9.0", "multiprocessors": device["multi_processor_count"],
        "clock_khz": device["clock_rate"], "memory_clock_khz": device["memory_clock_rate"],
        "memory_bus_bits": device["memory_bus_width"], "l2_bytes": device["L2_cache_size"],
        "memory_bytes": device["total_memory"], "nvlinks": 18,
    }
    assert of_facts.device_properties(facts) == device
    recorded = pack.xla_config("0.11.2")
    made = of_facts.xla_config(facts, recorded)
    scalar = re.compile(r"^  (\w+: .*)$", re.MULTILINE)
    left_out = {*scalar.findall(recorded)} - {*scalar.findall(made)}
    assert {line.partition(":")[0] for line in left_out} == {
        "ecc_enabled", "model_str", "pcie_bandwidth", "platform_version"
    }
    rates = r"key: (\d+)\s+value \{\s+clock_rate_ghz: (\S+)\s+units_per_core: (\d+)\s+ops_per_clock: (\d+)"
    of_made = {(key, float(clock) // 0.01, units, ops) for key, clock, units, ops in re.findall(rates, made)}
    of_recorded = {(key, float(clock) // 0.01, units, ops) for key, clock, units, ops in re.findall(rates, recorded)}
    assert of_made <= of_recorded
    assert {key for key, *_ in of_recorded - of_made} == {"35", "36"}  # newer types that no array of ours has


@pytest.mark.parametrize("series", ["0.10.2", "0.11.2"])
def test_a_description_has_only_fields_that_this_jax_knows(series: str) -> None:
    field = re.compile(r"^  (\w+): ", re.MULTILINE)
    known = {*field.findall(targets.load("h200").xla_config(series))}
    assert {*field.findall(targets.load("l4").xla_config(series))} < known


def test_ceilings_are_the_scaled_data_sheet() -> None:
    sheet, found = targets.load("a100-80gb").data_sheet, target_ceilings("a100-80gb")
    hopper = [targets.load(name) for name in ("h100", "h200")]
    shares = [pack.ceilings()["products"]["bfloat16"] / (pack.peak("bfloat16") or 0.0) for pack in hopper]
    assert found.products["bfloat16"] == pytest.approx(sheet["products"]["bfloat16"] * sum(shares) / 2)
    assert max(found.streams.values()) < sheet["bandwidth"]
    assert (found.data_sheet, target_ceilings("h200").data_sheet) == ("scaled data sheet", "")
    assert origin("a100-80gb") == "the scaled data sheet of a100-80gb"


def test_a_real_device_of_that_name_is_recognised() -> None:
    assert targets.of_device("NVIDIA A100-SXM4-80GB") == "a100-80gb"
    assert targets.of_device("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is None
