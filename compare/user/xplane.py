"""Compiled modules as a profile for XProf: an XSpace (xplane.proto of tsl/profiler/protobuf) without events.

XProf reads the HLO of a run from the plane "/host:metadata". There, each module is an event's metadata, and its stat
"Hlo Proto" is the serialized xla.HloProto. XProf then offers the graph viewer and the memory viewer (seen with xprof
2.24.2). Nothing was profiled: there are no device planes, and XProf's other tools show nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

_PLANE, _STAT = b"/host:metadata", b"Hlo Proto"


def space(modules: Mapping[str, bytes]) -> bytes:
    """Return a serialized XSpace. modules: serialized HloProtos by name ("jit_forward")."""
    plane = _number(1, 1) + _bytes(2, _PLANE)
    for number, (name, proto) in enumerate(modules.items(), 1):
        stat = _bytes(5, _number(1, 1) + _bytes(6, proto))
        event = _number(1, number) + _bytes(2, f"{name}({number})".encode()) + stat
        plane += _bytes(4, _number(1, number) + _bytes(2, event))
    return _bytes(1, plane + _bytes(5, _number(1, 1) + _bytes(2, _number(1, 1) + _bytes(2, _STAT))))


# Protobuf's wire format: field number and wire type, then a varint, or a length and its bytes.


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes(found) + bytes([value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
