"""Compare the price of missed fusions with the time that fusing saves, in 20 forced cases.

    python -m tools.benchmarks.missed_fusions [--json FILE] [--only NAME] [--measured FILE]

Each case is a pair of functions of equal results. The compiler misses a fusion in one of them, and does it in the
other. The predicted saving is the price that `xlafuse inspect --why` gives to all missed fusions together. The
realised saving is the difference of the two device times, in five interleaved rounds from a cold L2. PyTorch's calls
replay a CUDA graph. Without a GPU, both functions are compiled for an H200, and only the prices are shown.

`--measured` takes the times from a file that `--json` wrote on a GPU, and compares them with the prices that this
version gives. It prices the graphs in the file. A file without graphs needs both functions compiled here; a case with
other numbers of kernels then does not count.

The exit code is 1 if a pair does not count: its results differ, the unfused function has no price, or the fused one
still misses a fusion. The prices need the GPU's target pack, which has its bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from xlafuse.compare.workers.client import WORKER_FAILURES, Worker, interpreter

from .measured import Measured, NotMeasured, read
from .outcome import Outcome, UnknownBandwidth, failed, outcome, summary

_MODULES = {"xla": "xla_worker", "torch": "inductor_worker"}
_PREFIXES = {"xla": "jax-", "torch": "torch-"}
_CASE_SECONDS = 300  # two compiles, with Inductor's autotuning, and five rounds
_LOG_LINES = 40  # of a failed case's worker
_HEADERS = (
    "case",
    "compiler",
    "intermediate",
    "kernels",
    "predicted us",
    "realised us",
    "interval",
    "busy us",
    "ratio",
)


class UnknownCase(Exception):
    """A name that no case has."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=__package__, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds and numbers there, too")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="take the times from this file of --json")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a case; may be repeated")
    options = parser.parse_args()
    if strange := [name for name in options.only if not name.startswith(tuple(_PREFIXES.values()))]:
        parser.error(f"no case {strange[0]!r}; the names begin with {' or '.join(_PREFIXES.values())}")
    outcomes: list[Outcome] = []
    details: dict[str, Any] = {"environments": {}, "compiled_with": {}, "cases": {}}
    try:
        measured = None if options.measured is None else read(options.measured)
        for role, prefix in _PREFIXES.items():
            wanted = [name for name in options.only if name.startswith(prefix)]
            if wanted or not options.only:
                _run(role, wanted, outcomes, details, measured)
    except (UnknownCase, NotMeasured) as problem:
        parser.error(str(problem))
    except (*WORKER_FAILURES, UnknownBandwidth) as problem:  # a worker that does not start
        print(f"missed_fusions: {problem}", file=sys.stderr)
        return 1
    found = summary(outcomes)
    print(tabulate(list(map(_row, outcomes)), _HEADERS, disable_numparse=True))
    for line in _summaries(outcomes):
        print(line)
    problems = [f"{one.name}: {problem}" for one in outcomes for problem in one.problems]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
    if options.json:
        details |= {"outcomes": [asdict(one) | {"ratio": one.ratio} for one in outcomes]}
        details |= {"summary": None if found is None else asdict(found)}
        options.json.write_text(json.dumps(details, indent=1) + "\n")
    return 1 if problems else 0


def _run(
    role: str, wanted: list[str], outcomes: list[Outcome], details: dict[str, Any], measured: Measured | None
) -> None:
    """Run the cases of one compiler, all if none is wanted by name, and add their outcomes and details.

    measured: an earlier run, whose cases and times count. Where it has the graphs of them all, no worker starts.
    """
    if measured is not None:
        details["environments"][role] = measured.environments.get(role)
        wanted = wanted or [name for name in measured.cases if name.startswith(_PREFIXES[role])]
        kept = {name: measured.reply(name) for name in wanted}
        if None not in kept.values():
            for name, reply in kept.items():
                _add(name, reply or {}, outcomes, details)
            return
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        worker = _started(role, log)
        try:
            names = worker.ask("names")
            if unknown := [name for name in wanted if name not in names]:
                raise UnknownCase(f"no case {unknown[0]!r}; choose from {', '.join(names)}")
            details["environments" if measured is None else "compiled_with"][role] = worker.ask("environment")
            for name in wanted or names:
                print(f"{name} ...", file=sys.stderr, flush=True)
                if not worker.alive:
                    worker = _started(role, log)
                try:
                    reply = worker.ask("run", name=name, timeout=_CASE_SECONDS)
                except WORKER_FAILURES as problem:
                    outcomes.append(failed(name, role, str(problem)))
                    print(*log.read_text(errors="replace").splitlines()[-_LOG_LINES:], sep="\n", file=sys.stderr)
                    continue
                if measured is not None:
                    reply = measured.joined(name, role, reply)
                _add(name, reply, outcomes, details, graphs=measured is None)
        finally:
            worker.stop()


def _add(
    name: str, reply: Mapping[str, Any], outcomes: list[Outcome], details: dict[str, Any], *, graphs: bool = True
) -> None:
    """Add a case. graphs: its graphs are those of the program that was timed."""
    outcomes.append(outcome(name, reply["size"], reply))
    details["cases"][name] = {key: reply.get(key) for key in ("size", "error", "tolerance", "rounds")}
    if graphs:
        details["cases"][name]["graphs"] = reply["graphs"]


def _started(role: str, log: Path) -> Worker:
    worker = Worker(role, log, command=[interpreter(role), "-m", f"{__package__}.{_MODULES[role]}"])
    worker.wait_ready()
    return worker


def _row(one: Outcome) -> tuple[str, ...]:
    kernels = " -> ".join(map(str, one.kernels))
    start = one.name, one.compiler, one.size, kernels, f"{one.predicted_us:.3g}"
    if one.realised is None:
        return (*start, "", "", "", "")
    interval = f"{one.realised.low:.3g} to {one.realised.high:.3g}"
    busy = "" if one.busy is None else f"{one.busy.mean:.3g}"
    return (*start, f"{one.realised.mean:.3g}", interval, busy, "" if one.ratio is None else f"{one.ratio:.2f}")


def _summaries(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield realised over predicted savings of all cases, and of each size of intermediate."""
    groups = {"all": list(outcomes)} | {
        size: [one for one in outcomes if one.size == size] for size in dict.fromkeys(one.size for one in outcomes)
    }
    for name, group in groups.items():
        if (found := summary(group)) is not None:
            yield f"realised / predicted, {name}: {found}"


if __name__ == "__main__":
    sys.exit(main())
