"""Vector addition: out = x + y."""

from collections.abc import Mapping

from torch import Tensor

from xlafuse.triton_side.calls.stages import stage


def apply(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """x [elements], y [elements] -> out [elements], in the inputs' dtype."""
    with stage("add"):
        return {"out": inputs["x"] + inputs["y"]}
