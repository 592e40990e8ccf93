"""The missed fusions of a graph in a terminal, the largest savings first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from .. import formats
from ..analyse.missed_fusions import AlikeFusions, MissedFusion, Price, folded, missed, ranked, together
from ..analyse.roofline import Ceilings
from ..analyse.totals import predicted_sum, tally
from ..model import REASONS, FusionGraph, PredictedTime, Reason
from .text_view import add_some, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.tree import Tree

MOST_SHOWN = 20


def tree(graph: FusionGraph, ceilings: Ceilings | None, whose: str, *, every: bool = False) -> RenderableType:
    """Return each missed fusion with its price and the compiler's own words.

    ceilings: of the device `whose`; None shows no times.
    """
    from rich.tree import Tree

    priced, rest = _priced(graph, ceilings)
    root = Tree(plain(formats.name(graph.name, 76), "bold"), guide_style="dim")
    root.add(plain(formats.origin(graph)))
    if not graph.reasons:
        root.add(plain(_why_none(graph)))
        return root
    some_predicted = any(one.price.predicted for one in priced)
    how = ", from the kernels' predicted times (~), or" if some_predicted else ","
    root.add(plain(f"the saving of each missed fusion alone{_rates(ceilings, whose, how)}"))
    if len(priced) > 1:
        total = together(graph, ceilings)
        vanish = f"; {formats.count(total.launches, 'launch', 'launches')} fewer" if total.launches else ""
        root.add(plain(f"all of them together: {_saved(total)}{vanish}{_at_products(graph, ceilings, total)}"))
    alike = folded(graph, priced)
    shown = alike if every else alike[:MOST_SHOWN]
    places = {
        kernel.name: ", ".join(kernel.stages or map(formats.place, kernel.lines)) for kernel in graph.kernels or ()
    }
    for number, same in enumerate(shown, 1):
        _add(root, number, same, places, _pair_time(graph, same.first.reason))
    add_some(root, (), len(alike) - len(shown), "with smaller savings; --all shows them")
    if rest:
        branch = root.add(plain(f"{formats.count(len(rest), 'more reason')} with no saving, or an unknown one", "bold"))
        listed = rest if every else rest[:MOST_SHOWN]
        lines = [f"{_pair(reason)}: {reason.code}: {printable(reason.text, 120)}" for reason in listed]
        add_some(branch, lines, len(rest) - len(listed), "more; --all shows them")
    reasons = [*(same.first.reason for same in shown), *rest]
    codes = dict.fromkeys(reason.code for reason in reasons if reason.code != "other")
    if codes:
        add_some(root.add(plain("reason codes", "bold")), [f"{code}: {REASONS[code]}" for code in codes])
    return root


def _at_products(graph: FusionGraph, ceilings: Ceilings | None, total: Price) -> str:
    """Return how much of a saving is at matrix products and library calls, into which compilers fuse little."""
    fusible = [reason for reason in graph.reasons if reason.code not in ("gemm", "library")]
    rest = together(replace(graph, reasons=tuple(fusible)), ceilings)
    at_products = total.bytes - rest.bytes
    if not at_products:
        return ""
    share = formats.share(at_products, total.bytes)
    return f"; {share} of the bytes at matrix products, into which compilers fuse little"


def _priced(graph: FusionGraph, ceilings: Ceilings | None) -> tuple[list[MissedFusion], list[Reason]]:
    """Return the missed fusions with a known saving, and the other reasons."""
    priced = ranked(graph, ceilings)
    known = {id(one.reason) for one in priced}
    return priced, [reason for reason in missed(graph) if id(reason) not in known]


def _why_none(graph: FusionGraph) -> str:
    """Return why the graph has no reasons."""
    if graph.compiler not in ("xla", "inductor"):
        return "no compiler chose what to fuse here, so no reasons exist"
    if graph.kernels is not None and len(graph.kernels) == 1:
        return "one kernel: nothing is left to fuse"
    return "no reasons are recorded: the compiler's log was not requested or not kept"


def _rates(ceilings: Ceilings | None, whose: str, how: str) -> str:
    if ceilings is None:
        return "; its GPU's bandwidth is not known"
    launch = "" if ceilings.launch_us is None else f" and {formats.microseconds(ceilings.launch_us)} a launch"
    return f"{how} at {ceilings.bandwidth(1, 1) / 1e12:.2f} TB/s{launch} of {whose}"


def _saved(price: Price) -> str:
    return ", ".join(filter(None, [formats.size(price.bytes), price.time]))


def _pair_time(graph: FusionGraph, reason: Reason) -> tuple[float | None, PredictedTime | None]:
    """Return the measured time of the two kernels, else their predicted one; None where a name has several kernels."""
    ends = [graph.named.get(name, ()) for name in (reason.producer, reason.consumer)]
    kernels = [(graph.kernels or ())[indices[0]] for indices in ends if len(indices) == 1]
    if len(kernels) < 2:
        return None, None
    measured = tally(kernel.device_time_us for kernel in kernels).exact
    predicted = predicted_sum(kernels) if all(kernel.device_time_us is None for kernel in kernels) else None
    return measured, predicted if predicted is not None and predicted.us is not None else None


def _add(
    root: Tree, number: int, same: AlikeFusions, places: Mapping[str, str],
    time: tuple[float | None, PredictedTime | None],
) -> None:
    reason, others = same.first.reason, len(same.fusions) - 1
    several = f" in {others + 1} pairs that do the same work" if others else ""
    branch = root.add(plain(f"{number}. {_saved(same.price)}{several}", "bold"))
    branch.add(plain(_pair(reason) + (f" and {others} more" if others else "")))
    ends = [places.get(name, "") for name in (reason.producer, reason.consumer)]
    if any(ends):  # stages or lines, which often say more than the kernels' names
        branch.add(plain(" → ".join(formats.name(end, 34) if end else "?" for end in ends)))
    branch.add(plain(f"{reason.code} · {printable(reason.origin, 60)}: {printable(reason.text)}"))
    if reason.fused_us is not None and reason.unfused_us is not None:
        estimate = f"{reason.fused_us:.4g} µs fused, {reason.unfused_us:.4g} µs unfused"
        branch.add(plain(f"the compiler's estimate: {estimate}"))
    measured, predicted = time
    if measured is not None or predicted is not None:
        words = formats.microseconds(measured) if predicted is None else formats.predicted(predicted)
        branch.add(plain(f"the two kernels{' of the first pair' if others else ''} take {words}"))
    if reason.line:
        branch.add(plain(formats.place(reason.line, 70)))


def _pair(reason: Reason) -> str:
    if not (reason.producer or reason.consumer):
        return formats.place(reason.line, 70) if reason.line else "kernels that the log does not identify"
    return " → ".join(formats.name(name, 32) if name else "?" for name in (reason.producer, reason.consumer))


def to_json(graph: FusionGraph, ceilings: Ceilings | None, whose: str) -> dict[str, Any]:
    """Return the missed fusions with their savings.

    `missed`: ranked. `together`: all of them at once. `others`: reasons without a known saving.
    """
    priced, rest = _priced(graph, ceilings)
    return {
        "graph": graph.name, "bandwidth": None if ceilings is None else ceilings.bandwidth(1, 1),
        "launch_us": None if ceilings is None else ceilings.launch_us, "bandwidth_of": whose,
        "missed": [{**asdict(one.reason), **_fields(one.price), **_times(graph, one.reason)} for one in priced],
        "together": _fields(together(graph, ceilings)),
        "others": [asdict(reason) for reason in rest],
    }


def _times(graph: FusionGraph, reason: Reason) -> dict[str, Any]:
    measured, predicted = _pair_time(graph, reason)
    return {"kernels_us": measured, "kernels_predicted": predicted and asdict(predicted)}


def _fields(price: Price) -> dict[str, Any]:
    return {
        "saves_bytes": price.bytes, "saves_launches": price.launches, "saves_us": price.us,
        "saves_predicted": price.predicted,
    }
