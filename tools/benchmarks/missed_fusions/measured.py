"""The file of an earlier run on a GPU: its measured times are compared with the prices that this version gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlafuse.compare import targets

_TIMED = ("error", "tolerance", "rounds")


class NotMeasured(Exception):
    """A file without what `--json` writes on a GPU."""


@dataclass(frozen=True)
class Measured:
    """An earlier run. environments: by worker. cases: by name. kernels: of both functions of a case, by name."""

    environments: Mapping[str, Mapping[str, Any]]
    cases: Mapping[str, Mapping[str, Any]]
    kernels: Mapping[str, tuple[int, int]]

    def reply(self, name: str) -> dict[str, Any] | None:
        """Return the case as its worker replied; None where the file has no graphs, or not the case."""
        case = self.cases.get(name, {})
        return dict(case) if case.get("graphs") else None

    def joined(self, name: str, role: str, compiled: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply of a worker that compiled the case here, with the measured times in place of its own.

        Its "kernels" are the measured ones, and its "problems" say why the two do not belong together.
        """
        case = self.cases.get(name, {})
        if not case.get("rounds"):
            return {**compiled, "rounds": None, "problems": ("the file has no times of this case",)}
        graphs = compiled["graphs"]
        problems = []
        here = len(graphs["unfused"]["kernels"]), len(graphs["fused"]["kernels"])
        if here != (then := self.kernels.get(name, here)):
            counts = (f"{unfused} -> {fused}" for unfused, fused in (then, here))
            problems.append("{} kernels were measured, and {} are compiled here".format(*counts))
        device = str(self.environments[role]["device"])
        if targets.of_device(device) != targets.of_device(graphs["unfused"]["target"]):
            problems.append(f"{device} was measured, and the functions are compiled for {graphs['unfused']['target']}")
        return {**compiled, **{key: case[key] for key in _TIMED}, "kernels": then, "problems": problems}


def read(file: Path) -> Measured:
    """Return the run in a file of `--json`. Raises NotMeasured for another file, and for a run without a GPU."""
    try:
        found = json.loads(file.read_text())
        kernels = {one["name"]: tuple(one["kernels"]) for one in found["outcomes"]}
        measured = Measured(found["environments"], found["cases"], kernels)
        timed = any(case["rounds"] for case in measured.cases.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise NotMeasured(f"{file} is no result of --json: {problem!r}") from None
    if not timed:
        raise NotMeasured(f"{file} has no times: it was written without a GPU")
    return measured
