"""The join of a profile's kernels with those of fusion graphs.

XLA's profiler says of most kernels which instruction of which module they ran. All others are joined by their order:
the kernels of a step are aligned with the graph's (compare.graph.join). A kernel that fits none stays without one. So
does PyTorch's work outside of Inductor's code, where the profile of torch.profiler tells it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends import worker_of
from ..graph.join.kernel_records import assign
from ..graph.model import FusionGraph, Kernel
from .host_parts import in_compiled_graph
from .model import DeviceEvent
from .steps import ProfiledStep

Owner = tuple[str, int]  # the graph's name, and the kernel's launch index


@dataclass(frozen=True)
class Joined:
    """Graphs with the measured times of their kernels in a median step.

    owners: for each step, the kernel of each event. calls: how often a step runs the graph.
    """

    graphs: Mapping[str, FusionGraph]
    owners: tuple[tuple[Owner | None, ...], ...]
    calls: Mapping[str, int]


def join(steps: Sequence[ProfiledStep], graphs: Mapping[str, FusionGraph]) -> Joined:
    """Return the graphs that ran, with times, and the owner of each event.

    graphs: by name; a module of XLA's has the name that events give it, or numbered_name() if several have that name.
    """
    indices = {name: _indices(graph) for name, graph in graphs.items()}
    calls: dict[str, int] = {}
    owners: list[list[Owner | None]] = []
    known: dict[object, list[Owner | None]] = {}
    for step in steps:
        found: list[Owner | None] = [_named(event, indices) for event in step.events]
        outside = _outside_of_graphs(step.events, graphs)
        rest = [at for at, owner in enumerate(found) if owner is None and at not in outside]
        waiting = [step.events[at] for at in rest]
        named = frozenset(filter(None, found))
        key = tuple((event.name, event.grid, event.module, event.program) for event in waiting), named
        if key not in known:
            known[key] = _by_order(waiting, graphs, named)
        for at, owner in zip(rest, known[key], strict=True):
            found[at] = owner
        owners.append(found)
        for name, count in _calls(found, graphs).items():
            calls[name] = max(count, calls.get(name, 0))
    timed = {name: _timed(name, graphs[name], calls[name], steps, owners) for name in graphs if name in calls}
    return Joined(timed, tuple(map(tuple, owners)), calls)


def numbered_name(name: str, number: int) -> str:
    """Return the name of a module's graph where several modules have its name. number: XLA's."""
    return f"{name}#{number}"


def _indices(graph: FusionGraph) -> dict[str, int]:
    found: dict[str, int] = {}
    for index, kernel in enumerate(graph.kernels or ()):
        found.setdefault(kernel.name, index)
    return found


def _named(event: DeviceEvent, indices: Mapping[str, Mapping[str, int]]) -> Owner | None:
    """Return the kernel by the module and the instruction that the profile names."""
    if not event.operation:
        return None
    for name in (numbered_name(event.module, event.program), event.module):
        index = indices.get(name, {}).get(event.operation)
        if index is not None:
            return name, index
    return None


def _outside_of_graphs(events: Sequence[DeviceEvent], graphs: Mapping[str, FusionGraph]) -> frozenset[int]:
    """Return the events that PyTorch launched outside of Inductor's code, if all graphs are such code.

    The optimizer's kernels would fit its library calls. A graph of a live capture has operations between graphs, too.
    """
    for graph in graphs.values():
        if graph.compiler != "inductor" or any(kernel.provenance == "eager" for kernel in graph.kernels or ()):
            return frozenset()
    inside = [in_compiled_graph(event) for event in events]
    known = (at for at, event in enumerate(events) if event.host_path and not inside[at])
    return frozenset(known) if any(inside) else frozenset()


def _by_order(
    events: Sequence[DeviceEvent], graphs: Mapping[str, FusionGraph], named: Collection[Owner]
) -> list[Owner | None]:
    """Align events with graphs, the one with most of their names first.

    named: kernels that are joined by name.
    """
    owners: list[Owner | None] = [None] * len(events)
    left = {
        name: [index for index in range(len(graph.kernels or ())) if (name, index) not in named]
        for name, graph in graphs.items()
    }
    parts = {
        name: replace(graph, kernels=tuple((graph.kernels or ())[index] for index in left[name]))
        for name, graph in graphs.items()
    }
    own = {name: [at for at, event in enumerate(events) if _may_be_of(event, name, graphs)] for name in graphs}
    shares = {}
    for name, part in parts.items():
        expected = _expected(part)
        shares[name] = sum(events[at].name in expected for at in own[name])
    for name in sorted((name for name, share in shares.items() if share), key=lambda name: -shares[name]):
        rest = [at for at in own[name] if owners[at] is None]
        found = _aligned(parts[name], [events[at] for at in rest])
        for at, index in zip(rest, found, strict=True):
            if index is not None:
                owners[at] = (name, left[name][index])
    return owners


def _may_be_of(event: DeviceEvent, graph: str, graphs: Container[str]) -> bool:
    """Return whether an event may be of a graph: of any, unless the profile says its module.

    A module's number that no graph has tells nothing.
    """
    numbered = numbered_name(event.module, event.program)
    if numbered in graphs:
        return graph == numbered
    return not event.module or graph == event.module or graph.startswith(f"{event.module}#")


def _expected(graph: FusionGraph) -> Counter[str]:
    """Return the launches of one call by the names that profilers show, without library calls."""
    found: Counter[str] = Counter()
    for kernel in graph.kernels or ():
        if kernel.runtime_name is not None:
            found[kernel.runtime_name] += kernel.launches or 1
    return found


def _aligned(graph: FusionGraph, events: Sequence[DeviceEvent]) -> list[int | None]:
    """Return the launch index of each event's kernel: the call, repeated as often as it ran, aligned as a whole."""
    kernels = graph.kernels or ()
    calls = _repeats(graph, Counter(event.name for event in events))
    if not calls:
        return [None] * len(events)
    flat = replace(graph, kernels=tuple(replace(kernel, phase="forward") for kernel in kernels) * calls)
    place = {id(event): at for at, event in enumerate(events)}
    found: list[int | None] = [None] * len(events)
    joined, _ = assign(flat, {"forward": events})
    for index, records in joined.items():
        for record in records:
            found[place[id(record)]] = index % len(kernels)
    return found


def _repeats(graph: FusionGraph, names: Counter[str]) -> int:
    """Return how often a graph ran, at least once if any of its kernels did; 0 if none did.

    XLA launches one kernel, by one name, for all instructions with equal code: layers share names, so most kernels do
    not run by their own. Only the sum of launches tells the number of calls. Inductor's kernels run by their own names,
    and some may not run at all, as those of another branch.
    """
    expected = _expected(graph)
    repeats = [names[name] / launches for name, launches in expected.items() if names[name]]
    if not repeats:
        return 0
    if worker_of(graph.compiler) == "xla":
        return max(1, round(sum(names[name] for name in expected) / expected.total()))
    return max(1, round(statistics.median(repeats)))


def _calls(owners: Sequence[Owner | None], graphs: Mapping[str, FusionGraph]) -> dict[str, int]:
    """Return how often each graph ran in a step: the usual number of launches of its own kernels.

    A library call runs an unknown number of kernels, so it tells nothing. A graph of library calls alone counts once.
    """
    ratios: dict[str, list[float]] = {name: [] for name, _ in filter(None, owners)}
    for (name, index), count in Counter(owner for owner in owners if owner is not None).items():
        kernel = (graphs[name].kernels or ())[index]
        if kernel.runtime_name is not None:
            ratios[name].append(count / (kernel.launches or 1))
    return {name: max(1, round(statistics.median(found))) if found else 1 for name, found in ratios.items()}


def _timed(
    name: str, graph: FusionGraph, calls: int, steps: Sequence[ProfiledStep], owners: Sequence[Sequence[Owner | None]]
) -> FusionGraph:
    times: dict[int, list[float]] = {}
    ran: dict[int, dict[str, float]] = {}
    for number, (step, owned) in enumerate(zip(steps, owners, strict=True)):
        for event, owner in zip(step.events, owned, strict=True):
            if owner is not None and owner[0] == name:
                times.setdefault(owner[1], [0.0] * len(steps))[number] += event.seconds * 1e6 / calls
                seconds = ran.setdefault(owner[1], {})
                seconds[event.name] = seconds.get(event.name, 0.0) + event.seconds
    kernels = tuple(
        replace(_named_as_run(kernel, ran[index]), device_time_us=statistics.median(times[index]))
        if index in times else kernel
        for index, kernel in enumerate(graph.kernels or ())
    )
    return replace(graph, kernels=kernels)


def _named_as_run(kernel: Kernel, seconds: Mapping[str, float]) -> Kernel:
    """Return a kernel with the name on which it spent most time: a library's own, or the fact "ran_as" beside XLA's."""
    main = max(seconds, key=seconds.__getitem__)
    if kernel.runtime_name is None:
        return replace(kernel, runtime_name=main)
    return kernel if main == kernel.runtime_name else replace(kernel, facts={**kernel.facts, "ran_as": [main]})
