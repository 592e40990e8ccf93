"""Small fusion graphs, alone and for two autotune choices."""

from __future__ import annotations

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Reason, SourceOp
from xlafuse.compare.pytest_plugin.autotune_choices import AutotuneChoices

SIZE = 2048 * 4096 * 2


def op(name: str, stage: str = "", line: str = "mlp.py:7") -> SourceOp:
    return SourceOp(name, stage, line, site=f"{stage}/{name}")


def kernel(name: str, ops: list[SourceOp], reads: list[str], writes: list[str], kind: str = "elementwise") -> Kernel:
    inputs, outputs = (tuple(Access(buffer, SIZE) for buffer in side) for side in (reads, writes))
    return Kernel(name, kind, source_ops=tuple(ops), inputs=inputs, outputs=outputs)  # type: ignore[arg-type]


def buffer(name: str, role: str) -> Buffer:
    return Buffer(name, (2048, 4096), "bf16", SIZE, role)  # type: ignore[arg-type]


def graph(
    kernels: list[Kernel], name: str = "mlp", version: str = "0.10.2", reasons: tuple[Reason, ...] = ()
) -> FusionGraph:
    """Make a graph. A buffer without a writer is an input, one without a reader an output."""
    written = {access.buffer for each in kernels for access in each.outputs or ()}
    read = {access.buffer for each in kernels for access in each.inputs or ()}
    roles = {n: "output" for n in written} | {n: "intermediate" if n in written else "input" for n in read}
    buffers = tuple(buffer(n, role) for n, role in sorted(roles.items()))
    return FusionGraph(name, "xla", tuple(kernels), buffers, reasons, versions={"jax": version}, target="h200")


def apart(name: str = "mlp", version: str = "0.10.2") -> FusionGraph:
    """A product, and its activation in a second kernel."""
    kernels = [
        kernel("gemm", [op("dot_general", "layer/up")], ["x"], ["scores"], "gemm"),
        kernel("act", [op("tanh", "layer/act")], ["scores"], ["y"]),
    ]
    reason = Reason("gemm", "act", "gemm", "the producer is not fusible", "xla priority-fusion", 2 * SIZE)
    return graph(kernels, name, version, (reason,))


def together(name: str = "mlp", version: str = "0.10.2") -> FusionGraph:
    """PerChoice in one kernel."""
    ops = [op("dot_general", "layer/up"), op("tanh", "layer/act")]
    return graph([kernel("gemm", ops, ["x"], ["y"], "gemm")], name, version)


def single_choice(found: FusionGraph) -> AutotuneChoices:
    return AutotuneChoices(found.name, {"": found}, ())


def two_choices(name: str = "mlp", version: str = "0.10.2") -> AutotuneChoices:
    return AutotuneChoices(name, {"Triton GEMM": apart(name, version), "cuBLAS": together(name, version)}, ())
