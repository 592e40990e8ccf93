"""The reasons of an XLA graph: one for each edge, from the decisions in XLA's fusion log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from xlafuse.reasons.fusion_decisions import FusionDecision

from ..model import FusionGraph, Kernel, Reason
from .kernel_edges import KernelEdge, barrier, barrier_code, bytes_saved, kernel_edges

# Phrases of XLA's priority_fusion.cc, multi_output_fusion.cc, gpu_fusible.cc, instruction_fusion.cc and
# fusion_merger.cc. The first match counts. A bare "not fusible" gets its code from the kernel that XLA said it of.
PHRASES: tuple[tuple[str, str], ...] = (
    (r"us_fused: |Negative benefit|will execute slower if fused", "unprofitable"),
    (r"would create a loop fusion", "reduction"),
    (r"both the producer and the consumer contain a reduce", "reduction"),
    (r"Reductions from/to continuous dims epilogue not fusible", "reduction"),
    (r"different loop shapes|tiled (?:reductions|transposes) with different shapes", "shape"),
    (r"transpose and a reduction|nested transpose|become untiled|physically transposing", "layout"),
    (r"slices are non-overlapping", "no-shared-data"),
    (r"introduce a cycle|creates? a cycle| are connected$", "order"),
    (r"[Ii]n-?place|multiple DUSs", "order"),
    (r"too large IR|overly large code duplication|shared memory usage|unnested reductions", "resources"),
    (r"larger than allowed budget|[Nn]umber of operands|too many", "resources"),
    (r"only works for single user|duplicat|expensive|output of the root instruction|multiple users", "recompute"),
    (r"can ?not be tiled|Triton|triton|tiling|TiledRunTimeData|[Uu]nsupported|not supported", "unsupported"),
    (r"loop-fusible|multi-output fusion|single bitcast|not fusing constant|scatter", "unsupported"),
)
_NOT_FUSIBLE = re.compile(
    r"the (?:producer|consumer) is not fusible|only bitcast users|not eligible as multi-output fusion root|not fusible$"
)
_BARRIERS = {"gemm": "gemm", "library": "library", "output": "recompute", "order": "order"}


def reasons(graph: FusionGraph, raw: Iterable[FusionDecision]) -> tuple[Reason, ...]:
    """Return one reason for each edge of an XLA graph, in launch order, then those of decisions on unknown kernels.

    raw: the decisions that `fusion_decisions.read_decisions` found for the module; empty where no fusion log was
        kept. Give each phase's decisions to its own graph: `join_phases` renames kernels that both phases have.

    Words in square brackets in a reason's text are ours; they name the instruction of which XLA said it. The origin of
    an edge without a decision is "inferred". fused_us, unfused_us: XLA's estimate for the producer and all its
    consumers.
    """
    by_pair: dict[tuple[str, str], list[FusionDecision]] = {}
    for decision in raw:
        by_pair.setdefault((decision.producer, decision.consumer), []).append(decision)
    kernels = graph.kernels or ()
    found = []
    for edge in kernel_edges(graph):
        producer, consumer = kernels[edge.producer], kernels[edge.consumer]
        names = _instruction(producer), _instruction(consumer)
        decisions = by_pair.get(names) or by_pair.get((names[0], ""))
        found.append(_decided(graph, edge, decisions) if decisions else _undecided(graph, edge, bool(by_pair)))
    lost = [decision for decision in by_pair.get(("", ""), ()) if decision.log_producer]
    found += [Reason("", "", _code(each, None, None), _text(each), f"xla {each.fusion_pass}") for each in lost]
    return tuple(found)


def _instruction(kernel: Kernel) -> str:
    """Return the HLO instruction's name; kernels of a computation with several calls are "fusion.1", "fusion.1~2"."""
    return kernel.name.split("~")[0]


def _decided(graph: FusionGraph, edge: KernelEdge, decisions: list[FusionDecision]) -> Reason:
    kernels = graph.kernels or ()
    producer, consumer = kernels[edge.producer], kernels[edge.consumer]
    first, *rest = sorted(dict.fromkeys(decisions), key=_vagueness)
    also = [each for each in rest if each.fusion_pass != first.fusion_pass][:1]
    texts = [_text(first, consumer), *(f"{each.fusion_pass}: {_text(each, consumer)}" for each in also)]
    return Reason(
        producer.name,
        consumer.name,
        _code(first, producer, consumer),
        "; ".join(texts),
        f"xla {first.fusion_pass}",
        bytes_saved(graph, edge),
        first.fused_us,
        first.unfused_us,
    )


def _vagueness(decision: FusionDecision) -> int:
    """Return a sort key: a decision about the pair comes before one about a single side or another kernel."""
    general = bool(_NOT_FUSIBLE.search(decision.text))
    if decision.refused_by:
        return 2
    return 3 if general and decision.fusion_pass == "multi_output_fusion" else 0 if not general else 1


_REFUSED = {"gemm": "the matrix product ", "library": "the library call ", "output": "the output, "}


def _text(decision: FusionDecision, consumer: Kernel | None = None) -> str:
    replaced = consumer is not None and not decision.log_consumer and barrier_code(consumer) == decision.barrier
    if not decision.refused_by or replaced:  # a library call that replaced the product is the same consumer
        return decision.text
    return f"{decision.text} [said of {_REFUSED.get(decision.barrier, '')}{decision.refused_by}]"


def _code(decision: FusionDecision, producer: Kernel | None, consumer: Kernel | None) -> str:
    if not _NOT_FUSIBLE.search(decision.text):
        return code_of(decision.text)
    for kernel in (producer, consumer):
        if kernel is not None and (code := barrier_code(kernel)) is not None:
            return code
    if decision.refused_by and decision.log_consumer:
        return "recompute"  # this consumer could fuse it, but the producer must also run for the other one
    if not decision.consumer:
        return "unsupported"  # the two are in different computations, like a loop and its input
    return _BARRIERS.get(decision.barrier, "unsupported")


def code_of(text: str) -> str:
    """Return the key of `REASONS` for one of XLA's phrases; "other" for an unknown one."""
    return next((code for phrase, code in PHRASES if re.search(phrase, text)), "other")


def _undecided(graph: FusionGraph, edge: KernelEdge, has_log: bool) -> Reason:
    on_tpu = graph.target.startswith("tpu")  # XLA fuses into products there, so a product is no barrier
    if not on_tpu and (inferred := barrier(graph, edge)) is not None:
        return inferred
    kernels = graph.kernels or ()
    producer, consumer = kernels[edge.producer], kernels[edge.consumer]
    missing = "XLA for TPUs writes no fusion log" if on_tpu else "XLA's fusion log was not kept"
    code, text = "other", "XLA's fusion log does not mention the two" if has_log else missing
    copies = [kernel.name for kernel in (producer, consumer) if kernel.facts.get("opcode") == "copy"]
    if has_log and copies:
        code = "order"
        text = f"{copies[0]} was inserted after the fusion passes, to keep values that are overwritten later"
    return Reason(producer.name, consumer.name, code, text, "inferred", bytes_saved(graph, edge))
