"""FLOPs and source operations that the author of a custom call declares; to XLA the call is opaque.

The declaration is a frontend attribute of the call, so dumps contain it:

    with set_xla_metadata(**{ATTRIBUTE: json.dumps({"flops": 1e9, "operations": [{"op": "dot", "stage": "scores"}]})}):
        jax.ffi.ffi_call(...)(...)

Operations have the fields of `source_lines.SourceOp`. FLOPs are of one launch, null if they depend on data.
"""

import dataclasses
import json
import math
from dataclasses import dataclass

from xlafuse.hlo.source_lines import SourceOp
from xlafuse.hlo.text_reader import DECLARATION, Instruction

ATTRIBUTE = DECLARATION

_FIELDS = {field.name: bool if isinstance(field.default, bool) else str for field in dataclasses.fields(SourceOp)}


@dataclass(frozen=True)
class Declaration:
    """The FLOPs of one launch, None if they depend on data, and the source operations."""

    flops: float | None
    source_ops: tuple[SourceOp, ...]


def read(instruction: Instruction) -> Declaration | None:
    """Return the declaration, None if there is none. Raises ValueError if it is malformed."""
    if not instruction.declared:
        return None
    try:
        data = json.loads(instruction.declared)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(data, dict) or not isinstance(data.get("operations"), list):
        raise ValueError('expected {"flops": ..., "operations": [...]}')
    return Declaration(_flops(data.get("flops")), tuple(map(_operation, data["operations"])))


def _flops(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.100} is not a number of FLOPs")
    return value


def _operation(value: object) -> SourceOp:
    known = isinstance(value, dict) and "op" in value and all(
        name in _FIELDS and isinstance(item, _FIELDS[name]) for name, item in value.items()
    )
    if not known:
        raise ValueError(f"{value!r:.100} is not an operation, which has {', '.join(_FIELDS)}")
    assert isinstance(value, dict)
    return SourceOp(**value)
