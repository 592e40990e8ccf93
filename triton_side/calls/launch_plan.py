"""A recorded call as plain data: its kernels and their arguments, so that a runtime other than PyTorch can launch them.

    recorded = for_target.record_call(rmsnorm.apply, specs, {"eps": 1e-5}, train=True)
    launch_plan.of(recorded)["parts"]["forward"][0]["ir"]      # Triton's highest IR

A kernel's IR is Triton's for this launch, with one difference: its parameters are only the buffers, first those that it
reads, then those that it writes. Every number that the launch passes is a constant in the IR. Buffers have numbers, by
which launches share them; each buffer is a whole contiguous array. A kernel that builds tensor descriptors needs memory
from PyTorch's launcher and is refused: record it within `kernels.shared.tiles.without_descriptors`.

versions.py lists the series of Triton whose TTIR was tested.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from xlafuse.triton_side.calls.dispatch import Recorded
from xlafuse.triton_side.calls.effects import without_locations
from xlafuse.triton_side.calls.launches import Launch, TensorArgument

_PARAMETER = re.compile(r"(%[\w$.-]+): ([^,{]+?)\s*(\{[^}]*\})?\s*(?:,\s*|$)")
_FLOATS = {"f32": "<f", "f64": "<d"}


class NotPlain(ValueError):
    """The call does more than launch Triton kernels on whole arrays; the message says what."""


def of(recorded: Recorded) -> dict[str, Any]:
    """Return {"parts": {phase: [launch, ...]}, "inputs": {name: buffer}, "outputs": {name: buffer}}.

    Names are as in `Recorded`. A launch is {"name", "ir", "grid", "num_warps", "num_stages", "reads": [buffer, ...],
    "writes": [[buffer, shape, dtype], ...]}. Raises NotPlain.
    """
    sizes: dict[int, int] = {}

    def buffer(tensor: TensorArgument) -> int:
        if tensor.offset or not _is_contiguous(tensor):
            raise NotPlain(f"{tensor.name or 'an argument'} is a view of another array: strides {tensor.strides}")
        if sizes.setdefault(tensor.storage, tensor.bytes) != tensor.bytes:
            raise NotPlain(f"{tensor.name or 'an argument'} is part of another array")
        return tensor.storage

    def launch(event: Any) -> dict[str, Any]:
        if not isinstance(event, Launch):
            raise NotPlain(f"among the launches PyTorch runs {event.op}")
        if event.kind != "triton":
            raise NotPlain(f"{event.label} is no Triton kernel")
        if "ttir" not in event.artifacts.texts:
            raise NotPlain(f"{event.label} is a Gluon kernel")
        read, written = event.effects.reads, event.effects.writes
        reads = [tensor for tensor in event.tensors if tensor.position not in written]
        writes = [tensor for tensor in event.tensors if tensor.position in written]
        if read & written or {t.storage for t in reads} & {t.storage for t in writes}:
            raise NotPlain(f"{event.label} overwrites an input")
        if "tt.make_tensor_descriptor" in event.artifacts.texts["ttir"]:
            raise NotPlain(f"{event.label} builds tensor descriptors, in memory from its launcher")
        order = [event.parameters[tensor.position] for tensor in (*reads, *writes)]
        left = [name for name, kind in zip(event.parameters, event.signature, strict=True) if kind != "constexpr"]
        return {
            "name": event.name,
            "ir": bound(event.artifacts.texts["ttir"], event.name, left, order, event.scalars),
            "grid": list(event.grid), "num_warps": event.num_warps, "num_stages": event.num_stages,
            "reads": [buffer(tensor) for tensor in reads],
            "writes": [[buffer(tensor), list(tensor.shape), tensor.dtype] for tensor in writes],
        }

    return {
        "parts": {part: [launch(event) for event in events] for part, events in recorded.parts.items()},
        "inputs": {name: buffer(tensor) for name, tensor in recorded.inputs.items()},
        "outputs": {name: buffer(tensor) for name, tensor in recorded.outputs.items()},
    }


def bound(
    ttir: str, function: str, parameters: Sequence[str], buffers: Sequence[str], scalars: Mapping[str, Any]
) -> str:
    """Return the module with `function`'s parameters reordered to `buffers`, and the others as constants in its body.

    parameters: the names of the IR's parameters, in order. Raises NotPlain for one that is neither buffer nor number.
    """
    text = "\n".join(line for line in without_locations(ttir).splitlines() if not line.startswith("#loc"))
    head = re.search(rf"tt\.func public @{re.escape(function)}\((.*?)\)(?: attributes \{{[^}}]*\}})? *\{{\n", text)
    if head is None:
        raise NotPlain(f"no function {function} in its IR")
    declared = dict(zip(parameters, _PARAMETER.findall(head[1]), strict=True))
    constants = []
    for name, (value, kind, _) in declared.items():
        if name not in buffers:
            if name not in scalars:
                raise NotPlain(f"{function} takes {name}, a {kind}")
            constants.append(f"    {value} = arith.constant {_literal(scalars[name], kind)} : {kind}\n")
    kept = ", ".join("{}: {} {}".format(*declared[name]).rstrip() for name in buffers)
    signature = f"{text[head.start() : head.start(1)]}{kept}{text[head.end(1) : head.end()]}"
    return f"{text[: head.start()]}{signature}{''.join(constants)}{text[head.end() :]}"


def _literal(value: Any, kind: str) -> str:
    """Return `value` as MLIR writes it. Floats are written by their bits, which is exact."""
    if kind in _FLOATS:
        return f"0x{struct.pack(_FLOATS[kind], value)[::-1].hex().upper()}"
    return str(int(value)) if kind != "i1" else str(bool(value)).lower()


def _is_contiguous(tensor: TensorArgument) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return math.prod(tensor.shape) == 0
        expected *= size
    return True
