"""The table of targets: each one's device and rates, and whether they were measured or come from a data sheet."""

from __future__ import annotations

import json
from typing import Any

from .. import targets
from ..graph import formats
from ..sources.target_ceilings import target_ceilings


def rows() -> list[dict[str, Any]]:
    """Return a row for each target. sources: where its numbers come from."""
    return [_row(name) for name in targets.names()]


def _row(name: str) -> dict[str, Any]:
    pack, ceilings = targets.load(name), target_ceilings(name)
    device = {} if pack.tpu else pack.device_properties()
    return {
        "target": name, "device": pack.device,
        "compute_capability": f"{device['major']}.{device['minor']}" if device else None,
        "multiprocessors": device.get("multi_processor_count"),
        "memory_bytes": pack.tpu["hbm_bytes"] if pack.tpu else device["total_memory"],
        "bandwidth": ceilings.bandwidth(1, 1), "bf16_flop_per_s": ceilings.products.get("bfloat16"),
        "rates": ceilings.data_sheet or "measured", "sources": _sources(pack),
    }


def _sources(pack: targets.Pack) -> list[str]:
    parts = json.loads((pack.folder / "provenance.json").read_text())
    if pack.facts:
        return list(parts["facts.json"])
    said = (part.get("source") or f"a run on an {part['device']}, {part['created'][:10]}" for part in parts.values())
    return list(dict.fromkeys(said))


def as_json() -> str:
    return json.dumps({"schema": "xlafuse.targets/1", "targets": rows()}, indent=1)


def as_text() -> str:
    """Return the table, and below it the sources of each target."""
    from tabulate import tabulate

    found = rows()
    shown = [
        {
            "target": row["target"], "device": row["device"], "capability": row["compute_capability"] or "",
            "SMs": row["multiprocessors"] or "", "memory": formats.size(row["memory_bytes"]),
            "bandwidth": f"{formats.size(row['bandwidth'])}/s", "bf16": f"{row['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s",
            "rates": row["rates"],
        }
        for row in found
    ]
    measured = " and ".join(filter(targets.is_measured, targets.names()))
    notes = (
        "Bandwidth is of a copy. scaled data sheet: nothing was measured; the vendor's rates, times the share that\n"
        f"{measured} reach of theirs. Nothing is autotuned for those GPUs, and no time is recorded."
    )
    sources = [f"{row['target']}: {'; '.join(row['sources'])}" for row in found]
    return "\n".join([tabulate(shown, headers="keys", disable_numparse=True), "", notes, "", "Sources", *sources])
