"""Records to rows of numbers, and rows to tables. Reads a run's folder alone: no GPU, no framework."""

import math
import unicodedata
from functools import lru_cache


@lru_cache(maxsize=1 << 14)  # a page shows the same ones again and again
def printable(text: str, limit: int = 300) -> str:
    """`text` on one line, without characters that move a terminal's cursor or reorder its text, cut at `limit`.

    A run's folder may come from anywhere, and compilers quote colour codes in their errors.
    """
    start = text[: 4 * limit]
    if not start.isprintable():  # else nothing in it is to be replaced: most names, and a tenth of the time
        start = "".join(c if _shown(c) else " " for c in start)
    words = " ".join(start.split())
    if len(words) <= limit and len(text) <= 4 * limit:
        return words
    return f"{words[:limit]}… ({len(text)} characters)"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent, integers whole."""
    if value is None:
        return ""
    if isinstance(value, int) or not math.isfinite(value) or value == 0:
        return f"{value:g}" if isinstance(value, float) else str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def _shown(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
