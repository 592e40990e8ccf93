"""The roofline: the shortest time that bytes and FLOPs allow at the rates of a device's memory, products and links.

Exponentials have no term here. A device computes a measured number of them a second, too (an H200 3.3e12 in float32),
but no compiler says how many a kernel needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from xlafuse.hlo.shape import LONG_NAMES

from ..model import FusionGraph, Kernel
from ..operations import hides_flops
from .exchange import exchange_of

Bound = Literal["memory", "compute", "link", "launch"]


@dataclass(frozen=True)
class Ceilings:
    """The bandwidths and product rates of a device: measured, or those of its data sheet.

    streams: share of reads in the traffic of a copy -> bytes per second.
    products: "bfloat16", "float16", "float32-ieee", "float32-tf32", "float8_e4m3fn" -> FLOP per second.
    launch_us: device time of a kernel that does almost nothing; None where it was not measured.
    precision: "ieee" or "tf32", the accuracy of float32 products. None takes the fastest measured rate, because a
    roofline time must not be longer than what is possible. Three TF32 products have IEEE's accuracy.
    link: bytes per second to other GPUs in one direction, of the data sheet; None where it is not known.
    data_sheet: "data sheet" or "scaled data sheet" for rates that are not measured, else "".
    """

    streams: Mapping[float, float]
    products: Mapping[str, float]
    launch_us: float | None = None
    precision: str | None = None
    data_sheet: str = ""
    link: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ceilings:
        """Return the ceilings of a target pack or a segment: `{"streams": {"reads:writes": ...}, "products": {...}}`.

        Raises ValueError for a rate that is not positive.
        """
        streams = {}
        for mix, rate in data.get("streams", {}).items():
            reads, writes = map(float, mix.split(":"))
            streams[reads / (reads + writes)] = float(rate)
        launch = data.get("launch", {}).get("device_s")
        products = {name: float(rate) for name, rate in data.get("products", {}).items()}
        if not all(rate > 0 for rate in (*streams.values(), *products.values())):
            raise ValueError(f"rates must be positive, got {streams} and {products}")
        data_sheet = str(data.get("source", ""))
        launch_us = None if launch is None else float(launch) * 1e6
        return cls(streams, products, launch_us, data_sheet=data_sheet, link=data.get("link"))

    def at(self, precision: str | None) -> Ceilings:
        """Return the same ceilings for float32 products of this precision ("ieee" or "tf32")."""
        return replace(self, precision=precision)

    def bandwidth(self, read: float, written: float) -> float:
        """Return the bytes per second of a copy with this mix of reads and writes.

        The value is interpolated between the two nearest measured mixes; outside them it is the nearest one's.
        """
        share = read / (read + written) if read + written else 0.5
        below = max((mix for mix in self.streams if mix <= share), default=min(self.streams))
        above = min((mix for mix in self.streams if mix >= share), default=max(self.streams))
        along = (share - below) / (above - below) if above > below else 0.0
        return self.streams[below] + along * (self.streams[above] - self.streams[below])

    def rate(self, dtype: str) -> float | None:
        """Return the FLOP per second of products of `dtype` ("bf16"), by any algorithm of the accuracy asked for.

        None where it was not measured.
        """
        measured = self.measured_rate(dtype)
        if (dtype, self.precision) != ("f32", "ieee"):
            return measured
        return max(measured or 0.0, self.products.get("float32-tf32", 0.0) / 3) or None

    def measured_rate(self, dtype: str) -> float | None:
        """Return the FLOP per second of products of `dtype` in this precision; None where it was not measured."""
        name = LONG_NAMES.get(dtype)
        if name is None:
            return None
        exact = self.products.get(f"{name}-{self.precision}" if self.precision else name)
        rates = [exact] if exact else [rate for key, rate in self.products.items() if key.split("-")[0] == name]
        return max(rates, default=None)

    def roof(self, rate: float | None, low: float, high: float) -> list[tuple[float, float]]:
        """Return the corners of min(bandwidth x intensity, rate) between two intensities.

        Each corner is (FLOP per byte, FLOP per second). The bandwidth is that of as many reads as writes. rate: of
        products; None where it was not measured.
        """
        bandwidth = self.bandwidth(1, 1)
        knee = rate / bandwidth if rate else high
        corners = sorted({low, min(max(knee, low), high), high})
        return [(at, min(bandwidth * at, rate or bandwidth * at)) for at in corners]


def product_rate(graph: FusionGraph, kernel: Kernel, rate: Callable[[str], float | None]) -> float | None:
    """Return the FLOP per second of products of the fastest dtype that the kernel reads; None where none was measured.

    A float32 array beside 16-bit ones may be a sum, no operand. A roofline time must not be longer than what is
    possible.
    """
    dtypes = {graph.buffer[access.buffer].dtype for access in kernel.inputs or () if access.buffer in graph.buffer}
    return max(filter(None, map(rate, dtypes)), default=None)


def product_time_us(graph: FusionGraph, kernel: Kernel, flops: float, ceilings: Ceilings | None) -> float | None:
    """Return the time of FLOPs at the rate of the kernel's products; None without that rate."""
    rate = None if ceilings is None else product_rate(graph, kernel, ceilings.rate)
    return None if rate is None else flops / rate * 1e6


def recoverable_us(time_us: float | None, roofline_time_us: float | None) -> float | None:
    """Return the time above the roofline time, at least 0; None where either is unknown."""
    return None if time_us is None or roofline_time_us is None else max(0.0, time_us - roofline_time_us)


@dataclass(frozen=True)
class RooflinePoint:
    """A kernel's place on the roofline: the shortest times of its bytes and of its FLOPs, over all launches of a call.

    link_us: of the bytes that it sends to other GPUs; 0 where they, or the links' rate, are not known.
    bound: which of the three is longest. It is "launch" where all, for one launch, are shorter than a kernel that does
    almost nothing: no rate can be reached in that time.
    """

    memory_us: float
    compute_us: float
    bound: Bound
    link_us: float = 0.0

    @property
    def roofline_time_us(self) -> float:
        return max(self.memory_us, self.compute_us, self.link_us)


def roofline_point(graph: FusionGraph, kernel: Kernel, ceilings: Ceilings) -> RooflinePoint | None:
    """Return where the kernel lies on the roofline.

    None where its bytes or launches are unknown, or the FLOPs of a kernel that may compute products: they would decide.
    """
    read, written, launches = kernel.bytes_read, kernel.bytes_written, kernel.launches
    if read is None or written is None or launches is None:
        return None
    if hides_flops(kernel):
        return None
    rate = product_rate(graph, kernel, ceilings.rate)
    memory = (read + written) / ceilings.bandwidth(read, written) * 1e6
    compute = kernel.flops / rate * 1e6 if kernel.flops and rate else 0.0
    exchange = exchange_of(kernel)
    link = exchange.sent_bytes / ceilings.link * 1e6 if exchange and ceilings.link else 0.0
    longest = max(memory, compute, link)
    bound: Bound = "memory" if memory == longest else "compute" if compute == longest else "link"
    if ceilings.launch_us is not None and longest < ceilings.launch_us:
        bound = "launch"
    return RooflinePoint(memory * launches, compute * launches, bound, link * launches)


def intensity(flops: float | None, size: float | None) -> float | None:
    """Return FLOPs per byte; None where either is unknown, or no byte moves."""
    return None if flops is None or not size else flops / size


def roofline_time_us(graph: FusionGraph, kernel: Kernel, ceilings: Ceilings) -> float | None:
    """Return the shortest time that one call's launches allow; None as for `roofline_point`."""
    found = roofline_point(graph, kernel, ceilings)
    return None if found is None else found.roofline_time_us
