"""The fusion graphs of a profile's programs, from the profile itself and from the dumps next to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.usage import UsageError, join_some
from ..graph import formats
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..profiles import files
from ..profiles.join import Joined, join, numbered_name
from ..profiles.model import Profile, ProfileError
from ..profiles.steps import ProfiledStep, profiled_steps
from .graph_sources import MOST_NAMED, Contents, GraphSource, contents, has_profile
from .target_ceilings import own_ceilings, target_ceilings

MOST_GRAPHS = 200  # modules that are read where events do not name theirs
_MOST_CAPTURE_BYTES = 1 << 20


class UnreadableCapture(UsageError):
    """The profile of a captured program cannot be shown, but its compilers' files can."""


@dataclass(frozen=True)
class OpenedProfile:
    """A profile by steps, joined to the graphs of its programs.

    sources: of each graph, by its name.
    choice: what tells the profiles apart: "rank", "GPU", or "profile" for their places. number: of this one.
    alike, unlike: the numbers of those that run the same kernels as this one, and of those that do not.
    notes: facts without which the numbers mislead.
    """

    path: Path
    profile: Profile
    steps: tuple[ProfiledStep, ...]
    joined: Joined
    sources: Mapping[str, GraphSource]
    choice: str = "rank"
    number: int = 0
    alike: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def others(self) -> str:
        """The sentence about other ranks or GPUs; "" where there are none."""
        groups = (("the same", self.alike), ("other", self.unlike))
        named = [f"{words} kernels: {join_some(which, MOST_NAMED)}" for words, which in groups if which]
        count = 1 + len(self.alike) + len(self.unlike)
        return f"{self.choice} {self.number} of {count}; {'; '.join(named)}" if named else ""

    @property
    def joined_share(self) -> float:
        """The share of the kernels' time that is joined to a graph."""
        ran = [
            (event.seconds, owner) for step, owners in zip(self.steps, self.joined.owners, strict=True)
            for event, owner in zip(step.events, owners, strict=True)
        ]
        total = sum(seconds for seconds, _ in ran)
        return sum(seconds for seconds, owner in ran if owner is not None) / total if total else 0.0

    def ceilings(self, target: str | None) -> dict[str, Ceilings | None]:
        """Return ceilings by the graph's name: the target's, else those of the GPU that was profiled.

        Raises UsageError for an unknown target.
        """
        named = None if target is None else target_ceilings(target)
        return {name: named or own_ceilings(graph)[0] for name, graph in self.joined.graphs.items()}

    def graph_sources(self, module: str | None) -> list[GraphSource]:
        """Return the joined graphs, or those of a name. Raises UsageError for an unknown name."""
        found = [
            replace(self.sources[name], name=name, number=number, read=partial(_itself, graph))
            for number, (name, graph) in enumerate(self.joined.graphs.items(), 1)
        ]
        return found if module is None else Contents("dump", self.path, tuple(found)).modules(module)


def _itself(graph: FusionGraph) -> FusionGraph:
    return graph


def open_profile(path: Path, dump: Path | None = None, rank: int | None = None) -> OpenedProfile:
    """Read a path's profiles; one is joined. dump: the compiler's files, if they are not beside the profile.

    rank: which one, the first by default: of several ranks by their number, else of several GPUs.

    Raises UsageError where a profile or the dump cannot be read, and for a rank that is not there; UnreadableCapture in
    a folder of `xlafuse capture`.
    """
    notes: list[str] = []
    profiles = _profiles(path, notes)
    choice, numbers = _numbers(profiles)
    if rank is not None and rank not in numbers:
        raise UsageError(f"{path}: no {choice} {rank}; it has {join_some(map(str, numbers), MOST_NAMED)}")
    by_steps = [profiled_steps(profile) for profile in profiles]
    chosen = next((at for at, found in enumerate(by_steps) if found), 0) if rank is None else numbers.index(rank)
    first, steps = profiles[chosen], by_steps[chosen]
    if not steps:
        raise UsageError(f"{first.source}: {first.device} did nothing in its {formats.count(len(first.steps), 'step')}")
    folder = next((each for each in files.capture_folders(path) if Path(first.source).is_relative_to(each)), None)
    captured = {} if folder is None else _captured(folder)
    if first.device.startswith("GPU ") and captured.get("device"):
        first = replace(first, device=str(captured["device"]))
    if not first.versions and isinstance(captured.get("versions"), dict):
        first = replace(first, versions={str(key): str(value) for key, value in captured["versions"].items()})
    sources = _sources(first, path, dump or folder, required=dump is not None)
    joined = join(steps, _read(sources, first.device, notes))
    names = _kernel_counts(first)
    alike: list[str] = []
    unlike: list[str] = []
    for number, other in zip(numbers, profiles, strict=True):
        if number != numbers[chosen]:
            (alike if _kernel_counts(other) == names else unlike).append(str(number))
    counts = {tuple(sorted(Counter(event.name for event in step.events).items())) for step in steps}
    if len(counts) > 1:
        notes.append("the steps ran different kernels; a kernel takes 0 µs in a step that did not run it")
    if first.skipped:
        notes.append(f"{first.skipped:,} events could not be read and are left out")
    notes += first.notes
    return OpenedProfile(
        path, first, tuple(steps), joined, sources, choice, numbers[chosen], tuple(alike), tuple(unlike), tuple(notes)
    )


def _profiles(path: Path, notes: list[str]) -> list[Profile]:
    """Return the profiles of a path by rank. notes: gets a note on each file that cannot be read, if another one can.

    Raises as open_profile does.
    """
    found: list[Profile] = []
    problems: list[str] = []
    try:
        for file in files.profile_files(path):
            try:
                read = files.read(file)
            except ProfileError as problem:
                problems.append(str(problem))
                continue
            found += [each if each.rank is not None else replace(each, rank=files.rank_of(file)) for each in read]
    except OSError as problem:
        raise UsageError(str(problem)) from None
    if not found:
        raise (UnreadableCapture if files.capture_folders(path) else UsageError)(problems[0])
    notes += problems
    return sorted(found, key=lambda profile: profile.rank or 0)


def _numbers(profiles: Sequence[Profile]) -> tuple[str, list[int]]:
    """Return what tells the profiles apart, and the number of each."""
    for choice, found in (("rank", [each.rank for each in profiles]), ("GPU", [each.gpu for each in profiles])):
        numbers = [number for number in found if number is not None]
        if len(set(numbers)) == len(profiles):
            return choice, numbers
    return "profile", list(range(len(profiles)))


def profile_contents(path: Path) -> Contents:
    """Return the graphs that a path's profile is joined to, with the times of a median step.

    Raises UsageError as open_profile does, and where no kernel is joined to a graph.
    """
    opened = open_profile(path)
    if not opened.joined.graphs:
        raise UsageError(
            f"{path}: no kernel of this profile is joined to a graph; `xlafuse inspect {path}` lists its kernels, and "
            "a folder of `xlafuse capture` has their graphs, too"
        )
    outside = formats.share(1 - opened.joined_share, 1)
    note = f"kernels have the times of a median step of {len(opened.steps)}; {outside} of the time is of other kernels"
    warnings = (f"{path}: {note}", *filter(None, [opened.others]), *opened.notes)
    return Contents("dump", path, tuple(opened.graph_sources(None)), warnings)


def any_contents(path: Path) -> Contents:
    """Return the graphs of a path: a profile's, joined to it, else those of `contents`. Raises as these do."""
    if not has_profile(path):
        return contents(path)
    try:
        return profile_contents(path)
    except UnreadableCapture as problem:  # its compilers' files may be there
        opened = contents(path)
        return replace(opened, warnings=(str(problem), *opened.warnings))


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


def _sources(profile: Profile, path: Path, dump: Path | None, *, required: bool) -> dict[str, GraphSource]:
    """Return the modules that ran, from the dump where it has them, else from the profile."""
    known = {
        key: GraphSource(key[0], 1, path, partial(_from_proto, key[0], read), order=key[1])
        for key, read in profile.modules.items()
    }
    if dump is not None:
        try:
            opened = contents(dump, _rank_in(dump, profile.rank))
            known |= {
                (each.graph().name if opened.kind == "file" else each.name, each.order): each for each in opened.graphs
            }
        except UsageError:
            if required:
                raise
    ran = {event.module for event in profile.events}
    named = {key: source for key, source in known.items() if key[0] in ran}
    if "" in ran:  # any program may have launched these
        named |= {key: source for key, source in list(known.items())[-MOST_GRAPHS:] if key not in named}
    several = Counter(name for name, _ in named)
    return {
        numbered_name(name, number) if several[name] > 1 else name: each for (name, number), each in named.items()
    }


def _rank_in(dump: Path, rank: int | None) -> int | None:
    """Return the rank if it is one of several in a TORCH_TRACE folder, else None."""
    if rank is None or not dump.is_dir():
        return None
    from xlafuse.triton_side.inductor.dump import ranks

    found = ranks(dump)
    return rank if rank in found and len(found) > 1 else None


def _read(sources: Mapping[str, GraphSource], device: str, notes: list[str]) -> dict[str, FusionGraph]:
    """Return the graphs that can be read, with the device that ran them as the target, if they name none."""
    found = {}
    for name, source in sources.items():
        try:
            graph = source.graph()
        except (UsageError, ValueError) as problem:
            notes.append(f"{name}: its kernels are not joined: {problem}")
            continue
        found[name] = graph if graph.target or device.startswith("GPU ") else replace(graph, target=device)
    return found


def _from_proto(name: str, read: Callable[[], bytes]) -> FusionGraph:
    from xlafuse.hlo.proto_reader import parse_proto

    from ..graph.build import xla_reasons
    from ..graph.build.from_hlo import from_hlo

    graph = from_hlo(parse_proto(read()))
    return replace(graph, name=name, reasons=xla_reasons.reasons(graph, ()))


def _kernel_counts(profile: Profile) -> Mapping[str, int]:
    return Counter(event.name for event in profile.events)
