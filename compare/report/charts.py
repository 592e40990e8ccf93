"""The charts of a case as Vega-Lite specifications: for its page, and for pictures.

static/charts.js and picture.py add the colours of text and axes. The page also lists the numbers of each chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any

from ..graph.analyse.roofline import Ceilings
from ..plan.speedup import TIE

Spec = dict[str, Any]
Values = Sequence[Mapping[str, Any]]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier; nothing is fetched
# All colours are legible on white and on dark backgrounds.
PALETTE = (
    "#4c78a8", "#e0862f", "#54a24b", "#8c8c8c", "#c44e52", "#b279a2", "#3f9c95", "#9d755d", "#b79a20", "#6f4fa0",
    "#d67195", "#2f7ed8", "#5b8c2a", "#a05d3b", "#7a8fb8", "#c2477f",
)
KINDS = {
    "gemm": "#4c78a8", "attention": "#b279a2", "reduction": "#e0862f", "elementwise": "#54a24b", "copy": "#c44e52",
    "other": "#8c8c8c",
}
_QUIET, _LOUD, _THIRD = "#7a8fb8", "#e0862f", "#b79a20"
ROWS_OF_RANK = {"communication": _LOUD, "compute": KINDS["gemm"]}
_SEPARATOR = " / "  # between an implementation and a row of a GPU
_BAR = 22  # pixels for each row of bars
_LOG = {"type": "log", "nice": False}


def colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each implementation, in order of first appearance.

    Give it all names of a run, not the selected ones: then an implementation has the same colour everywhere.
    """
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(dict.fromkeys(names))}


def _page_chart(values: Values, layers: list[Spec], **rest: Any) -> Spec:
    """Return a chart that is as wide as its place on the page."""
    return {
        "$schema": SCHEMA, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)}, "layer": layers, **rest,
    }


def _rows(names: Sequence[str]) -> Spec:
    """Return an axis with one row for each implementation, in this order."""
    return {"field": "implementation", "type": "nominal", "sort": list(names), "axis": {"title": None}}


def _quantity(title: str, **axis: Any) -> Spec:
    return {"type": "quantitative", "axis": {"title": title, **axis}}


def colour(field: str, palette: Mapping[str, str], **legend: Any) -> Spec:
    """Return a colour for each value of a field."""
    scale = {"domain": list(palette), "range": list(palette.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None, **legend}}


def _tooltip(*fields: str, **formatted: str) -> list[Spec]:
    """Return a tooltip: plain fields, then fields with a number format."""
    plain = [{"field": field, "type": "nominal"} for field in fields]
    return [*plain, *({"field": field, "format": form} for field, form in formatted.items())]


def _whisker(**encoding: Any) -> Spec:
    return {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": encoding}


def time_layers(names: Sequence[str], x: Spec, bar: Spec, label_at: str, **more: Any) -> list[Spec]:
    """Return bars of times, with whiskers from "low" to "high", and their labels to the right of the field `label_at`.

    bar: the bars' encoding. more: encodings of bars and whiskers.
    """
    y = _rows(names)
    label = {"y": y, "x": {"field": label_at, **x}, "text": {"field": "label"}}
    return [
        {"mark": {"type": "bar", "height": {"band": 0.62}}, "encoding": {"y": y, **more, **bar}},
        _whisker(y=y, x={"field": "low", **x}, x2={"field": "high"}, **more),
        {"mark": {"type": "text", "align": "left", "dx": 8}, "encoding": label},
    ]


def times(values: Values, names: Sequence[str]) -> Spec:
    """Draw device time, its recoverable part, and half the interquartile range of its samples on each side.

    values: {"implementation", "time", "recoverable" (or null), "low", "high", "label"}, µs.
    """
    rest, unknown = "roofline time and launch gaps", "recoverable time unknown"
    split = [
        {"calculate": "datum.time - (datum.recoverable || 0)", "as": "rest"},
        {"fold": ["rest", "recoverable"], "as": ["share", "us"]},
        {"filter": "datum.us > 0"},
        {"calculate": f"datum.recoverable === null ? '{unknown}' : datum.share === 'rest' ? '{rest}' : 'recoverable'",
         "as": "kind of time"},
        {"calculate": "datum.share === 'rest' ? 0 : 1", "as": "order"},
    ]
    palette = {rest: _QUIET, "recoverable": _LOUD}
    if any(value["recoverable"] is None for value in values):
        palette[unknown] = KINDS["other"]
    x = _quantity("µs")
    bar = {
        "x": {"field": "us", **x, "stack": "zero"}, "order": {"field": "order"},
        "color": colour("kind of time", palette, orient="top", columns=2),
    }
    tooltip = _tooltip("implementation", "label", recoverable=".4s", low=".5s", high=".5s")
    bars, *layers = time_layers(names, x, bar, "time", tooltip=tooltip)
    return _page_chart(values, [{"transform": split, **bars}, *layers], height=_BAR * len(names), padding={"right": 60})


def ratios(values: Values, names: Sequence[str], baseline: str) -> Spec:
    """Draw ratios of paired rounds to the baseline with their 95% intervals; the band marks a tie.

    values: {"implementation", "ratio", "low", "high", "word"}.
    """
    x = {**_quantity(f"time / {baseline}'s (below 1 is faster)", format="~g"), "scale": {**_LOG, "padding": 12}}
    y = _rows(names)
    tooltip = _tooltip("implementation", "word", ratio=".3f", low=".3f", high=".3f")
    band = {"x": {"field": "from", **x}, "x2": {"field": "to"}, "color": {"value": _QUIET}}
    layers: list[Spec] = [
        {"data": {"values": [{"from": 1 / (1 + TIE), "to": 1 + TIE}]}, "mark": {"type": "rect", "opacity": 0.35},
         "encoding": band},
        _whisker(y=y, x={"field": "low", **x}, x2={"field": "high"}),
        {"mark": {"type": "point", "filled": True, "size": 60},
         "encoding": {"y": y, "x": {"field": "ratio", **x}, "tooltip": tooltip}},
    ]
    return _page_chart(values, layers, height=_BAR * len(names))


def _launches(
    values: Values, y: Spec, ends: Iterable[float], palette: Mapping[str, str], mark: Spec, height: int,
    transform: Sequence[Spec] = (), **encoding: Any,
) -> Spec:
    """Draw launches as bars on one time axis, whose end a slider moves.

    ends: that of each implementation's last launch; the axis first ends at the longest, or at six times the shortest.
    """
    ends = list(ends)
    until, longest = min(max(ends), 6 * min(ends)), max(ends)
    slider = {"input": "range", "min": 1, "max": ceil(longest), "step": 1, "name": "axis until, µs "}
    x = {**_quantity("µs"), "scale": {"domainMin": 0, "domainMax": {"expr": "until"}, "nice": False}}
    layer = {
        "transform": list(transform), "mark": {"type": "bar", "clip": True, "cursor": "pointer", **mark},
        "encoding": {
            "y": y, "x": {"field": "start", **x}, "x2": {"field": "end"},
            "color": colour("kind", palette, orient="top"), **encoding,
        },
    }
    params = [{"name": "until", "value": ceil(until), "bind": slider}]
    return _page_chart(values, [layer], height=height, params=params)


def kernels(ends: Mapping[str, float]) -> Spec:
    """Draw the kernels of each implementation. ends: by implementation, µs.

    static/kernels.js makes the values, from the bars of kernels.py and the data of the fusion graphs.
    """
    tooltip = _tooltip("implementation", "kernel", "stages", "reads", "writes", "took", "roofline time", "bound")
    mark = {"height": {"band": 0.72}, "stroke": "#ffffff", "strokeWidth": 0.5}
    return _launches([], _rows(list(ends)), ends.values(), KINDS, mark, _BAR * len(ends), tooltip=tooltip)


def ranks(values: Values) -> Spec:
    """Draw one call of each implementation, with two rows for each GPU: communication and computation.

    values: as content.kernels.calls_of_ranks makes them, µs.
    """
    rows: dict[str, None] = {}
    ends: dict[str, float] = {}
    for value in values:
        name, rank = value["implementation"], value["rank"]
        rows |= dict.fromkeys((name, *(f"{name}{_SEPARATOR}rank {rank} {kind}" for kind in ROWS_OF_RANK)))
        ends[name] = max(ends.get(name, 0.0), value["end"])
    row = f"datum.implementation + '{_SEPARATOR}rank ' + datum.rank + ' ' + datum.kind"
    bar = [{"calculate": row, "as": "row"}, {"calculate": "datum.end - datum.start", "as": "took"}]
    y = {
        "field": "row", "type": "nominal", "scale": {"domain": list(rows)},
        "axis": {
            "title": None, "ticks": False, "domain": False,
            "labelExpr": f"split(datum.value, '{_SEPARATOR}')[1] || datum.value",
            "labelFontWeight": {
                "condition": {"test": f"indexof(datum.value, '{_SEPARATOR}') < 0", "value": "bold"}, "value": "normal"
            },
        },
    }
    # An outline in the bar's own colour separates neighbours and makes kernels of less than a pixel visible.
    outline = {
        "condition": {"test": "datum.kind === 'communication'", "value": ROWS_OF_RANK["communication"]},
        "value": ROWS_OF_RANK["compute"],
    }
    tooltip = [
        *_tooltip("implementation", "rank", "kernel"), {"field": "start", "format": ",.1f", "title": "start, µs"},
        {"field": "took", "format": ",.4r", "title": "duration, µs"},
    ]
    mark = {"height": {"band": 0.75}, "fillOpacity": 0.65, "strokeWidth": 0.75}
    return _launches(
        values, y, ends.values(), ROWS_OF_RANK, mark, 16 * len(rows), bar, stroke=outline, tooltip=tooltip
    )


def roof(ceilings: Ceilings, rate: float | None, points: Values) -> list[dict[str, float]]:
    """Return the corners of the roof above the points. rate: FLOP per second of matrix products."""
    reached = [point["intensity"] for point in points]
    corners = ceilings.roof(rate, min(reached) / 4, max(reached) * 4)
    return [{"intensity": at, "gflops": height / 1e9} for at, height in corners]


def roofline_layers(
    points: Values, roofs: Values, shapes: Mapping[str, str], colours: Spec, mark: Spec, title: str = "FLOP per byte",
    **axis: Any,
) -> list[Spec]:
    """Return points below their roofs.

    points: {"implementation", "intensity" (FLOP per byte), "gflops", "kind"}. roofs: {"intensity", "gflops", "roof" (if
    there are several)}. shapes: by kind. mark: of the points. title: of the axis of intensities. axis: of both axes.
    """
    axes: Spec = {
        "x": {"field": "intensity", **_quantity(title, format="~g", **axis), "scale": _LOG},
        "y": {"field": "gflops", **_quantity("GFLOP/s", format="~s", **axis), "scale": {"type": "log"}},
    }
    shape = {
        "field": "kind", "type": "nominal", "legend": {"title": None},
        "scale": {"domain": list(shapes), "range": list(shapes.values())},
    }
    tooltip = _tooltip("implementation", "kind", intensity=".4s", gflops=".4s")
    several = {"detail": {"field": "roof", "type": "nominal"}} if any("roof" in corner for corner in roofs) else {}
    return [
        {"data": {"values": list(roofs)}, "mark": {"type": "line", "strokeDash": [5, 3]},
         "encoding": {**axes, **several}},
        {"data": {"values": list(points)},
         "mark": {"type": "point", "filled": False, "strokeWidth": 2, **mark},
         "encoding": {**axes, "color": colours, "shape": shape, "tooltip": tooltip}},
    ]


def roofline(points: Values, ceilings: Ceilings, rate: float | None, palette: Mapping[str, str]) -> Spec:
    """Draw the roofline of a case. points: as in `roofline_layers`. rate: FLOP per second of matrix products."""
    names = dict.fromkeys(str(point["implementation"]) for point in points)
    shapes = {"measured": "circle", "measured, by measured bytes": "triangle-up", "roofline": "stroke"}
    own = colour("implementation", {name: palette[name] for name in names})
    layers = roofline_layers(points, roof(ceilings, rate, points), shapes, own, {"size": 90})
    return _page_chart([], layers, height=300)


def traffic(values: Values, names: Sequence[str], compulsory: float | None) -> Spec:
    """Draw the bytes of a call. values: {"implementation", "kind", "mb"}. compulsory: MB."""
    x = _quantity("MB")
    kinds = list(dict.fromkeys(str(value["kind"]) for value in values))
    palette = dict(zip(kinds, (_QUIET, "#c44e52", _THIRD), strict=False))
    bars = {
        "y": _rows(names), "yOffset": {"field": "kind", "sort": kinds}, "x": {"field": "mb", **x},
        "color": colour("kind", palette, orient="top"), "tooltip": _tooltip("implementation", "kind", mb=",.4r"),
    }
    layers: list[Spec] = [{"mark": {"type": "bar"}, "encoding": bars}]
    if compulsory is not None:
        rule = {"x": {"field": "compulsory", **x}, "tooltip": _tooltip(compulsory=",.4r")}
        mark = {"type": "rule", "strokeWidth": 2, "strokeDash": [4, 3]}
        layers.append({"data": {"values": [{"compulsory": compulsory}]}, "mark": mark, "encoding": rule})
    return _page_chart(values, layers, height=len(names) * (12 * len(kinds) + 6 if len(kinds) > 1 else _BAR))
