"""One of the two runs of a program: its folder, with what the program recorded and the compilers wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xlafuse.hlo.shape import LONG_NAMES

from ..base.usage import UsageError
from ..sources.opening import open_source
from ..sources.source import Source

_HALVES = {
    "bfloat16": re.compile("bf16|bfloat16", re.IGNORECASE), "float16": re.compile(r"\bf16|fp16|half", re.IGNORECASE),
}


@dataclass(frozen=True)
class CapturedRun:
    """One of two runs of a program. facts: what its program wrote into `capture.json`."""

    folder: Path
    facts: Mapping[str, Any]

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The records of `step_record` and `switches`."""
        found: Mapping[str, Any] = self.facts["trial"]
        return found

    @property
    def step_seconds(self) -> list[float]:
        """The times of steps after the profiled ones."""
        return list(self.recorded["step_seconds"])

    @cached_property
    def source(self) -> Source | str:
        """The captured results, or the reason why there are none."""
        try:
            return open_source(self.folder)
        except UsageError as problem:
            return str(problem)

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of arrays in the compiled programs, and in the names of kernels, by their long names."""
        if isinstance(self.source, str):
            return set()
        graphs = [result.graph for result in self.source.results if result.graph is not None]
        found = {LONG_NAMES.get(buffer.dtype, buffer.dtype) for graph in graphs for buffer in graph.buffers}
        profile = self.source.profile
        names = {event.name for step in profile.steps for event in step.events} if profile is not None else set()
        return found | {dtype for dtype, pattern in _HALVES.items() if any(map(pattern.search, names))}

    @property
    def is_of_jax(self) -> bool:
        """True where JAX's steps were profiled, or nothing was, and the program imports no torch."""
        imported = self.recorded["matmul"]  # by framework
        return bool(self.facts.get("framework", "torch" if "torch" in imported else "jax") == "jax")

    @property
    def on_cpu(self) -> bool:
        """True where the profile is of a CPU."""
        return self.facts.get("device") == "cpu"
