"""A plan: the cases of a run, each with its implementations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import ValidationError, convert

from ..base.usage import UsageError
from ..record.record import record_id
from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation, OwnFunction
from ..spec.own_size import shape_with
from .timing_modes import Timing

SUITES = ("tour", "quick", "full", "check", "parallel")


@dataclass(frozen=True)
class Shard:
    """The names of the shards that a plan consists of ("1/3"), and the ids of all cases of all shards."""

    names: tuple[str, ...]
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The work of a run: each case with its selected implementations, and their timing on a GPU.

    shard: of a plan for one of several GPUs, so that `xlafuse merge` can tell that a shard is missing. own: the user's
    functions in it.
    """

    suite: str
    work: tuple[tuple[Case, tuple[Implementation, ...]], ...]
    timing: Timing = Timing()
    shard: Shard | None = None
    own: tuple[OwnFunction, ...] = ()

    def to_json(self) -> dict[str, Any]:
        work = [{"case": case.to_json(), "implementations": [i.name for i in found]} for case, found in self.work]
        plan = {"suite": self.suite, "work": work, "timing": asdict(self.timing)}
        if self.own:
            plan["with"] = [asdict(each) for each in self.own]
        return plan if self.shard is None else plan | {"shard": asdict(self.shard)}

    def implementations(self, block: str) -> tuple[Implementation, ...]:
        """Return a block's implementations, and the user's for it."""
        return (*BLOCKS[block].implementations, *(user.row() for user in self.own if user.block == block))

    def in_depth(self, case: Case) -> bool:
        """Return whether a case gets the other modes, a timeline and traffic."""
        return not self.timing.main_only or BLOCKS[case.block].is_main(case)

    @property
    def is_timed(self) -> bool:
        """Return whether a run on a GPU times the cases; the suite `check` has edge cases, which are checked alone."""
        return self.suite != "check"

    @property
    def record_ids(self) -> set[str]:
        """Ids of the records that the run makes."""
        return {record_id(case, i.name) for case, implementations in self.work for i in implementations}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return a recorded plan.

        Raises UsageError where this installation lacks one of its blocks, cases or implementations, or has other sizes.
        """
        try:
            work, own = [], convert(data.get("with", []), list[OwnFunction])
            for entry in data["work"]:
                case = Case.from_json(entry["case"])
                block = BLOCKS[case.block]
                _require_own(case, block)
                rows = {user.name: user.row() for user in own if user.block == block.name}
                found = (rows.get(name) or block.implementation(name) for name in entry["implementations"])
                work.append((case, tuple(found)))
            return cls(data["suite"], tuple(work), timing_of(data), own=tuple(own))
        except (KeyError, TypeError, ValidationError) as problem:
            raise UsageError(f"the run's own selection cannot be repeated here: {problem}; select by name") from None


def with_added(plan: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded plan with the work and the functions of another one, which a resumed run adds to it.

    Raises UsageError as `own_functions`.
    """
    work = {Case.from_json(entry["case"]).id: entry for entry in plan["work"]}
    for entry in added["work"]:
        known = work.get(id := Case.from_json(entry["case"]).id, entry)
        named = dict.fromkeys([*known["implementations"], *entry["implementations"]])
        work[id] = {**entry, "implementations": [*named]}
    return {**plan, "work": [*work.values()], **own_functions([plan, added])}


def own_functions(plans: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the users' functions of recorded plans, as `Plan.to_json` has them.

    Raises UsageError where two that differ have one name.
    """
    found: dict[tuple[str, str], OwnFunction] = {}
    for own in (own for plan in plans for own in convert(plan.get("with", []), list[OwnFunction])):
        if (known := found.setdefault((own.block, own.name), own)).code != own.code:
            raise UsageError(f"{known.function} and {own.function} differ, and rows are named like them: rename one")
    return {"with": [asdict(own) for own in found.values()]} if found else {}


def _require_own(case: Case, block: Block) -> None:
    """Raise UsageError where the block lacks the case, or has it with other sizes: its times could not be compared."""
    own = next((own for suite in SUITES for own in block.cases(suite) if own.id == case.id), None)
    if own is None and shape_with(block, case.sizes).name == case.name:
        return
    if own is None or own.sizes != case.sizes:
        here = "is unknown to this installation" if own is None else f"has sizes {_sizes(own)} here"
        raise UsageError(
            f"the run's own selection cannot be repeated here: its case {case.id}, with sizes {_sizes(case)}, {here}; "
            "select by name"
        )


def _sizes(case: Case) -> str:
    return ", ".join(f"{name} {size}" for name, size in case.sizes.items())


def timing_of(plan: Mapping[str, Any]) -> Timing:
    """Return the timing of a recorded plan. A plan without one was timed in the main mode alone."""
    return convert(plan["timing"], Timing) if "timing" in plan else Timing()
