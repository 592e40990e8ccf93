"""What a test session did with snapshots, for the summary at its end; under pytest-xdist one of each process."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .snapshot import FOLDER, shown_test, test_of


@dataclass
class Book:
    """used: folders and stems of the snapshots that were asked for. written: files. uncompared: what could not be
    compared, for want of a snapshot of these versions. collected: "file::test" of what the session knows of; partial:
    test files of which some tests were deselected; passed: of those that were run, which passed.
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
        for item in dataclasses.fields(self):
            getattr(self, item.name).update(data[item.name])

    def unused(self) -> list[Path]:
        """Snapshot files that no test asks for: of tests that are gone from a file that was collected whole, and of
        tests that passed without asking."""
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
