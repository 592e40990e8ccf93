"""Does this machine's measuring tell a difference where there is one, and none where there is none?

One copy kernel, the same PTX in both workers, is timed by the protocol of a run: rounds that visit every row, each
round starting with another one. Rows of identical code must not win against each other; a row that copies 3% more
must lose.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base import host
from ..base.usage import UsageError
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..plan import paired_rounds
from ..plan.speedup import LEAST_ROUNDS, compare
from ..report import rows
from ..workers.pool import WorkerPool

PLANTED = 0.03
SAMPLES = 10  # a row in a round
LARGEST_FALSE_WINS, SMALLEST_FOUND = 0.02, 0.95


@dataclass(frozen=True)
class Row:
    """What is timed: the copy in one worker, `slower` of it more."""

    name: str
    role: str
    slower: float = 0.0


ROWS = (
    Row("torch", "torch"), Row("torch again", "torch"), Row("xla", "xla"),
    Row("torch, 3% more", "torch", PLANTED), Row("xla, 3% more", "xla", PLANTED),
)
IDENTICAL = (("torch again", "torch"), ("xla", "torch"))
SLOWED = (("torch, 3% more", "torch"), ("xla, 3% more", "torch"))


@dataclass(frozen=True)
class Outcome:
    """words: by pair of rows, how many trials ended with which verdict. clocks: the calibration kernel by each worker's
    clock, in seconds."""

    trials: int
    words: dict[tuple[str, str], Counter[str]]
    clocks: dict[str, float]

    @property
    def problems(self) -> list[str]:
        """What must not be, in words; none where all is well."""
        found = []
        if (apart := disagreement(self.clocks)) > AGREEMENT:
            found.append(f"the workers' clocks differ by {apart:.2%}, more than {AGREEMENT:.0%}")
        for pair in IDENTICAL:
            wins = (self.words[pair]["faster"] + self.words[pair]["slower"]) / self.trials
            if wins > LARGEST_FALSE_WINS:
                found.append(f"{pair[0]} against {pair[1]}: identical code won or lost in {wins:.0%} of trials")
        for pair in SLOWED:
            share = self.words[pair]["slower"] / self.trials
            if share < SMALLEST_FOUND:
                found.append(f"{pair[0]} against {pair[1]}: {PLANTED:.0%} was found in {share:.0%} of trials only")
        return found


def run(trials: int, progress: Callable[[int], None]) -> Outcome:
    """Raises what compare.workers.client raises where a worker cannot time on a GPU."""
    times: dict[str, list[list[float]]] = {row.name: [] for row in ROWS}
    with tempfile.TemporaryDirectory(prefix="xlafuse-selftest-", dir=host.scratch_root()) as scratch:
        workers = WorkerPool(Path(scratch), {})
        try:
            roles = sorted({row.role for row in ROWS})
            workers.start(roles)
            clocks = {role: workers.ask(role, "calibrate") for role in roles}
            for trial in range(trials):
                for row in ROWS:
                    times[row.name].append([])
                for number in range(LEAST_ROUNDS):
                    start = number % len(ROWS)
                    for row in ROWS[start:] + ROWS[:start]:
                        samples = workers.ask(row.role, "stream", slower=row.slower, samples=SAMPLES)
                        times[row.name][-1].append(statistics.median(samples))
                progress(trial + 1)
        finally:
            workers.stop()
    words: dict[tuple[str, str], Counter[str]] = {}
    for one, other in IDENTICAL + SLOWED:
        found = [compare(a, b) for a, b in zip(times[one], times[other], strict=True)]
        words[one, other] = Counter(verdict.word for verdict in found if verdict)
    return Outcome(trials, words, clocks)


@dataclass(frozen=True)
class Agreement:
    """Of two runs' verdicts on the same comparisons. compared: how many rows both have a verdict on."""

    compared: int
    contradictions: list[str]
    warnings: list[str]

    def __str__(self) -> str:
        if self.contradictions:
            count = f"{len(self.contradictions)} of {self.compared} rows: opposite winners"
            return "\n".join([*self.contradictions, count])
        return f"no opposite winners in {self.compared} rows that both runs have a verdict on"


def agreement(a: Path, b: Path) -> Agreement:
    """Whether two runs name opposite winners. Raises RunFolderError where one cannot be read, UsageError where they
    are one, or have no verdict in common."""
    if a.resolve() == b.resolve():
        raise UsageError(f"{a} and {b} are the same run; name two")
    ours, theirs = rows.read(a), rows.read(b)
    compared = paired_rounds.in_common(ours.rows, theirs.rows)
    if not compared:
        raise UsageError(f"{a} and {b} have no verdict on the same case and implementation")
    return Agreement(
        len(compared), paired_rounds.contradictions(compared), [*ours.warnings, *theirs.warnings]
    )


def as_text(outcome: Outcome) -> str:
    """A table of pairs and verdicts, then what is wrong, or that nothing is."""
    from tabulate import tabulate

    columns = ("faster", "slower", "tie", "unresolved")
    lines = [[f"{a} against {b}", *(found[word] for word in columns)] for (a, b), found in outcome.words.items()]
    table = tabulate(
        lines, headers=[f"of {outcome.trials} trials", *columns], tablefmt="github"
    )
    clocks = ", ".join(f"{role} {seconds * 1e6:.2f} µs" for role, seconds in outcome.clocks.items())
    ending = "\n".join(outcome.problems) or "all as it must be"
    return f"{table}\n\nThe calibration kernel (1 ms) by each worker's clock: {clocks}.\n\n{ending}"
