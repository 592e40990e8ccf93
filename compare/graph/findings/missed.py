"""The missed fusion that would save the most bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from .. import formats
from ..analyse.missed_fusions import ranked
from ..model import REASONS, Reason
from .finding import Finding
from .view import View


def missed(view: View) -> Iterator[Finding]:
    """Yield the missed fusion with the largest saving."""
    named: dict[str, list[int]] = defaultdict(list)
    for index, kernel in enumerate(view.kernels):
        named[kernel.name].append(index)
    priced = [
        one for one in ranked(view.graph, None) if one.reason.producer in named and one.reason.consumer in named
    ]
    if not priced:
        return
    best, size = priced[0].reason, priced[0].price.bytes
    if not view.is_significant(size):
        return
    indices = [named[name] for name in (best.producer, best.consumer)]
    ends = list(map(view.kernel_kind, indices))
    if ends[0] == ends[1]:  # one kind and one place, so only the operations tell the two apart
        ends = [f"the kernel of {view.work(end)}" for end in indices]
    text = (
        f"{view.name} does not fuse {ends[0]} with {ends[1]}: {_because(view, best)}. "
        f"Fusing them would save at most {formats.size(size)}."
    )
    kernels = {view.key: (*named[best.producer], *named[best.consumer])}
    # The buffer with most of the saving decides whether another finding has covered it.
    buffers = frozenset((view.key, name) for name in priced[0].price.buffers[:1])
    yield Finding("missed", text, (view.key,), size, None, kernels, buffers)


def _because(view: View, reason: Reason) -> str:
    if view.key == "xla-unfused":
        return "its fusion passes are off"
    words = reason.text if reason.code == "other" else REASONS[reason.code]
    return words.rstrip(".") or "it gives no reason"
