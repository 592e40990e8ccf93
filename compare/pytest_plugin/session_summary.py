"""A test session's use of snapshots, for the summary at its end. Under pytest-xdist each process has its own."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .snapshot import FOLDER, shown_test, test_of


@dataclass
class SessionSummary:
    """A session's use of snapshots.

    used: folders and stems of the snapshots that tests asked for. written: files. uncompared: messages about snapshots
    of other versions only. collected: "file::test" of all tests. partial: files with deselected tests. passed: tests.
    """

    used: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    uncompared: set[str] = field(default_factory=set)
    collected: set[str] = field(default_factory=set)
    partial: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, list[str]]:
        return {item.name: sorted(getattr(self, item.name)) for item in dataclasses.fields(self)}

    def add(self, data: Mapping[str, Iterable[str]]) -> None:
        """Add another process's summary, as `to_json` made it."""
        for item in dataclasses.fields(self):
            getattr(self, item.name).update(data[item.name])

    def unused(self) -> list[Path]:
        """Return snapshot files that no test asks for.

        These belong to a test that is gone from a completely collected file, or to a test that passed without asking.
        """
        tests: dict[str, dict[str, str]] = defaultdict(dict)
        for node in self.collected:
            file, _, test = node.partition("::")
            tests[file][shown_test(test)] = node
        found = []
        for file, known in tests.items():
            folder = Path(file).parent / FOLDER / Path(file).stem
            for path in sorted(folder.glob("*@*@*.txt")) if folder.is_dir() else ():
                test = test_of(path)
                if not test or f"{folder}/{path.name.partition('@')[0]}" in self.used:
                    continue
                owner = known.get(test)
                if file not in self.partial if owner is None else owner in self.passed:
                    found.append(path)
        return found

    def lines(self, root: Path) -> list[str]:
        """Return lines about written, uncompared and unused snapshots. Paths are relative to `root`."""
        written = [f"written: {_place(Path(path), root)}" for path in sorted(self.written)]
        uncompared = [f"not compared: {shown_test(message)}" for message in sorted(self.uncompared)]
        unused = [f"unused, no test asks for it: {_place(path, root)}" for path in self.unused()]
        return written + uncompared + unused


def _place(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
