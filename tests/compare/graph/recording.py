"""Recorded calls as xlafuse.triton_side.calls.dispatch makes them, without a GPU or a compiler: what the graph builders
read."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

ITEMSIZE = {"bfloat16": 2, "float32": 4}


def tensor(
    storage: int, shape: tuple[int, ...], dtype: str = "bfloat16", name: str = "", *,
    strides: tuple[int, ...] | None = None, offset: int = 0,
) -> Any:
    """Contiguous where no strides are given."""
    size = math.prod(shape) * ITEMSIZE[dtype]
    strides = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return SimpleNamespace(
        storage=storage, shape=shape, strides=strides, dtype=dtype, name=name, bytes=size, bytes_used=size, position=0,
        offset=offset, itemsize=ITEMSIZE[dtype],
    )


def computed(op: str, stage: str, backward: bool = False, rematerialized: bool = False) -> Any:
    site = f"{'gradient of ' if backward else ''}{stage}:{op}:"
    return SimpleNamespace(op=op, stage=stage, backward=backward, rematerialized=rematerialized, site=site)


def launch(label: str, reads: list[Any], writes: list[Any], operations: list[Any], flops: float | None = 1.0) -> Any:
    return SimpleNamespace(
        label=label, name=f"{label}_runtime", kind="triton", source="triton_side/kernels/k.py", line=7, grid=(4, 1, 1),
        block=(128, 1, 1), num_warps=4, num_stages=3, constants={"BLOCK": 64}, reads=tuple(reads),
        writes=tuple(writes), operations=tuple(operations), flops=flops,
        resources=SimpleNamespace(registers=32, spill_bytes=0, shared_bytes=1024, num_warps=4),
    )


def operation(
    op: str, kind: str, reads: list[Any], writes: list[Any], *, stage: str = "", line: str = "model.py:3",
    backward: bool = False, rematerialized: bool = False, flops: float | None = 1.0,
) -> Any:
    return SimpleNamespace(
        op=op, kind=kind, reads=tuple(reads), writes=tuple(writes), stage=stage, line=line, backward=backward,
        rematerialized=rematerialized, flops=flops,
    )


def recorded(parts: dict[str, list[Any]], inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    return SimpleNamespace(parts={p: tuple(events) for p, events in parts.items()}, inputs=inputs, outputs=outputs)


def record(name: str, us: float = 1.0, **more: Any) -> Any:
    return SimpleNamespace(name=name, start=0.0, end=us * 1e-6, **more)
