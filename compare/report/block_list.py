"""The table of blocks, their cases and implementations, as text, JSON or Markdown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from .. import targets
from ..base.text import escaped
from ..plan.plan import SUITES
from ..spec.block import Block
from ..spec.case import Shape
from ..spec.dtype import DTYPES
from ..spec.tensor import Tensor


def as_json(blocks: Sequence[Block]) -> str:
    """Return {"schema", "blocks": [...], "targets": [...]}, with every name that `xlafuse run` takes."""
    names = {"blocks": [_block(block) for block in blocks], "targets": targets.names()}
    return json.dumps({"schema": "xlafuse.list/1", **names}, indent=1)


def as_text(blocks: Sequence[Block]) -> str:
    return "\n\n".join([*map(_block_text, blocks), f"targets (xlafuse list targets): {', '.join(targets.names())}"])


def as_markdown(blocks: Sequence[Block]) -> str:
    """Return a table with a line a block: its summary and its implementations."""
    from tabulate import tabulate

    rows = [
        [escaped(text) for text in (block.name, block.summary, ", ".join(i.name for i in block.implementations))]
        for block in blocks
    ]
    return tabulate(rows, headers=["block", "what it is", "implementations"], tablefmt="github")


def _block(block: Block) -> dict[str, Any]:
    return {
        "name": block.name,
        "summary": block.summary,
        "inputs": {t.name: list(t.axes) for t in block.inputs},
        "outputs": {t.name: list(t.axes) for t in block.outputs},
        "attributes": dict(block.attributes),
        "parameters": list(block.parameters),
        "own_dtypes": {t.name: t.dtype for t in (*block.inputs, *block.outputs) if t.dtype},
        "directions": list(block.directions),
        "cases": {
            suite: [
                {
                    "name": s.name, "sizes": dict(s.sizes), "dtypes": list(s.dtypes),
                    "precisions": list(s.precisions_in(suite)),
                    "directions": [d for d in block.directions if d in s.directions],
                }
                for s in block.shapes_in(suite)
            ]
            for suite in SUITES
        },
        "implementations": [
            {
                "name": i.name, "compiler": i.backend_name, "summary": i.summary, "target": i.target,
                "directions": [d for d in block.directions if d in i.directions], "requires": list(i.requires),
            }
            for i in block.implementations
        ],
    }


def _block_text(block: Block) -> str:
    lines = [f"{block.name}: {block.summary}"]
    lines += textwrap.wrap(
        f"{_tensors(block.inputs)} -> {_tensors(block.outputs)}", 98, initial_indent="  ", subsequent_indent="    "
    )
    if attributes := [*(f"{name}={value}" for name, value in block.attributes.items()), *block.parameters]:
        lines.append(f"  attributes: {', '.join(attributes)}")
    lines.append(f"  directions: {', '.join(block.directions)}")
    for suite in SUITES:
        if shapes := block.shapes_in(suite):
            lines.append(f"  cases of suite {suite}:")
            lines += [f"    {_shape_text(shape, block, suite)}" for shape in shapes]
    lines.append("  implementations:")
    width = max(len(i.name) for i in block.implementations)
    for i in block.implementations:
        lines.append(f"    {i.name:{width}}  {i.summary}")
        lines.append(f"    {'':{width}}  {i.backend_name}: {i.target}")
        if i.requires:
            lines.append(f"    {'':{width}}  needs {', '.join(i.requires)}")
    return "\n".join(lines)


def _tensors(tensors: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{t.name}[{_axes(t)}]{f' {t.dtype}' if t.dtype else ''}" for t in tensors)


def _axes(tensor: Tensor) -> str:
    """Return the axes, with a question mark after one that only some shapes have."""
    return ", ".join(f"{axis}?" if axis in tensor.optional else axis for axis in tensor.axes)


def _shape_text(shape: Shape, block: Block, suite: str) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in shape.sizes.items())
    dtypes = ", ".join(DTYPES[dtype].short for dtype in shape.dtypes)
    found = shape.precisions_in(suite)
    precisions = "" if found == ("ieee",) else f" ({', '.join(found)})"
    fewer = [d for d in block.directions if d in shape.directions]
    directions = "" if fewer == list(block.directions) else f" ({', '.join(fewer)} only)"
    return f"{shape.name}  {sizes}  {dtypes}{precisions}{directions}"
