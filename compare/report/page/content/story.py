"""The findings of the front page: what costs most in a run, in a sentence each, made from its graphs and times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....base.text import printable
from ....graph.findings.collect import findings
from ....graph.findings.finding import Finding
from .headlines import Subject, headline
from .overview import href, label
from .reading import BASELINES, CaseOf, Run

MOST = 5


@dataclass(frozen=True)
class Story:
    """at_stake_us: what the finding is about, of a timed run no more than the implementation loses against the one
    that does better. headline: the finding with its times (compare.report.page.content.headlines)."""

    at_stake_us: float
    headline: str
    case: str
    href: str
    sort: str
    block: str


def stories(run: Run, findings_of: Mapping[int, Sequence[Finding]], most: int = MOST) -> list[Story]:
    """The most telling ones, most microseconds first: one a block, and two of a sort at most, while others are left.

    findings_of: by a case's number, what `told` says of it.
    """
    every = (story for case in run.cases for story in of_case(case, findings_of[case.number]))
    everything = sorted(every, key=lambda story: -story.at_stake_us)
    chosen: list[Story] = []
    for per_block, per_sort in ((1, 2), (2, 3), (most, most)):
        for story in everything:
            blocks, sorts = [s.block for s in chosen], [s.sort for s in chosen]
            if len(chosen) < most and story not in chosen:
                if blocks.count(story.block) < per_block and sorts.count(story.sort) < per_sort:
                    chosen.append(story)
    return sorted(chosen, key=lambda story: -story.at_stake_us)


def of_case(case: CaseOf, found: Iterable[Finding]) -> Iterator[Story]:
    """Every finding of a case that is about microseconds, with them."""
    members = {member.name: member for member in case.members}
    for finding in found:
        subject = Subject(finding, members[finding.graphs[0]], [members[name] for name in finding.graphs[1:]])
        if (at_stake := subject.at_stake_us) is not None and (subject.whole is not None or not case.timed):
            yield Story(
                at_stake, printable(headline(subject), 600),
                f"{printable(case.case.block, 60)} {label(case)}", href(case), finding.kind, case.case.block,
            )


def told(case: CaseOf) -> list[Finding]:
    """What stands out in a case's graphs, priced where the device, or the target, is known."""
    members = [member for member in case.members if member.name not in BASELINES]
    graphs = {member.name: member.graph for member in members if member.graph is not None}
    if not graphs:
        return []
    ceilings = next((member.ceilings for member in members if member.ceilings is not None), None)
    return findings(graphs, ceilings)
