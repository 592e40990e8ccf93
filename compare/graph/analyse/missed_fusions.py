"""The missed fusions of a graph, ranked by what each could save."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import FusionGraph, Reason
from .split_k import split_products


@dataclass(frozen=True)
class PriceError:
    """Realised over predicted savings of forced missed fusions: the middle 80% of the cases lie between low and high.

    gpu: the GPU that measured them.
    """

    cases: int
    low: float
    high: float
    median: float
    gpu: str

    def __str__(self) -> str:
        return (
            f"realised / predicted was {self.low:.2g} to {self.high:.2g} (10% to 90%), median {self.median:.2g}, in "
            f"{self.cases} forced cases on {self.gpu}: docs/fusion-graph.md"
        )


# From the summary of `python -m tools.benchmarks.missed_fusions` on a GPU. No run was made yet, so views show nothing.
PRICE_ERROR: PriceError | None = None


def missed(graph: FusionGraph) -> list[Reason]:
    """Return the graph's reasons, without those between a split-K product and the kernel that adds up its partial sums.

    The compiler split one kernel into the two.
    """
    kernels = graph.kernels or ()
    split = {(kernels[each.product].name, kernels[each.sums].name) for each in split_products(graph)}
    return [reason for reason in graph.reasons if (reason.producer, reason.consumer) not in split]


def ranked(graph: FusionGraph, bandwidth: float | None) -> list[tuple[Reason, float | None]]:
    """Return missed fusions with the microseconds that each would save at `bandwidth` (bytes per second).

    The microseconds are None where the bandwidth is.

    The largest saving comes first. Each is an upper bound: the saved bytes over the bandwidth. It assumes that the
    fused kernel is no slower otherwise and that no byte comes from cache. Savings of two edges of one buffer do not
    add up. Reasons that save no bytes, or an unknown number, are left out.

    Raises ValueError for a bandwidth that is not positive.
    """
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}; a target's is in its measured ceilings")
    saving = sorted((reason for reason in missed(graph) if reason.bytes_saved), key=lambda one: -(one.bytes_saved or 0))
    return [(one, None if bandwidth is None else (one.bytes_saved or 0) / bandwidth * 1e6) for one in saving]
