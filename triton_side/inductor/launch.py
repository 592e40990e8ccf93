"""How Inductor's code launches a kernel: configuration, grid, and the layouts of a library call's operands."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from xlafuse.triton_side.inductor.graph import Layout, Shape
from xlafuse.triton_side.inductor.ir_text import MAX_ELEMENTS

_MOST_Y = 65535  # blocks in y and z of any NVIDIA GPU
VIEW = re.compile(r"reinterpret_tensor\((\w+), (\([^()]*\)), (\([^()]*\)), \d+\)")
_WORD = re.compile(r"\w+")


def configuration(text: str | None) -> dict[str, Any]:
    """Return Triton's text of a configuration ("XBLOCK: 64, num_warps: 4, maxnreg: None") by name; without Nones."""
    found = {}
    for name, _, value in (part.partition(": ") for part in (text or "").split(", ")):
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return {name: value for name, value in found.items() if name and value is not None and value != ""}


def grid(kind: str, sizes: Mapping[str, int], config: Mapping[str, Any], last: Sequence[int]) -> Shape | None:
    """Return the blocks in x, y and z of a launch; None where the code does not tell.

    kind: Inductor's `grid_type`. sizes: the numbers among the arguments, by parameter. last: the arguments after the
    kernel's own. The rules are those of torch 2.11 to 2.13 (`GridExpr` in
    torch/_inductor/runtime/triton_heuristics.py).
    """

    def blocks(axis: str) -> int:
        return -(-sizes[f"{axis}numel"] // int(config.get(f"{axis.upper()}BLOCK", 1)))

    try:
        match kind:
            case "Grid1D":
                return blocks("x"), 1, 1
            case "Grid2D":
                return blocks("x"), blocks("y"), 1
            case "Grid3D":
                return blocks("x"), blocks("y"), blocks("z")
            case "Grid2DWithYZOverflow":
                rows = blocks("y")
                slices = -(-rows // _MOST_Y)
                return blocks("x"), -(-rows // max(slices, 1)), slices
            case "SplitScanGrid":
                return blocks("r0_"), sizes["xnumel"], 1
            case "CooperativeReductionGrid":
                return int(config["RSPLIT"]), blocks("x"), 1
            case "MixOrderReductionGrid":
                return -(-sizes["xnumel"] // int(config["RSPLIT_SIZE"])), 1, 1
            case "FixedGrid":
                x, y, z = last
                return x, y, z
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        pass
    return None


def layouts_in(line: str) -> dict[str, Layout | None]:
    """Return the layout of each view among a call's arguments; None for a buffer that stands there by itself, too.

    A buffer of which the call has several views with different layouts is left out, and so are all others.
    """
    arguments = line.partition("(")[2]
    views: dict[str, set[Layout]] = {}
    for name, sizes, steps in VIEW.findall(arguments):
        shape, strides = shape_of(sizes), shape_of(steps)
        views.setdefault(name, set()).update([(shape, strides)] if shape is not None and strides is not None else [])
    bare = dict.fromkeys(_WORD.findall(VIEW.sub("", arguments)))
    found: dict[str, Layout | None] = {name: None for name in bare if name not in views}
    return found | {name: next(iter(each)) for name, each in views.items() if len(each) == 1 and name not in bare}


def shape_of(sizes: str | ast.expr) -> Shape | None:
    """Return the shape, or None if no tensor can have these sizes."""
    try:
        value = ast.literal_eval(sizes)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(value, tuple) or len(value) > 64 or any(not isinstance(e, int) or e < 0 for e in value):
        return None
    return value if math.prod(value) < MAX_ELEMENTS else None
