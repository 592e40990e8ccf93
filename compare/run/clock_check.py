"""A check that measurements on this machine find real differences and no others: `xlafuse doctor --clock`.

Both workers time one copy kernel, from the same PTX, by the protocol of a run: every round visits every row, and each
round starts with another row. Rows of identical code must not win against each other. A row that copies 3% more must
lose.
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
from ..measure import machine_remarks
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..plan import paired_rounds
from ..plan.speedup import LEAST_ROUNDS, compare
from ..sources.run_source import open_run
from ..workers.client import WORKER_FAILURES
from ..workers.pool import WorkerPool
from .progress import counting

PLANTED = 0.03  # the slowdown that must be found
SAMPLES = 10  # of each row in a round
LARGEST_FALSE_WINS, SMALLEST_FOUND = 0.02, 0.95


@dataclass(frozen=True)
class Row:
    """One timed copy in one worker. slower: the share that it copies more."""

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
    """words: for each pair of rows, the number of trials that ended faster, slower, tie or unresolved. clocks: seconds
    that each worker's clock measured for the calibration kernel."""

    trials: int
    words: dict[tuple[str, str], Counter[str]]
    clocks: dict[str, float]

    @property
    def problems(self) -> list[str]:
        """Return a sentence for each failed check; none where all passed."""
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
                slowdown = f"{pair[0]} against {pair[1]}: a slowdown of {PLANTED:.0%}"
                found.append(f"{slowdown} was found in only {share:.0%} of trials")
        return found


def check(trials: int) -> Outcome:
    """Time all rows in every trial, and show the progress. Raises UsageError where this machine cannot time."""
    from ..measure.clock import cupti_missing

    machine_remarks.require_gpu("--clock times kernels, and needs an NVIDIA GPU")
    if reason := cupti_missing():
        raise UsageError(f"--clock times with CUPTI: {reason}")
    try:
        with counting(trials, "trials") as progress:
            return run(trials, progress)
    except WORKER_FAILURES as problem:
        raise UsageError(f"a worker could not time: {problem}") from None


def run(trials: int, progress: Callable[[int], None]) -> Outcome:
    """Time all rows in every trial. Raises compare.workers.client.WORKER_FAILURES where a worker cannot time."""
    times: dict[str, list[list[float]]] = {row.name: [] for row in ROWS}
    with tempfile.TemporaryDirectory(prefix="xlafuse-clock-", dir=host.scratch_root()) as scratch:
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
        words[one, other] = Counter(speedup.word for speedup in found if speedup)
    return Outcome(trials, words, clocks)


@dataclass(frozen=True)
class Agreement:
    """How two runs judge the same comparisons. compared: the number of rows that both runs judged."""

    compared: int
    contradictions: list[str]
    warnings: list[str]

    def __str__(self) -> str:
        if self.contradictions:
            count = f"{len(self.contradictions)} of {self.compared} rows: opposite winners"
            return "\n".join([*self.contradictions, count])
        return f"no opposite winners in {self.compared} rows that both runs judged"


def agreement(a: Path, b: Path) -> Agreement:
    """Compare the winners of two runs.

    Raises RunFolderError for a run that cannot be read, and UsageError for one run given twice or two runs without a
    common judged row.
    """
    if a.resolve() == b.resolve():
        raise UsageError(f"{a} and {b} are the same run; name two")
    runs = [open_run(path) for path in (a, b)]
    ours, theirs = ({r.id: r.row.speedups for r in run.results if r.row.comparison} for run in runs)
    compared = ours.keys() & theirs.keys()
    if not compared:
        raise UsageError(f"{a} and {b}: no case and implementation was judged in both")
    return Agreement(
        len(compared), paired_rounds.opposite_winners(ours, theirs), [*runs[0].warnings, *runs[1].warnings]
    )


def as_text(outcome: Outcome) -> str:
    """Return a table of pairs and outcomes, then the problems, if any."""
    from tabulate import tabulate

    columns = ("faster", "slower", "tie", "unresolved")
    lines = [[f"{a} against {b}", *(found[word] for word in columns)] for (a, b), found in outcome.words.items()]
    table = tabulate(
        lines, headers=[f"of {outcome.trials} trials", *columns], tablefmt="github"
    )
    clocks = ", ".join(f"{role} {seconds * 1e6:.2f} µs" for role, seconds in outcome.clocks.items())
    ending = "\n".join(outcome.problems) or "all checks passed"
    return f"{table}\n\nThe calibration kernel (1 ms) by each worker's clock: {clocks}.\n\n{ending}"
