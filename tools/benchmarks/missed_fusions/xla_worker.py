"""The process of the JAX pairs: it compiles and checks both functions of a case and, on a GPU, times them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from xlafuse.compare import targets
from xlafuse.compare.base.host import installed
from xlafuse.compare.graph import store
from xlafuse.compare.measure.rounds import rounds_of
from xlafuse.compare.workers import main as worker

from .case import Array, Case, difference


class XlaPairs:
    """The JAX pairs, on this machine's GPU or for the default target."""

    def __init__(self) -> None:
        from xlafuse.compare.workers.xla.worker import XlaBackend  # sets XLA's environment, so it comes before jax

        self._backend = XlaBackend()
        from .xla_cases import CASES

        self._cases = {case.name: case for case in CASES}
        self._clock = self._backend.clock()
        self._versions = installed("jax", "jaxlib")
        self._name = self._backend.device if self._backend.has_gpu else targets.DEFAULT

    def names(self) -> list[str]:
        return list(self._cases)

    def environment(self) -> dict[str, Any]:
        return self._backend.environment() | {"timer": self._clock.name if self._clock else None}

    def run(self, name: str) -> dict[str, Any]:
        """Return both graphs, the difference of the results, and the rounds if there is a GPU."""
        import jax

        case = self._cases[name]
        compiled = {program: self._compile(case, program) for program in case.programs}
        graphs = {program: graph for program, (graph, _) in compiled.items()}
        reply: dict[str, Any] = {"size": case.size, "graphs": graphs}
        if not self._backend.has_gpu:
            arrays = _arrays(case.small_arrays)
            results = [jax.jit(function)(*arrays) for function, _ in case.programs.values()]
            return reply | _difference(*results)
        arrays = _arrays(case.arrays)
        calls = {program: (lambda run=run: run(*arrays)) for program, (_, run) in compiled.items()}
        reply |= _difference(*(call() for call in calls.values()))
        if self._clock is not None:
            reply["rounds"] = rounds_of(calls, self._clock, self._backend.flush_l2, self._backend.synchronize)
        return reply

    def _compile(self, case: Case, program: str) -> tuple[Any, Any]:
        """Return the graph as JSON, and the executable."""
        import jax

        from xlafuse.compare.workers.xla import fusion_graph
        from xlafuse.compile import compiler

        function, options = case.programs[program]
        target = None
        if not self._backend.has_gpu:
            target = compiler.Target(targets.load(targets.DEFAULT).xla_config(jax.__version__))
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.arrays]
        with tempfile.TemporaryDirectory() as folder:
            dumps = Path(folder) / "dumps"
            found = compiler.compile(
                function, structs, matmul_precision=None, target=target, dump_to=dumps, options=options
            )
            graph, _ = fusion_graph.of_module(found, dumps, target=self._name, versions=self._versions)
        return store.to_json(graph), found.executable


def _arrays(arrays: tuple[Array, ...]) -> list[Any]:
    import jax

    keys = jax.random.split(jax.random.key(0), len(arrays))
    return [jax.random.normal(key, shape, dtype) for key, (shape, dtype) in zip(keys, arrays, strict=True)]


def _difference(unfused: Any, fused: Any) -> dict[str, float]:
    """Return the error of the results, and the largest allowed one."""
    import jax
    import jax.numpy as jnp

    pairs = list(zip(jax.tree.leaves(unfused), jax.tree.leaves(fused), strict=True))

    def error(a: jax.Array, b: jax.Array) -> float:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float((jnp.abs(a - b) / (jnp.abs(b) + jnp.sqrt(jnp.mean(b * b)))).max())

    eps = max(float(jnp.finfo(b.dtype).eps) for _, b in pairs)
    return difference((error(a, b) for a, b in pairs), eps)


def methods() -> worker.Methods:
    pairs = XlaPairs()
    return {"names": pairs.names, "environment": pairs.environment, "run": pairs.run}


if __name__ == "__main__":
    sys.exit(worker.serve(methods))
