"""A numerical check of several functions against the first of them, on the CPU of this process.

The functions may be of JAX and of PyTorch. Arrays pass between the two as numpy's. Those in bfloat16 pass as float32
with the name of their dtype.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.frameworks import Framework
from ..sources.explained import Agreement
from ..spec.dtype import EPS

if TYPE_CHECKING:
    import numpy as np

MOST_BYTES = 256 << 20  # of all arguments
ROUNDINGS = 16  # of the coarsest dtype among the results; two programs round different intermediates


class NotChecked(Exception):
    """The functions could not be compared; the message gives the reason and what to do."""


@dataclass(frozen=True)
class _Values:
    """An array outside any framework."""

    values: np.ndarray[Any, Any]
    dtype: str


def check(
    functions: Mapping[str, tuple[Framework, Callable[..., Any]]], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Agreement, ...]:
    """Return how well each function's results agree with the first one's. Raises NotChecked.

    Arrays without data (`jax.ShapeDtypeStruct`, meta and fake tensors) get normally distributed values, and zeros if
    their dtype is not floating.
    """
    inputs = _mapped((tuple(args), dict(kwargs)), _drawer())
    size = sum(leaf.values.nbytes for leaf in _leaves(inputs) if isinstance(leaf, _Values))
    if size > MOST_BYTES:
        raise NotChecked(
            f"the arguments hold {size / 1e6:.0f} MB, and a check on the CPU takes at most {MOST_BYTES / 1e6:.0f} MB; "
            "give smaller arguments: check=(x, y)"
        )
    results = {name: _called(name, framework, function, inputs) for name, (framework, function) in functions.items()}
    first, *others = results
    return tuple(_agreement(name, results[name], first, results[first]) for name in others)


def _called(name: str, framework: Framework, function: Callable[..., Any], inputs: Any) -> list[_Values]:
    try:
        with _on_cpu(framework):
            args, kwargs = _mapped(inputs, _MAKE[framework])
            outputs = function(*args, **kwargs)
            return [_outside(leaf) for leaf in _leaves(outputs)]
    except NotChecked:
        raise
    except Exception as problem:
        lines = str(problem).strip().splitlines() or ["no message"]
        raise NotChecked(f"{name} does not run on the CPU: {type(problem).__name__}: {lines[0][:300]}") from problem


def _agreement(name: str, found: list[_Values], first: str, wanted: list[_Values]) -> Agreement:
    import numpy as np

    shapes = [[list(array.values.shape) for array in arrays] for arrays in (found, wanted)]
    if shapes[0] != shapes[1]:
        raise NotChecked(f"{name} returns arrays of {shapes[0]}, {first} of {shapes[1]}: they compute different things")
    worst = 0.0
    for a, b in zip(found, wanted, strict=True):
        if a.values.size:
            x, y = a.values.astype(np.float64), b.values.astype(np.float64)
            scale = math.sqrt(float(np.mean(y * y)))
            difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
            error = float(np.max(difference)) / scale if scale else float(np.max(difference))
            worst = error if math.isnan(error) or error > worst else worst
            if math.isnan(worst):
                break
    eps = max((EPS.get(array.dtype, 0.0) for array in (*found, *wanted)), default=0.0)
    return Agreement(name, first, worst, ROUNDINGS * eps)


# Arrays between frameworks


def _drawer() -> Callable[[Any], Any]:
    import numpy as np

    from ..functions.parcel import array_like

    generator = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        like = array_like(leaf)
        if like is None:
            return leaf
        if like.is_key:
            raise NotChecked("an argument is a random key, which the two frameworks do not share")
        if _has_data(leaf):
            return _outside(leaf)
        if like.dtype in EPS:
            dtype = "float32" if like.dtype == "bfloat16" else like.dtype
            return _Values(generator.standard_normal(like.shape).astype(dtype), like.dtype)
        return _Values(np.zeros(like.shape, like.dtype), like.dtype)

    return draw


def _has_data(array: Any) -> bool:
    if type(array).__name__ in ("ShapeDtypeStruct", "ArrayLike", "FakeTensor"):
        return False
    return not getattr(array, "is_meta", False)


def _outside(array: Any) -> _Values:
    """Return an array of any framework, or a number, as numpy's."""
    import numpy as np

    if hasattr(array, "detach"):
        dtype = str(array.dtype).removeprefix("torch.")
        plain = array.detach().cpu()
        return _Values((plain.float() if dtype == "bfloat16" else plain).numpy(), dtype)
    dtype = str(getattr(array, "dtype", np.asarray(array).dtype))
    values = np.asarray(array)
    return _Values(values.astype(np.float32) if dtype == "bfloat16" else values, dtype)


def _to_jax(leaf: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(leaf.values, leaf.dtype) if isinstance(leaf, _Values) else leaf


def _to_torch(leaf: Any) -> Any:
    import torch

    if not isinstance(leaf, _Values):
        return leaf
    return torch.from_numpy(leaf.values.copy()).to(getattr(torch, leaf.dtype))


_MAKE: dict[str, Callable[[Any], Any]] = {"jax": _to_jax, "torch": _to_torch}


@contextlib.contextmanager
def _on_cpu(framework: Framework) -> Any:
    if framework == "jax":
        import jax

        with jax.default_device(jax.devices("cpu")[0]):
            yield
    else:
        import torch

        with torch.no_grad(), torch.device("cpu"):
            yield


def neutral(value: Any) -> Any:
    """Return a tree of arguments whose arrays are shapes and dtypes of no framework."""
    from dataclasses import replace

    from ..functions.parcel import array_like

    def without_framework(leaf: Any) -> Any:
        like = array_like(leaf)
        return leaf if like is None or like.is_key else replace(like, framework="numpy")

    return _mapped(value, without_framework)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _leaves(value: Any) -> list[Any]:
    """Return the leaves in order, a mapping's by key; None is none, as in JAX."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
