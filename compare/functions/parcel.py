"""Pickles for the compiling process: a function by name or by value, and its arguments as shapes.

Importable functions are sent by name. All others (of `__main__`, a notebook, a closure) are sent by value, with
cloudpickle. Arrays among the arguments, or in a called module, are sent without their data.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class ArrayLike:
    """An array without its data. dtype: a name ("bfloat16"; "key<fry>" for a typed PRNG key).

    sharding: JAX's NamedSharding, where it has one.
    """

    framework: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    requires_grad: bool = False
    is_parameter: bool = False
    weak_type: bool = False
    is_key: bool = False
    sharding: Any = None


class NotSendable(Exception):
    """A value cannot be sent to another process; the message names it."""


def pack(value: Any, *, arrays: bool, elsewhere: bool = False) -> bytes:
    """Pickle `value`, its arrays with their data if `arrays`, else as `ArrayLike`s. Raises NotSendable.

    elsewhere: for another Python, with other versions of packages; code and objects of packages do not fit it.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, arrays)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError, ValueError) as problem:
        raise NotSendable(
            f"it cannot be sent to the compiling process ({str(problem).rstrip('.')}); a function at the top level of "
            "an importable module can"
        ) from None
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    if elsewhere and (b"cloudpickle.cloudpickle" in stream.getvalue() or pickler.tied):
        raise NotSendable(pickler.tied or "it is not at the top level of an importable module")
    return stream.getvalue()


def unpack(data: bytes, make: Callable[[ArrayLike], Any]) -> Any:
    """Unpickle what `pack` made, with `make(array)` in place of every ArrayLike. Imports the modules it needs."""
    with _making(make):
        return pickle.loads(data)


def forget_classes() -> None:
    """Let classes that come by value be made anew: cloudpickle would add to a class that came before."""
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.clear()


def path_for(*, elsewhere: bool) -> tuple[str, ...]:
    """Return this process's import path for another process. elsewhere: of another Python, which has its own library
    and packages."""
    path = tuple(str(Path(entry).absolute()) for entry in sys.path)
    if not elsewhere:
        return path
    library = Path(sysconfig.get_path("stdlib"))
    zipped = library.with_name(f"{library.name.replace('.', '')}.zip")
    return tuple(
        entry for entry in path
        if not of_packages(entry) and not Path(entry).is_relative_to(library) and Path(entry) != zipped
    )


_make: list[Callable[[ArrayLike], Any]] = []


@contextmanager
def _making(make: Callable[[ArrayLike], Any]) -> Iterator[None]:
    _make.append(make)
    try:
        yield
    finally:
        _make.pop()


def _restore(*fields: Any) -> Any:
    return _make[-1](ArrayLike(*fields))


def _resolve(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


class _Pickler(cloudpickle.Pickler):
    def __init__(self, stream: io.BytesIO, arrays: bool) -> None:
        super().__init__(stream)
        self._arrays = arrays
        self.by_value: list[types.ModuleType] = []
        self.tied = ""  # the reason why this Python's versions of packages are needed to read the pickle

    def reducer_override(self, obj: Any) -> Any:
        if not self._arrays and (like := array_like(obj)) is not None:
            return _restore, tuple(getattr(like, field.name) for field in fields(like))
        name = getattr(obj, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
        if module is not None and callable(obj):
            plain = isinstance(obj, (type, types.FunctionType))
            if not _is_importable(module):
                if plain and module not in self.by_value:
                    cloudpickle.register_pickle_by_value(module)
                    self.by_value.append(module)
            elif not plain and _is_at(module, getattr(obj, "__qualname__", None), obj):
                return _resolve, (name, obj.__qualname__)  # jitted, custom_vjp, ...: cloudpickle would copy these
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(obj, jax.sharding.Mesh):
            return _mesh_again, (obj.devices.shape, obj.axis_names, obj.axis_types)
        if jax is not None and isinstance(obj, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding, (obj.mesh, obj.spec)
        if type(obj).__name__ == "PjitFunction":
            from xlafuse.compile._jax_private import jit_options

            return _jit_again, jit_options(obj)
        if not isinstance(obj, (type, types.FunctionType, types.ModuleType)) and _of_package(type(obj)):
            self.tied = self.tied or f"it holds a {type(obj).__module__}.{type(obj).__name__}"
        return super().reducer_override(obj)


def _mesh_again(shape: tuple[int, ...], names: tuple[Any, ...], kinds: tuple[Any, ...]) -> Any:
    """Return a mesh of the compiling process's devices. Raises ValueError where it has fewer."""
    import jax
    import numpy as np

    devices, needed = jax.devices(), math.prod(shape)
    if needed > len(devices):
        raise ValueError(f"the mesh has {needed} devices, and devices={len(devices)} (--devices)")
    return jax.sharding.Mesh(np.array(devices[:needed]).reshape(shape), names, axis_types=kinds)


def _jit_again(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    import jax

    return jax.jit(function, **options)


def _of_package(kind: type) -> bool:
    """Return whether a class is of an installed package. numpy's pickles fit all of its versions."""
    if kind.__module__.partition(".")[0] == "numpy":
        return False
    return of_packages(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def of_packages(path: str) -> bool:
    """Return whether a path is in a folder of installed packages."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _is_at(module: types.ModuleType, name: Any, obj: Any) -> bool:
    try:
        return isinstance(name, str) and reduce(getattr, name.split("."), module) is obj
    except AttributeError:
        return False


def _is_importable(module: types.ModuleType) -> bool:
    """Return True where a fresh process with the same sys.path finds the module. Test runners make up others."""
    if getattr(module, "__file__", None) is None:  # built in, or made by an extension at import
        return True
    path: Any = None
    parts = module.__name__.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        spec = _found(name, path)
        if spec is None:
            return False
        # A package may set its __path__, as xlafuse.compare does in a checkout.
        path = getattr(sys.modules.get(name), "__path__", spec.submodule_search_locations)
    return True


def _found(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None:
            return spec
    return None


def array_like(obj: Any) -> ArrayLike | None:
    """Return an array as an ArrayLike, or None for another object. Raises NotSendable for an array that is more than
    a shape and a dtype."""
    if isinstance(obj, ArrayLike):
        return obj
    jax, torch, numpy = (sys.modules.get(name) for name in ("jax", "torch", "numpy"))
    if numpy is not None and type(obj) is numpy.ndarray and obj.dtype.kind not in "OSU":
        return ArrayLike("numpy", tuple(obj.shape), obj.dtype.name)
    if jax is not None and isinstance(obj, (jax.Array, jax.ShapeDtypeStruct)):
        return _of_jax(jax, obj)
    if torch is not None and isinstance(obj, torch.Tensor):
        return _of_torch(torch, obj)
    return None


def _of_jax(jax: Any, obj: Any) -> ArrayLike:
    if isinstance(obj, jax.core.Tracer):
        raise NotSendable("an argument is being traced; call explain outside jit, vmap and grad")
    if jax.dtypes.issubdtype(obj.dtype, jax.dtypes.prng_key):
        return ArrayLike("jax", tuple(obj.shape), str(obj.dtype), is_key=True)
    sharding = obj.sharding if isinstance(obj.sharding, jax.sharding.NamedSharding) else None
    weak = bool(getattr(obj, "weak_type", False))
    return ArrayLike("jax", tuple(obj.shape), str(obj.dtype), weak_type=weak, sharding=sharding)


def _of_torch(torch: Any, obj: Any) -> ArrayLike:
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(obj, (torch.nn.Parameter, FakeTensor)) and type(obj) not in (torch.Tensor, torch.nn.Buffer):
        raise NotSendable(f"a tensor is a {type(obj).__name__}, which is more than a shape and a dtype")
    if obj.layout is not torch.strided:
        raise NotSendable(f"a tensor has layout {obj.layout}; only strided tensors are supported")
    return ArrayLike(
        "torch", tuple(obj.shape), str(obj.dtype).removeprefix("torch."), tuple(obj.stride()),
        requires_grad=obj.requires_grad, is_parameter=isinstance(obj, torch.nn.Parameter),
    )
