"""A shape of the user's own: a block's main shape with other sizes of some axes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace

from ..base.usage import UsageError, one_of
from .block import Block
from .case import Shape, Sizes


def own_shape(block: Block, axes: Mapping[str, int]) -> Shape:
    """Return the main shape with these sizes, named after them: "heads-24-sequence-12288".

    Sizes that follow from others are computed again: 24 heads of attention have 24 `kv_heads`, unless given.
    Raises UsageError for an axis that the block lacks, for a size that follows from others, and for sizes that do not
    fit together.
    """
    main = block.shapes[0]
    own = _arguments(block)
    for axis in axes:
        if axis in main.sizes and axis not in own:
            raise UsageError(f"{block.name}: {axis} follows from other sizes; sizes: {', '.join(own)}")
        one_of("size", axis, own, where=f"of {block.name}")
    optional = {axis for axis in own if _has_default(block, axis, own)}

    def all_sizes(axes: Sizes) -> Sizes:
        return _all(block, {axis: size for axis, size in own.items() if axis not in optional} | dict(axes))

    sizes = all_sizes(axes)
    _check(block, sizes)
    changed = [
        axis for axis in own
        if sizes.get(axis, own[axis]) != own[axis]
        and (axis not in optional or all_sizes({other: axes[other] for other in axes if other != axis}) != sizes)
    ]
    return replace(main, name="-".join(f"{axis}-{sizes[axis]}" for axis in changed), sizes=sizes) if changed else main


def shape_with(block: Block, sizes: Sizes) -> Shape:
    """Return the user's own shape that has these sizes. Raises UsageError where it cannot have them."""
    own = _arguments(block)
    return own_shape(block, {axis: sizes[axis] for axis in own if sizes.get(axis, own[axis]) != own[axis]})


def _arguments(block: Block) -> dict[str, int]:
    """Return the sizes of the main shape that do not follow from others; the default of one that it does not have."""
    main = block.shapes[0].sizes
    if block.sizes is None:
        return dict(main)
    return {axis: main.get(axis, given.default) for axis, given in inspect.signature(block.sizes).parameters.items()}


def _has_default(block: Block, axis: str, own: Sizes) -> bool:
    """Return whether the main shape has the default of an axis."""
    if block.sizes is None or inspect.signature(block.sizes).parameters[axis].default is inspect.Parameter.empty:
        return False
    return _all(block, {name: size for name, size in own.items() if name != axis}) == block.shapes[0].sizes


def _all(block: Block, axes: Sizes) -> Sizes:
    return dict(axes) if block.sizes is None else block.sizes(**axes)


def _check(block: Block, sizes: Sizes) -> None:
    array_axes = {axis for tensor in (*block.inputs, *block.outputs) for axis in tensor.axes}
    for axis, size in sizes.items():
        if size < (1 if axis in array_axes else 0):
            raise UsageError(f"{block.name}: {axis} is {size}; expected at least {1 if axis in array_axes else 0}")
    if sizes.get("heads", 1) % sizes.get("kv_heads", 1):
        raise UsageError(
            f"{block.name}: {sizes['heads']} heads cannot share {sizes['kv_heads']} kv_heads evenly: give both, as in "
            f"heads={sizes['heads']},kv_heads={sizes['heads']}"
        )
