"""Arguments that a user gives by shape: "bf16[4096,4096], bf16[4096], eps=1e-6"."""

from __future__ import annotations

import ast
import re
from typing import Any

from xlafuse.hlo.shape import LONG_NAMES

from ..base.usage import UsageError, one_of
from .parcel import ArrayLike

# Dtypes as HLO and Triton spell them; long names ("bfloat16") work too.
DTYPES = {
    **LONG_NAMES, **{f"fp{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}
_ARRAY = re.compile(r"(\w+)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*)?)\]")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=\s*(.+)", re.DOTALL)


def parse_arguments(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of "bf16[4096,4096], bf16[4096], eps=1e-6": shapes, or Python literals.

    Raises UsageError.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for piece in _pieces(text):
        match = _KEYWORD.fullmatch(piece)
        if match is None:
            if kwargs:
                raise UsageError(f"--args: {piece!r} has no name but comes after a named argument")
            args.append(_value(piece))
        elif match[1] in kwargs:
            raise UsageError(f"--args: {match[1]!r} is given twice")
        else:
            kwargs[match[1]] = _value(match[2])
    return tuple(args), kwargs


def _pieces(text: str) -> list[str]:
    """Split at commas outside brackets and strings."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
        elif letter == "," and depth == 0:
            pieces.append("")
            continue
        pieces[-1] += letter
    stripped = [piece.strip() for piece in pieces]
    if stripped == [""]:
        return []
    if not all(stripped):
        raise UsageError(f"--args: there is nothing between two commas of {text!r}")
    return stripped


def _value(text: str) -> Any:
    if match := _ARRAY.fullmatch(text):
        dtype = DTYPES.get(match[1], match[1])
        one_of("dtype", dtype, set(DTYPES.values()), sorted(DTYPES))
        return ArrayLike("numpy", tuple(int(size) for size in match[2].split(",") if size.strip()), dtype)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise UsageError(
            f"--args: {text!r} is neither a shape such as bf16[4096,4096] nor a Python value such as 3, 1e-6 or 'a'"
        ) from None
