"""Fields of CUPTI's activity records, read directly from CUPTI's memory.

cupti-python 13.0.1 reads each attribute through numpy.recarray, in 5 us: the nine of a kernel cost 40 ms in each timed
call of 900 kernels. It also gives a record's address and memory layout, with which all nine take 6 us. A version
without layouts is read by attributes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

Read = Callable[[Any], tuple[Any, ...]]


def reader(cupti: Any, fields_of: Callable[[int], Sequence[str]]) -> Read:
    """Return a function that reads a record's kind, as an int, and the fields of that kind, in order.

    cupti: the module. A record must be read within the callback that gets it, because CUPTI then frees its memory.
    """
    known: dict[type, Read] = {}

    def read(record: Any) -> tuple[Any, ...]:
        found = known.get(type(record))
        if found is None:  # all kinds of one class have the same fields
            fields = ("kind", *fields_of(int(record.kind)))
            layout = getattr(cupti, f"{type(record).__name__.replace('Activity', 'activity_').lower()}_dtype", None)
            found = known[type(record)] = attrgetter(*fields) if layout is None else _at_address(layout, fields)
        return found(record)

    return read


def _at_address(layout: np.dtype[Any], fields: Sequence[str]) -> Read:
    """Read a record at its address, int(record). layout: of that memory; `name` is a string's address, or 0."""
    structure = np.ctypeslib.as_ctypes_type(layout)
    values = attrgetter(*fields)
    if "name" not in fields:
        return lambda record: values(structure.from_address(int(record)))
    name = fields.index("name")

    def read(record: Any) -> tuple[Any, ...]:
        found = list(values(structure.from_address(int(record))))
        found[name] = ctypes.string_at(found[name]).decode() if found[name] else ""
        return tuple(found)

    return read
