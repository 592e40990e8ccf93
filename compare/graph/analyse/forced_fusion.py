"""Two kernels of a graph that a user wants as one, found by name, and their saving as one."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.usage import UsageError, join_some, one_of
from ..formats import count, kernels_named, known_names, microseconds, signed_size
from ..model import FusionGraph, Kernel
from .missed_fusions import Price, at_rates, price
from .roofline import Ceilings
from .totals import Tally, totals

FORCED = "forced"  # a fact of the one kernel
MOST_NAMED = 30


class NotForced(Exception):
    """The two kernels cannot be one; the message says why, in one line."""


def pair(graph: FusionGraph, text: str) -> tuple[int, int]:
    """Return the launch indices of "KERNEL+KERNEL", in launch order. A kernel has a name or a number.

    Raises UsageError for what names no two kernels, and NotForced for two that have nothing in common.
    """
    names = text.split("+")
    if len(names) != 2:
        raise UsageError(f"--force {text}: expected two kernels with a + between them, such as 1+2")
    first, second = sorted(_index(graph, name.strip()) for name in names)
    if first == second:
        raise UsageError(f"--force {text}: both are the kernel {_named(graph, first)}")
    one, other = (graph.kernels or ())[first], (graph.kernels or ())[second]
    if one.phase != other.phase:
        raise NotForced(
            f"{one.name} is of {one.phase} and {other.name} of {other.phase}: two programs, and other blocks run "
            "between them"
        )
    if not _buffers(one) & _buffers(other):
        raise NotForced(
            f"{one.name} and {other.name} share no buffer: neither reads the other's result, and they read no array in "
            "common"
        )
    return first, second


def _index(graph: FusionGraph, name: str) -> int:
    found = kernels_named(graph, name)
    if not found:
        one_of("kernel", name, known_names(graph), [k.name for k in graph.kernels or ()], most=MOST_NAMED)
    if len(found) > 1:
        listed = join_some((_named(graph, index) for index in found), MOST_NAMED)
        raise UsageError(f"{len(found)} kernels are called {name!r}; choose one by number or name: {listed}")
    return found[0]


def _named(graph: FusionGraph, index: int) -> str:
    return f"{index + 1} {(graph.kernels or ())[index].name}"


def _buffers(kernel: Kernel) -> set[str]:
    return {access.buffer for access in (*(kernel.inputs or ()), *(kernel.outputs or ()))}


@dataclass(frozen=True)
class Saving:
    """The saving of one kernel instead of two: by the price of the missed fusion, and by the two graphs.

    actual: declared bytes and launches of one call, at a copy's bandwidth; None where they are unknown.
    roofline_us: of all kernels; None where unknown. device_us: measured; None without a GPU.
    """

    kernels: tuple[str, str]
    predicted: Price
    actual: Price | None
    roofline_us: float | None
    device_us: float | None = None

    def __str__(self) -> str:
        actual = "an unknown number of bytes" if self.actual is None else _words(self.actual)
        times = {"roofline": self.roofline_us, "device": self.device_us}
        less = [
            f"{name} time {microseconds(round(abs(us), 2))} {'less' if us >= 0 else 'more'}"
            for name, us in times.items() if us is not None
        ]
        return "; ".join([
            f"{' and '.join(self.kernels)} as one kernel: the price of the missed fusion is {_words(self.predicted)}",
            f"the forced program saves {actual} at a copy's bandwidth", *less,
        ])


def saving(default: FusionGraph, forced: FusionGraph, indices: tuple[int, int], ceilings: Ceilings | None) -> Saving:
    """Return the saving of the forced program over the default one. indices: of the two kernels in `default`."""
    before, after = (totals(graph, ceilings=ceilings) for graph in (default, forced))
    declared, roofline = _less(before.declared, after.declared), None
    if before.roofline_time_us is not None and after.roofline_time_us is not None:
        roofline = _less(before.roofline_time_us, after.roofline_time_us)
    launches = sum(k.certain_launches for k in default.kernels or ()) - sum(
        k.certain_launches for k in forced.kernels or ()
    )
    names = [(default.kernels or ())[index].name for index in indices]
    return Saving(
        (names[0], names[1]), price(default, ceilings, indices),
        None if declared is None else at_rates(default, ceilings, round(declared), launches), roofline,
    )


def _less(before: Tally, after: Tally) -> float | None:
    """Return by how much a sum fell; None where other terms are unknown."""
    return before.value - after.value if before.unknown == after.unknown else None


def _words(price: Price) -> str:
    listed = [signed_size(price.bytes).lstrip("+"), count(price.launches, "launch", "launches"), price.time]
    return ", ".join(filter(None, listed))
