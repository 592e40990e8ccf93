"""A call of a user's function: the function, its arguments and its settings, as the compiling process gets them."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.frameworks import Framework
from ..functions.framework import UnclearCall, UnclearFramework, framework_of, is_stage, refuse_factory, uncompiled
from ..functions.parcel import NotSendable, pack

_JAX_STATE = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion",
    "jax_default_prng_impl", "jax_threefry_partitionable",
)

_SDPA = ("flash", "mem_efficient", "math", "cudnn")


class ExplainError(Exception):
    """A function could not be explained. The message names the function, the reason and the user's line.

    kind: the type of the error in the compiling process, or "". traceback: the one of that process, or "". frames: the
    traceback's frames in the user's code, or "".
    """

    def __init__(self, message: str, *, kind: str = "", traceback: str = "", frames: str = "") -> None:
        super().__init__(message)
        self.kind, self.traceback, self.frames = kind, traceback, frames


@dataclass(frozen=True)
class Call:
    """One function with its arguments, or the `stablehlo` of a Lowered. The rest: as for
    `compare.user.explain.explain_all`."""

    name: str
    framework: Framework
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stablehlo: str | None = None
    again: Callable[[], tuple[Any, Any, Any]] | None = None
    products: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    force: str = ""


class Stays(Exception):
    """A call cannot be made in another Python; the message says why."""


def make_call(
    name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], framework: Framework | None, grad: bool
) -> Call:
    """Return the call. Raises ExplainError for what cannot be called, and where no framework is clear."""
    if is_stage(function, "Lowered"):
        refuse_arguments(name, args, kwargs, grad, framework)
        text = function.as_text(dialect="stablehlo", debug_info=True)
        return Call(name, "jax", None, (), {}, stablehlo=text)
    function = uncompiled(function)
    while isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = uncompiled(function.func)
    if not callable(function):
        raise ExplainError(f"{function!r:.80} cannot be called; give a function, a module, or a Lowered of jax")
    try:
        refuse_factory(name, function, args, kwargs)
        return Call(name, framework or framework_of(name, function, args, kwargs), function, args, kwargs)
    except UnclearFramework as problem:
        raise ExplainError(
            f"{problem}: say framework='jax' or framework='torch' (--framework), or give jax.ShapeDtypeStructs or "
            "tensors"
        ) from None
    except UnclearCall as problem:
        raise ExplainError(str(problem)) from None


def gpus_of_arguments(call: Call) -> int:
    """Return the devices of the largest mesh over which arguments of a JAX function lie; 1 without one."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return 1
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((call.args, call.kwargs)))
    return max((each.mesh.size for each in shardings if isinstance(each, jax.sharding.NamedSharding)), default=1)


def refuse_arguments(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], grad: bool, framework: Framework | None
) -> None:
    """Raise ExplainError for what goes with a function, and not with a lowered or compiled one."""
    if args or kwargs or grad:
        raise ExplainError(f"{name} is already lowered: it takes neither arguments nor grad=True")
    if framework == "torch":
        raise ExplainError(f"{name} is already lowered by JAX: framework='torch' goes with a function")


def state_of(framework: Framework) -> dict[str, Any]:
    """Return this process's settings of a framework that change the code that it compiles; none before its import."""
    return _jax_state() if framework == "jax" else _torch_state()


def packed(call: Call, *, elsewhere: bool = False) -> dict[str, Any]:
    """Return the call's part of a request. elsewhere: for another Python.

    Raises ExplainError for a function that cannot be sent, or Stays where only another Python cannot receive it.
    """
    asked = {"name": call.name, "products": call.products, "settings": dict(call.settings), "force": call.force}
    if elsewhere and call.again is not None:
        return {**asked, "again": pickle.dumps(functools.partial(_packed_again, call.again))}
    if call.stablehlo is not None:
        if elsewhere:
            raise Stays(f"{call.name} was lowered by this process")
        return {**asked, "stablehlo": call.stablehlo}
    try:
        if call.framework == "torch":  # one pickle, so that shared tensors stay shared
            return {**asked, "parcel": pack((call.function, call.args, call.kwargs), arrays=False)}
        return {
            **asked,
            "function": pack(call.function, arrays=not _holds_parameters(call.function), elsewhere=elsewhere),
            "arguments": pack((call.args, call.kwargs), arrays=False, elsewhere=elsewhere),
        }
    except NotSendable as problem:
        raise (Stays if elsewhere else ExplainError)(f"{call.name}: {problem}") from None


def _packed_again(again: Callable[[], tuple[Any, Any, Any]]) -> dict[str, Any]:
    """Import a function and make its arguments, in the compiling process. Return their part of the request."""
    function, args, kwargs = again()
    made = packed(make_call("", function, tuple(args), dict(kwargs), "jax", False))
    return {name: made[name] for name in ("stablehlo", "function", "arguments") if name in made}


def _holds_parameters(function: Any) -> bool:
    """Return True where arrays in a JAX callable are inputs: those of an nnx module, not those of a closure."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(getattr(function, "__self__", function), nnx.Pytree)


def _jax_state() -> dict[str, Any]:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return {}
    values = {option: getattr(jax.config, option) for option in _JAX_STATE}
    return {option: getattr(value, "value", value) for option, value in values.items()}  # enums as plain data


def _torch_state() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    enabled = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _SDPA}
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": enabled,
        "autocast": _autocast_dtype(torch),
    }


def _autocast_dtype(torch: Any) -> str | None:
    if not torch.is_autocast_enabled("cuda"):
        return None
    return str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")
