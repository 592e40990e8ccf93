"""Ceilings of a target's GPU, recorded in its pack, for code that was compiled and not measured."""

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
    """Return the ceilings of the graph's GPU and its target's name, or (None, "") without a pack of it."""
    name = targets.of_device(graph.target)
    return (None, "") if name is None else (target_ceilings(name), name)
