"""A fusion graph as HTML for a notebook: a table of kernels, with each one's operations folded below its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from .. import formats
from ..analyse.totals import declared_bytes, tally
from ..model import PHASES, FusionGraph, Kernel
from . import text_view

if TYPE_CHECKING:
    from jinja2 import Template

MOST_KERNELS = 200

_PAGE = """\
<div class="xlafuse">
<p><strong>{{ name }}</strong><br>{{ origin }}{% for line in notes %}<br>{{ line }}{% endfor %}</p>
{%- for phase in phases %}
<table>
<caption>{{ phase.title }}</caption>
<thead><tr><th>#</th><th>kernel</th><th>kind</th><th>read</th><th>written</th><th>share</th>
{%- if timed %}<th>µs</th><th>share</th>{% endif %}</tr></thead>
<tbody>
{%- for row in phase.rows %}
<tr><td>{{ row.number }}</td><td>
{%- if row.operations %}<details><summary>{{ row.name }}</summary><ul>
{%- for operation in row.operations %}<li>{{ operation }}</li>{% endfor %}</ul></details>
{%- else %}{{ row.name }}{% endif %}</td>
{%- for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody>
</table>
{%- if phase.hidden %}
<p>{{ phase.hidden }}</p>
{%- endif %}
{%- endfor %}
{%- for line in rest %}
<p>{{ line }}</p>
{%- endfor %}
</div>
"""


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    return Environment(autoescape=True, undefined=StrictUndefined).from_string(_PAGE)


def html(graph: FusionGraph, *, findings: bool = True) -> str:
    """Return an HTML fragment without scripts or links. All text of the graph is escaped."""
    kernels = graph.kernels or ()
    timed = any(kernel.device_time_us is not None for kernel in kernels)
    shown = set(text_view.costliest(graph, MOST_KERNELS))
    phases = [phase for name in PHASES if (phase := _part(graph, name, shown, timed))]
    notes = (
        *graph.notes, *text_view.totals_lines(graph), *(text_view.finding_lines(graph) if findings else ())
    )
    return _template().render(
        name=formats.name(graph.name, 200), origin=formats.origin(graph),
        notes=[printable(line, text_view.MOST_WORDS) for line in notes],
        phases=phases, timed=timed, rest=_rest(graph),
    )


def _part(graph: FusionGraph, phase: str, shown: set[int], timed: bool) -> Mapping[str, Any] | None:
    members = [(index, kernel) for index, kernel in enumerate(graph.kernels or ()) if kernel.phase == phase]
    if not members:
        return None
    traffic = tally(map(declared_bytes, graph.kernels or ())).exact
    time = tally(kernel.device_time_us for kernel in graph.kernels or ()).exact
    rows = []
    for index, kernel in members:
        if index in shown:
            cells = [
                printable(kernel.kind), formats.size(kernel.bytes_read), formats.size(kernel.bytes_written),
                formats.share(declared_bytes(kernel), traffic),
            ]
            if timed:
                cells += [formats.number_of_us(kernel.device_time_us), formats.share(kernel.device_time_us, time)]
            rows.append(
                {"number": index + 1, "name": formats.name(kernel.name), "operations": _operations(kernel),
                 "cells": cells}
            )
    hidden = len(members) - len(rows)
    return {
        "title": f"{phase}: {formats.count(len(members), 'kernel')}", "rows": rows,
        "hidden": f"{formats.count(hidden, 'cheaper kernel')} not shown" if hidden else "",
    }


def _operations(kernel: Kernel) -> list[str]:
    return [
        " ".join(filter(None, (f"{stage}:" if stage else "", words, f"({place})" if place else "")))
        for stage, words, place in text_view.operations(kernel.source_ops)
    ]


def _rest(graph: FusionGraph) -> list[str]:
    lines = []
    if graph.kernels is None:
        words = formats.words(formats.operation(op) for op in graph.operations)
        lines.append(f"{formats.count(len(graph.operations), 'operation')}, kernels unknown: {words}")
    for title, buffers in text_view.buffer_lists(graph):
        largest = ", ".join(f"{formats.name(b.name, 40)} {formats.shape(b)}" for b in buffers[: text_view.MOST_BUFFERS])
        more = ", …" if len(buffers) > text_view.MOST_BUFFERS else ""
        total = formats.size(sum(buffer.bytes for buffer in buffers))
        lines.append(f"{title}: {formats.count(len(buffers), 'buffer')}, {total}: {largest}{more}")
    if graph.unparsed:
        lines.append(f"{formats.count(len(graph.unparsed), 'thing')} could not be read")
    return lines
