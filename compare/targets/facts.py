"""A GPU that nothing was recorded on, from its vendor's public numbers: device properties, XLA's description, ceilings.

`facts.json` of a pack holds the numbers of one product; `architectures.json` those that its compute capability fixes.
A number that no public source states is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

Facts = Mapping[str, Any]

# XLA's primitive types (xla_data.proto) by the name of a unit in architectures.json.
_PRIMITIVE_TYPES = {
    "i32": (4, 8), "i8": (2, 6), "f64": (12,), "f32": (11,), "f16": (10, 16), "f8": (19, 20, 23, 24, 25, 28, 29, 33),
    "f4": (32,),
}
# Lines of a recorded description that state versions of software, or limits that all of CUDA's GPUs share.
_SHARED = (
    "block_dim_limit_x", "block_dim_limit_y", "block_dim_limit_z", "thread_dim_limit_x", "thread_dim_limit_y",
    "thread_dim_limit_z", "device_address_bits", "numa_node", "pci_bus_id", "driver_version",
    "kernel_mode_driver_version", "runtime_version", "compile_time_toolkit_version", "dnn_version", "cub_version",
    "device_vendor", "collective_memory_granularity",
)


@cache
def _architectures() -> dict[str, Any]:
    return dict(json.loads(Path(__file__).with_name("architectures.json").read_text()))


def architecture(facts: Facts) -> dict[str, Any]:
    """Return the numbers that the GPU's compute capability fixes."""
    return {**_architectures()["all"], **_architectures()[facts["compute_capability"]]}


def device_properties(facts: Facts) -> dict[str, Any]:
    """Return the properties that Inductor reads, as torch.cuda.get_device_properties names them."""
    its = architecture(facts)
    major, minor = map(int, facts["compute_capability"].split("."))
    return {
        "name": facts["name"], "gcnArchName": facts["name"], "major": major, "minor": minor, "is_integrated": 0,
        "is_multi_gpu_board": 0, "multi_processor_count": facts["multiprocessors"], "clock_rate": facts["clock_khz"],
        "memory_clock_rate": facts["memory_clock_khz"], "memory_bus_width": facts["memory_bus_bits"],
        "L2_cache_size": facts["l2_bytes"], "total_memory": facts["memory_bytes"], "warp_size": its["warp_size"],
        "max_threads_per_block": its["max_threads_per_block"], "max_threads_per_multi_processor": its["max_threads"],
        "regs_per_multiprocessor": its["registers"], "shared_memory_per_block": its["shared_memory_per_block"],
        "shared_memory_per_block_optin": its["shared_memory"] - its["reserved_shared_memory_per_block"],
        "shared_memory_per_multiprocessor": its["shared_memory"],
    }


def xla_config(facts: Facts, recorded: str) -> str:
    """Return XLA's device description, with the fields that `recorded` has: a description by the same series of jax.

    Versions of software are those of the recorded one. Rates of units are given where XLA knows them for this compute
    capability; elsewhere it has none on the GPU itself either.
    """
    its, device = architecture(facts), device_properties(facts)
    clock = facts["clock_khz"] / 1e6
    own = {
        "threads_per_block_limit": its["max_threads_per_block"], "threads_per_warp": its["warp_size"],
        "shared_memory_per_block": its["shared_memory_per_block"], "shared_memory_per_core": its["shared_memory"],
        "threads_per_core_limit": its["max_threads"], "core_count": facts["multiprocessors"],
        "fpus_per_core": its["fpus"], "l2_cache_size": facts["l2_bytes"], "clock_rate_ghz": clock,
        "memory_bandwidth": facts["memory_clock_khz"] * 1000 * 2 * facts["memory_bus_bits"] // 8,
        "device_memory_size": facts["memory_bytes"], "name": json.dumps(facts["name"]),
        "shared_memory_per_block_optin": device["shared_memory_per_block_optin"],
        "registers_per_core_limit": its["registers"], "registers_per_block_limit": its["registers"],
        "mem_clock_ghz": facts["memory_clock_khz"] / 1e6, "max_blocks_per_multiprocessor": its["max_blocks"],
        "reserved_shared_memory_per_block": its["reserved_shared_memory_per_block"],
    }
    fields = dict(re.findall(r"^  (\w+): (.*)$", recorded, re.MULTILINE))
    lines = [f"{name}: {own.get(name, fields[name])}" for name in fields if name in own or name in _SHARED]
    extension = "ACCELERATED_FEATURES" if device["major"] >= 9 else "NONE"
    capability = f"major: {device['major']} minor: {device['minor']} feature_extension: {extension}"
    lines.append(f"cuda_compute_capability {{ {capability} }}")
    for kind, units in its.get("units", {}).items():
        rates = [
            f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {clock * scale:.9g} units_per_core: {count} "
            f"ops_per_clock: {ops} }} }}"
            for name, (count, ops, scale) in units.items() for key in _PRIMITIVE_TYPES[name]
        ]
        lines.append(f"{kind}_unit_description {{ {' '.join(rates)} }}")
    if "device_interconnect_info" in recorded and "nvlinks" in facts:
        lines.append(f"device_interconnect_info {{ active_links: {facts['nvlinks']} }}")
    body = "".join(f"  {line}\n" for line in lines)
    end = recorded[recorded.index("\n}\n") + 3 :].replace(fields["name"], json.dumps(facts["name"]))
    return f"gpu_device_info {{\n{body}}}\n{end}"


def ceilings(sheet: Facts, measured: Sequence[tuple[Facts, Facts]]) -> dict[str, Any]:
    """Return ceilings from a data sheet: each rate is scaled by the mean share that the measured GPUs reach of theirs.

    measured: (ceilings, data sheet) of each GPU with both. A rate that none of them has is left out.
    """
    streams = {
        mix: sheet["bandwidth"] * fmean(found["streams"][mix] / own["bandwidth"] for found, own in measured)
        for mix in measured[0][0]["streams"]
    }
    shares = {
        dtype: [
            found["products"][dtype] / own["products"][dtype] for found, own in measured
            if dtype in found["products"] and dtype in own["products"]
        ]
        for dtype in sheet["products"]
    }
    products = {dtype: rate * fmean(shares[dtype]) for dtype, rate in sheet["products"].items() if shares[dtype]}
    return {"streams": streams, "products": products, "source": "scaled data sheet"}
