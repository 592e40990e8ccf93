"""The precision of a step's products. A GPU computes those of float32 arrays several times as fast in TF32 as in IEEE
float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ..graph.analyse.roofline import roofline_time_us
from ..sources.target_ceilings import target_ceilings
from .evidence import Measured
from .parts import Piece
from .step import Step

# In the names of cuBLAS's kernels. Those of TF32 have "tf32" or "s1688gemm".
_IEEE = re.compile(r"(?<![a-z])sgemm|xmma_gemm_f32f32_f32f32_f32_\w*ffma")
_TF32 = re.compile(r"tf32|s1688gemm")


def precision_of_products(pieces: Iterable[Piece]) -> str:
    """Return the precision in which products take most of their time, as data sheets have it.

    It is "float32-ieee", "float32-tf32", or "bfloat16" for types of 16 bits and for names that tell none.
    """
    times = {"bfloat16": 0.0, "float32-ieee": 0.0, "float32-tf32": 0.0}
    for piece in pieces:
        name = piece.kernel.runtime_name or piece.kernel.name
        if _IEEE.search(name):
            times["float32-ieee"] += piece.time_us
        elif _TF32.search(name):
            times["float32-tf32"] += piece.time_us
        elif piece.is_product:
            times["bfloat16"] += piece.time_us
    return max(times, key=times.__getitem__)


def ieee_products(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the kernels whose names say that they multiply in IEEE float32. A generated kernel's name does not."""
    return [piece for piece in pieces if _IEEE.search(piece.kernel.runtime_name or piece.kernel.name)]


def in_tf32(step: Step, products: Iterable[Piece], pair: Measured, target: str) -> Measured:
    """Return a measured pair of IEEE float32 and TF32, scaled to products of a step.

    They gain as much as the pair's whole call, and none takes less than its roofline time in TF32.
    """
    ceilings, after = target_ceilings(target).at("tf32"), 0.0
    for piece in products:
        graph = step.graphs.get(piece.graph)
        roofline = None if graph is None else roofline_time_us(graph, piece.kernel, ceilings)
        after += min(piece.time_us, max(piece.time_us * pair.time_us / pair.before_us, roofline or 0.0))
    return replace(pair, work_ratio=after / pair.time_us)
