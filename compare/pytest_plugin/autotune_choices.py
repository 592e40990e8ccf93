"""Compile a user's function for an absent GPU, once for each choice that the GPU's autotuner could make.

A GPU chooses the kernels of matrix products by measuring. Without a recorded choice, the function is compiled with each
kind of kernel.
"""

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
class AutotuneChoices:
    """A function's fusion graphs by choice, in the order in which they are shown. A single one, called "", means that
    nothing was left to choose."""

    name: str
    graphs: Mapping[str, FusionGraph]
    notes: tuple[str, ...]


def compile_choices(
    fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, grad: bool, target: str,
    framework: Framework | None, timeout: float, autotune: Path | None = None,
) -> AutotuneChoices:
    """Compile `fn` for every choice. Arguments as of `explain_all`. Raises compare.user.explain.ExplainError."""
    options: dict[str, Any] = {
        "grad": grad, "target": target, "framework": framework, "timeout": timeout, "autotune": autotune
    }
    first = explain_all({name: fn}, args, kwargs, **options)
    graph = first.graph
    products = _open_choices(fn, graph)
    if not products:
        return AutotuneChoices(name, {"": graph}, first.notes)
    # XLA's default without an autotuner is none of a GPU's choices; Inductor's default is one of them.
    graphs = {} if graph.compiler == "xla" else {"ATen": graph}
    others = explain_all(dict.fromkeys(products, fn), args, kwargs, products=products, **options)
    graphs |= {choice: replace(found, name=name) for choice, found in others.graphs.items()}
    return AutotuneChoices(name, graphs, first.notes)


def _open_choices(fn: Any, graph: FusionGraph) -> dict[str, str]:
    """Return the choices that `graph` leaves open, with the `products` argument of `explain_all` for each."""
    products = [kernel for kernel in graph.kernels or () if is_product(kernel)]
    untuned = any(kernel.provenance == NOT_TUNED for kernel in products)
    if graph.compiler == "xla":
        return {"Triton GEMM": "triton", "cuBLAS": "cublas"} if untuned and graph.target else {}
    found = {"ATen, padded": "padded"} if untuned else {}
    if products and _autotunes_products(fn):
        found["Triton GEMM"] = "triton"
    return found


def _autotunes_products(fn: Any) -> bool:
    """Return True where torch.compile was told to time kernels for matrix products (mode="max-autotune")."""
    ask = getattr(fn, "get_compiler_config", None)
    config: Mapping[str, Any] = (ask() if callable(ask) else None) or {}
    return any(config.get(key) for key in ("max_autotune", "max_autotune_gemm"))
