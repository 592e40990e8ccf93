"""Storage types of arrays: names, sizes, machine epsilons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A floating-point storage type. eps: the distance from 1 to the next value."""

    name: str
    short: str
    itemsize: int
    eps: float


DTYPES = {
    d.name: d
    for d in (
        DType("bfloat16", "bf16", 2, 2.0**-7),
        DType("float16", "fp16", 2, 2.0**-10),
        DType("float32", "fp32", 4, 2.0**-23),
    )
}
EPS = {**{d.name: d.eps for d in DTYPES.values()}, "float64": 2.0**-52}
# Further types of inputs, which have no gradient: integers, and fp8 for storage only.
OTHER_BYTES = {"int32": 4, "int64": 8, "float8_e4m3fn": 1}
DTYPE_BY_ANY_NAME = {**{d.name: d.name for d in DTYPES.values()}, **{d.short: d.name for d in DTYPES.values()}}
