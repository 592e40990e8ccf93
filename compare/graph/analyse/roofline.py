"""The least time that work can take on a device whose bandwidth and product rates were measured, and what sets it.

Exponentials are not counted: a device computes a measured number of them a second, too (an H200 3.3e12 in float32), but
no compiler says how many a kernel needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..model import FusionGraph, Kernel
from ..operations import is_product

Bound = Literal["memory", "compute", "launch"]

_PRODUCT_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f8e4m3fn": "float8_e4m3fn"}


@dataclass(frozen=True)
class Ceilings:
    """streams: share of reads in a stream's traffic -> bytes per second. products: "bfloat16", "float16",
    "float32-ieee", "float32-tf32", "float8_e4m3fn" -> FLOP per second. launch_us: what a kernel that does next to
    nothing takes on the device; None where nobody measured it."""

    streams: Mapping[float, float]
    products: Mapping[str, float]
    launch_us: float | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ceilings:
        """Of a target pack's or a segment's `{"streams": {"reads:writes": ...}, "products": {...}}`.

        Raises ValueError for a rate that is none.
        """
        streams = {}
        for mix, rate in data.get("streams", {}).items():
            reads, writes = map(float, mix.split(":"))
            streams[reads / (reads + writes)] = float(rate)
        launch = data.get("launch", {}).get("device_s")
        products = {name: float(rate) for name, rate in data.get("products", {}).items()}
        if not all(rate > 0 for rate in (*streams.values(), *products.values())):
            raise ValueError(f"rates must be positive, got {streams} and {products}")
        return cls(streams, products, None if launch is None else float(launch) * 1e6)

    def bandwidth(self, read: float, written: float) -> float:
        """Bytes per second of a stream of this mix of reads and writes, on the line between the two measured mixes
        that lie around it; the nearest one's where only one does."""
        share = read / (read + written) if read + written else 0.5
        below = max((mix for mix in self.streams if mix <= share), default=min(self.streams))
        above = min((mix for mix in self.streams if mix >= share), default=max(self.streams))
        along = (share - below) / (above - below) if above > below else 0.0
        return self.streams[below] + along * (self.streams[above] - self.streams[below])

    def rate(self, dtype: str, precision: str | None = None) -> float | None:
        """FLOP per second of a product of `dtype` ("bf16"); None where none was measured. Of float32 the fastest that
        was measured, unless `precision` says "ieee" or "tf32": a floor must not lie above what is possible."""
        name = _PRODUCT_NAMES.get(dtype)
        if name is None:
            return None
        exact = self.products.get(f"{name}-{precision}" if precision else name)
        rates = [exact] if exact else [rate for key, rate in self.products.items() if key.split("-")[0] == name]
        return max(rates, default=None)

    def roof(self, rate: float | None, low: float, high: float) -> list[tuple[float, float]]:
        """Corners of min(bandwidth x intensity, rate), between two intensities: (FLOP a byte, FLOP per second). The
        bandwidth is that of as many reads as writes; rate: of products, None where none was measured."""
        bandwidth = self.bandwidth(1, 1)
        knee = rate / bandwidth if rate else high
        corners = sorted({low, min(max(knee, low), high), high})
        return [(at, min(bandwidth * at, rate or bandwidth * at)) for at in corners]


def product_dtype(graph: FusionGraph, kernel: Kernel) -> str:
    """The type of the largest array that goes into the kernel, "" where it reads none."""
    read = [graph.buffer[access.buffer] for access in kernel.inputs or () if access.buffer in graph.buffer]
    return max(read, key=lambda buffer: buffer.bytes).dtype if read else ""


def recoverable_us(time_us: float | None, least_us: float | None) -> float | None:
    """What was taken above the least; None where either is not known."""
    return None if time_us is None or least_us is None else max(0.0, time_us - least_us)


@dataclass(frozen=True)
class Place:
    """Where a kernel lies on the roofline: microseconds that its bytes, and its FLOPs, take at least, over all launches
    of one call.

    bound: what sets the larger of the two; "launch" where both, of one launch, are less than what a kernel takes that
    does next to nothing: no bandwidth and no product rate could be reached in it. intensity: FLOPs a byte, None where
    either is not known, or no byte moves.
    """

    memory_us: float
    compute_us: float
    bound: Bound
    intensity: float | None

    @property
    def floor_us(self) -> float:
        return max(self.memory_us, self.compute_us)


def place(graph: FusionGraph, kernel: Kernel, ceilings: Ceilings, precision: str | None = None) -> Place | None:
    """None where bytes or launches are not known, or the FLOPs of a product or an attention, which would decide."""
    read, written, launches = kernel.bytes_read, kernel.bytes_written, kernel.launches
    if read is None or written is None or launches is None:
        return None
    if kernel.flops is None and (kernel.kind == "attention" or is_product(kernel)):
        return None
    rate = ceilings.rate(product_dtype(graph, kernel), precision)
    memory = (read + written) / ceilings.bandwidth(read, written) * 1e6
    compute = kernel.flops / rate * 1e6 if kernel.flops and rate else 0.0
    bound: Bound = "memory" if memory >= compute else "compute"
    if ceilings.launch_us is not None and max(memory, compute) < ceilings.launch_us:
        bound = "launch"
    return Place(memory * launches, compute * launches, bound, intensity(kernel.flops, read + written))


def intensity(flops: float | None, moved: float | None) -> float | None:
    """FLOPs a byte; None where either is not known, or no byte moves."""
    return None if flops is None or not moved else flops / moved


def floor_us(graph: FusionGraph, kernel: Kernel, ceilings: Ceilings, precision: str | None = None) -> float | None:
    """max(bytes / bandwidth, flops / rate) of one call's launches, in microseconds; None as for `place`."""
    found = place(graph, kernel, ceilings, precision)
    return None if found is None else found.floor_us
