"""Text and numbers for people: one printable line, significant digits."""

import math
import re
import unicodedata
from functools import lru_cache


@lru_cache(maxsize=1 << 14)  # a page shows the same names many times
def printable(text: str, limit: int = 300) -> str:
    """Return `text` on one line, cut at `limit`, without characters that move a cursor or reorder text.

    A run's folder may come from an untrusted source, and compilers quote colour codes in their errors.
    """
    start = text[: 4 * limit]
    if not start.isprintable():  # most names are printable, and skipping them takes a tenth of the time
        start = "".join(c if _shown(c) else " " for c in start)
    words = " ".join(start.split())
    if len(words) <= limit and len(text) <= 4 * limit:
        return words
    return f"{words[:limit]}… ({len(text)} characters)"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with these significant digits and no exponent. Integers stay whole."""
    if value is None:
        return ""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def escaped(text: str) -> str:
    """Return Markdown and HTML as plain text."""
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code_span(text: str, limit: int = 300) -> str:
    """Return a line as code within Markdown."""
    line = printable(text, limit)
    ticks = _ticks(line, 1)
    space = " " if "`" in line else ""
    return f"{ticks}{space}{line}{space}{ticks}"


def code_block(text: str, language: str = "") -> str:
    """Return text as a block of code in Markdown."""
    fence = _ticks(text, 3)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _ticks(text: str, least: int) -> str:
    """Return more backticks than follow one another in the text."""
    return "`" * max(least, *(1 + len(run) for run in re.findall("`+", text)), 0)


def _shown(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
