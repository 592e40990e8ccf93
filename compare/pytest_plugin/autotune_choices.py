"""A user's function compiled for a GPU that is not here: once, or, where that GPU would choose by measuring which
kernels compute its matrix products, once for each choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..graph.model import FusionGraph
from ..graph.operations import is_product
from ..user.explain import Framework, explain_all

NOT_TUNED = "not autotuned"


@dataclass(frozen=True)
class Worlds:
    """graphs: by world, in the order in which they are shown; one, called "", where nothing was left to choose."""

    name: str
    graphs: Mapping[str, FusionGraph]
    notes: tuple[str, ...]


def compiled(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, grad: bool, target: str,
    framework: Framework | None, timeout: float, autotune: Path | None = None,
) -> Worlds:
    """Arguments as of `compare.user.explain.explain_all`. Raises compare.user.explain.ExplainError."""
    options: dict[str, Any] = {
        "grad": grad, "target": target, "framework": framework, "timeout": timeout, "autotune": autotune
    }
    first = explain_all({name: fn}, args, kwargs, **options)
    graph = first.graph
    choices = _choices(fn, graph)
    if not choices:
        return Worlds(name, {"": graph}, first.notes)
    # What XLA takes without its autotuner is no choice of a GPU's; what Inductor takes without tuning is one.
    graphs = {} if graph.compiler == "xla" else {"ATen": graph}
    others = explain_all(dict.fromkeys(choices, fn), args, kwargs, products=choices, **options)
    graphs |= {world: replace(found, name=name) for world, found in others.graphs.items()}
    return Worlds(name, graphs, first.notes)


def _choices(fn: Any, graph: FusionGraph) -> dict[str, str]:
    """World -> `products` of `explain_all`, beside the graph that there is."""
    products = [kernel for kernel in graph.kernels or () if is_product(kernel)]
    untuned = any(kernel.provenance == NOT_TUNED for kernel in products)
    if graph.compiler == "xla":
        return {"Triton GEMM": "triton", "cuBLAS": "cublas"} if untuned and graph.target else {}
    found = {"ATen, padded": "padded"} if untuned else {}
    if products and _tunes_products(fn):
        found["Triton GEMM"] = "triton"
    return found


def _tunes_products(fn: Any) -> bool:
    """Whether torch.compile was told to time kernels for matrix products (mode="max-autotune")."""
    ask = getattr(fn, "get_compiler_config", None)
    config: Mapping[str, Any] = (ask() if callable(ask) else None) or {}
    return any(config.get(key) for key in ("max_autotune", "max_autotune_gemm"))
