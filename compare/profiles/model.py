"""A profile: the kernels, copies and memsets that one device ran, and the steps that the host announced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

MOST_EVENTS = 2_000_000  # of one device


class ProfileError(ValueError):
    """A file that holds no profile of a device's work; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """One kernel, copy or memset. Times are in seconds.

    name: as the profiler shows it; for copies and memsets as in compare.graph.join.kernel_records.
    grid: its blocks by dimension; None where they are unknown, and for copies.
    module, operation: XLA's module and instruction; "" where the profile does not say. program: XLA's number of the
        module; 0 where it is unknown.
    host_op: the operation of PyTorch that launched it. host_function: the user's Python function that called it,
        "main (train.py:60)"; "" where the profile does not say.
    host_path: the operations of PyTorch and the ranges of torch.profiler.record_function around the launch, outermost
        first, without the step: ("Optimizer.step#AdamW.step", "aten::_foreach_mul_").
    launched: when the host's call began; None where it is unknown.
    """

    name: str
    start: float
    end: float
    grid: tuple[int, ...] | None = None
    module: str = ""
    operation: str = ""
    program: int = 0
    host_op: str = ""
    host_function: str = ""
    launched: float | None = None
    host_path: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """A step as the host announced it, by the time of its beginning and its end.

    program: the compiled function that it called first, and called: when; "" and None where the profile does not say.
    """

    name: str
    start: float
    end: float
    program: str = ""
    called: float | None = None


@dataclass(frozen=True, slots=True)
class HostWait:
    """A time in which the host launched nothing, because it waited for the device, for input or for a compiler.

    kind: "copy" is a wait for a copy from pageable memory. name: of the operation of PyTorch around it, else of the
    call; of a compile, "torch.compile 0/1" or the jitted function. host_function: as of `DeviceEvent`.
    """

    kind: Literal["synchronisation", "copy", "input", "compile"]
    name: str
    start: float
    end: float
    host_function: str = ""


@dataclass(frozen=True)
class Profile:
    """The work of one device.

    tool: "jax.profiler", "torch.profiler" or "Nsight Systems". source: the file. device: its name, else its number;
    "cpu" where a host ran XLA's operations. gpu: its number. rank: of the process. Both are None where the profile does
    not say. events: by their beginning. modules: readers of serialized HloProtos by (name, XLA's number).
    skipped: events that could not be read. notes: what else is missing. waits: of the host, where the profile has them.
    """

    tool: str
    source: str
    device: str
    events: tuple[DeviceEvent, ...]
    steps: tuple[Step, ...] = ()
    rank: int | None = None
    modules: Mapping[tuple[str, int], Callable[[], bytes]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
    gpu: int | None = None
    notes: tuple[str, ...] = ()
    waits: tuple[HostWait, ...] = ()
