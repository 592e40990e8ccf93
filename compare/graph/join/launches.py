"""The launch of a kernel from the records of what a GPU ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model import Launch

_RECORDED = ("grid", "block", "registers", "shared_bytes", "local_bytes")


def measured(stated: Launch, records: Sequence[Any]) -> Launch:
    """Return the launch that a kernel's records agree on.

    records: of the kernel itself, without its helpers. stated: by the compiler, for what no record tells. It describes
    other code if the GPU ran the kernel as the driver's copy or memset, or with another grid or block, as after another
    autotuning. Then nothing of it is kept.
    """
    known = {name: [getattr(record, name, None) for record in records] for name in _RECORDED}
    found = agreed(known)
    others = any(
        getattr(stated, name) is not None and any(value not in (None, getattr(stated, name)) for value in known[name])
        for name in ("grid", "block")
    )
    if others or any(getattr(record, "bytes", None) is not None for record in records):
        return found
    unsaid = {name: getattr(stated, name) for name, values in known.items() if set(values) == {None}}
    return replace(found, config=stated.config, **unsaid)


def agreed(values: Mapping[str, Iterable[Any]]) -> Launch:
    """Return a launch from each field's values in all launches: one value, or all of them under `differing`."""
    once = {name: list(dict.fromkeys(each)) for name, each in values.items()}
    differing = {name: found for name, found in once.items() if len(found) > 1}
    return Launch(
        **{name: found[0] for name, found in once.items() if len(found) == 1}, differing=differing or None
    )
