"""What each implementation became: its kernels in the order they run, each with what it contains and what it took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare.record import Record, read_records, read_run
from compare.report import printable
from compare.report.rows import only

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

Kernel = Mapping[str, Any]


@dataclass(frozen=True)
class PartView:
    """One part. `measured_us[i]` is what kernel i took within the launches, or None where that is not certain.

    launches: [{"name", "duration_us"}], what the device ran in a median call.
    """

    kernels: list[Kernel]
    measured_us: list[float | None]
    launches: list[dict[str, Any]]


@dataclass(frozen=True)
class View:
    """One implementation of one case."""

    id: str
    block: str
    case: str
    direction: str
    dtype: str
    precision: str
    implementation: str
    status: str
    detail: str | None
    segment: str | None
    target: str | None
    dumps: str | None
    parts: dict[str, PartView]


def read(folder: Path, **wanted: Iterable[str]) -> tuple[list[View], list[str]]:
    """Views of the records that have all wanted fields, and warnings about what could not be read.

    Raises RunFolderError for what is not a run folder, UsageError for a name that no record has.
    """
    read_run(folder)
    records, warnings = read_records(folder)
    views = []
    for record in records:
        try:
            views.append(view_of(record))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as problem:
            warnings.append(
                f"{folder / 'records.jsonl'}: {record.id} left out, its fields are not as written by this version: "
                f"{type(problem).__name__}: {problem}"
            )
    kept = only([vars(view) for view in views], **wanted)
    return [view for view in views if any(vars(view) is row for row in kept)], warnings


def view_of(record: Record) -> View:
    case = record.case
    measured = ((record.measurement or {}).get("parts") or {}) if record.status == "ok" else {}
    parts = {}
    for part in case.parts:
        kernels: list[Kernel] = [_checked(kernel) for kernel in record.kernels.get(part, [])]
        records = measured.get(part, {}).get("records", [])
        launches = [{"name": r["name"], "duration_us": (r["end"] - r["start"]) * 1e6} for r in records]
        parts[part] = PartView(kernels, match(kernels, launches), launches)
    return View(
        record.id, case.block, case.name, case.direction, case.dtype, case.precision, record.implementation,
        record.status, record.detail, record.segment, record.target, record.dumps, parts,
    )


_LISTS = ("ops", "stages", "lines")
_NUMBERS = ("registers", "spills_bytes", "shared_bytes", "num_warps", "bytes_read", "bytes_written", "launches")


def _checked(kernel: Any) -> dict[str, Any]:
    """A copy. Raises TypeError for fields that are not of the kind that compilers' readers write."""
    kernel = dict(kernel)
    for names, kind in ((_LISTS, list), (_NUMBERS, int | float)):
        for name in names:
            if kernel.get(name) is not None and not isinstance(kernel[name], kind):
                raise TypeError(f"a kernel's {name} is of type {type(kernel[name]).__name__}")
    return kernel


def match(kernels: list[Kernel], launches: list[dict[str, Any]]) -> list[float | None]:
    """What each kernel took, in microseconds, where only one reading of the launches is possible.

    By name: all launches of a name belong to the one kernel that has it, or one each, in order, to the kernels that
    share it. The rest by position, if each kernel is launched once and no name contradicts that.
    """
    names = [kernel.get("runtime_name", kernel.get("name")) for kernel in kernels]
    times: list[float | None] = [None] * len(kernels)
    by_position = len(kernels) == len(launches) and all(kernel.get("launches", 1) == 1 for kernel in kernels)
    for name in {name for name in names if name is not None}:
        mine = [i for i, other in enumerate(names) if other == name]
        theirs = [i for i, launch in enumerate(launches) if launch["name"] == name]
        if len(mine) == 1 and len(theirs) == (kernels[mine[0]].get("launches", 1) or len(theirs)) > 0:
            times[mine[0]] = sum(launches[i]["duration_us"] for i in theirs)
        elif len(mine) == len(theirs):
            for i, j in zip(mine, theirs, strict=True):
                times[i] = launches[j]["duration_us"]
        promised = any(kernels[i].get("runtime_name") for i in mine)
        by_position &= theirs == mine or (not theirs and not promised)
    if by_position:
        return [launch["duration_us"] for launch in launches]
    return times


def unmatched(part: PartView) -> list[dict[str, Any]]:
    """The launches whose time no kernel got: of libraries, whose kernels have names of their own."""
    if part.kernels and all(time is not None for time in part.measured_us):
        return []
    timed = {
        kernel.get("runtime_name", kernel.get("name"))
        for kernel, time in zip(part.kernels, part.measured_us, strict=True) if time is not None
    }
    return [launch for launch in part.launches if launch["name"] not in timed]


def as_json(views: list[View]) -> str:
    """A list with one entry an implementation of a case; each kernel carries its `measured_us`."""
    result = []
    for view in views:
        parts = {
            name: {
                "kernels": [{**k, "measured_us": us} for k, us in zip(part.kernels, part.measured_us, strict=True)],
                "launches": part.launches,
                "unmatched": unmatched(part),
            }
            for name, part in view.parts.items()
        }
        result.append(asdict(view) | {"parts": parts})
    return json.dumps(result, indent=1)


def show(views: list[View]) -> None:
    """Print one tree a case and direction, to the width of the terminal (80 columns where there is none)."""
    from rich.console import Console

    console = Console(highlight=False)
    if not views:
        console.print("no records")
    trees: dict[str, Tree] = {}
    for view in views:
        title = view.id.removesuffix(f"/{view.implementation}")
        if title not in trees:
            trees[title] = _tree(title)
        _add_view(trees[title], view)
    for tree in trees.values():
        console.print(tree)


def _tree(title: str) -> Tree:
    from rich.tree import Tree

    return Tree(_text(title, "bold"))


def _text(words: str, style: str = "") -> Text:
    """Text, never markup: names come from compilers and files."""
    from rich.text import Text

    return Text(printable(words), style)


def _add_view(tree: Tree, view: View) -> None:
    made_for = f", for {view.target}" if view.target else ""
    branch = tree.add(_text(f"{view.implementation}: {view.status}{made_for}", "bold cyan"))
    if view.detail:
        branch.add(_text(view.detail, "yellow"))
    for name, part in view.parts.items():
        if part.kernels or part.launches:
            _add_part(branch.add(_text(f"{name}: {_part_summary(part)}")), part)


def _part_summary(part: PartView) -> str:
    listed = _count(len(part.kernels), "kernel") if part.kernels else "no kernels listed by its compiler"
    if not part.launches:
        return listed
    total = sum(launch["duration_us"] for launch in part.launches)
    return f"{listed}, {_count(len(part.launches), 'launch', 'launches')} measured, {total:.1f} µs in all"


def _add_part(branch: Tree, part: PartView) -> None:
    for number, (kernel, time) in enumerate(zip(part.kernels, part.measured_us, strict=True), 1):
        branch.add(_kernel_text(number, kernel, time))
    left = unmatched(part)
    if left:
        rest = branch.add(_text("launches that no kernel above names:")) if part.kernels else branch
        for launch in left:
            rest.add(_text(f"{launch['duration_us']:.1f} µs  {launch['name']}"))


def _kernel_text(number: int, kernel: Kernel, time: float | None) -> Text:
    head = f"{number}. {kernel.get('name', 'unnamed')}"
    if kernel.get("kind"):
        head += f" ({kernel['kind']})"
    if time is not None:
        head += f"  {time:.1f} µs"
    text = _text(head, "green")
    for label, key in (("stages", "stages"), ("ops", "ops"), ("from", "lines")):
        if kernel.get(key):
            text.append("\n").append_text(_text(f"{label}: {_compact(kernel[key])}"))
    facts = _facts(kernel)
    if facts:
        text.append("\n").append_text(_text(" · ".join(facts), "dim"))
    return text


def _compact(words: Iterable[Any]) -> str:
    """In order, each once, with how often it came."""
    counts: dict[str, int] = {}
    for word in words:
        counts[str(word)] = counts.get(str(word), 0) + 1
    return ", ".join(word if count == 1 else f"{word} x{count}" for word, count in counts.items())


def _facts(kernel: Kernel) -> list[str]:
    facts = [str(kernel["provenance"])] if kernel.get("provenance") else []
    if kernel.get("bytes_read") is not None and kernel.get("bytes_written") is not None:
        facts.append(f"reads {_size(kernel['bytes_read'])}, writes {_size(kernel['bytes_written'])}")
    if kernel.get("num_warps") is not None:
        facts.append(_count(kernel["num_warps"], "warp"))
    if kernel.get("registers") is not None:
        facts.append(_count(kernel["registers"], "register"))
    if kernel.get("spills_bytes") is not None:
        facts.append(f"{_size(kernel['spills_bytes'])} spilled" if kernel["spills_bytes"] else "no spills")
    if kernel.get("shared_bytes") is not None:
        facts.append(f"{_size(kernel['shared_bytes'])} shared memory")
    return facts


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
