"""The interface between the measuring protocol and a framework: a compiled `Program`, and the framework's backend."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..graph.model import FusionGraph
from ..record.record_fields import GraphInputs, PeakMemory
from ..spec.case import Case
from ..spec.implementation import Implementation
from .clock import Clock

Arrays = dict[str, Any]
Extent = tuple[int, int]  # first and one-past-last device address


@dataclass
class Program:
    """A compiled case: `forward(inputs) -> (outputs, saved)`, `backward(saved, cotangents) -> gradients by input`.

    intercepts_allocations: its allocations go through the framework's Python dispatch, where they can be poisoned.
    allocations: for each phase, the bytes of each buffer that a call allocates.
    command_buffers: for each phase, (launches replayed from XLA's command buffers or from CUDA graphs, all launches);
        None for other programs, and where no clock counted them.
    variants: compiles the same case for another launch mode; a missing mode is this program's own.
    artifacts: the artifacts while another thread writes them, because disassembling machine code takes long.
    poison: replaces WorkerBackend.poison where a call's memory is its own; fills it and returns its addresses.
    graph_inputs: of a program that replays CUDA graphs by itself, in every mode; None for others.
    direct_launches: it launches Triton's kernels directly (triton_side.calls.direct_launch).
    peaks: for each phase, the peak of the call that was captured, because a replay allocates nothing.
    late_graph: of a rank's program in PyTorch, makes the graph after the measurement, on all ranks at once, because it
        may call the program; None for others.
    sent: the bytes that a rank sends in a call, by the shapes of its exchanges; None where they are not known.
    renew_inputs: of a user's function that may keep results, writes bits that no call has seen into its inputs' memory;
        None for others.
    """

    forward: Callable[[Arrays], tuple[Arrays, Any]]
    backward: Callable[[Any, Arrays], Arrays] | None
    compile_s: float
    graph: FusionGraph | None
    intercepts_allocations: bool = True
    allocations: dict[str, list[int]] = field(default_factory=dict)
    command_buffers: dict[str, tuple[int, int]] | None = None
    variants: dict[str, Callable[[], Program]] = field(default_factory=dict)
    artifacts: Future[None] | None = None
    poison: Callable[[str], list[Extent]] | None = None
    graph_inputs: GraphInputs | None = None
    direct_launches: bool = False
    peaks: dict[str, PeakMemory] = field(default_factory=dict)
    late_graph: Callable[[], FusionGraph] | None = None
    sent: int | None = None
    renew_inputs: Callable[[], None] | None = None


class WorkerBackend(Protocol):
    """A worker's framework: it compiles programs and gives them arrays, memory and a clock on its device.

    Arrays are the framework's own. name: the check's `backend` in a record, "xla", "torch" or "interpreter".
    """

    device: str
    name: str

    def build(
        self, case: Case, implementation: Implementation, folder: Path, dumps: Path, autotune: bool = True
    ) -> Program:
        """Compile the implementation for this case and write its artifacts to `dumps`.

        folder: stored inputs, for compilers that need a first call. Raises compare.base.worker_protocol.NotAutotuned
        where the compile needs autotuning and `autotune` does not allow it.
        """
        ...

    def clock(self) -> Clock | None:
        """Return the clock of this process, or None where the framework has none here."""
        ...

    def environment(self) -> dict[str, Any]:
        """Return the versions of the framework's packages, and the device."""
        ...

    def device_works(self) -> bool:
        """Return whether this process can still use its device.

        An illegal access by a kernel ends that: every later CUDA call of the process fails with the same error (CUDA
        Runtime API, cudaErrorIllegalAddress).
        """
        ...

    def needs_restart(self, kept: int) -> bool:
        """Return whether this process keeps more than `kept` bytes of the GPU's memory and cannot return them."""
        ...

    def release_memory(self, *, idle: bool) -> None:
        """Return unused memory to the GPU, which other workers share, where the framework can.

        idle: no program is left, so no case's arrays are needed again.
        """
        ...

    def inputs(self, folder: Path, case: Case) -> Arrays:
        """Return the case's inputs with the bits stored in `folder`.

        The buffers stay the same from call to call where the framework allows it, so a result cached by address is
        stale and noticed.
        """
        ...

    def cotangents(self, folder: Path, case: Case) -> Arrays:
        """Return the cotangents stored in `folder`; none for a case without a backward phase."""
        ...

    def changed_inputs(self, inputs: Arrays, folder: Path, case: Case) -> list[str]:
        """Return the names of inputs whose bits differ from the stored ones."""
        ...

    def reference(self, folder: Path, role: str, name: str) -> Any:
        """Return a stored reference on this device."""
        ...

    def largest_difference(self, values: Any, reference: Any) -> float:
        """Return max|values - reference| in float64, nan where a value is."""
        ...

    def largest_differences_by_row(self, values: Any, reference: Any) -> list[float]:
        """Return max|values - reference| of each row of a matrix in float64, nan where a value is."""
        ...

    def poisoned_allocations(self, program: Program) -> AbstractContextManager[Any]:
        """Fill uninitialised memory that the framework's Python code asks for with NaN.

        It does nothing for programs whose allocations cannot be intercepted.
        """
        ...

    def poison(self, program: Program, phase: str) -> list[Extent]:
        """Fill the memory that the next call will get with NaN, and return its addresses."""
        ...

    def was_poisoned(self, poisoned: list[Extent], arrays: Arrays) -> bool:
        """Return whether all of `arrays` lie in poisoned memory."""
        ...

    def in_mode(
        self, program: Program, mode: str, inputs: Arrays, cotangents: Arrays
    ) -> AbstractContextManager[Program | None]:
        """Return the program on these very arrays, launched as `mode` asks; None where it is launched so already.

        mode: a mode but "cold" and "warm" (compare.plan.timing_modes). Raises the framework's own error where the
        program cannot be launched so.
        """
        ...

    def flush_l2(self) -> int:
        """Leave the L2 cache full of other, clean data, and return what was reserved (compare.measure.l2_flush)."""
        ...

    def synchronize(self, results: Any = None) -> None:
        """Wait until the device is idle and `results` are there."""
        ...

    def peak_memory(self, program: Program, phase: str, call: Callable[[], Any]) -> PeakMemory:
        """Return the peak of one call: measured around `call`, or planned by the compiler."""
        ...

    def late_results(self, program: Program, phase: str, call: Callable[[], Arrays]) -> list[str]:
        """Return the names of results of `call` that the caller's next enqueued work would read too early."""
        ...


def lies_within(extent: Extent, ranges: list[Extent]) -> bool:
    """Return whether every address of `extent` lies in the union of `ranges`.

    An allocator may merge neighbouring freed ranges, so the extent may cross from one into the next.
    """
    at, end = extent
    for first, past in sorted(ranges):
        if first <= at < past:
            at = past
    return at >= end
