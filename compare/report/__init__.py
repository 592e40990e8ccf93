"""Records to rows of numbers, and rows to tables. Reads a run's folder alone: no GPU, no framework."""

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


def _shown(character: str) -> bool:
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
