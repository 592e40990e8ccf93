"""An XSpace as jax.profiler writes it for a GPU: streams, launches, steps and the HLO of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xlafuse.hlo.proto_reader import message_type


class Space:
    def __init__(self) -> None:
        self.proto = message_type("tensorflow.profiler.XSpace")()
        self._lines: dict[tuple[str, str], Any] = {}
        self._keys: dict[tuple[str, str, str], int] = {}

    def plane(self, name: str) -> Any:
        for plane in self.proto.planes:
            if plane.name == name:
                return plane
        return self.proto.planes.add(name=name)

    def _key(self, plane: Any, table: str, name: str) -> int:
        key = self._keys.setdefault((plane.name, table, name), len(self._keys) + 1)
        entry = getattr(plane, table)[key]
        entry.id, entry.name = key, name
        return key

    def stat(self, plane: Any, stats: Any, name: str, value: Any) -> None:
        stat = stats.add(metadata_id=self._key(plane, "stat_metadata", name))
        if isinstance(value, int):
            stat.int64_value = value
        elif isinstance(value, bytes):
            stat.bytes_value = value
        else:
            stat.ref_value = self._key(plane, "stat_metadata", value)

    def event(self, plane_name: str, line: str, name: str, start_us: float, duration_us: float, **stats: Any) -> None:
        plane = self.plane(plane_name)
        if (plane_name, line) not in self._lines:
            self._lines[plane_name, line] = plane.lines.add(name=line, timestamp_ns=1000)
        found = self._lines[plane_name, line].events.add(
            metadata_id=self._key(plane, "event_metadata", name), offset_ps=int(start_us * 1e6),
            duration_ps=int(duration_us * 1e6),
        )
        for key, value in stats.items():
            self.stat(plane, found.stats, key, value)

    def module(self, name: str, number: int, proto: bytes) -> None:
        plane = self.plane("/host:metadata")
        entry = plane.event_metadata[number]
        entry.id, entry.name = number, f"{name}({number})"
        self.stat(plane, entry.stats, "Hlo Proto", proto)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.proto.SerializeToString())
        return path
