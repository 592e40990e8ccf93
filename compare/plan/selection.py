"""Selection: names of blocks, cases, implementations, modes and targets become a plan.

A name that is unknown, or selects nothing, is refused in one line that lists the possible names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import targets
from ..base.usage import UsageError, one_of
from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.case import PHASES, RANKS, Case, Shape
from ..spec.dtype import DTYPE_BY_ANY_NAME, DTYPES
from ..spec.implementation import OwnFunction
from ..spec.own_size import own_shape
from . import timing_modes as timing
from .plan import SUITES, Plan, timing_of
from .timing_modes import Timing

_MORE_GPUS = (4, 8)  # of one host, besides the two of the blocks' main shapes

# The suite `tour` has these blocks, unless others are named.
TOUR = ("gelu", "softmax", "rmsnorm", "swiglu_mlp", "attention", "cross_entropy")


def default_suite(blocks: Iterable[str]) -> str:
    """Return the suite of a run that names none: the tour, or the quick cases of the named blocks."""
    return "quick" if list(blocks) else "tour"


def resolve(
    blocks: Iterable[str],
    *,
    suite: str,
    implementations: Iterable[str] = (),
    cases: Iterable[str] = (),
    directions: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    sizes: Iterable[Mapping[str, int]] = (),
    own: Iterable[OwnFunction] = (),
) -> Plan:
    """Return the plan of the cases in `suite` that pass every filter, in the table's order; no filter passes all.

    A case is named by its shape ("llama-8b") or its id ("gelu/llama-8b/bf16/fwd"), a dtype by its long or short name.
    sizes: instead of the suite's shapes, take the main shape with these sizes of some axes, in `dtypes` if given.
    own: functions of the user, all for the only block that is named, which become its implementations.
    Raises UsageError for an unknown name, and for a name that no selected case has.
    """
    one_of("suite", suite, SUITES)
    blocks = [one_of("block", name, BLOCKS) for name in dict.fromkeys(blocks)]
    directions = [one_of("direction", name, PHASES) for name in dict.fromkeys(directions)]
    dtypes = [DTYPE_BY_ANY_NAME[one_of("dtype", name, DTYPE_BY_ANY_NAME, shown=DTYPES)] for name in dtypes]
    shown = blocks or _blocks_of(suite)
    wanted = [BLOCKS[name] for name in BLOCKS if name in shown]
    if sizes and not blocks:
        raise UsageError("--size needs a block: xlafuse run attention --size sequence=8192")
    own = tuple(own)
    rows = [function.row() for function in own]
    asked = list(implementations)
    mine = [row.name for row in rows]
    implementations = [
        *_known_implementations([name for name in asked if name not in mine], wanted), *(mine if asked else [])
    ]
    cases = _known_cases(cases, wanted, suite)

    work = []
    for block in wanted:
        selected = tuple(
            i for i in (*block.implementations, *rows) if not implementations or i.name in implementations
        )
        for case in block.cases(suite, [_own_shape(block, axes, dtypes) for axes in sizes] or None):
            found = tuple(
                i for i in selected
                if case.direction in i.directions and (i.name in implementations or block.takes(case, i, suite))
            )
            if (
                found
                and (not cases or case.name in cases or case.id in cases)
                and (not directions or case.direction in directions)
                and (not dtypes or case.dtype in dtypes)
            ):
                work.append((case, found))
    plan = Plan(suite, tuple(work), timing.of_suite(suite), own=own)

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


def resolve_again(run: Mapping[str, Any], blocks: Iterable[str], suite: str | None, **filters: Any) -> Plan:
    """Return the plan of a resumed run: its own without filters, else a new one, by default in the run's suite."""
    blocks, own = list(blocks), run.get("plan")
    if suite is not None or blocks or any(filters.values()):
        plan = resolve(blocks, suite=suite or run.get("suite") or default_suite(blocks), **filters)
        return plan if suite is not None or own is None else replace(plan, timing=timing_of(own))
    if own is None:
        raise UsageError(
            f"run.json lacks the run's selection: name it again, as in {run.get('command', 'xlafuse run BLOCK')!r}"
        )
    return Plan.from_json(own)


def repeated(
    run: Mapping[str, Any], texts: Iterable[str], implementations: Iterable[str] = ()
) -> tuple[Plan, dict[str, str]]:
    """Return the plan of the cases that are measured anew for a run, and the reason of each by its id.

    A case of the run has the run's implementations, and those of `implementations` that take it. Another case of the
    run's suite, which a later program brought, has all of its own.

    texts: "CASE=REASON". Raises UsageError for another form, and for a case that neither the run nor its suite has.
    """
    plan, today = resolve_again(run, [], None), {}
    if suite := run.get("suite"):
        today = {case.id: (case, found) for case, found in resolve([], suite=suite).work}
    own = {case.id: (case, found) for case, found in plan.work}
    cases, reasons, added = [*{**own, **today}], {}, set(implementations)
    for text in texts:
        named = text.partition("=")[0]
        name = next((case for case in cases if text.startswith(f"{case}=")), named)  # a size of one's own has a "="
        reason = text.removeprefix(name).removeprefix("=").strip()
        if not reason:
            raise UsageError(f"--again takes CASE=REASON, such as 'gelu/llama-8b/bf16/fwd=low clocks'; got {text!r}")
        reasons[one_of("case", name, cases, where="in the run or its suite")] = reason
    work = []
    for id in (id for id in cases if id in reasons):
        case, found = own.get(id) or today[id]
        more = tuple(i for i in today.get(id, (case, ()))[1] if i.name in added and i not in found)
        work.append((case, (*found, *more)))
    if unknown := added - {i.name for _, found in work for i in found}:
        raise UsageError(f"none of the cases measured anew has {', '.join(sorted(unknown))}")
    return replace(plan, work=tuple(work)), reasons


def over_absent_gpus(plan: Plan) -> Plan:
    """Return the plan of suite `parallel` for GPUs that are not here: also with more of them, as no host limits it."""
    if plan.suite != "parallel":
        return plan
    more = [
        (replace(case, name=shape.name, sizes=shape.sizes), found)
        for gpus in _MORE_GPUS
        for case, found in plan.work if case.name == BLOCKS[case.block].shapes[0].name
        for shape in (own_shape(BLOCKS[case.block], {RANKS: gpus}),)
    ]
    return replace(plan, work=(*plan.work, *more))


def without_replays(plan: Plan, implementations: Iterable[str]) -> Plan:
    """Return the plan of a machine without a GPU: without replays of CUDA graphs, unless `implementations` names them.

    They run on a GPU only, and have the kernels of another implementation.
    """
    named = set(implementations)
    work = tuple(
        (case, tuple(i for i in found if i.name in named or not i.backend.replays_graphs)) for case, found in plan.work
    )
    return replace(plan, work=work)


def resolve_timing(plan: Plan, modes: Iterable[str], restarts: int | None, *, timed: bool) -> Plan:
    """Return the plan with these modes and restarts; without modes, or with restarts None, it keeps its own.

    timed: the run takes times. Raises UsageError for an unknown mode, and for modes or restarts of a run without times
    or of cases over several GPUs alone.
    """
    modes = [one_of("mode", name, (timing.MAIN, *timing.OTHER_MODES)) for name in modes]
    if not modes and restarts is None:
        return plan
    if not timed:
        raise UsageError("--mode and --restarts are about timing, and a run for a GPU that is not here times nothing")
    if all(BLOCKS[case.block].spans_gpus for case, _ in plan.work):
        raise UsageError(
            "--mode and --restarts are for cases of one GPU; a case over several is timed in one process for each GPU, "
            "as it is and without its exchanges: leave them out"
        )
    chosen = tuple(mode for mode in timing.OTHER_MODES if mode in modes) if modes else plan.timing.modes
    main_only = plan.timing.main_only and not modes
    return replace(plan, timing=Timing(chosen, plan.timing.restarts if restarts is None else restarts, main_only))


def resolve_target(name: str | None) -> str | None:
    """Return the known target. None stays None: this machine's GPU, or the default target where there is none."""
    return None if name is None else one_of("target", name, targets.names())


def autotune_results(name: str) -> list[Path]:
    """Return files of XLA's recorded autotuning results, one for each jax version.

    name: a target pack, or the folder of a run on a GPU. Raises UsageError where there are none.
    """
    folder = (targets.FOLDER / name if name in targets.names() else Path(name) / "target") / "xla"
    found = targets.all_autotune_results(folder)
    if not found:
        raise UsageError(
            f"{name!r} holds no autotuning results of XLA ({folder}/autotune-<jax version>.textproto): name a target "
            f"({', '.join(targets.names())}) or the folder of a run on a GPU"
        )
    return found


def _blocks_of(suite: str) -> tuple[str, ...]:
    """Return the blocks of a suite; those that span several GPUs have one of their own."""
    if suite == "tour":
        return TOUR
    return tuple(name for name, block in BLOCKS.items() if block.spans_gpus == (suite == "parallel"))


def _own_shape(block: Block, axes: Mapping[str, int], dtypes: Iterable[str]) -> Shape:
    shape = own_shape(block, axes)
    known = {dtype for each in block.shapes for dtype in each.dtypes}
    return replace(shape, dtypes=tuple(dtype for dtype in dtypes if dtype in known) or shape.dtypes)


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
    """Return the message for a known name without a case that passes the other filters, with the cases it has."""
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
