"""One finding: a sentence about a fusion graph, with the kernels, buffers and bytes behind it; ranking and remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from ...spec.blocks import UNFUSED
from .. import formats

FindingKind = Literal[
    "above roofline", "copy", "duplicate", "recomputed", "inside a product", "kept on chip", "largest", "missed",
    "saved", "intermediates", "more FLOPs", "dense ragged product", "launch gaps",
]

FACTS: frozenset[FindingKind] = frozenset(["inside a product"])  # fusions that were made, which cost nothing
# Implementations that a user would not choose: those without fusion, and the CUDA kernels written for teaching.
NEVER_LEADING = frozenset((*UNFUSED.values(), "cuda"))

_ONE_KERNEL = (
    "use a library call that fuses these steps, or write them as one kernel (Triton, Pallas); the reasons for missed "
    "fusions say what stopped the compiler"
)
# By kind. A kind without a remedy is no problem.
REMEDIES: dict[FindingKind, str] = {
    "above roofline": "try other tile sizes and numbers of warps (autotuning), or another kernel for this step",
    "copy": "give the array its layout and dtype where it is made, so that no kernel has to convert it",
    "duplicate": "compute the value once and pass it on",
    "recomputed": "compute the value once and keep it, if reading it costs less than the repeated reads",
    "kept on chip": _ONE_KERNEL,
    "largest": _ONE_KERNEL,
    "intermediates": _ONE_KERNEL,
    "missed": "see the compiler's reason under missed fusions; rewriting the producer or the consumer may remove it",
    "saved": "recompute it in backward (jax.checkpoint, torch.utils.checkpoint), or use a call that saves less",
    "dense ragged product": "use a grouped product (Pallas's megablox, a kernel in Triton), which skips other groups",
    "launch gaps": "replay the launches as a CUDA graph (torch.compile's mode reduce-overhead, torch.cuda.graph)",
    "more FLOPs": "use an implementation that skips the masked or unused part of the product",
}


@dataclass(frozen=True)
class Finding:
    """One finding about one graph, or about several that it compares.

    graphs: names of the graphs in the sentence; the first is the one that it is about.
    bytes: the traffic behind the finding.
    us: the cost in microseconds; None for a fact, and where neither ceilings nor measured times give it. "above
        roofline": the time above the roofline time. "more FLOPs" and "dense ragged product": the extra FLOPs over the
        rate of products.
        "launch gaps": the time in which nothing ran. Otherwise the measured time of the kernels if the finding is about
        whole kernels, else the time of `bytes`: their share of the kernels' predicted times (analyse/traffic_time.py),
        or that at the bandwidth.
    predicted: `us` is of kernels' predicted times, because nothing of the graph was measured.
    kernels: launch indices, by graph.
    buffers: (graph, buffer) pairs whose traffic is counted in `bytes`; of "missed", the one with most of it; none of
        "saved".
    """

    kind: FindingKind
    text: str
    graphs: tuple[str, ...]
    bytes: int
    us: float | None = None
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: frozenset[tuple[str, str]] = frozenset()
    predicted: bool = False

    @property
    def is_fact(self) -> bool:
        return self.kind in FACTS

    def __str__(self) -> str:
        about = "~" if self.predicted else ""
        return self.text if self.us is None else f"{self.text} ({about}{formats.microseconds(self.us)})"


Item = TypeVar("Item")


def rank(items: Iterable[Item], implementation: Callable[[Item], str], cost: Callable[[Item], float]) -> list[Item]:
    """Return the items sorted: those about an implementation in NEVER_LEADING last, and larger costs first."""
    return sorted(items, key=lambda item: (implementation(item) in NEVER_LEADING, -cost(item)))
