"""The fusion graphs of a profile's programs, from the profile itself and from the dumps next to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.usage import UsageError
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..profiles import files
from ..profiles.join import Joined, join
from ..profiles.model import Profile, ProfileError
from ..profiles.steps import ProfiledStep, profiled_steps
from .graph_sources import Contents, GraphSource, contents
from .target_ceilings import own_ceilings, target_ceilings

MOST_GRAPHS = 200  # modules that are read where events do not name theirs
_MOST_CAPTURE_BYTES = 1 << 20


class UnreadableCapture(UsageError):
    """The profile of a captured program cannot be shown, but its compilers' files can."""


@dataclass(frozen=True)
class OpenedProfile:
    """A profile by steps, joined to the graphs of its programs.

    others: profiles of other ranks or devices: those that run the same kernels as this one, and those that do not.
    notes: facts without which the numbers mislead.
    """

    path: Path
    profile: Profile
    steps: tuple[ProfiledStep, ...]
    joined: Joined
    alike: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def ceilings(self, target: str | None) -> dict[str, Ceilings | None]:
        """Return ceilings by the graph's name: the target's, else those of the GPU that was profiled.

        Raises UsageError for an unknown target.
        """
        named = None if target is None else target_ceilings(target)
        return {name: named or own_ceilings(graph)[0] for name, graph in self.joined.graphs.items()}

    def graph_sources(self, module: str | None) -> list[GraphSource]:
        """Return the joined graphs, or those of a name. Raises UsageError for an unknown name."""
        found = [
            GraphSource(name, number, self.path, partial(_itself, graph))
            for number, (name, graph) in enumerate(self.joined.graphs.items(), 1)
        ]
        return found if module is None else Contents("dump", self.path, tuple(found)).modules(module)


def _itself(graph: FusionGraph) -> FusionGraph:
    return graph


def open_profile(path: Path, dump: Path | None = None) -> OpenedProfile:
    """Read a path's profiles; the first one is joined. dump: the compiler's files, if they are not beside the profile.

    Raises UsageError where a profile or the dump cannot be read, UnreadableCapture in a folder of `xlafuse capture`.
    """
    try:
        profiles = [
            profile if profile.rank is not None else replace(profile, rank=files.rank_of(file))
            for file in files.profile_files(path) for profile in files.read(file)
        ]
        folder = next((each for each in files.capture_folders(path) if files.profile_files(each)), None)
    except ProfileError as problem:
        raise (UnreadableCapture if files.capture_folders(path) else UsageError)(str(problem)) from None
    except OSError as problem:
        raise UsageError(str(problem)) from None
    profiles.sort(key=lambda profile: profile.rank or 0)
    first, *others = profiles
    captured = {} if folder is None else _captured(folder)
    if first.device.startswith("GPU ") and captured.get("device"):
        first = replace(first, device=str(captured["device"]))
    if not first.versions and isinstance(captured.get("versions"), dict):
        first = replace(first, versions={str(key): str(value) for key, value in captured["versions"].items()})
    steps = profiled_steps(first)
    if not steps:
        raise UsageError(f"{first.source}: the device did nothing in its {len(first.steps)} steps")
    notes: list[str] = []
    graphs = _graphs(first, dump or folder, required=dump is not None, notes=notes)
    joined = join(steps, {name: _for_device(graph, first.device) for name, graph in graphs.items()})
    names = _kernel_counts(first)
    alike: list[str] = []
    unlike: list[str] = []
    for number, other in enumerate(others, 1):
        label = str(other.rank if other.rank is not None else number)
        (alike if _kernel_counts(other) == names else unlike).append(label)
    counts = {tuple(sorted(Counter(event.name for event in step.events).items())) for step in steps}
    if len(counts) > 1:
        notes.append("the steps ran different kernels; a median is one of the steps that ran it, or of zero times")
    if first.skipped:
        notes.append(f"{first.skipped:,} events could not be read and are left out")
    return OpenedProfile(path, first, tuple(steps), joined, tuple(alike), tuple(unlike), tuple(notes))


def _captured(folder: Path) -> dict[str, Any]:
    """Return the facts that `xlafuse capture` wrote about its folder; {} where they cannot be read."""
    file = folder / files.CAPTURE
    try:
        if file.stat().st_size > _MOST_CAPTURE_BYTES:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _graphs(profile: Profile, dump: Path | None, *, required: bool, notes: list[str]) -> dict[str, FusionGraph]:
    """Return the graphs of the modules that ran, from the dump where it has them, else from the profile."""
    readers: dict[tuple[str, int], Callable[[], FusionGraph]] = {
        key: partial(_from_proto, key[0], read) for key, read in profile.modules.items()
    }
    if dump is not None:
        try:
            opened = contents(dump)
            readers |= {
                (each.graph().name if opened.kind == "file" else each.name, each.order): each.graph
                for each in opened.graphs
            }
        except UsageError:
            if required:
                raise
    ran = {event.module for event in profile.events}
    named = {key: read for key, read in readers.items() if key[0] in ran}
    if "" in ran:  # any program may have launched these
        named |= {key: read for key, read in list(readers.items())[-MOST_GRAPHS:] if key not in named}
    several = Counter(name for name, _ in named)
    found = {}
    for (name, number), read in named.items():
        try:
            found[f"{name}#{number}" if several[name] > 1 else name] = read()
        except (UsageError, ValueError) as problem:
            notes.append(f"{name}: its kernels are not joined: {problem}")
    return found


def _from_proto(name: str, read: Callable[[], bytes]) -> FusionGraph:
    from xlafuse.hlo.proto_reader import parse_proto

    from ..graph.build import xla_reasons
    from ..graph.build.from_hlo import from_hlo

    graph = from_hlo(parse_proto(read()))
    return replace(graph, name=name, reasons=xla_reasons.reasons(graph, ()))


def _for_device(graph: FusionGraph, device: str) -> FusionGraph:
    """Return the graph with the device that ran it as its target, if it names none."""
    return graph if graph.target or device.startswith("GPU ") else replace(graph, target=device)


def _kernel_counts(profile: Profile) -> Mapping[str, int]:
    return Counter(event.name for event in profile.events)
