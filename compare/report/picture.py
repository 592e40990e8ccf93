"""Rows as a picture for a page or a pull request: device times as bars, or the roofline; SVG or PNG.

Vega-Lite in vl-convert-python draws it, without a browser and without network. The background is transparent, and the
colours are legible on white and on GitHub's dark background. The same rows give the same bytes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..base.text import number, printable
from ..base.usage import UsageError, write_file
from ..graph.analyse.roofline import Ceilings
from ..sources.row import Row, product_rate
from . import charts
from .charts import Spec
from .columns import marks, marks_explained
from .table import title

INSTALL = "pip install 'xlafuse[html]'"
FORMATS = (".svg", ".png")
MOST_CASES = 24  # charts above each other; a longer picture is unreadable
INK = "#787878"  # 4.4 : 1 on white, 4.3 : 1 on GitHub's dark ground
_WIDTH = 520
_PADDING = {"left": 24, "right": 40, "top": 8, "bottom": 8}  # the viewer's fonts may be wider than those of the layout
_TIME = "device time, µs: median ± half the interquartile range"
_CONFIG: Spec = {
    "background": "transparent", "font": "Arial, Helvetica, sans-serif", "view": {"stroke": None},
    "axis": {"labelColor": INK, "titleColor": INK, "gridColor": INK, "gridOpacity": 0.25, "domainColor": INK,
             "tickColor": INK, "labelLimit": 200, "titleFontWeight": "normal", "labelFontSize": 12},
    "legend": {"labelColor": INK, "titleColor": INK, "labelLimit": 200, "labelFontSize": 12},
    "title": {"color": INK, "subtitleColor": INK, "anchor": "start", "frame": "group", "fontSize": 13,
              "subtitleFontSize": 11},
    "text": {"color": INK, "fontSize": 12}, "rule": {"color": INK}, "line": {"color": INK},
}


def write(file: Path, spec: Spec) -> None:
    """Draw the picture into a file that ends in .svg or .png.

    Raises UsageError for another ending, without vl-convert-python, and for a file that cannot be written.
    """
    form = file.suffix.lower()
    if form not in FORMATS:
        raise UsageError(f"{file}: a picture ends in {' or '.join(FORMATS)}")
    if importlib.util.find_spec("vl_convert") is None:
        raise UsageError(f"a picture needs vl-convert-python: {INSTALL}")
    import vl_convert

    content = vl_convert.vegalite_to_svg(spec).encode() if form == ".svg" else vl_convert.vegalite_to_png(spec, scale=2)
    write_file(file, content)


def times(rows: Sequence[Row], colours: Mapping[str, str]) -> Spec:
    """Return each case's device times, fastest first, with device_time_us_spread to either side.

    Raises UsageError where no row has a time, and for too many cases.
    """
    groups = _cases(rows, "device_time_us")
    colour = {**_colour(groups, colours), "legend": None}
    return _stacked([_times(label, group, colour) for label, group in groups.items()])


def roofline(rows: Sequence[Row], ceilings: Mapping[str, Ceilings], colours: Mapping[str, str]) -> Spec:
    """Return each case's rates and roofline rates, under the roof of their segment.

    ceilings: by segment. Raises UsageError where no row has a rate, and for too many cases.
    """
    known = [row for row in rows if row.intensity_flop_per_byte and row.segment in ceilings]
    groups = _cases(known, "gflop_per_s")
    colour = _colour(groups, colours)
    return _stacked([_roofline(label, group, ceilings, colour) for label, group in groups.items()])


def colours(rows: Iterable[Row]) -> dict[str, str]:
    """Return a colour for each implementation. Give it all rows of a run, so that all pictures have the same colours.
    """
    return charts.colours(map(_name, rows))


def _cases(rows: Iterable[Row], needed: str) -> dict[str, list[Row]]:
    """Return the rows that have the needed number, by title."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if getattr(row, needed):
            groups.setdefault(title(row), []).append(row)
    if not groups:
        raise UsageError(f"nothing to draw: no row here has {needed}; only runs on a GPU take times")
    if len(groups) > MOST_CASES:
        raise UsageError(f"{len(groups)} cases are too many for a picture; select with --block, --case, --direction")
    return groups


def _stacked(stacked: list[Spec]) -> Spec:
    return {
        "$schema": charts.SCHEMA, "config": _CONFIG, "padding": _PADDING, "vconcat": stacked,
        "resolve": {"legend": {"color": "shared"}},
    }


def _name(row: Row) -> str:
    return printable(str(row.implementation), 40)


def _times(label: str, rows: list[Row], colour: Spec) -> Spec:
    values = []
    for row in sorted(rows, key=lambda row: (row.device_time_us, _name(row))):
        time, spread = row.device_time_us or 0.0, row.spread_us or 0.0
        values.append({
            "implementation": _name(row), "time": time, "low": max(0.0, time - spread), "high": time + spread,
            "label": " ".join(filter(None, [number(time), "µs", marks(row)])),
        })
    names = [str(value["implementation"]) for value in values]
    x: Spec = {"type": "quantitative", "axis": {"title": _TIME, "format": ".6~g"}}
    return {
        "title": {"text": label, "subtitle": marks_explained(rows)},
        "width": _WIDTH, "height": {"step": 22}, "data": {"values": values},
        "layer": charts.time_layers(names, x, {"x": {"field": "time", **x}, "color": colour}, "high"),
    }


def _roofline(label: str, rows: list[Row], ceilings: Mapping[str, Ceilings], colour: Spec) -> Spec:
    points = [
        {"implementation": _name(row), "intensity": row.intensity_flop_per_byte, "gflops": rate, "kind": kind}
        for row in rows
        for rate, kind in ((row.gflop_per_s, "reached"), (row.roofline_gflop_per_s, "roofline")) if rate
    ]
    roofs = []
    for segment, row in {row.segment or "": row for row in reversed(rows)}.items():
        rate = product_rate(row.block, row.dtype, row.precision, ceilings[segment])
        roofs += [{"roof": segment, **corner} for corner in charts.roof(ceilings[segment], rate, points)]
    shapes = {"reached": "circle", "roofline": "stroke"}
    mark, intensity = {"size": 80, "opacity": 1}, "FLOP per declared byte"
    layers = charts.roofline_layers(points, roofs, shapes, colour, mark, intensity, grid=False)
    return {"title": label, "width": _WIDTH, "height": 260, "layer": layers}


def _colour(groups: Mapping[str, list[Row]], colours: Mapping[str, str]) -> Spec:
    """Return one scale for all charts of the picture."""
    shown = {_name(row) for rows in groups.values() for row in rows}
    palette = {name: colour for name, colour in colours.items() if name in shown}
    return charts.colour("implementation", palette, symbolType="circle")
