"""The losses of a program's first steps, and the times of the steps after the profiled ones.

`compare/user/capture.py` runs this file in the program's interpreter, so it imports the standard library alone.
No hook of a framework tells the loss. In PyTorch it is a scalar on which `backward` is called; in JAX, the scalars are
candidates that a step made and left. Their values are read after the last step, so no step waits for one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MOST_LOSSES = 10  # steps
MOST_TIMES = 20  # steps


class StepRecord:
    """Losses and times of a program's steps. Those from `first` until before `last` are profiled.

    Nothing is recorded in a profiled step, whose kernels shall be the program's alone. The device is idle at both ends
    of a timed step.
    """

    def __init__(self, first: int, last: int) -> None:
        self._profiled = range(first, last)
        self._step = 0
        self._losses: dict[int, list[Any]] = {}
        self._before: list[Any] = []  # JAX's scalars at the step's beginning, kept so that no other gets their id
        self._ends: list[float] = []
        self._problem = ""

    def actions(self) -> list[tuple[str, Callable[[ModuleType], None]]]:
        """Return what to do after the import of which module."""
        return [("torch", self._watch_backward)]

    def begin(self) -> None:
        """Take note of the beginning of a step of JAX."""
        with self._program_goes_on():
            self._before = _scalars() if self._wants_losses else []

    def end(self, framework: str, wait: Callable[[], None] | None) -> None:
        """Take note of the end of a step. wait: waits for the device; None where the profiler failed."""
        with self._program_goes_on():
            if framework == "jax" and self._wants_losses:
                before = {id(array) for array in self._before}
                self._losses[self._step] = [array for array in _scalars() if id(array) not in before]
            self._step += 1
            if self._step > self._profiled.stop and len(self._ends) <= MOST_TIMES and wait is not None:
                wait()
                self._ends.append(time.perf_counter())

    def facts(self) -> dict[str, Any]:
        """Return the losses by step, and the times of steps in seconds."""
        losses = []
        with self._program_goes_on():
            for step, arrays in self._losses.items():
                values = [float(array) for array in arrays if not getattr(array, "is_deleted", bool)()]
                if values:
                    dtype = str(arrays[0].dtype).removeprefix("torch.")
                    losses.append({"step": step, "dtype": dtype, "values": values})
        times = [end - begin for begin, end in zip(self._ends, self._ends[1:], strict=False)]
        return {"losses": losses, "step_seconds": times, "problem": self._problem}

    @property
    def _wants_losses(self) -> bool:
        return self._step not in self._profiled and len(self._losses) < MOST_LOSSES

    def _watch_backward(self, torch: ModuleType) -> None:
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def watched(tensor: Any, *args: Any, **options: Any) -> Any:
            with self._program_goes_on():
                if tensor.numel() == 1 and (self._wants_losses or self._step in self._losses):
                    # A copy: a CUDA graph of torch.compile writes the next step's loss to the same memory.
                    self._losses.setdefault(self._step, []).append(tensor.detach().clone())
            return backward(tensor, *args, **options)

        torch.Tensor.backward = watched

    @contextlib.contextmanager
    def _program_goes_on(self) -> Iterator[None]:
        """Keep an error for the report: it must not end the program."""
        try:
            yield
        except Exception as problem:
            self._problem = f"{type(problem).__name__}: {problem}"


def _scalars() -> list[Any]:
    """Return JAX's live scalars of a floating dtype."""
    jax = sys.modules["jax"]
    return [
        array for array in jax.live_arrays()
        if array.ndim == 0 and jax.numpy.issubdtype(array.dtype, jax.numpy.floating) and not array.is_deleted()
    ]
