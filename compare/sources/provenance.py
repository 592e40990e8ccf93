"""The source of kernels' configurations, in words: replayed from recorded autotuning, predicted or guessed, and why."""

from __future__ import annotations

from collections import Counter

from .. import targets
from ..graph.model import UNMEASURED_CHOICES, FusionGraph

_WORDS = {
    "replayed": "replayed from the {target}'s recorded autotuning",
    "device": "chosen on the GPU",
    "predicted choice": "chosen by predicted times",
    "not autotuned": "not autotuned",
    "compiled": "without a choice to make",
}


def counts(graph: FusionGraph) -> dict[str, int]:
    """Return the number of kernels by their `provenance`, in a fixed order."""
    found = Counter(kernel.provenance for kernel in graph.kernels or ())
    return {provenance: found[provenance] for provenance in _WORDS if found[provenance]}


def sentence(graph: FusionGraph) -> str:
    """Return the counts in words, with the reason why nothing measured chose kernels of XLA; "" without kernels."""
    found = counts(graph)
    words = [f"{number} {_WORDS[name].format(target=graph.target)}" for name, number in found.items()]
    reason = _reason(graph) if any(name in found for name in UNMEASURED_CHOICES) else ""
    return f"kernel configurations: {', '.join(words)}{reason}" if words else ""


def _reason(graph: FusionGraph) -> str:
    """Return why nothing measured chose the kernels. XLA's recorded choices are of one jax version and some modules."""
    if graph.target in targets.names() and targets.load(graph.target).facts:
        return (
            f"; nothing was recorded on the {graph.target}, so these have the compiler's first choice: the GPU would "
            "time candidates, and give products other tiles or a library's kernel"
        )
    if graph.compiler != "xla" or graph.target not in targets.names():
        return ""
    jax = graph.versions.get("jax", "")
    if targets.load(graph.target).xla_autotune_results(jax) is None:
        return f"; the {graph.target} has no recorded choices that jax {jax} reads (see xlafuse doctor)"
    return f"; the {graph.target}'s recorded choices do not cover all of this function"
