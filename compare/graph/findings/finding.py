"""One finding: a sentence about a fusion graph, with the kernels, buffers and bytes behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .. import formats

FindingKind = Literal[
    "above roofline", "copy", "duplicate", "recomputed", "inside a product", "kept on chip", "largest", "missed",
    "saved", "intermediates", "more FLOPs", "dense ragged product", "launch gaps",
]


FACTS: frozenset[FindingKind] = frozenset(["inside a product"])  # fusions that were made, which cost nothing


@dataclass(frozen=True)
class Finding:
    """One finding about one graph, or about several that it compares.

    graphs: names of the graphs in the sentence; the first is the one that it is about.
    bytes: the traffic behind the finding.
    us: the cost in microseconds; None for a fact, and where neither ceilings nor measured times give it. "above
        roofline": the time above the roofline time. "more FLOPs" and "dense ragged product": the extra FLOPs over the
        rate of products.
        "launch gaps": the time in which nothing ran. Otherwise the measured time of the kernels if the finding is about
        whole kernels, else `bytes` over the bandwidth.
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

    @property
    def is_fact(self) -> bool:
        return self.kind in FACTS

    def __str__(self) -> str:
        return self.text if self.us is None else f"{self.text} ({formats.microseconds(self.us)})"
