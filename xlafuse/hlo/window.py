"""Attributes that describe dimensions: {0,2}, and the windows of convolutions and reductions."""

from dataclasses import dataclass

from xlafuse.hlo.shape import Malformed, read_integer


@dataclass(frozen=True)
class WindowDimension:
    """One dimension of a convolution's or a reduction's window; negative padding crops elements."""

    size: int
    stride: int = 1
    padding_low: int = 0
    padding_high: int = 0
    base_dilation: int = 1
    window_dilation: int = 1


def read_dimensions(text: str) -> tuple[int, ...]:
    """Read {0,2} or {}."""
    return tuple([read_integer(dimension) for dimension in text.strip("{}").split(",") if dimension.strip()])


def read_window(text: str) -> tuple[WindowDimension, ...]:
    """Read {size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=1x1 rhs_dilate=1x1 rhs_reversal=0x0}."""
    fields = {}
    for piece in text.strip("{}").split():
        key, _, value = piece.partition("=")
        fields[key] = value.split("x")
    sizes = [read_integer(size) for size in fields.get("size", ())]

    def numbers(key: str) -> list[int]:
        values = [read_integer(value) for value in fields.get(key, ["1"] * len(sizes))]
        if len(values) != len(sizes):
            raise Malformed
        return values

    padding = fields.get("pad", ["0_0"] * len(sizes))
    if len(padding) != len(sizes):
        raise Malformed
    low, high = zip(*map(_padding, padding), strict=True) if padding else ((), ())
    rows = zip(sizes, numbers("stride"), low, high, numbers("lhs_dilate"), numbers("rhs_dilate"), strict=True)
    return tuple(WindowDimension(*row) for row in rows)


def _padding(text: str) -> tuple[int, int]:
    low, _, high = text.partition("_")
    return _signed(low), _signed(high)


def _signed(text: str) -> int:
    return -read_integer(text[1:]) if text.startswith("-") else read_integer(text)
