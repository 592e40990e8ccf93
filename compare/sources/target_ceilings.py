"""Ceilings from target packs: the measured bandwidths and product rates of a GPU that this machine need not have.

They give roofline times for code that was compiled for a target and not measured.
"""

from __future__ import annotations

import json

from .. import targets
from ..base.usage import one_of
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph


def target_ceilings(name: str) -> Ceilings:
    """Return the ceilings of a target pack. Raises UsageError for an unknown target."""
    one_of("target", name, targets.names())
    return Ceilings.from_json(json.loads((targets.FOLDER / name / "ceilings.json").read_text()))


def own_ceilings(graph: FusionGraph) -> tuple[Ceilings | None, str]:
    """Return the ceilings and the target name of the graph's GPU, or (None, "") if no target pack is of that GPU."""
    name = targets.of_device(graph.target)
    return (None, "") if name is None else (target_ceilings(name), name)
