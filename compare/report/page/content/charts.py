"""The charts of a case's page as Vega-Lite specifications; static/charts.js adds the page's colours.

The page also shows the numbers of each chart in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from ....graph.analyse.roofline import Ceilings
from ....plan.speedup import TIE

Spec = dict[str, Any]
Values = Sequence[Mapping[str, Any]]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier; nothing is fetched
# Legible on white and on black.
KINDS = {
    "gemm": "#4c78a8", "attention": "#b279a2", "reduction": "#e0862f", "elementwise": "#54a24b", "copy": "#c44e52",
    "other": "#8c8c8c",
}
_QUIET, _LOUD, _THIRD = "#7a8fb8", "#e0862f", "#b79a20"
ROWS_OF_RANK = {"communication": _LOUD, "compute": KINDS["gemm"]}
_SEPARATOR = " / "  # between an implementation and a row of a GPU
_BAR = 22  # pixels for each row of bars
_US = {"type": "quantitative", "axis": {"title": "µs"}}
_LOG = {"type": "log", "nice": False}


def _spec(values: Values, layers: list[Spec], **rest: Any) -> Spec:
    return {
        "$schema": _SCHEMA, "width": "container", "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": list(values)}, "layer": layers, **rest,
    }


def _rows(names: Sequence[str]) -> Spec:
    """Return an axis with one row for each implementation, in this order."""
    return {"field": "implementation", "type": "nominal", "sort": list(names), "axis": {"title": None}}


def _colour(field: str, palette: Mapping[str, str], **legend: Any) -> Spec:
    scale = {"domain": list(palette), "range": list(palette.values())}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None, **legend}}


def _tooltip(*fields: str, **formatted: str) -> list[Spec]:
    """Return a tooltip: plain fields, then fields with a number format."""
    plain = [{"field": field, "type": "nominal"} for field in fields]
    return [*plain, *({"field": field, "format": form} for field, form in formatted.items())]


def times(values: Values, names: Sequence[str]) -> Spec:
    """Draw device time, its recoverable part, and half the interquartile range of its samples on each side.

    values: {"implementation", "time", "recoverable" (or null), "low", "high", "label"}, µs.
    """
    y = _rows(names)
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
    tooltip = _tooltip("implementation", "label", recoverable=".4s", low=".5s", high=".5s")
    bar = {
        "y": y, "x": {"field": "us", **_US, "stack": "zero"}, "order": {"field": "order"}, "tooltip": tooltip,
        "color": _colour("kind of time", palette, orient="top", columns=2),
    }
    whisker = {"y": y, "x": {"field": "low", **_US}, "x2": {"field": "high"}, "tooltip": tooltip}
    label = {"y": y, "x": {"field": "time", **_US}, "text": {"field": "label"}}
    layers: list[Spec] = [
        {"transform": split, "mark": {"type": "bar", "height": {"band": 0.62}}, "encoding": bar},
        {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": whisker},
        {"mark": {"type": "text", "align": "left", "dx": 8}, "encoding": label},
    ]
    return _spec(values, layers, height=_BAR * len(names), padding={"right": 60})


def ratios(values: Values, names: Sequence[str], baseline: str) -> Spec:
    """Draw ratios of paired rounds to the baseline with their 95% intervals; the band marks a tie.

    values: {"implementation", "ratio", "low", "high", "word"}.
    """
    axis = {"title": f"time / {baseline}'s (below 1 is faster)", "format": "~g"}
    x = {"type": "quantitative", "scale": {**_LOG, "padding": 12}, "axis": axis}
    y = _rows(names)
    tooltip = _tooltip("implementation", "word", ratio=".3f", low=".3f", high=".3f")
    band = {"x": {"field": "from", **x}, "x2": {"field": "to"}, "color": {"value": _QUIET}}
    layers: list[Spec] = [
        {"data": {"values": [{"from": 1 / (1 + TIE), "to": 1 + TIE}]}, "mark": {"type": "rect", "opacity": 0.35},
         "encoding": band},
        {"mark": {"type": "rule", "strokeWidth": 2},
         "encoding": {"y": y, "x": {"field": "low", **x}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 60},
         "encoding": {"y": y, "x": {"field": "ratio", **x}, "tooltip": tooltip}},
    ]
    return _spec(values, layers, height=_BAR * len(names))


def kernels(names: Sequence[str], longest: float, until: float) -> Spec:
    """Draw kernels as bars on one time axis. The axis first ends at `until`; a slider moves its end.

    static/kernels.js makes the values, from the bars of kernels.py and the data of the fusion graphs.
    """
    x = {**_US, "scale": {"domainMin": 0, "domainMax": {"expr": "until"}, "nice": False}}
    encoding = {
        "y": _rows(names), "x": {"field": "start", **x}, "x2": {"field": "end"},
        "color": _colour("kind", KINDS, orient="top"),
        "tooltip": _tooltip("implementation", "kernel", "stages", "reads", "writes", "took", "roofline time", "bound"),
    }
    mark = {
        "type": "bar", "clip": True, "height": {"band": 0.72}, "stroke": "#ffffff", "strokeWidth": 0.5,
        "cursor": "pointer",
    }
    slider = {"input": "range", "min": 1, "max": ceil(longest), "step": 1, "name": "axis until, µs "}
    params = [{"name": "until", "value": ceil(until), "bind": slider}]
    return _spec([], [{"mark": mark, "encoding": encoding}], height=_BAR * len(names), params=params)


def ranks(values: Values) -> Spec:
    """Draw one call of each implementation, with two rows for each GPU: communication and computation.

    All rows have one time axis; a slider moves its end. values: as ranks.calls makes them, µs.
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
    x = {**_US, "scale": {"domainMin": 0, "domainMax": {"expr": "untilOfRanks"}, "nice": False}}
    encoding = {
        "y": y, "x": {"field": "start", **x}, "x2": {"field": "end"},
        "color": _colour("kind", ROWS_OF_RANK, orient="top"),
        # An outline in the bar's own colour separates neighbours and makes kernels of less than a pixel visible.
        "stroke": {
            "condition": {"test": "datum.kind === 'communication'", "value": ROWS_OF_RANK["communication"]},
            "value": ROWS_OF_RANK["compute"],
        },
        "tooltip": [
            *_tooltip("implementation", "rank", "kernel"),
            {"field": "start", "format": ",.1f", "title": "start, µs"},
            {"field": "took", "format": ",.4r", "title": "duration, µs"},
        ],
    }
    mark = {
        "type": "bar", "clip": True, "height": {"band": 0.75}, "fillOpacity": 0.65, "strokeWidth": 0.75,
        "cursor": "pointer",
    }
    slider = {"input": "range", "min": 1, "max": ceil(max(ends.values())), "step": 1, "name": "axis until, µs "}
    until = min(max(ends.values()), 6 * min(ends.values()))
    params = [{"name": "untilOfRanks", "value": ceil(until), "bind": slider}]
    return _spec(
        values, [{"transform": bar, "mark": mark, "encoding": encoding}], height=16 * len(rows), params=params
    )


def roofline(values: Values, ceilings: Ceilings, rate: float | None, palette: Mapping[str, str]) -> Spec:
    """Draw the roofline of a case.

    values: {"implementation", "intensity" (FLOP per byte), "gflops", "kind"}. rate: FLOP per second of matrix products.
    """
    points = [value["intensity"] for value in values]
    corners = ceilings.roof(rate, min(points) / 4, max(points) * 4)
    roof = [{"intensity": at, "gflops": reached / 1e9} for at, reached in corners]
    x = {"field": "intensity", "type": "quantitative", "scale": _LOG}
    y = {"field": "gflops", "type": "quantitative", "scale": {"type": "log"}}
    x |= {"axis": {"title": "FLOP per byte", "format": "~g"}}
    y |= {"axis": {"title": "GFLOP/s", "format": "~s"}}
    names = dict.fromkeys(str(value["implementation"]) for value in values)
    marks = {"measured": "circle", "measured, by measured bytes": "triangle-up", "roofline": "stroke"}
    shape = {
        "field": "kind", "type": "nominal", "legend": {"title": None},
        "scale": {"domain": list(marks), "range": list(marks.values())},
    }
    dots = {
        "x": x, "y": y, "color": _colour("implementation", {name: palette[name] for name in names}), "shape": shape,
        "tooltip": _tooltip("implementation", "kind", intensity=".4s", gflops=".4s"),
    }
    layers: list[Spec] = [
        {"data": {"values": roof}, "mark": {"type": "line", "strokeDash": [5, 3]}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "size": 90, "filled": False, "strokeWidth": 2}, "encoding": dots},
    ]
    return _spec(values, layers, height=300)


def traffic(values: Values, names: Sequence[str], compulsory: float | None) -> Spec:
    """Draw the bytes of a call. values: {"implementation", "kind", "mb"}. compulsory: MB."""
    x = {"type": "quantitative", "axis": {"title": "MB"}}
    kinds = list(dict.fromkeys(str(value["kind"]) for value in values))
    palette = dict(zip(kinds, (_QUIET, "#c44e52", _THIRD), strict=False))
    bars = {
        "y": _rows(names), "yOffset": {"field": "kind", "sort": kinds}, "x": {"field": "mb", **x},
        "color": _colour("kind", palette, orient="top"), "tooltip": _tooltip("implementation", "kind", mb=",.4r"),
    }
    layers: list[Spec] = [{"mark": {"type": "bar"}, "encoding": bars}]
    if compulsory is not None:
        rule = {"x": {"field": "compulsory", **x}, "tooltip": _tooltip(compulsory=",.4r")}
        mark = {"type": "rule", "strokeWidth": 2, "strokeDash": [4, 3]}
        layers.append({"data": {"values": [{"compulsory": compulsory}]}, "mark": mark, "encoding": rule})
    return _spec(values, layers, height=len(names) * (12 * len(kinds) + 6 if len(kinds) > 1 else _BAR))
