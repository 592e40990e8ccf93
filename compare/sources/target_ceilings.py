"""Ceilings from target packs: the bandwidths and product rates of a GPU or TPU that this machine need not have.

Those of h100 and h200 are measured. Those of TPUs are the data sheet's, which no program reaches; those of other GPUs
are the data sheet's, scaled by the share that h100 and h200 reach of theirs.

They give roofline times for code that was compiled for a target and not measured.
"""

from __future__ import annotations

from .. import targets
from ..base.usage import one_of
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph


def target_ceilings(name: str) -> Ceilings:
    """Return the ceilings of a target pack. Raises UsageError for an unknown target."""
    one_of("target", name, targets.names())
    return Ceilings.from_json(targets.load(name).ceilings())


def own_ceilings(graph: FusionGraph) -> tuple[Ceilings | None, str]:
    """Return the ceilings and their origin for the graph's device, or (None, "") if no target pack is of it."""
    name = targets.of_device(graph.target)
    return (None, "") if name is None else (target_ceilings(name), origin(name))


def origin(name: str) -> str:
    """Return the words for the origin of a target's ceilings: the name of a GPU, on which they were measured."""
    if targets.is_measured(name):
        return name
    return f"the data sheet of {name}" if targets.is_tpu(name) else f"the scaled data sheet of {name}"
