"""A finding about one implementation as a sentence with its times, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....base.text import number
from ....graph import formats
from ....graph.analyse.causes import cause
from ....graph.findings.finding import Finding
from ....graph.findings.view import DISPLAY_NAMES
from ....graph.model import Buffer, FusionGraph
from ....plan import paired_rounds
from .kernels import where
from .reading import Member


@dataclass(frozen=True)
class Subject:
    """A finding with the implementation that it is about, and those that do better."""

    finding: Finding
    worse: Member
    better: list[Member]

    @property
    def graph(self) -> FusionGraph:
        assert self.worse.graph is not None
        return self.worse.graph

    @property
    def whole(self) -> float | None:
        return self.worse.time_us

    @property
    def what(self) -> str:
        return "it" if len(self.finding.buffers) < 2 else "them"

    @property
    def within(self) -> float | None:
        """What the finding's kernels take, measured."""
        indices = self.finding.kernels.get(self.worse.name, ())
        times = [(self.graph.kernels or ())[index].device_time_us for index in indices]
        return sum(time for time in times if time is not None) if times and None not in times else None

    @cached_property
    def fastest(self) -> Member | None:
        """Of those that do better, the fastest that is faster beyond doubt."""
        found = [m for m in self.better if m.time_us is not None and m.group == self.worse.group]
        best = min(found, key=lambda m: m.time_us or 0.0, default=None)
        judged = None if best is None else paired_rounds.between(self.worse.rounds, best.rounds)
        return best if judged is not None and judged.word == "slower" else None

    @property
    def rival(self) -> Member | None:
        """Whose graph to hold its own against: the fastest's, or, where nothing was timed, the one that keeps least."""
        if self.whole is not None or not self.better:
            return self.fastest
        return self.better[-1]

    @property
    def at_stake_us(self) -> float | None:
        """None where a comparison is not borne out by the times. Of what another one keeps on chip it is the time of
        the kernels that pass it on, of other traffic its bytes at the speed of memory; never more than what the
        implementation loses."""
        us, whole = self.finding.us, self.whole
        if us is None or whole is None:
            return us
        if self.finding.kind not in ("kept on chip", "saved", "intermediates", "more FLOPs"):
            return min(us, whole)
        fastest = self.fastest
        if fastest is None:
            return None
        spent = self.within if self.finding.kind == "kept on chip" else None
        return min(us if spent is None else spent, whole - (fastest.time_us or 0.0))


def headline(subject: Subject) -> str:
    """ "XLA materialises 2.15 GB of scores that Triton keeps on chip: 9.71 of its 10.1 ms; Triton takes 1.08 ms" """
    finding, name = subject.finding, spelt(subject.worse.name)
    match finding.kind:
        case "kept on chip":
            text = f"{name} materialises {_materialised(subject)} that {_keepers(subject.better)} on chip"
        case "saved" | "intermediates":
            text = _kept_more(subject)
        case "above roofline":
            text = _slow(subject)
        case _:
            text = finding.text.rstrip(".")
    return f"{text}: {_times(subject)}"


def _times(subject: Subject) -> str:
    us, within, whole = subject.finding.us, subject.within, subject.whole
    name = spelt(subject.worse.name)
    speed = "rate of products" if subject.finding.kind == "more FLOPs" else "speed of memory"
    if whole is None or us is None:
        return f"{span(us or 0.0)} at the {speed}"
    match subject.finding.kind:
        case "above roofline":
            words = f"{span(us)} more than it must, of {span(whole)} for the whole call"
        case "inside a product" | "missed" | "largest" | "more FLOPs":
            words = f"{span(us)} at the {speed}; {name} takes {span(whole)}"
        case "saved" | "intermediates":
            words = f"{name} takes {span(whole)}"
        case _ if within is not None:
            share = f"all of its {span(whole)}" if within > 0.97 * whole else f"{span(within)} of its {span(whole)}"
            words = f"the kernels that touch {subject.what} take {share}"
        case _:
            words = f"{span(us)} at the speed of memory; {name} takes {span(whole)}"
    if (fastest := subject.fastest) is not None:
        words += f"; {spelt(fastest.name)} takes {span(fastest.time_us or 0.0)}"
    return words


def span(us: float) -> str:
    return f"{number(us / 1e3)} ms" if us >= 1e3 else formats.microseconds(us)


def _slow(subject: Subject) -> str:
    """ "XLA's fusion.9 of scores, mask takes 3.60 ms, 3.6 times what the 4.31 GB that it moves and its FLOPs take; its
    largest array is bf16[64,4096,4096], 2.15 GB" """
    graph, finding = subject.graph, subject.finding
    (index,) = finding.kernels[subject.worse.name]
    kernel = (graph.kernels or ())[index]
    took = kernel.device_time_us or 0.0
    least = took - (finding.us or 0.0)
    times = f", {number(took / least, 2)} times" if least > 0 else ", more than"
    touched = [graph.buffer[access.buffer] for access in (*(kernel.inputs or ()), *(kernel.outputs or ()))]
    largest = max(touched, key=lambda buffer: buffer.bytes, default=None)
    place = where(kernel)
    return (
        f"{spelt(subject.worse.name)}'s {formats.name(kernel.name)}{f' of {place}' if place else ''} takes "
        f"{span(took)}{times} what the {formats.size(finding.bytes)} that it moves and its FLOPs take"
        + (f"; its largest array is {formats.shape(largest)}, {formats.size(largest.bytes)}" if largest else "")
    )


def _kept_more(subject: Subject) -> str:
    """ "XLA saves 11.8 GB for backward, its largest array bf16[64,4096,4096] of scores (attention.py:23); Triton saves
    1.05 MB" """
    graph, saved = subject.graph, subject.finding.kind == "saved"
    kept = _kept(graph, saved)
    verb, purpose = ("saves", "for backward") if saved else ("writes", "of intermediates to memory")
    words = f"{spelt(subject.worse.name)} {verb} {formats.size(sum(b.bytes for b in kept))} {purpose}"
    if kept:
        words += f", the largest array {_described(graph, kept[0])}"
    if (rival := subject.rival) is not None and rival.graph is not None:
        size = formats.size(sum(b.bytes for b in _kept(rival.graph, saved)))
        words += f"; {spelt(rival.name)} {verb} {size}"
    return words


def _kept(graph: FusionGraph, saved: bool) -> list[Buffer]:
    """What forward saves, or what one kernel passes to another, largest first."""
    if saved:
        return sorted(graph.saved, key=lambda buffer: -buffer.bytes)
    return [b for b in graph.materialized if b.role == "intermediate" and graph.consumers.get(b.name)]


def _described(graph: FusionGraph, buffer: Buffer) -> str:
    found = cause(graph, buffer.name)
    stage = ", ".join(found.stages)
    place = f" ({formats.place(found.line)})" if found.line else ""
    return f"{formats.size(buffer.bytes)} of {stage or formats.shape(buffer)}{place}"


def _materialised(subject: Subject) -> str:
    """ "2.15 GB of scores (xlafuse/blocks/attention.py:23) and 3 more arrays" """
    graph = subject.graph
    names = [name for whose, name in subject.finding.buffers if whose == subject.worse.name]
    buffers = sorted((graph.buffer[name] for name in names), key=lambda buffer: (-buffer.bytes, buffer.name))
    more = len(buffers) - 1
    others = f" and {formats.count(more, 'more array')}" if more else ""
    return f"{_described(graph, buffers[0])}{others}"


def _keepers(better: list[Member]) -> str:
    names = [spelt(member.name) for member in better]
    if len(names) == 1:
        return f"{names[0]} keeps"
    return f"{', '.join(names[:-1])} and {names[-1]} keep"


def spelt(name: str) -> str:
    return DISPLAY_NAMES.get(name, formats.name(name))
