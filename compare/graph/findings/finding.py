"""One thing that stands out in a fusion graph, as a sentence and what is behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .. import formats

FindingKind = Literal[
    "above roofline", "copy", "duplicate", "recomputed", "inside a product", "kept on chip", "largest", "missed",
    "saved", "intermediates", "more FLOPs",
]


@dataclass(frozen=True)
class Finding:
    """One sentence. graphs: those it speaks of.

    bytes: the traffic that it is about. us: what these bytes take; measured where the finding is about whole kernels
    that were, else bytes over bandwidth, and None without ceilings; of "above roofline" the time above it, of "more
    FLOPs", which is about no traffic, what those take at the rate of products. kernels: launch indices by graph. about:
    buffers whose traffic it is, each with its graph's name.
    """

    kind: FindingKind
    text: str
    graphs: tuple[str, ...]
    bytes: int
    us: float | None = None
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: frozenset[tuple[str, str]] = frozenset()

    def __str__(self) -> str:
        return self.text if self.us is None else f"{self.text} ({formats.microseconds(self.us)})"
