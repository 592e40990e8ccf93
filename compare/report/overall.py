"""The overall result of a run in one sentence: which implementation wins, by how much, over how many cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.text import number
from ..graph import formats
from ..graph.analyse.totals import tally
from ..graph.findings.finding import NEVER_LEADING
from ..graph.findings.view import display_name, series
from ..plan.speedup import TIE
from ..sources.case_results import BASELINES, CaseResults
from ..sources.result import Result
from ..sources.source import Source
from ..spec.block import MAIN_IMPLEMENTATIONS
from .matrix import counts

LEAST_SHARE = 0.5  # of the cases; an implementation of fewer is no candidate for the overall winner
MOST_RIVALS = 3

Costs = Sequence[Mapping[str, tuple[Any, float]]]  # by case and implementation: what must be equal to compare, and cost


@dataclass(frozen=True)
class Lead:
    """The winner's lead over another implementation.

    ratio: the geometric mean of the other's cost over the winner's. cases: the number of cases that both have.
    """

    winner: str
    other: str
    ratio: float
    cases: int


def overall(source: Source) -> str:
    """Return the sentence; for a path without records, one about its kernels and bytes.

    Candidates are the implementations that a user would choose (all but NEVER_LEADING) with a result in at least half
    of the cases. Times are compared only within a segment and by one clock. Without times, declared bytes are compared.
    """
    if source.timed:
        return _of_times(source)
    return _of_bytes(source) if source.run is not None else _of_graphs(source)


def leads(costs: Costs) -> list[Lead]:
    """Return the winner's lead over each other candidate, smallest first; [] if no candidate is ahead of all others."""
    candidates = _candidates(costs)
    for winner in candidates:
        found = [_lead(winner, other, costs) for other in candidates if other != winner]
        known = [lead for lead in found if lead is not None and lead.ratio >= 1]
        if known and len(known) == len(found):
            return sorted(known, key=lambda lead: lead.ratio)
    return []


def _candidates(costs: Costs) -> list[str]:
    least = LEAST_SHARE * sum(map(bool, costs))
    names = dict.fromkeys(name for found in costs for name in found if name not in NEVER_LEADING)
    return [name for name in names if sum(name in found for found in costs) >= least]


def _lead(winner: str, other: str, costs: Costs) -> Lead | None:
    both = [(found[winner], found[other]) for found in costs if winner in found and other in found]
    logs = [math.log(its / own) for (own_key, own), (its_key, its) in both if own_key == its_key]
    return Lead(winner, other, math.exp(sum(logs) / len(logs)), len(logs)) if logs else None


def _of_times(source: Source) -> str:
    found = leads([{r.name: (r.group, r.time_us) for r in case.results if r.time_us} for case in source.cases])
    if not found:
        return "No implementation is ahead of all others overall."
    winner = found[0].winner
    name = display_name(winner)
    start, subject = f"{name} is the fastest overall", "it"
    if found[0].ratio < 1 + TIE:
        start, subject = f"{name} and {display_name(found[0].other)} tie overall, within {TIE:.0%}", name
    timed = [case for case in source.cases if case.timed]
    ahead = [_ahead(case, r) for case in timed for r in case.results if r.name == winner and r.time_us]
    wins = sum(each > 1 + TIE for each in ahead)
    close = sum(each >= 1 / (1 + TIE) for each in ahead) - wins
    tied = f", and within {TIE:.0%} of the fastest other in {close} more" if close else ""
    return (
        f"{start}. By geometric means of device times {subject} is "
        f"{_listed(found, '{ratio} times as fast as {other}', 'ran')}. "
        f"{name} is the fastest of all in {wins} of {formats.count(len(timed), 'case')}{tied}."
    )


def _ahead(case: CaseResults, result: Result) -> float:
    """Return the time of the fastest other implementation over this one's; infinity without another."""
    others = [each for each in case.comparable(result) if each is not result and each.name not in BASELINES]
    return min((each.time_us or math.inf for each in others), default=math.inf) / (result.time_us or math.inf)


def _of_bytes(source: Source) -> str:
    costs: Costs = [
        {
            r.name: (None, float(r.row.bytes_declared))
            for r in case.results if counts(r.row) and r.row.bytes_declared
        }
        for case in source.cases
    ]
    nothing = "Nothing ran on a GPU, so there are no times."
    if source.recorded_on:
        known = sum(result.row.recorded_time_us is not None for result in source.shown)
        nothing = (
            f"Nothing ran on a GPU; {known} of {formats.count(len(source.shown), 'record')} "
            f"{'has' if known == 1 else 'have'} the time of the same kernels, recorded on an {source.recorded_on}."
        )
    if not (found := leads(costs)):
        return nothing
    shown = [found[0].winner, *(lead.other for lead in _rivals(found))]
    cases = [case for case, known in zip(source.cases, costs, strict=True) if all(name in known for name in shown)]
    kernels = [
        f"{display_name(name)} {sum(r.row.kernels or 0 for case in cases for r in case.results if r.name == name)}"
        for name in shown
    ]
    return (
        f"{display_name(shown[0])} moves the fewest bytes. By geometric means of declared bytes, "
        f"{_listed(found, '{other} moves {ratio} times as many', 'compiled')}. "
        f"Kernels in the {formats.count(len(cases), 'case')} that all of them compiled: {series(kernels)}. {nothing}"
    )


def _of_graphs(source: Source) -> str:
    if len(source.cases) == 1:
        return " ".join(f"{text}." for result in source.shown if (text := kernels_and_bytes(result)))
    made = [result for result in source.shown if result.row.kernels]
    declared = tally(result.row.bytes_declared for result in made).exact
    moving = "" if declared is None else f", which move {formats.size(declared)}"
    kernels = formats.count(sum(result.row.kernels or 0 for result in made), "kernel")
    return f"{formats.count(len(made), 'graph')} with {kernels}{moving}."


def kernels_and_bytes(result: Result) -> str:
    """Return "XLA makes 7 kernels, which move 302 MB (2.1 times the fewest possible)"; "" without kernels."""
    row = result.row
    if result.graph is None or not result.graph.kernels:
        return ""
    made = len(result.graph.kernels)
    text = f"{display_name(result.name)} makes {formats.count(made, 'kernel')}"
    if row.bytes_declared:
        text += f", which {'moves' if made == 1 else 'move'} {formats.size(row.bytes_declared)}"
        if row.bytes_compulsory:
            text += f" ({number(row.bytes_declared / row.bytes_compulsory, 2)} times the fewest possible)"
    return text


def _listed(found: Sequence[Lead], form: str, did: str) -> str:
    """Return "1.4 times as fast as XLA and 1.2 times as fast as Inductor over the 241 cases that both ran"."""
    shown = _rivals(found)
    words = [form.format(ratio=number(lead.ratio), other=display_name(lead.other)) for lead in shown]
    if len({lead.cases for lead in shown}) == 1:
        return f"{series(words)} over the {formats.count(shown[0].cases, 'case')} that both {did}"
    return series([f"{text} ({formats.count(lead.cases, 'case')})" for text, lead in zip(words, shown, strict=True)])


def _rivals(found: Sequence[Lead]) -> list[Lead]:
    """Return the closest one and the main ones, closest first."""
    first = sorted(found, key=lambda lead: (lead is not found[0], lead.other not in MAIN_IMPLEMENTATIONS))
    return sorted(first[:MOST_RIVALS], key=lambda lead: lead.ratio)
