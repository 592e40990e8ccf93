"""How long the compilers of a captured program take. Like `capture`, it imports the standard library alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

# jax.monitoring: tracing is left out, because the trace of a function holds those of its inner ones.
_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration")
_CALLBACK = "torch._dynamo.callback"  # private; torch 2.11 to 2.13. torch._dynamo.reset() ends the counting


class CompileTimes:
    """seconds: by the function that JAX compiles, as "jit(step)", and by torch.compile's number of a graph."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = 0.0

    def actions(self) -> list[tuple[str, Callable[[ModuleType], None]]]:
        """Return what to do after the import of which module."""
        return [("jax.monitoring", self._follow_jax), (_CALLBACK, self._follow_torch)]

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def _follow_jax(self, module: ModuleType) -> None:
        def listen(event: str, seconds: float, **about: Any) -> None:
            if event in _EVENTS:
                self._add(str(about.get("fun_name", "")), seconds)

        module.register_event_duration_secs_listener(listen)

    def _follow_torch(self, module: ModuleType) -> None:
        def begin(about: Any) -> None:
            self._began = time.perf_counter()

        def end(about: Any) -> None:
            self._add(f"torch.compile {about.compile_id}", time.perf_counter() - self._began)

        with contextlib.suppress(AttributeError):  # another release of torch: its program must run all the same
            module.on_compile_start(begin)
            module.on_compile_end(end)
