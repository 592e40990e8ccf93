"""A list of a run's graphs, with a line a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.text import printable
from ..sources.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType


def table(results: Sequence[Result]) -> RenderableType:
    """Return the kernels, declared bytes, fusion efficiency and time of each record's graph, below its case."""
    from rich.console import Group

    from ..graph.render import text_view

    grid = text_view.columns(None, 8, 9, 11, 9, right=(1, 2, 3, 4), gap=1)
    grid.add_row(*map(text_view.plain, ("", "kernels", "declared", "efficiency", "µs")))
    case = ""
    for result in results:
        assert result.record is not None
        if result.record.case.id != case:
            case = result.record.case.id
            grid.add_row(text_view.plain(printable(case), "bold"))
        cells = _cells(result)
        grid.add_row(text_view.plain(f"  {printable(result.record.implementation, 30)}"), *map(text_view.plain, cells))
    return Group(
        grid, text_view.plain(""),
        text_view.plain("declared: bytes that the kernels read and write. efficiency: compulsory bytes over those."),
        text_view.plain(
            "--block, --case, --direction and -i select records and show their kernels; --all shows the kernels of all."
        ),
    )


def _cells(result: Result) -> list[str]:
    from ..graph import formats
    from ..graph.analyse.totals import totals

    assert result.record is not None
    graph = result.graph
    if graph is None:
        return ["no graph", "", "", printable(result.record.status, 9)]
    sums = totals(graph, bytes_compulsory=result.record.bytes_compulsory or None)
    declared = formats.UNKNOWN if sums.declared.exact is None else formats.size(sums.declared.exact)
    efficiency = sums.fusion_efficiency
    return [
        formats.UNKNOWN if sums.kernels is None else str(sums.kernels), declared,
        formats.share(efficiency, 1),
        "" if sums.device_time_us is None else formats.number_of_us(sums.device_time_us.exact),
    ]
