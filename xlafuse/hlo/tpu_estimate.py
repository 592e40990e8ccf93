"""The cycles that XLA for TPUs expects an instruction to take, from its backend_config."""

import re

# "window_config":{"kernel_window_bounds":[], ... "estimated_cycles":"874272", ...
_CYCLES = re.compile(r'"estimated_cycles\\?":\s?\\?"(\d{1,18})\\?"')


def cycles(backend_config: str) -> int | None:
    """Return the estimated cycles of one launch; None where XLA gives none, or a 0, which is no estimate."""
    found = _CYCLES.search(backend_config)
    return (int(found[1]) or None) if found else None
