"""What takes longer than its bytes and FLOPs must, and what computes more of them than others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.text import number
from .. import formats
from ..analyse.excess import excesses
from ..analyse.roofline import Ceilings, roofline_time_us
from ..operations import ANCHORS, token
from .finding import Finding
from .phrases import series
from .view import View

_SLOW = 0.1  # of a graph's time
# Of a graph's time. What attention counts of masked scores is less than its tiles compute, most so where they are few.
_TELLING = 0.05


def above_roofline(views: Sequence[View], ceilings: Ceilings) -> Iterator[Finding]:
    """The kernel that takes longest beyond what it must."""
    worst: tuple[float, View, int, float, float] | None = None
    for view in views:
        whole = sum(kernel.device_time_us or 0.0 for kernel in view.kernels)
        for index, kernel in enumerate(view.kernels):
            floor, took = roofline_time_us(view.graph, kernel, ceilings), kernel.device_time_us
            if floor is None or took is None or took - floor < _SLOW * whole:
                continue
            if worst is None or took - floor > worst[0]:
                worst = took - floor, view, index, took, floor
    if worst is not None:
        above, view, index, took, floor = worst
        name, place = formats.name(view.kernels[index].name), view.place([index])
        text = (
            f"Furthest above its floor is {view.name}'s {name}{f' of {place}' if place != name else ''}: it takes "
            f"{formats.microseconds(took)}, and its bytes and FLOPs {formats.microseconds(floor)} at least."
        )
        yield Finding("above roofline", text, (view.key,), view.moved([index]), above, {view.key: (index,)})


def more_flops(views: Sequence[View], ceilings: Ceilings | None) -> Iterator[Finding]:
    """What computes more than others of the graphs need; not what has no time by these ceilings, or next to none."""
    for excess in excesses([view.graph for view in views], ceilings):
        view, least = views[excess.of], [views[index] for index in excess.least]
        whole = view.time(range(len(view.kernels)))
        if ceilings is not None and (excess.us is None or excess.us < _TELLING * (whole or 0.0)):
            continue
        products = [op for i in excess.kernels for op in view.kernels[i].source_ops if token(op.op) in ANCHORS]
        place = series([view.stage(op) or formats.place(op.line) for op in products]) or view.place(excess.kernels)
        again = f" ({formats.flops(excess.again)} of it again)" if excess.again else ""
        text = (
            f"{view.name} computes {formats.flops(excess.flops)} in the products of {place}{again}, "
            f"{number(excess.flops / excess.needed, 2)} times the {formats.flops(excess.needed)} that "
            f"{series([other.name for other in least])} {'gets' if len(least) == 1 else 'get'} by with."
        )
        keys = tuple(other.key for other in (view, *least))
        yield Finding("more FLOPs", text, keys, 0, excess.us, {view.key: excess.kernels})
