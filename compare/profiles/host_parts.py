"""The part of a training step to which PyTorch's work outside of compiled graphs belongs, by the host's calls.

A graph's kernels have their parts from their source operations. Other kernels have `DeviceEvent.host_path`: an
optimizer opens a range "Optimizer.step#AdamW.step", and autograd one for each node,
"autograd::engine::evaluate_function: MmBackward0".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .model import DeviceEvent

_OPTIMIZER = "Optimizer."
_STEP = "Optimizer.step#"
_BACKWARD = "autograd::engine::evaluate_function: "
_CHECKPOINT = "CheckpointFunctionBackward"  # runs the forward pass again, unless use_reentrant=False
_COMPILED = "## Call CompiledFxGraph"
CLIPPING = "clip_grad_norm_"
# clip_grad_norm_ has no range: it takes norms, limits a factor, and scales the gradients by it.
_NORMS = ("aten::_foreach_norm", "aten::linalg_vector_norm")
_SCALES = ("aten::_foreach_mul_", "aten::mul_")
_LIMIT = "aten::clamp"


class HostPart(NamedTuple):
    """name: "AdamW.step", "clip_grad_norm_", an autograd node, else the outermost range or operation; "" if unknown.

    phase: "forward", "recompute", "backward", "update", or "" where it is unknown.
    """

    name: str = ""
    phase: str = ""


def in_compiled_graph(event: DeviceEvent) -> bool:
    """Return whether code of Inductor launched an event."""
    return any(name.startswith(_COMPILED) for name in event.host_path)


def host_parts(events: Sequence[DeviceEvent]) -> list[HostPart]:
    """Return the part of each event of a step.

    Other work before a backward call is forward, and other work before the optimizer's step is update. Work after these
    has no phase.
    """
    order = sorted(range(len(events)), key=lambda at: _launched(events[at]), reverse=True)
    found = [HostPart()] * len(events)
    phase = ""
    between: list[int] = []  # the events between backward and the optimizer's step, last first
    for at in order:
        path = events[at].host_path
        if not path:
            continue
        optimizer = next((name for name in path if name.startswith(_OPTIMIZER)), "")
        nodes = [name.removeprefix(_BACKWARD) for name in path if name.startswith(_BACKWARD)]
        if optimizer:
            found[at] = HostPart(optimizer.partition("#")[2] or optimizer, "update")
            phase = "update" if optimizer.startswith(_STEP) else phase
        elif nodes:
            found[at] = HostPart(nodes[-1], "recompute" if nodes[-1] == _CHECKPOINT else "backward")
            phase = "forward"
        else:
            found[at] = HostPart(path[0], phase)
            between += [at] if phase == "update" else []
    for at in _clipping(events, between[::-1]):
        found[at] = HostPart(CLIPPING, "update")
    return found


def _launched(event: DeviceEvent) -> float:
    return event.start if event.launched is None else event.launched


def _clipping(events: Sequence[DeviceEvent], between: Sequence[int]) -> Iterator[int]:
    """Yield the events from the first norm to the last scaling, if a factor is limited between them."""
    names = [events[at].host_path[0] for at in between]
    first = next((at for at, name in enumerate(names) if name in _NORMS), math.inf)
    last = max((at for at, name in enumerate(names) if name in _SCALES), default=-1)
    if any(name == _LIMIT and first < at < last for at, name in enumerate(names)):
        yield from (each for at, each in enumerate(between) if first <= at <= last)
