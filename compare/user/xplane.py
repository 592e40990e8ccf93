"""Compiled modules as a profile that XProf opens: an XSpace (xplane.proto of tsl/profiler/protobuf) without events.

XProf takes the HLO of a run out of the plane "/host:metadata", where each module is an event's metadata whose stat
"Hlo Proto" is its serialized xla.HloProto; then it lists the graph viewer and the memory viewer (seen with xprof
2.24.2). Nothing was profiled, so there are no planes of devices, and its other tools have nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping

_PLANE, _STAT = b"/host:metadata", b"Hlo Proto"


def space(modules: Mapping[str, bytes]) -> bytes:
    """A serialized XSpace. modules: by name ("jit_forward"), each a serialized HloProto."""
    plane = _number(1, 1) + _bytes(2, _PLANE)
    for number, (name, proto) in enumerate(modules.items(), 1):
        stat = _bytes(5, _number(1, 1) + _bytes(6, proto))
        event = _number(1, number) + _bytes(2, f"{name}({number})".encode()) + stat
        plane += _bytes(4, _number(1, number) + _bytes(2, event))
    return _bytes(1, plane + _bytes(5, _number(1, 1) + _bytes(2, _number(1, 1) + _bytes(2, _STAT))))


# Protobuf's wire format: a field's number and wire type, then a varint, or a length and as many bytes.


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
