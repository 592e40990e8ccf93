"""What a target's GPU reached, as its pack has it: for what was compiled for that GPU where nobody measured."""

from __future__ import annotations

import json

from .. import targets
from ..base.usage import one_of
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph


def target_ceilings(name: str) -> Ceilings:
    """Of a target pack. Raises UsageError for an unknown target."""
    one_of("target", name, targets.names())
    return Ceilings.from_json(json.loads((targets.FOLDER / name / "ceilings.json").read_text()))


def own_ceilings(graph: FusionGraph) -> tuple[Ceilings | None, str]:
    """Of the GPU that the graph was compiled for, and its target's name; (None, "") where there is no pack of it."""
    name = targets.of_device(graph.target)
    return (None, "") if name is None else (target_ceilings(name), name)
