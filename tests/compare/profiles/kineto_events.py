"""Events of a trace of torch.profiler, in Kineto's format. Times are in us."""

from __future__ import annotations

from typing import Any


def span(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration, "args": args}


def kernel(name: str, start: float, duration: float, correlation: int, device: int = 0, **args: Any) -> dict[str, Any]:
    return span(
        "kernel", name, start, duration,
        **{"device": device, "stream": 7, "correlation": correlation, "grid": [4, 1, 1], "block": [128, 1, 1], **args},
    )


def trace(*events: Any, **top: Any) -> dict[str, Any]:
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], **top,
            "traceEvents": list(events)}
