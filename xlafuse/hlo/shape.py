"""Shapes in HLO text: arrays, tuples of arrays, and their bytes."""

import math
import re
from dataclasses import dataclass, field, replace

# The name of a dtype in HLO -> in numpy, jax and torch.
LONG_NAMES = {
    "pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "c64": "complex64",
    "c128": "complex128", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz", "f8e8m0fnu": "float8_e8m0fnu",
    **{f"{short}{bits}": f"{long}{bits}" for short, long in (("s", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)},
}
MAX_DIGITS = 18  # of one dimension or identifier, so that it fits in 64 bits
UNBOUNDED = -1
_MAX_RANK = 64
_MAX_BYTES = 1 << 62

# bf16[4096,2048]{1,0:T(8,128)}, or a tuple's bracket
_SHAPE_TOKEN = re.compile(r"(?<![a-z0-9])([a-z][a-z0-9]*+)\s*+\[([^\]\[]*+)\](\s*+\{[^{}]*+\})?|b\s*+\(|[()]")
_BITS = re.compile(r"(?:pred|[a-z]+?(\d{1,3})(?:e\d+m\d+[a-z0-9]*)?)$")
_ELEMENT_BITS = re.compile(r"E\s*\(\s*(\d{1,3})\s*\)")
_SPACE = re.compile(r"S\s*\(\s*(\d{1,9})\s*\)")
_TILES = re.compile(r"T\s*((?:\([^()]*\)\s*)+)")
_MOST_TILES = 8


class Malformed(ValueError):
    """Text that the reader does not understand."""


@dataclass(frozen=True)
class Shape:
    """One array: dtype as HLO writes it ("bf16"), dims, bytes in memory (0 for token and opaque).

    The bytes include what a tiled layout pads: f32[3,100]{1,0:T(8,128)} fills 8 x 128 elements. padding: those bytes.
    bits: of an element in memory. space: the number of its memory space, 0 for the device's main memory.
    order: the dimensions from the one that varies fastest in memory; None without a layout. tiled: the layout has
    tiles. Equality ignores both.

    A dynamic dimension `<=8` counts as its bound, 8; an unbounded one, `?`, is UNBOUNDED, and the bytes are 0.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    bits: int = 0
    space: int = 0
    padding: int = 0
    order: tuple[int, ...] | None = field(default=None, compare=False)
    tiled: bool = field(default=False, compare=False)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The step in elements of each dimension; None without a layout, for tiles and for unknown sizes."""
        if self.order is None or self.tiled or UNBOUNDED in self.dims:
            return None
        steps, step = [0] * len(self.dims), 1
        for axis in self.order:
            steps[axis] = step
            step *= self.dims[axis]
        return tuple(steps)


@dataclass(frozen=True, eq=False, repr=False)
class Element:
    """The shape of a result as a tree: an array has a `shape`, a tuple has `elements`; `bytes` is the sum."""

    bytes: int
    elements: tuple["Element", ...] = ()
    shape: Shape | None = None


def read_shapes(text: str) -> tuple[tuple[Shape, ...], Element]:
    """Return the arrays of a shape in order, and the same as a tree. b(f32[2]), a buffer, is an array like f32[2]."""
    shapes: list[Shape] = []
    levels: list[list[Element]] = [[]]
    openings: list[str] = []
    for token in _SHAPE_TOKEN.finditer(text):
        if token[0][-1] == "(":
            openings.append(token[0])
            levels.append([])
        elif token[0] == ")":
            if not openings:
                raise Malformed
            elements = levels.pop()
            if openings.pop() == "(":
                levels[-1].append(Element(sum(element.bytes for element in elements), tuple(elements)))
            else:
                levels[-1] += elements
        else:
            shapes.append(_shape(*token.groups()))
            levels[-1].append(Element(shapes[-1].bytes, shape=shapes[-1]))
    if len(levels) != 1 or len(levels[0]) != 1:
        raise Malformed
    return tuple(shapes), levels[0][0]


def arrays(element: Element) -> tuple[Shape, ...]:
    """Return the arrays of an element in order."""
    found: list[Shape] = []
    pending = [element]
    while pending:
        part = pending.pop()
        if part.shape is not None:
            found.append(part.shape)
        pending += reversed(part.elements)
    return tuple(found)


def _shape(dtype: str, dims_text: str, layout: str | None) -> Shape:
    dims = [] if not dims_text.strip() else dims_text.split(",", _MAX_RANK + 1)
    if len(dims) > _MAX_RANK:
        raise Malformed
    bits = _ELEMENT_BITS.search(layout or "")
    shape = _array(dtype, tuple([_dimension(dim.strip()) for dim in dims]), int(bits[1]) if bits else 0)
    tiles, space = (pattern.search(layout or "") for pattern in (_TILES, _SPACE))
    if layout is not None or not shape.dims:
        shape = replace(shape, order=_order(layout or "", len(shape.dims)), tiled=tiles is not None)
    if tiles and shape.dims and UNBOUNDED not in shape.dims:
        count = _padded_count(shape.dims, shape.order, tiles[1])
        padded = -(-count * shape.bits // 8)
        shape = replace(shape, bytes=padded, padding=padded - shape.bytes)
    return replace(shape, space=int(space[1])) if space else shape


def _order(layout: str, rank: int) -> tuple[int, ...] | None:
    """Return a layout's dimensions, from the one that varies fastest; None unless it has each once."""
    found = tuple(int(axis) for axis in re.findall(r"\d{1,3}", layout.partition(":")[0]))
    return found if sorted(found) == list(range(rank)) else None


def _padded_count(dims: tuple[int, ...], order: tuple[int, ...] | None, tiles: str) -> int:
    """Return the elements of an array after each tile in turn has rounded its dimensions up. tiles: "(8,128)(2,1)".

    A tile covers the dimensions that vary fastest. "*" merges a dimension with the next one.
    """
    extents = list(dims) if order is None else [dims[axis] for axis in reversed(order)]
    found = re.findall(r"\(([^()]*)\)", tiles)
    if len(found) > _MOST_TILES:
        raise Malformed
    for tile in found:
        sizes = [size.strip() for size in tile.split(",", _MAX_RANK + 1)]
        if len(sizes) > _MAX_RANK or sizes[-1] == "*":
            raise Malformed
        extents = [1] * (len(sizes) - len(extents)) + extents
        outer, inner = extents[: len(extents) - len(sizes)], extents[len(extents) - len(sizes) :]
        merged = 1
        blocks: list[int] = []
        for size, extent in zip(sizes, inner, strict=True):
            merged *= extent
            if size != "*":
                side = read_integer(size)
                if not side:
                    raise Malformed
                outer.append(-(-merged // side))
                blocks.append(side)
                merged = 1
        extents = outer + blocks
    count = math.prod(extents)
    if count > _MAX_BYTES:
        raise Malformed
    return count


def _dimension(text: str) -> int:
    return UNBOUNDED if text == "?" else read_integer(text.removeprefix("<="))


def _array(dtype: str, dims: tuple[int, ...], layout_bits: int) -> Shape:
    if dtype in ("token", "opaque"):
        return Shape(dtype, (), 0)
    bits = _BITS.match(dtype)
    if not bits:
        raise Malformed
    element = int(bits[1]) if bits[1] else 8
    if element <= 8:  # an element of less than a byte fills one unless its layout packs it: s4[8,2]{1,0:E(4)}
        element = min(layout_bits, 8) or 8
    if UNBOUNDED in dims:
        return Shape(dtype, dims, 0)
    count = 1
    for size in dims:
        count *= size
        if count > _MAX_BYTES:
            raise Malformed
    return Shape(dtype, dims, -(-count * element // 8), element)


def read_integer(text: str) -> int:
    """Return a non-negative integer of at most MAX_DIGITS digits. Raises Malformed for other text."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise Malformed
    return int(text)
