"""How a run times its implementations: in which modes, in how many rounds, and how often from fresh processes.

Modes, each a way to make the same call on the same inputs:

    cold      from a cold L2, launched as the framework launches by default: the main mode, always timed
    warm      again and again, so that L2 holds what the last call left there
    graph     from a cold L2, every launch replayed from a CUDA graph (XLA: a command buffer)
    launches  from a cold L2, every launch by itself, where the framework's default is otherwise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .speedup import LEAST_ROUNDS

MAIN = "cold"
OTHER_MODES = ("warm", "graph", "no-graph")
_ROUNDS_A_PROCESS = 2  # at least: what differs within a process is told from what differs between them


@dataclass(frozen=True)
class Timing:
    """modes: beside the main one. restarts: how often, within a case's rounds, fresh workers replace all of them."""

    modes: tuple[str, ...] = ()
    restarts: int = 0

    @property
    def rounds(self) -> int:
        return max(LEAST_ROUNDS, _ROUNDS_A_PROCESS * (self.restarts + 1))

    def process_of(self, number: int) -> int:
        """Which of the `restarts + 1` processes, in order, takes round `number`; as even as can be."""
        return number * (self.restarts + 1) // self.rounds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timing:
        """Raises KeyError or TypeError for what `to_json` did not make."""
        return cls(tuple(data["modes"]), int(data["restarts"]))


def of_suite(suite: str) -> Timing:
    """What a suite times unless told otherwise."""
    return Timing(OTHER_MODES, restarts=2) if suite == "full" else Timing()
