"""Ceilings of this GPU: the bandwidth of streams, and the rates of matrix products and exponentials.

The clock that times everything else measures them in this process. A stream's bandwidth depends on its mix of reads and
writes (on an H200 an add reaches more than a copy), so several mixes are measured, and rooflines interpolate between
them. A target pack stores them: compare/targets/h200/ceilings.json has an H200's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .clock import Clock

_ELEMENTS = 1 << 28  # bfloat16: 512 MiB a stream, eight times an H200's L2
_PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 14336), (16384, 4096, 4096))  # m, n, k
_FLOAT32_PRODUCT = (4096, 4096, 4096)
_CHAIN = 64  # exponentials of an element
_LAUNCHES = 500  # a full launch queue would make the host wait for the device


def measure(clock: Clock, flush_l2: Callable[[], object], repeats: int = 15) -> dict[str, Any]:
    """Return the ceilings, each a median of `repeats`.

    streams: {"reads:writes": bytes per second}.
    products: {dtype: FLOP per second}, the best of several shapes. float32 comes twice, as `float32-ieee` and
        `float32-tf32`; `float8_e4m3fn` has fast accumulation. A dtype that PyTorch refuses on this GPU is left out.
    exponentials: float32 exponentials per second.
    launch: {"host_s": host seconds of one launch in a row of them, "device_s": device seconds of a kernel that does
        next to nothing}.
    """

    def seconds(call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        clock.start()
        for _ in range(repeats):
            flush_l2()
            clock.time(call, lambda results=None: torch.cuda.synchronize())
        return statistics.median(sample.device_time for sample in clock.collect())

    return {
        "streams": _streams(seconds), "products": _products(seconds), "exponentials": _exponentials(seconds),
        "launch": _launch(seconds),
    }


def _streams(seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    a, b, c, out = (torch.randn(_ELEMENTS, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    one = a.nbytes
    add3 = torch.compile(lambda a, b, c, out: out.copy_(a + b + c))
    # A kernel that only reads must reduce, and reductions differ: XLA's over rows was 10% faster than torch.sum.
    rows = a.view(-1, 1 << 15)
    reductions: tuple[Callable[[], Any], ...] = (
        lambda: torch.sum(a.view(torch.int64)), lambda: torch.amax(rows, dim=1), partial(torch.compile(_sum_rows), rows)
    )
    return {
        "1:0": one / min(map(seconds, reductions)),
        "0:1": one / seconds(lambda: out.fill_(1.5)),
        "1:1": 2 * one / seconds(lambda: out.copy_(a)),
        "2:1": 3 * one / seconds(lambda: torch.add(a, b, out=out)),
        "3:1": 4 * one / seconds(lambda: add3(a, b, c, out)),
    }


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.float().sum(dim=1)


def _exponentials(seconds: Callable[[Callable[[], Any]], float]) -> float:
    """Measure chains of exponentials in registers, with one read and one write for _CHAIN of them."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_CHAIN):
            x = torch.exp(-x)
        return x

    x = torch.rand(1 << 26, device="cuda")
    compiled = torch.compile(chain)
    return x.numel() * _CHAIN / seconds(lambda: compiled(x))


def _launch(seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    x = torch.zeros(1, device="cuda")
    device_s = seconds(lambda: x.add_(1))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_LAUNCHES):
        x.add_(1)
    host_s = (time.perf_counter() - started) / _LAUNCHES
    torch.cuda.synchronize()
    return {"host_s": host_s, "device_s": device_s}


def _products(seconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
    rates = {}
    precision = torch.get_float32_matmul_precision()
    for name, dtype, setting, shapes in (
        ("bfloat16", torch.bfloat16, "highest", _PRODUCTS),
        ("float16", torch.float16, "highest", _PRODUCTS),
        ("float32-ieee", torch.float32, "highest", (_FLOAT32_PRODUCT,)),
        ("float32-tf32", torch.float32, "high", (_FLOAT32_PRODUCT,)),
    ):
        torch.set_float32_matmul_precision(setting)
        rates[name] = _best(partial(_product, seconds, dtype), shapes)
    torch.set_float32_matmul_precision(precision)
    rates["float8_e4m3fn"] = _best(partial(_fp8_product, seconds), _PRODUCTS)
    return {name: rate for name, rate in rates.items() if rate is not None}


def _best(rate: Callable[[int, int, int], float], shapes: Sequence[tuple[int, int, int]]) -> float | None:
    """Return the highest rate of these shapes, or None where PyTorch refuses the product on this GPU."""
    try:
        return max(rate(m, n, k) for m, n, k in shapes)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):  # fp8 before compute capability 8.9
        return None


def _product(
    seconds: Callable[[Callable[[], Any]], float], dtype: torch.dtype, m: int, n: int, k: int
) -> float:
    # Random data, because zeros run faster. A transposed second factor is cuBLAS's fastest layout.
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    b = torch.randn(n, k, device="cuda", dtype=dtype).mT
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return 2 * m * n * k / seconds(partial(torch.mm, a, b, out=out))


def _fp8_product(seconds: Callable[[Callable[[], Any]], float], m: int, n: int, k: int) -> float:
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).mT
    one = torch.ones((), device="cuda")
    product = partial(
        torch._scaled_mm, a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return 2 * m * n * k / seconds(product)
