"""Compile a user's function for an absent GPU, once for each choice that the GPU's autotuner could make.

On a GPU, the autotuner times kernels for each matrix product and takes the fastest. Without the GPU and without a
recorded choice, the function is compiled once with each kind of kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.frameworks import Framework
from ..graph.model import UNMEASURED_CHOICES, FusionGraph
from ..graph.operations import is_product
from ..user.explain import explain_all


@dataclass(frozen=True)
class AutotuneChoices:
    """A function's fusion graphs by choice, in display order. If there is nothing to choose, the only key is ""."""

    name: str
    graphs: Mapping[str, FusionGraph]
    notes: tuple[str, ...]


def compile_choices(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, grad: bool, target: str,
    framework: Framework | None, timeout: float, autotune: Path | None = None,
) -> AutotuneChoices:
    """Compile `fn` for every choice, with the arguments of `explain_all`. Raises compare.user.explain.ExplainError."""
    options: dict[str, Any] = {
        "grad": grad, "target": target, "framework": framework, "timeout": timeout, "autotune": autotune
    }
    first = explain_all({name: fn}, args, kwargs, **options)
    graph = first.graph
    products = _open_choices(fn, graph)
    if not products:
        return AutotuneChoices(name, {"": graph}, first.notes)
    # Without autotuning, Inductor takes ATen, which a GPU may choose, too. XLA takes a kernel that no GPU would choose.
    graphs = {} if graph.compiler == "xla" else {"ATen": graph}
    others = explain_all(dict.fromkeys(products, fn), args, kwargs, products=products, **options)
    graphs |= {choice: replace(found, name=name) for choice, found in others.graphs.items()}
    return AutotuneChoices(name, graphs, first.notes)


def _open_choices(fn: Any, graph: FusionGraph) -> dict[str, str]:
    """Return the choices that were not made for `graph`, each with its `products` argument of `explain_all`."""
    products = [kernel for kernel in graph.kernels or () if is_product(kernel)]
    untuned = any(kernel.provenance in UNMEASURED_CHOICES for kernel in products)
    if graph.compiler == "xla":
        return {"Triton GEMM": "triton", "cuBLAS": "cublas"} if untuned and graph.target else {}
    found = {"ATen, padded": "padded"} if untuned else {}
    if products and _autotunes_products(fn):
        found["Triton GEMM"] = "triton"
    return found


def _autotunes_products(fn: Any) -> bool:
    """Return whether torch.compile autotunes matrix products for `fn`, as with mode="max-autotune"."""
    get_config = getattr(fn, "get_compiler_config", None)
    config: Mapping[str, Any] = (get_config() if callable(get_config) else None) or {}
    return any(config.get(key) for key in ("max_autotune", "max_autotune_gemm"))
