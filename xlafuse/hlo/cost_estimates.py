"""The times that XLA's own cost models expect of a fusion, from its backend_config.

XLA writes them with --xla_gpu_collect_cost_model_stats=true:

    "reification_cost":[{"compute_time_us":91.0,"exec_time_us":93.1,"memory_access_time_us":41.8,"name":"sol"}, ...]
"""

from __future__ import annotations

import json
import math
import re

ANALYTICAL = "analytical"  # the model that XLA names ""
_COSTS = re.compile(r'"reification_cost"\s*:\s*(\[[^\[\]]{1,10000}\])')


def estimates_us(backend_config: str) -> dict[str, float]:
    """Return microseconds of one launch by the name of the model; without numbers that are not finite."""
    found = _COSTS.search(backend_config)
    if found is None:
        return {}
    try:
        costs = json.loads(found[1])
    except ValueError:
        return {}
    known: dict[str, float] = {}
    for cost in costs:
        time = cost.get("exec_time_us") if isinstance(cost, dict) else None
        if isinstance(time, int | float) and math.isfinite(time):
            known[str(cost.get("name") or ANALYTICAL)] = float(time)
    return known
