"""Progress of a run on standard error: a line for each block, or for each record; a bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..record.record import BAD, Record

_STYLES = {"ok": "green", "compiled": "green", "skipped": "dim", "wrong": "bold red", "failed": "red", "timeout": "red"}


class Progress:
    """Counts records as they finish.

    expected: the number of records by block. verbose: print a line for each record.
    """

    def __init__(self, expected: Mapping[str, int], *, verbose: bool = False) -> None:
        self._left, self._verbose, self._began = Counter(expected), verbose, time.monotonic()
        self._done: dict[str, Counter[str]] = defaultdict(Counter)
        total = self._left.total()
        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=self._console, disable=not sys.stderr.isatty())
        self._total, self._count = total, 0
        self._ended: set[str] = set()  # ids of finished records
        self._task = self._bar.add_task("starting workers", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._bar.stop()

    def say(self, what: str) -> None:
        """Show the current step."""
        self._bar.update(self._task, description=what)

    def announce(self, what: str) -> None:
        """Show a long step, as a line also where there is no terminal."""
        self.say(escape(what))
        if self._bar.disable:
            self._console.print(what, markup=False, highlight=False, soft_wrap=True)

    def warn(self, what: str) -> None:
        """Print a warning as a line of its own, also on a terminal, where the next step replaces the label."""
        self._console.print(" ".join(what.split()), markup=False, highlight=False, soft_wrap=True)

    def skip(self, block: str) -> None:
        """Count a record of an earlier stretch."""
        self._add(block, "done before")

    def kept(self, record: Record, reason: str | None) -> None:
        """Count an earlier record that stays, because it could not be made again; reason says why."""
        self._line("kept", "yellow", record.id, f"as of segment {record.segment}; now: {reason}")
        self._add(record.case.block, "kept")

    def done(self, record: Record) -> None:
        """Count a finished record, once if it was made again.

        One with a problem has a line of its own, also where others have none.
        """
        if record.id in self._ended:
            return
        self._ended.add(record.id)
        if self._verbose or record.status in BAD:
            detail = record.detail if record.status != "skipped" else None
            self._line(record.status, _STYLES[record.status], record.id, detail)
        self._add(record.case.block, record.status)

    def _line(self, word: str, style: str, id: str, detail: str | None) -> None:
        said = f"  {detail.splitlines()[0][:160]}" if detail else ""
        line = f"[{style}]{word:8}[/] {escape(id)}{escape(said)}"
        self._console.print(f"{self._count + 1:>4}/{self._total} {line}", highlight=False, soft_wrap=True)

    def _add(self, block: str, word: str) -> None:
        self._count += 1
        self._left[block] -= 1
        self._done[block][word] += 1
        if not self._left[block]:
            counts = ", ".join(f"{count} {status}" for status, count in self._done[block].items())
            seconds = time.monotonic() - self._began
            line = f"{self._count:>4}/{self._total} [bold]{escape(block)}[/]: {counts}, after {seconds:.0f} s"
            self._console.print(line, highlight=False, soft_wrap=True)
        self._bar.advance(self._task)


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal for `total` equal steps; the yielded function takes the number done."""
    with Bar(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
