"""The results of a profile: its steps, and the graphs of its programs, which the profile or dumps next to it have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.usage import UsageError, join_some
from ..graph import formats
from ..graph.model import FusionGraph
from ..profiles import files
from ..profiles.join import join, numbered_name
from ..profiles.model import Profile, ProfileError
from ..profiles.steps import profiled_steps
from .dump_files import open_files
from .profiled import ProfiledSteps
from .result import Result, reader_of, reading_errors_as_usage
from .run_source import is_run
from .source import MOST_NAMED, Source

if TYPE_CHECKING:
    from xlafuse.hlo.text_reader import Module

MOST_GRAPHS = 200  # modules that are read where events do not name theirs


class UnreadableCapture(UsageError):
    """The profile of a captured program cannot be shown, but its compilers' files can."""


def has_profile(path: Path) -> bool:
    """Return whether a path is a profile, or a folder that has one and is no run.

    Raises UsageError where its files cannot be read.
    """
    with reading_errors_as_usage(path):
        return not is_run(path) and bool(files.profile_files(path))


def open_profile(path: Path, dump: Path | None = None, rank: int | None = None) -> Source:
    """Read a path's profiles; one is joined. dump: the compiler's files, if they are not beside the profile.

    rank: which one, the first by default: of several ranks by their number, else of several GPUs. Results have the
    times of a median step.

    Raises UsageError where a profile or the dump cannot be read, and for a rank that is not there; UnreadableCapture in
    a folder of `xlafuse capture`.
    """
    notes: list[str] = []
    profiles = _profiles(path, notes)
    choice, numbers = _numbers(profiles)
    if rank is not None and rank not in numbers:
        raise UsageError(f"{path}: no {choice} {rank}; it has {join_some(map(str, numbers), MOST_NAMED)}")
    by_steps = [profiled_steps(profile) for profile in profiles]
    chosen = next((at for at, steps in enumerate(by_steps) if steps), 0) if rank is None else numbers.index(rank)
    first, steps = profiles[chosen], by_steps[chosen]
    if not steps:
        raise UsageError(f"{first.source}: {first.device} did nothing in its {formats.count(len(first.steps), 'step')}")
    folder = next((each for each in files.capture_folders(path) if Path(first.source).is_relative_to(each)), None)
    captured = {} if folder is None else files.capture_facts(folder)
    if first.device.startswith("GPU ") and captured.get("device"):
        first = replace(first, device=str(captured["device"]))
    if not first.versions and folder is not None:
        first = replace(first, versions=files.captured_versions(folder))
    modules = _modules(first, path, dump or folder, required=dump is not None)
    joined = join(steps, _read(modules, first.device, notes))
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
    profile = ProfiledSteps(
        path, first, tuple(steps), joined, choice, numbers[chosen], tuple(alike), tuple(unlike), tuple(notes),
        {} if folder is None else files.compile_seconds(folder), _compile_places(first, folder),
    )
    results = tuple(
        replace(modules[name], id=name, number=number, read=reader_of(graph))
        for number, (name, graph) in enumerate(joined.graphs.items(), 1)
    )
    return Source("profile", path, results, (*profile.warnings, *notes), profile=profile)


def _compile_places(profile: Profile, folder: Path | None) -> dict[str, str]:
    """Return the user's lines that made torch.compile compile in a captured profile, by the names of its waits."""
    if folder is None or all(wait.kind != "compile" for wait in profile.waits):
        return {}
    from xlafuse.triton_side.inductor.compile_places import compile_places

    return {f"torch.compile {number}": place for number, place in compile_places(folder).items()}


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


def _modules(profile: Profile, path: Path, dump: Path | None, *, required: bool) -> dict[str, Result]:
    """Return the modules that ran, from the dump where it has them, else from the profile."""
    known = {
        key: Result(
            key[0], 1, path, partial(_from_proto, key[0], read), order=key[1], program=partial(_module, read)
        )
        for key, read in profile.modules.items()
    }
    if dump is not None:
        try:
            with reading_errors_as_usage(dump):
                opened = open_files(dump, _rank_in(dump, profile.rank))
            known |= {
                (result.load().name if opened.kind == "file" else result.id, result.order): result
                for result in opened.results
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


def _read(modules: Mapping[str, Result], device: str, notes: list[str]) -> dict[str, FusionGraph]:
    """Return the graphs that can be read, with the device that ran them as the target, if they name none."""
    found = {}
    for name, module in modules.items():
        try:
            graph = module.load()
        except (UsageError, ValueError) as problem:
            notes.append(f"{name}: its kernels are not joined: {problem}")
            continue
        found[name] = graph if graph.target or device.startswith("GPU ") else replace(graph, target=device)
    return found


def _from_proto(name: str, read: Callable[[], bytes]) -> FusionGraph:
    from ..graph.build import xla_reasons
    from ..graph.build.from_hlo import from_hlo

    graph = from_hlo(_module(read))
    return replace(graph, name=name, reasons=xla_reasons.reasons(graph, ()))


def _module(read: Callable[[], bytes]) -> Module:
    from xlafuse.hlo.proto_reader import parse_proto

    return parse_proto(read())


def _kernel_counts(profile: Profile) -> Mapping[str, int]:
    return Counter(event.name for event in profile.events)
