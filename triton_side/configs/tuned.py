"""The choice of a launch configuration: the entry of this GPU's table, else the kernel's own rule.

    @tuned
    def configure_forward(rows: int, columns: int, element_bytes: int, multiprocessors: int) -> RowConfig:
        ...the rule

`configure_forward(...)` then returns the configuration that the table has for the shape class of its arguments; without
an entry it returns what the rule says. `configure_forward.__wrapped__(...)` is the rule alone. Choices are cached, so a
call costs what one of functools.lru_cache costs.

The shape class is all arguments, except that the number of rows is rounded up to a power of two, and that the
multiprocessors are left out, because they belong to the GPU. Only an entry of the very class counts.

In a table of another GPU, a resident set of programs is scaled to this GPU's multiprocessors, and an entry with more
shared memory than this GPU has for a block does not count. In Triton's interpreter there is no table.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import triton

from xlafuse.triton_side.configs import table as tables
from xlafuse.triton_side.configs.table import Gpu, Table, TableError

_Config = TypeVar("_Config")

_ROUNDED = ("rows", "m", "tokens", "slots")  # numbers of rows
_OF_THE_GPU = ("multiprocessors", "mps")

TUNED: dict[str, Any] = {}  # the decorated functions of the imported kernels, by name

# Given the function's name and arguments, and its rule's configuration, returns another one, or None for the choice.
Override = Callable[[str, Mapping[str, Any], Any], Any]
_override: Override | None = None


def tuned(rule: Callable[..., _Config]) -> functools._lru_cache_wrapper[_Config]:
    """Return `rule` with a table's entries in place of its own results."""
    name = f"{rule.__module__.removeprefix('xlafuse.triton_side.kernels.')}.{rule.__name__}"
    signature = inspect.signature(rule)

    @functools.lru_cache
    @functools.wraps(rule)
    def choose(*given: Any) -> _Config:
        return _choose(name, rule, dict(signature.bind(*given).arguments))

    choose.__wrapped__ = rule
    TUNED[name] = choose
    return choose


def class_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape class of a function's arguments, as a table has it."""
    return {name: _plain(value) for name, value in rounded(facts).items() if name not in _OF_THE_GPU}


def rounded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the largest number of rows of their class."""
    return {name: _next_power_of_2(value) if name in _ROUNDED else value for name, value in facts.items()}


@contextlib.contextmanager
def overridden(override: Override) -> Iterator[None]:
    """Let `override` see and replace every choice within the context. It is called once for equal arguments."""
    global _override
    _forget()
    _override = override
    try:
        yield
    finally:
        _override = None
        _forget()


@functools.cache
def gpu() -> Gpu | None:
    """Return the current GPU, or None without one and in Triton's interpreter."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        return None
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(
        found.name, (found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin
    )


def has_small_blocks() -> bool:
    """Return whether a block of the current GPU has too little shared memory for the tiles that suit an H200.

    Compute capability 8.9 and 12.0 have 99 KiB, 8.0 163 and 9.0 and 10.0 227. Nothing was measured on the former.
    """
    found = gpu()
    return found is not None and found.shared_bytes < 128 * 1024


def has_wgmma() -> bool:
    """Return whether the current GPU has Hopper's `wgmma`; True in Triton's interpreter."""
    found = gpu()
    return found is None or found.capability[0] == 9


@functools.cache
def current_table() -> Table | None:
    """Return the table in use; it is read once. Raises TableError."""
    found = gpu()
    return None if found is None else tables.of_gpu(found, tables.FOLDER)


def table_in_use() -> str | None:
    """Return the table in use, its number of entries and its version, for records; None without a table."""
    table = current_table()
    if table is None or table.file is None:
        return None
    version = hashlib.sha256(table.file.read_bytes()).hexdigest()[:8]
    return f"{table.file.name}, {len(table.entries)} entries, version {version}"


def _choose(name: str, rule: Callable[..., _Config], facts: Mapping[str, Any]) -> _Config:
    config = rule(**facts)
    if _override is not None:
        config = _override(name, facts, config) or _measured(name, facts, config) or config
        return _fitted(config, facts)
    return _measured(name, facts, config) or config


def _measured(name: str, facts: Mapping[str, Any], config: _Config) -> _Config | None:
    """Return the table's configuration, of the class of `config`, if there is one that this GPU can launch."""
    table, here = current_table(), gpu()
    entry = table.find(name, class_of(facts)) if table else None
    if table is None or here is None or entry is None or entry.shared_bytes > here.shared_bytes:
        return None
    try:
        measured = type(config)(**entry.config)
    except TypeError as problem:
        raise TableError(f"{table.file}: {name} has another configuration: {problem}; run xlafuse tune") from None
    return _fitted(measured, facts, here.multiprocessors, table.multiprocessors)


def _fitted(config: Any, facts: Mapping[str, Any], here: int = 1, measured_on: int = 1) -> Any:
    """Return the configuration with as many programs as these rows and this GPU need.

    A configuration of a class has one program for each tile of the most rows, which are a power of two, or a resident
    set of programs: a multiple of the multiprocessors that it was measured on.
    """
    if not (hasattr(config, "programs") and hasattr(config, "block_rows") and "rows" in facts):
        return config
    programs = config.programs
    if here != measured_on and programs % measured_on == 0:
        programs = programs // measured_on * here
    return replace(config, programs=max(1, min(programs, -(-facts["rows"] // config.block_rows))))


def _forget() -> None:
    for choose in TUNED.values():
        choose.cache_clear()


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
