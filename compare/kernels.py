"""A compiler's kernel, as each package describes it, as the dict that records carry."""

from __future__ import annotations

import dataclasses
from typing import Any

from compare.archive import portable


def to_json(kernel: Any, **more: Any) -> dict[str, Any]:
    """Fields of the dataclass `kernel` that say something, and `more`; source lines relative to the project, so that a
    record reads the same on any machine."""
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)} | more
    if fields.get("lines"):
        lines = [relative(line) for line in fields["lines"]]
        fields["lines"] = [line for line in lines if not line.startswith("compare/")]  # this harness's own frames
    return {name: _plain(value) for name, value in fields.items() if value not in (None, (), [], {})}


def of_launch(launch: Any) -> dict[str, Any]:
    """A launch of a hand-written kernel (triton_side.launches.Launch)."""
    resources = launch.resources
    return {
        "name": launch.label, "runtime_name": launch.name, "kind": "custom", "language": launch.kind,
        "lines": [relative(f"{launch.source}:{launch.line}")], "provenance": "compiled",
        "grid": list(launch.grid), "block": list(launch.block), "num_warps": launch.num_warps,
        "registers": resources.registers, "spills_bytes": resources.spill_bytes, "shared_bytes": resources.shared_bytes,
    }


def relative(line: str) -> str:
    """`file:line` with the file below the project's folder or its environment's packages shortened."""
    return portable(line.encode()).decode()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
