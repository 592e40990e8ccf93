"""How many GPUs exchange data with each other in a collective, as an instruction's text or proto tells it."""

import math
import re
from collections.abc import Mapping
from typing import Any

from xlafuse.hlo.shape import read_integer

_LISTED = re.compile(r"\{\{([\d,]+)\}")  # {{0,1},{2,3}}
_IOTA = re.compile(r"\[\d+,(\d+)\]")  # [2,4]<=[8]
_MESH = re.compile(r"mesh\[([^\]]*)\].*?\{([^{}]*)\}")  # mesh['x'=2,'y'=4] {'y'}
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_NAME = re.compile(r"'([^']*)'")


def gpus_of_text(attributes: Mapping[str, str]) -> int:
    """Return the GPUs of one group; 0 without groups, or where the text does not tell their size.

    A permutation sends from one GPU to one other.
    """
    if "source_target_pairs" in attributes:
        return 2
    text = attributes.get("replica_groups", "")
    if listed := _LISTED.match(text):
        return listed[1].count(",") + 1
    if iota := _IOTA.match(text):
        return read_integer(iota[1])
    mesh = _MESH.match(text)
    if mesh is None or ":" in mesh[2]:  # a part of an axis
        return 0
    sizes = {name: read_integer(size) for name, size in _AXIS.findall(mesh[1])}
    return math.prod(sizes.get(name, 0) for name in _NAME.findall(mesh[2]))


def gpus_of_proto(proto: Any) -> int:
    """Return the same from an HloInstructionProto."""
    if proto.source_target_pairs:
        return 2
    for groups in (proto.replica_groups, proto.collective_device_list.replica_groups):
        if groups:
            return len(groups[0].replica_ids)
    if proto.iota_collective_device_list.num_devices_per_group:
        return int(proto.iota_collective_device_list.num_devices_per_group)
    joined, axes = proto.mesh_axes_replica_group_list.axes, proto.mesh_axes_replica_group_list.mesh.axes
    if not joined or any(axis.HasField("sub_axis_info") or axis.mesh_axis_index >= len(axes) for axis in joined):
        return 0
    return math.prod(axes[axis.mesh_axis_index].size for axis in joined)
