"""Measure the processor time of commands that read, each in a fresh process, best of five.

    python tools/benchmarks/command_time.py [RUN]

RUN is a run's folder, by default reports/h200. The table shows each command's CPU seconds, and their ratio to
those of importing the printing libraries (click, rich, tabulate).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
HLO = "tests/data/xla/softmax.hlo.txt"
PRINTING = [sys.executable, "-c", "import click, rich.console, rich.tree, tabulate"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default=str(ROOT / "reports" / "h200"))
    run = parser.parse_args().run
    printing = best(PRINTING)
    rows = []
    for words in (["--help"], ["run", "--help"], ["list"], ["report", run], ["report", run, "--json"], ["inspect", run],
                  ["inspect", HLO], ["inspect", HLO, "--why"], ["diff", HLO, HLO]):
        seconds = best([sys.executable, "-m", "xlafuse", *words])
        shown = " ".join("RUN" if word == run else "HLO" if word == HLO else word for word in words)
        rows.append((shown, seconds, seconds / printing))
    print(tabulate(rows, ("command", "CPU s", "of the imports"), floatfmt=".2f"))


def best(command: list[str]) -> float:
    """Return a command's CPU seconds: the least of five runs."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


if __name__ == "__main__":
    main()
