"""The first words of a case's page: which implementation to choose in each framework, and what the default one does."""

from __future__ import annotations

from collections.abc import Sequence

from ....base.text import number, printable
from ....graph import formats
from ....graph.analyse.products import passed_on
from ....graph.findings.view import display_name
from ....graph.operations import cause_text
from ....plan import paired_rounds
from ....sources.case_results import BASELINES, CaseResults
from ....sources.result import Result
from ....spec.blocks import BLOCKS
from ....spec.implementation import Implementation
from ...overall import kernels_and_bytes

# A framework, its worker, and the implementation that a user has without a choice.
_FRAMEWORKS = (("JAX", "xla", "xla"), ("PyTorch", "torch", "inductor"))


def choices(case: CaseResults) -> list[str]:
    """Return a sentence about the fastest implementation, and some about the choice in each framework.

    Without times, and without records, the sentences are about kernels and bytes.
    """
    if case.timed:
        sentences = [_fastest(case), *(_in_framework(case, *framework) for framework in _FRAMEWORKS)]
    else:
        sentences = [_made(result) for result in case.results if result.name not in BASELINES]
    return [printable(sentence, 800) for sentence in sentences if sentence]


def _fastest(case: CaseResults) -> str:
    best = case.best(case.ranked[0])
    if best is None or len(case.comparable(best)) < 2:
        return ""
    judged = {display_name(result.name): case.judged.get(result.name) for result in case.comparable(best)}
    ties = [name for name, comparison in judged.items() if comparison is not None and comparison.word == "tie"]
    tied = f" ({', '.join(ties)}: a tie)" if ties else ""
    return f"{_called(case, best)} is the fastest: {formats.span(best.time_us or 0.0)}{tied}."


def _in_framework(case: CaseResults, framework: str, worker: str, default: str) -> str:
    """Return the fastest implementation of a framework against its default, and the default's kernels and arrays."""
    own = next((result for result in case.results if result.name == default and result.time_us is not None), None)
    if own is None:
        return ""
    members = [r for r in case.comparable(own) if _worker(case, r) == worker and r.name not in BASELINES]
    if not members:  # a block or implementation of another release
        return ""
    best = min(members, key=lambda member: member.time_us or 0.0)
    judged = None if best is own else paired_rounds.compare_rounds(own.rounds, best.rounds)
    own_us, best_us = own.time_us or 0.0, best.time_us or 1.0
    if best is own or (judged is not None and judged.word == "tie"):
        return f"In {framework}, nothing is faster than {display_name(own.name)}, {formats.span(own_us)}. {_made(own)}"
    return (
        f"In {framework}, {_called(case, best)} takes {formats.span(best_us)}; "
        f"{display_name(own.name)} takes {formats.span(own_us)}, "
        f"{number(own_us / best_us)} times as long. {_made(own)}"
    )


def _made(result: Result) -> str:
    """ "XLA makes 7 kernels, which move 302 MB; the largest array between them is bf16[64,64], 8 kB (loss.py:19)." """
    if not (text := kernels_and_bytes(result)):
        return ""
    if (array := largest(result)) not in ("", "none"):
        text += f"; the largest array between them is {array}"
    return printable(f"{text}.", 600)


def largest(result: Result) -> str:
    """Return the largest array that one kernel writes for another: "bf16[64,4096,4096], 2.15 GB (softmax.py:19)"."""
    graph = result.graph
    if graph is None or graph.kernels is None:
        return ""
    passed = next(iter(passed_on(graph)), None)
    if passed is None:
        return "none"
    where = cause_text(graph, passed.name)
    return f"{formats.shape(passed)}, {formats.size(passed.bytes)}{f' ({formats.place(where)})' if where else ''}"


def _called(case: CaseResults, result: Result) -> str:
    """ "xla-cudnn (jax.nn.dot_product_attention(implementation="cudnn"))": its name, and what a user calls. """
    row = _implementation(case.block, result.name)
    return display_name(result.name) if row is None else f"{display_name(result.name)} ({row.summary})"


def _worker(case: CaseResults, result: Result) -> str:
    row = _implementation(case.block, result.name)
    return "" if row is None else row.backend.worker


def _implementation(block: str, name: str) -> Implementation | None:
    rows: Sequence[Implementation] = BLOCKS[block].implementations if block in BLOCKS else ()
    return next((row for row in rows if row.name == name), None)
