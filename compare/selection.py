"""From what the user names (blocks, cases, implementations, a target, a folder) to what a run does.

What cannot be done as named is refused in one line, before any work, with what could have been named instead.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from compare import targets, timing, whole
from compare.blocks import BLOCKS
from compare.record import read_run, record_id
from compare.spec import DTYPE_BY_ANY_NAME, DTYPES, PARTS, Block, Case, Implementation
from compare.timing import Timing

SUITES = ("quick", "full", "check")
DEFAULT_SUITE = "quick"
FREE_BYTES = 200_000_000  # a quick run with its dumps stays well below


class UsageError(Exception):
    """What the user asked for cannot be done as asked; the message is one line that says what could."""


def write(file: Path, content: bytes) -> None:
    """Make or replace a file that the user named. Raises UsageError where it cannot be written."""
    try:
        whole.write(file, content)
    except OSError as problem:
        raise UsageError(f"{file}: cannot be written: {problem.strerror}") from None


@dataclass(frozen=True)
class Share:
    """What a plan is a part of: which ("1/3"), and the ids of all cases that were shared out."""

    parts: tuple[str, ...]
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a run does: each case with the implementations selected for it, and how they are timed on a GPU.

    share: of a part, so that who merges parts sees that one is missing.
    """

    suite: str
    work: tuple[tuple[Case, tuple[Implementation, ...]], ...]
    timing: Timing = Timing()
    share: Share | None = None

    def to_json(self) -> dict[str, Any]:
        work = [{"case": case.to_json(), "implementations": [i.name for i in found]} for case, found in self.work]
        plan = {"suite": self.suite, "work": work, "timing": self.timing.to_json()}
        return plan if self.share is None else plan | {"share": asdict(self.share)}

    @property
    def record_ids(self) -> set[str]:
        """Of the records that it makes."""
        return {record_id(case, i.name) for case, implementations in self.work for i in implementations}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Raises UsageError where the run's blocks, cases with their sizes, or implementations are not those of this
        installation."""
        try:
            work = []
            for entry in data["work"]:
                case = Case.from_json(entry["case"])
                block = BLOCKS[case.block]
                _require_own(case, block)
                work.append((case, tuple(block.implementation(name) for name in entry["implementations"])))
            return cls(data["suite"], tuple(work), _timing(data))
        except (KeyError, TypeError) as problem:
            raise UsageError(f"the run's own selection cannot be repeated here: {problem}; select by name") from None


def resolve(
    blocks: Iterable[str],
    *,
    suite: str,
    implementations: Iterable[str] = (),
    cases: Iterable[str] = (),
    directions: Iterable[str] = (),
    dtypes: Iterable[str] = (),
) -> Plan:
    """The cases of `suite` that every filter lets through, in the table's order. An empty filter lets all through.

    A case is named by its shape ("llama-8b") or its id ("gelu/llama-8b/bf16/fwd"), a dtype by its long or short name.
    Raises UsageError for an unknown name, and for a known one that nothing in the selection has.
    """
    one_of("suite", suite, SUITES)
    blocks = [one_of("block", name, BLOCKS) for name in dict.fromkeys(blocks)]
    directions = [one_of("direction", name, PARTS) for name in dict.fromkeys(directions)]
    dtypes = [DTYPE_BY_ANY_NAME[one_of("dtype", name, DTYPE_BY_ANY_NAME, shown=DTYPES)] for name in dtypes]
    wanted = [BLOCKS[name] for name in BLOCKS if not blocks or name in blocks]
    implementations = _known_implementations(implementations, wanted)
    cases = _known_cases(cases, wanted, suite)

    work = []
    for block in wanted:
        mine = tuple(i for i in block.implementations if not implementations or i.name in implementations)
        for case in block.cases(suite):
            found = tuple(
                i for i in mine
                if case.direction in i.directions and (i.name in implementations or block.takes(case, i, suite))
            )
            if (
                found
                and (not cases or case.name in cases or case.id in cases)
                and (not directions or case.direction in directions)
                and (not dtypes or case.dtype in dtypes)
            ):
                work.append((case, found))
    plan = Plan(suite, tuple(work), timing.of_suite(suite))

    in_plan: list[tuple[str, Sequence[str], set[str]]] = [
        ("implementation", implementations, {i.name for _, found in work for i in found}),
        ("case", cases, {c.name for c, _ in work} | {c.id for c, _ in work}),
        ("direction", directions, {c.direction for c, _ in work}),
        ("dtype", dtypes, {c.dtype for c, _ in work}),
        ("block", blocks, {c.block for c, _ in work}),
    ]
    for kind, named, present in in_plan:
        for name in named:
            if name not in present:
                raise UsageError(_nothing_left(kind, name, wanted, suite))
    return plan


def resolve_again(run: Mapping[str, Any], blocks: Iterable[str], suite: str | None, **filters: Iterable[str]) -> Plan:
    """The plan of a resumed run: its own where nothing is named, else what is named, in its own suite by default."""
    blocks, own = list(blocks), run.get("plan")
    if suite is not None or blocks or any(filters.values()):
        plan = resolve(blocks, suite=suite or run.get("suite", DEFAULT_SUITE), **filters)
        return plan if suite is not None or own is None else replace(plan, timing=_timing(own))
    if own is None:
        raise UsageError(
            f"run.json does not say what was selected: name it again, as in {run.get('command', 'xlafuse run BLOCK')!r}"
        )
    return Plan.from_json(own)


def _require_own(case: Case, block: Block) -> None:
    """Raises UsageError where the block has no such case, or has it with other sizes: neither its inputs could be drawn
    here, nor what is done now stand beside what was done."""
    own = next((own for suite in SUITES for own in block.cases(suite) if own.id == case.id), None)
    if own is None or own.sizes != case.sizes:
        here = "is none of this installation's" if own is None else f"has sizes {_sizes(own)} here"
        raise UsageError(
            f"the run's own selection cannot be repeated here: its case {case.id}, with sizes {_sizes(case)}, {here}; "
            "select by name"
        )


def _sizes(case: Case) -> str:
    return ", ".join(f"{name} {size}" for name, size in case.sizes.items())


def _timing(plan: Mapping[str, Any]) -> Timing:
    """A recorded plan's; one that says nothing of it was timed in the main mode alone."""
    return Timing.from_json(plan["timing"]) if "timing" in plan else Timing()


def resolve_timing(plan: Plan, modes: Iterable[str], restarts: int | None, *, timed: bool) -> Plan:
    """The plan, timed in these modes beside the main one, and with as many restarts; nothing named leaves its own.

    timed: whether the run times at all. Raises UsageError for an unknown mode, and where something is asked of a run
    that does not.
    """
    modes = [one_of("mode", name, (timing.MAIN, *timing.OTHER_MODES)) for name in modes]
    if not modes and restarts is None:
        return plan
    if not timed:
        raise UsageError("--mode and --restarts are about timing, and a run for a GPU that is not here times nothing")
    chosen = tuple(mode for mode in timing.OTHER_MODES if mode in modes) if modes else plan.timing.modes
    return replace(plan, timing=Timing(chosen, plan.timing.restarts if restarts is None else restarts))


def resolve_target(name: str | None) -> str | None:
    """None stays None: this machine's GPU, or the run's own choice where there is none."""
    return None if name is None else one_of("target", name, targets.names())


def recorded_choices(name: str) -> list[Path]:
    """Files of what XLA chose before, one a jax version: in a target pack, by its name, or in a run on a GPU, by its
    folder. Raises UsageError where there is none."""
    folder = (targets.FOLDER / name if name in targets.names() else Path(name) / "target") / "xla"
    found = [path for path in sorted(folder.glob("autotune-*.textproto")) if path.stem.count(".") == 2]
    if not found:  # there may be a process's own (autotune-0.11.2.4711.textproto), of a run that was killed
        raise UsageError(
            f"{name!r} holds no choices of XLA ({folder}/autotune-<jax version>.textproto): name a target "
            f"({', '.join(targets.names())}) or the folder of a run on a GPU"
        )
    return found


def output_folder(out: Path | None, *, suite: str, now: datetime) -> Path:
    """Where a new run goes; nothing is created yet.

    Raises UsageError where it exists, cannot be written, or the disk is nearly full: before any work, not after.
    """
    folder = out or Path("runs") / f"{now:%Y%m%d-%H%M%S}-{suite}"
    try:
        if folder.exists():
            resume = "--resume goes on with it, or " if (folder / "run.json").exists() else ""
            raise UsageError(f"{str(folder)!r} exists already: {resume}name another --out")
        _writable(next(parent for parent in folder.absolute().parents if parent.exists()), folder)
    except OSError as problem:
        raise UsageError(f"{str(folder)!r} cannot be made: {problem.strerror}; name another --out") from None
    return folder


def resumed_folder(out: Path | None) -> tuple[Path, dict[str, Any]]:
    """An existing run's folder and its run.json. Raises UsageError or RunFolderError where there is none."""
    if out is None:
        raise UsageError("--resume needs --out DIR, the folder of the run to go on with")
    try:
        if not out.exists():
            raise UsageError(f"{str(out)!r}: no run to resume; leave --resume out to start one there")
        run = read_run(out)
        _writable(out, out)
    except OSError as problem:
        raise UsageError(f"{str(out)!r} cannot be written: {problem.strerror}") from None
    return out, run


def some(names: Iterable[str], most: int | None) -> str:
    """The names, or the first of them and how many more there are."""
    listed = list(names)
    more = len(listed) - (len(listed) if most is None else most)
    return f"{', '.join(listed[:most])} and {more:,} more" if more > 0 else ", ".join(listed)


def one_of(
    kind: str, name: str, possible: Iterable[str], shown: Iterable[str] | None = None, *, most: int | None = None,
    where: str = "",
) -> str:
    """`name`, if it is among the possible. Raises UsageError with near matches and what is possible: `shown` in its
    place, `most` of it.

    where: what was searched, as in "among these records", if a name may well be known elsewhere.
    """
    possible = list(possible)
    if name in possible:
        return name
    near = difflib.get_close_matches(name, possible, n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    what = f"{kind} {name!r} {where}".rstrip()
    raise UsageError(f"no {what}{meant} {kind}s: {some(shown or possible, most) or 'none'}")


def _known_implementations(names: Iterable[str], wanted: list[Block]) -> list[str]:
    everywhere = list(dict.fromkeys(i.name for block in BLOCKS.values() for i in block.implementations))
    found = [one_of("implementation", name, everywhere) for name in dict.fromkeys(names)]
    here = list(dict.fromkeys(i.name for block in wanted for i in block.implementations))
    for name in found:
        if name not in here:
            of = [b.name for b in BLOCKS.values() if any(i.name == name for i in b.implementations)]
            raise UsageError(
                f"implementation {name!r} belongs to {', '.join(of)}, not to {', '.join(b.name for b in wanted)}, "
                f"which has {', '.join(here)}"
            )
    return found


def _known_cases(names: Iterable[str], wanted: list[Block], suite: str) -> list[str]:
    found = list(dict.fromkeys(names))
    cases = {each: [c for block in wanted for c in block.cases(each)] for each in SUITES}

    def names_of(each: str) -> list[str]:
        return list(dict.fromkeys(c.name for c in cases[each]))

    for name in found:
        if name in names_of(suite) or name in {c.id for c in cases[suite]}:
            continue
        for other in SUITES:
            if name in names_of(other) or name in {c.id for c in cases[other]}:
                raise UsageError(f"case {name!r} is not in suite {suite}, but in suite {other}: add --suite {other}")
        shown = names_of(suite)
        one_of("case", name, [c.id for c in cases[suite]] if "/" in name else shown, shown=shown)
    return found


def _nothing_left(kind: str, name: str, wanted: list[Block], suite: str) -> str:
    """Every name is known, yet together they leave nothing of this one: say what there is to choose from."""
    blocks = [b for b in wanted if kind != "block" or b.name == name]
    test: Callable[[Block, Case], bool] = {
        "implementation": lambda block, case: any(i.name == name for i in block.implementations),
        "case": lambda block, case: name in (case.name, case.id),
        "direction": lambda block, case: case.direction == name,
        "dtype": lambda block, case: case.dtype == name,
    }.get(kind, lambda block, case: True)
    there = [case.id for block in blocks for case in block.cases(suite) if test(block, case)]
    if there:
        return f"nothing of {kind} {name!r} is left by the other filters; suite {suite} has {', '.join(there)}"
    elsewhere = [s for s in SUITES if any(test(b, c) for b in blocks for c in b.cases(s))]
    remedy = f"--suite {elsewhere[0]} has it" if elsewhere else "no suite has it"
    return f"suite {suite} has no case of {', '.join(b.name for b in blocks)} with {kind} {name!r}; {remedy}"


def _writable(parent: Path, folder: Path) -> None:
    """Raises OSError or UsageError unless a file in `parent` can really be written."""
    if not parent.is_dir():
        raise UsageError(f"{str(folder)!r} cannot be made: {str(parent)!r} is a file; name another --out")
    with tempfile.TemporaryFile(dir=parent) as probe:
        probe.write(b"\0" * 4096)
    free = shutil.disk_usage(parent).free
    if free < FREE_BYTES:
        raise UsageError(
            f"{str(folder)!r}: {free / 1e6:.0f} MB free on its disk, a run needs {FREE_BYTES / 1e6:.0f} MB; "
            "free some or name another --out"
        )
