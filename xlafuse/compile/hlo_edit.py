"""Edits of a module within XLA's compile for GPUs, behind its fusion passes and its scheduler.

XLA's CUDA plugin offers this as an extension of its C interface, PJRT (`pjrt_c_api_xla_transform_extension.h` of
openxla/xla). jax has it as `jax.extend.xla`, which in jax 0.10 needs a GPU. So this file calls the extension itself.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Edit = Callable[[bytes], bytes | None]

_EXTENSION = 24  # PJRT_Extension_Type_XlaTransform
_VERSION = 1
_POST_SCHEDULER = 1


class _Base(ctypes.Structure):
    """PJRT_Extension_Base, and the first function of the extension."""


_Base._fields_ = [
    ("size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.POINTER(_Base)), ("register", ctypes.c_void_p),
]


class _Api(ctypes.Structure):
    """The beginning of PJRT_Api."""

    _fields_ = [("size", ctypes.c_size_t), ("extensions", ctypes.POINTER(_Base))]


class _Call(ctypes.Structure):
    """PJRT_XlaTransform_Args."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("version", ctypes.c_int64), ("data", ctypes.c_void_p),
        ("cleanup", ctypes.c_void_p), ("has_error", ctypes.c_bool), ("code", ctypes.c_int),
        ("message", ctypes.c_void_p), ("message_size", ctypes.c_size_t), ("module", ctypes.c_void_p),
        ("module_size", ctypes.c_size_t), ("edited", ctypes.c_void_p), ("edited_size", ctypes.c_size_t),
        ("changed", ctypes.c_bool),
    ]


_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_Call))


class _Callbacks(ctypes.Structure):
    """PJRT_XlaTransform_Callbacks."""

    _fields_ = [("version", ctypes.c_int64), ("destructor", ctypes.c_void_p), ("transform", _FUNCTION)]


class _Registration(ctypes.Structure):
    """PJRT_Register_Xla_Transform_Args."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("name", ctypes.c_char_p), ("name_size", ctypes.c_size_t),
        ("stage", ctypes.c_int), ("callbacks", ctypes.POINTER(_Callbacks)),
    ]


class _State:
    """The edit in force. failure: the first exception of the edit; C++ cannot take it."""

    edit: Edit | None = None
    failure: Exception | None = None
    kept: Any = None  # the bytes that XLA reads after a call


def _called(_: Any, call: Any) -> None:
    if _State.edit is None:
        return
    arguments = call.contents
    try:
        edited = _State.edit(ctypes.string_at(arguments.module, arguments.module_size))
    except Exception as problem:
        _State.failure = _State.failure or problem
        return
    if edited is not None:
        _State.kept = ctypes.create_string_buffer(edited, len(edited))
        arguments.edited, arguments.edited_size = ctypes.addressof(_State.kept), len(edited)
        arguments.changed = True


_CALLBACKS = _Callbacks(_VERSION, None, _FUNCTION(_called))


@functools.cache
def _register() -> None:
    """Let the plugin call this process's edits. Raises RuntimeError for a plugin without the extension."""
    name, plugin = next(
        ((name, module) for name, module in sys.modules.items() if name.startswith("jax_plugins.xla_cuda")), ("", None)
    )
    if plugin is None:
        raise RuntimeError("editing XLA's HLO needs jax's CUDA plugin: jax-cuda13-pjrt")
    library = ctypes.CDLL(str(Path(str(plugin.__file__)).with_name("xla_cuda_plugin.so")))
    library.GetPjrtApi.restype = ctypes.POINTER(_Api)
    found = library.GetPjrtApi().contents.extensions
    while found and found.contents.type != _EXTENSION:
        found = found.contents.next
    if not found:
        raise RuntimeError(f"{name} cannot edit HLO; install jax 0.10.2 or newer")
    registration = _Registration(
        ctypes.sizeof(_Registration), b"xlafuse", len(b"xlafuse"), _POST_SCHEDULER, ctypes.pointer(_CALLBACKS)
    )
    register = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Registration))(found.contents.register)
    if register(ctypes.byref(registration)):
        raise RuntimeError(f"{name} refused to register an edit of HLO")


@contextlib.contextmanager
def editing(edit: Edit | None) -> Iterator[None]:
    """Let `edit` change each serialized HloModuleProto that XLA compiles meanwhile; it returns None to leave one as is.

    XLA also compiles candidates for kernels as modules of their own. An exception of `edit` is raised on leaving.
    """
    if edit is None:
        yield
        return
    _register()
    _State.edit, _State.failure = edit, None
    try:
        yield
        if _State.failure is not None:
            raise _State.failure
    finally:
        _State.edit = _State.failure = _State.kept = None
