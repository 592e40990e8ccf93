"""The timing of a run: its modes, its rounds, and its restarts of the worker processes.

A mode is a way to make the same call on the same inputs:

- `cold`: from a cold L2, launched as the framework does by default. It is the main mode and always timed.
- `warm`: one call after another, so that L2 holds the data that the last call left there.
- `graph`: from a cold L2, every launch replayed from a CUDA graph (XLA: a command buffer).
- `no-graph`: from a cold L2, every kernel launched by itself, where the framework's default replays graphs.
- `triton-launch`: from a cold L2, every Triton kernel launched by Triton's own launcher, where the default is the
  direct launch of this project (triton_side.calls.direct_launch).

A case that spans several GPUs is timed in two: `cold`, and `alone`, with each exchange replaced by a local operation.
"""

from __future__ import annotations

from dataclasses import dataclass

from .speedup import LEAST_ROUNDS

MAIN = "cold"
ALONE = "alone"
OTHER_MODES = ("warm", "graph", "no-graph", "triton-launch")
_ROUNDS_A_PROCESS = 2  # at least: they tell differences within a process from differences between processes


@dataclass(frozen=True)
class Timing:
    """Modes besides the main one, and how often fresh workers replace all workers within a case's rounds.

    main_only: modes, timelines and traffic are of the blocks' main cases only (compare.spec.block.Block.is_main).
    """

    modes: tuple[str, ...] = ()
    restarts: int = 0
    main_only: bool = False

    @property
    def rounds(self) -> int:
        return max(LEAST_ROUNDS, _ROUNDS_A_PROCESS * (self.restarts + 1))

    def process_of(self, number: int) -> int:
        """Return the number of the process that takes round `number`; `restarts + 1` processes share the rounds evenly.
        """
        return number * (self.restarts + 1) // self.rounds


def of_suite(suite: str) -> Timing:
    """Return the default timing of a suite."""
    return Timing(OTHER_MODES, restarts=2, main_only=True) if suite == "full" else Timing()
