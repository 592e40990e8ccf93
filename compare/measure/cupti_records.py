"""Fields of CUPTI's activity records, read where CUPTI left them.

cupti-python 13.0.1 reads each attribute of a record through numpy.recarray, in 5 us: nine of each kernel, 40 ms of each
timed call of 900 kernels. It also says where a record lies and how its class is laid out there, and so all nine take
6 us. Of a version that does not say so, attributes are read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

Read = Callable[[Any], tuple[Any, ...]]


def reader(cupti: Any, fields_of: Callable[[int], Sequence[str]]) -> Read:
    """What reads of a record its kind, as an int, and then the fields that there are of that kind, in their order.

    cupti: the module. A record must be read before CUPTI takes its memory back, at the end of the callback that has it.
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
    """layout: of the memory whose address the record is as an int; its `name` is the address of a string, or 0."""
    structure = np.ctypeslib.as_ctypes_type(layout)
    values = attrgetter(*fields)
    if "name" not in fields:
        return lambda record: values(structure.from_address(int(record)))
    place = fields.index("name")

    def read(record: Any) -> tuple[Any, ...]:
        found = list(values(structure.from_address(int(record))))
        found[place] = ctypes.string_at(found[place]).decode() if found[place] else ""
        return tuple(found)

    return read
