"""A plan: the cases of a run, each with its implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..base.usage import UsageError
from ..record.record import record_id
from ..spec.block import Block
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from .timing_modes import Timing

SUITES = ("quick", "full", "check")


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
    def is_timed(self) -> bool:
        """Return whether a run on a GPU times the cases; the suite `check` has edge cases, which are checked alone."""
        return self.suite != "check"

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
