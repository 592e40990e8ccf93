"""Edits of a module within XLA's compile for GPUs, behind its fusion passes and its scheduler.

XLA's CUDA plugin offers them as an extension of its C interface (`pjrt_c_api_xla_transform_extension.h` of openxla/xla,
which names the fields below). jax has it as `jax.extend.xla`, which in jax 0.10 needs a GPU, so this file calls the
extension itself. All its structures are words of 8 bytes; a shorter field has a word of its own.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Edit = Callable[[bytes], bytes | None]

_WORDS = ctypes.POINTER(ctypes.c_uint64)
_EXTENSION = 24  # PJRT_Extension_Type_XlaTransform
_VERSION = 1
_POST_SCHEDULER = 1
_MODULE, _EDITED, _CHANGED = 7, 9, 11  # words of PJRT_XlaTransform_Args; behind an address comes the size


class _State:
    """The edit in force. failure: the first exception of the edit, which C++ cannot take."""

    edit: Edit | None = None
    failure: Exception | None = None
    kept: Any = None  # the bytes that XLA reads after a call


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, _WORDS)
def _called(_: Any, words: Any) -> None:
    if _State.edit is None:
        return
    try:
        edited = _State.edit(ctypes.string_at(words[_MODULE], words[_MODULE + 1]))
    except Exception as problem:
        _State.failure = _State.failure or problem
        return
    if edited is not None:
        _State.kept = ctypes.create_string_buffer(edited, len(edited))
        words[_EDITED], words[_EDITED + 1] = ctypes.addressof(_State.kept), len(edited)
        words[_CHANGED] = 1


_NAME = ctypes.create_string_buffer(b"xlafuse")
_CALLBACKS = (ctypes.c_uint64 * 3)(_VERSION, 0, ctypes.cast(_called, ctypes.c_void_p).value or 0)  # no destructor


@functools.cache
def _register() -> None:
    """Let the plugin call this process's edits. Raises RuntimeError for a plugin without the extension."""
    plugin = next((module for name, module in sys.modules.items() if name.startswith("jax_plugins.xla_cuda")), None)
    if plugin is None:
        raise RuntimeError("editing XLA's HLO needs jax's CUDA plugin: jax-cuda13-pjrt")
    library = ctypes.CDLL(str(Path(str(plugin.__file__)).with_name("xla_cuda_plugin.so")))
    library.GetPjrtApi.restype = _WORDS
    extension = library.GetPjrtApi()[1]
    while extension:
        _, kind, following, register = ctypes.cast(extension, _WORDS)[:4]
        if kind & 0xFFFFFFFF == _EXTENSION:
            break
        extension = following
    else:
        raise RuntimeError(f"{plugin.__name__} cannot edit HLO; install jax 0.10.2 or newer")
    asked = (ctypes.c_uint64 * 5)(
        40, ctypes.addressof(_NAME), len(_NAME.value), _POST_SCHEDULER, ctypes.addressof(_CALLBACKS)
    )
    if ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(register)(ctypes.addressof(asked)):
        raise RuntimeError(f"{plugin.__name__} refused to register an edit of HLO")


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
