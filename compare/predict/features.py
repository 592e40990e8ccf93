"""Numbers that a compiled kernel tells about its time: bytes by access, rows, operations, tiles, the launch, L2.

A number that a graph does not have is NaN, and the fitted trees have a way for it. A name's first word is its group,
by which `predictor.why` explains a prediction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from .. import targets
from ..graph.analyse.roofline import Ceilings, product_rate
from ..graph.model import Access, Buffer, FusionGraph, Kernel
from ..graph.operations import PRODUCTS, REDUCTIONS, kind_by_operations, token

_NAN = math.nan
_LARGEST_HEAD = 512  # elements of an attention head, at most
_LAUNCH_US = 1.3  # of a device whose own was not measured
_WIDTHS = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
KINDS = (
    "elementwise", "copy", "memset", "reduction", "scatter", "gemm", "attention", "custom", "library", "collective",
)
FAMILIES = ("xla", "inductor", "triton", "eager", "cuda")
_GROUPS = {  # common names of operations, by what they use of a GPU
    **dict.fromkeys("exp tanh log sigmoid erf pow sin cos log1p expm1 silu gelu exp2".split(), "transcendental"),
    **dict.fromkeys("div rsqrt sqrt remainder reciprocal".split(), "divisions"),
    **dict.fromkeys((*REDUCTIONS, "var", "var_mean", "logsumexp", "softmax"), "reductions"),
    **dict.fromkeys(PRODUCTS, "products"),
    **dict.fromkeys("gather dynamic-slice".split(), "gathers"),
    **dict.fromkeys("scatter update index_copy histc bincount".split(), "scatters"),
    **dict.fromkeys("sort top_k topk argsort cumsum reduce_window".split(), "sorts"),
    **dict.fromkeys("threefry rand randint bitwise_xor xor shift_left shift-left philox".split(), "random"),
    "transpose": "transposes", "broadcast": "broadcasts", "convert": "converts", "where": "selects",
    "concatenate": "concatenates", "pad": "concatenates", "slice": "slices", "iota": "iotas",
}
_COUNTED = (
    "transcendental", "divisions", "reductions", "products", "gathers", "scatters", "sorts", "random", "transposes",
    "broadcasts", "converts", "selects", "concatenates", "slices", "iotas",
)
_COMPILED = ("transposes", "reductions", "transcendental", "converts", "broadcasts")
_WORDS = (  # parts of kernels' names, which tell the code that a library or compiler took
    "vectorized", "unrolled", "elementwise_kernel", "reduce_kernel", "index", "softmax", "norm", "nvjet", "cutlass",
    "cudnn", "flash", "simt", "gemv", "splitk|split_k", "coopa", "coopb", "_h_", "_v_", "bwd|bprop|backward",
    "persistent", "_red_", "_per_", "_poi_", "_tem_", "scatter", "transpose", "sort", "copy", "nocast", "dk_dv", "sm80",
    "hopper", "mosaic", "badd|bias", "wrapped", "loop_", "input_", "gemm_fusion", "grouped", "partial|statistics",
)
_PATTERNS = tuple(re.compile(word) for word in _WORDS)
_TILES = tuple(map(re.compile, (
    r"nvjet_sm\d+_\w+?_(\d+)x(\d+)_(\d+)x(\d+)", r"tilesize(\d+)x(\d+)x(\d+)_stage(\d+)",
    r"knob_\d+_(\d+)x(\d+)x(\d+)()", r"sgemm_(\d+)x(\d+)_(\d+)x(\d+)", r"_(\d+)x(\d+)_(\d+)x(\d+)_",
)))


NAMES = (
    *(f"size {name}" for name in (
        "kind", "work", "family", "launches", "memory", "compute", "compute over memory", "bytes", "read", "written",
        "flops", "flops per byte", "flops guessed", "rate", "workspace", "backward",
    )),
    "l2 written", "l2 used",
    *(f"access {name}" for name in ("strided", "transposed", "gathered", "broadcast", "large inputs", "large outputs")),
    "access same axis", "size 1 byte", "size 4 bytes", "size second input",
    *(f"{name} {side}" for side in ("in", "out") for name in (
        "rows elements", "access run", "rows length", "rows count", "rows unaligned", "rows width",
    )),
    "rows in over out", "rows same length", "rows second length",
    *(f"tile {name}" for name in ("M", "N", "K", "batch")),
    *(f"operations {name}" for name in _COUNTED), *(f"operations compiled {name}" for name in _COMPILED),
    "operations fusion",
    *(f"name {word}" for word in _WORDS), "name known",
    *(f"tile {name}" for name in (
        "rows", "columns", "depth", "stages", "warps", "x", "y", "r", "split", "tma", "waves", "use", "other waves",
        "other use",
    )),
    *(f"launch {name}" for name in (
        "blocks", "threads", "registers", "shared", "spilled", "occupancy", "waves", "use", "bytes of block",
        "bytes of thread", "helpers", "other kernels",
    )),
)


@dataclass(frozen=True)
class Device:
    """The target of a prediction. l2_bytes: what L2 keeps of the data of earlier kernels."""

    ceilings: Ceilings
    processors: int = 132
    l2_bytes: int = 50 << 20

    @classmethod
    def named(cls, target: str, precision: str | None = None) -> Device:
        """Return a target pack's device, with the rate of float32 products of this precision."""
        pack = targets.load(target)
        return cls(Ceilings.from_json(pack.ceilings())).sized(target).at(precision)

    def sized(self, target: str) -> Device:
        """Return the same rates with a target pack's processors and L2."""
        properties = targets.load(target).device_properties()
        return Device(self.ceilings, int(properties["multi_processor_count"]), int(properties["L2_cache_size"]))

    def at(self, precision: str | None) -> Device:
        return Device(self.ceilings.at(precision), self.processors, self.l2_bytes)


@dataclass(frozen=True)
class Row:
    """Numbers of a kernel, in the order of NAMES.

    base_us: roofline time and launches of one call; the predicted time is a multiple of it.
    """

    values: list[float]
    base_us: float


@dataclass(frozen=True)
class _View:
    """An array as a kernel is given it. run: elements that lie together. axis: of the smallest stride."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    width: int
    elements: float
    row: int
    run: float
    axis: int


def rows(graph: FusionGraph, device: Device) -> Iterator[Row | str]:
    """Yield a row for each kernel in launch order, or the reason why it has none."""
    family = graph.compiler.partition("-")[0]
    moved = 0.0  # bytes since the call began; each phase is timed as a call of its own
    touched: dict[str, tuple[float, bool]] = {}  # buffer -> `moved` when a kernel last used it, and whether it wrote it
    phase = None
    for kernel in graph.kernels or ():
        if kernel.phase != phase:
            phase, moved, touched = kernel.phase, 0.0, {}
        if not kernel.launches:
            yield "the number of its launches is unknown" if kernel.launches is None else "it never runs"
        elif kernel.bytes_read is None or kernel.bytes_written is None:
            yield "the bytes that it moves are unknown"
        else:
            yield _row(graph, kernel, family, device, _in_l2(kernel, moved, touched, device.l2_bytes))
        moved += ((kernel.bytes_read or 0) + (kernel.bytes_written or 0)) * kernel.certain_launches
        for access in kernel.inputs or ():
            touched[access.buffer] = moved, False
        for access in kernel.outputs or ():
            touched[access.buffer] = moved, True


def _in_l2(kernel: Kernel, moved: float, touched: Mapping[str, tuple[float, bool]], size: int) -> tuple[float, float]:
    """Return the bytes of inputs that L2 may still hold: written by an earlier kernel, and used by one."""
    written = used = 0.0
    for access in kernel.inputs or ():
        when, wrote = touched.get(access.buffer, (None, False))
        if when is not None and moved - when + (access.bytes or 0) < size:
            used += access.bytes or 0
            written += wrote * (access.bytes or 0)
    return written, used


def _row(graph: FusionGraph, kernel: Kernel, family: str, device: Device, in_l2: tuple[float, float]) -> Row:
    read, written, launches = kernel.bytes_read or 0, kernel.bytes_written or 0, kernel.launches or 1
    ceilings, total = device.ceilings, max(read + written, 1)
    views = {id(access): _view(access, graph.buffer) for access in (*(kernel.inputs or ()), *(kernel.outputs or ()))}
    work, flops, guessed = kind_by_operations(kernel), kernel.flops, False
    if flops is None and work in ("attention", "gemm", "custom"):
        named = work == "attention"
        if work != "gemm" and (guess := _attention_flops(kernel, views, named)) is not None:
            work, flops, guessed = "attention", guess, True
        elif not named and (guess := _product_flops(kernel, views)) is not None:
            work, flops, guessed = "gemm", guess, True
    rate = product_rate(graph, kernel, ceilings.measured_rate)
    if family == "cuda" and rate:  # the raw CUDA kernels compute products without tensor cores
        rate = ceilings.products.get("float32-ieee", rate)
    memory = total / ceilings.bandwidth(read, written) * 1e6
    compute = flops / rate * 1e6 if flops and rate else 0.0
    values = [
        KINDS.index(kernel.kind), KINDS.index(work), FAMILIES.index(family) if family in FAMILIES else _NAN,
        math.log2(launches), math.log2(memory + 0.01), math.log2(compute + 0.01),
        math.log2((compute + 0.01) / (memory + 0.01)), _log(total), _log(read), _log(written), _log(flops),
        _log(None if flops is None else flops / total), guessed,
        math.log2(rate / 1e12) if rate else _NAN, _log(kernel.workspace_bytes), kernel.phase == "backward",
        in_l2[0] / read if read else 0.0, in_l2[1] / read if read else 0.0,
    ]
    dims = _accesses(kernel, views, values, total, flops)
    _operations(kernel, values)
    _launch(kernel, values, total, dims, device.processors)
    return Row(values, (max(memory, compute) + (ceilings.launch_us or _LAUNCH_US)) * launches)


def _accesses(
    kernel: Kernel, views: Mapping[int, _View | None], values: list[float], total: float, flops: float | None
) -> tuple[float, float, float]:
    """Add what the arrays tell; return a product's rows, columns and batch, NaN where they are unknown."""
    inputs = sorted(kernel.inputs or (), key=_bytes, reverse=True)
    outputs = sorted(kernel.outputs or (), key=_bytes, reverse=True)
    big = views[id(inputs[0])] if inputs else None
    second = views[id(inputs[1])] if len(inputs) > 1 else None
    out = views[id(outputs[0])] if outputs else None
    reference = max(big.elements if big else 0.0, out.elements if out else 0.0)
    strided = transposed = gathered = broadcast = narrow = wide = 0.0
    laid_out = False
    for index, access in enumerate((*inputs, *outputs)):
        view, size = views[id(access)], access.bytes or 0
        if view is None or not size:
            continue
        if view.width == 1:
            narrow += size
        elif view.width >= 4:
            wide += size
        if index < len(inputs) and view.elements < reference:
            broadcast += size
        if view.strides is None:
            continue
        laid_out = True
        if view.run < view.elements:
            strided += size
        if out and out.strides is not None and view.axis != out.axis and view.shape == out.shape:
            transposed += size
        if index == 0 and any(_group(op.op) == "gathers" for op in kernel.source_ops):
            gathered = size
    values += (strided / total, transposed / total, gathered / total) if laid_out else (_NAN, _NAN, _NAN)
    values += (
        broadcast / total, sum(_bytes(each) > 0.2 * total for each in inputs),
        sum(_bytes(each) > 0.2 * total for each in outputs),
        big.shape[big.axis] == out.shape[out.axis] if big and out and big.axis >= 0 and out.axis >= 0 else _NAN,
        narrow / total, wide / total, _log(_bytes(inputs[1])) if second else 0.0,
    )
    for view in (big, out):
        if view is None:
            values += (_NAN,) * 6
        else:
            length = view.row * view.width
            values += (
                _log(view.elements), _log(view.run * view.width), _log(length), _log(view.elements / view.row),
                length % 16 != 0, view.width,
            )
    m = n = batch = depth = _NAN
    if big and out:
        values += (math.log2((big.elements + 1) / (out.elements + 1)), big.row == out.row)
        if kernel.kind in ("gemm", "custom") and flops and second and second.elements and out.elements:
            depth = flops / 2 / out.elements
            if depth >= 1:
                batch = max(1.0, big.elements * second.elements / (out.elements * depth * depth))
                n, m = float(out.row), out.elements / out.row / batch
    else:
        values += (_NAN, _NAN)
    values += (_log(second.row * second.width) if second else _NAN, _log(m), _log(n), _log(depth), _log(batch))
    return m, n, batch


def _bytes(access: Access) -> int:
    return access.bytes or 0


def _operations(kernel: Kernel, values: list[float]) -> None:
    values += _counts(tuple([op.op for op in kernel.source_ops]), _COUNTED)
    opcodes = kernel.facts.get("opcodes")
    values += _counts(tuple(opcodes), _COMPILED) if opcodes else (_NAN,) * len(_COMPILED)
    fusion = kernel.facts.get("fusion_kind")
    values.append({"kLoop": 0, "kInput": 1, "kCustom": 2}.get(fusion, 3) if fusion else _NAN)


def _launch(
    kernel: Kernel, values: list[float], total: float, dims: tuple[float, float, float], processors: int
) -> None:
    launch, name = kernel.launch, kernel.runtime_name
    values += _words(f"{kernel.name} {name or ''}")
    text = kernel.facts.get("config")
    config: Mapping[str, Any] = launch.config or (_config_of(text) if isinstance(text, str) else {})
    rows, columns, depth, stages = _tile_of(name) if name else (_NAN,) * 4
    if math.isnan(rows) and config:
        rows, columns, depth = _tile_in(config)
    values += (name is not None, _log(rows), _log(columns), _log(depth))
    if config:
        values += (
            _first(config, ("num_stages", "STAGES", "NUM_STAGES"), stages), _first(config, ("num_warps",)),
            _log(_first(config, ("XBLOCK",))), _log(_first(config, ("YBLOCK",))), _log(_first(config, ("R0_BLOCK",))),
            _log(_first(config, ("SPLITS", "RSPLIT_SIZE"), kernel.facts.get("split_k") or _NAN)),
            config.get("is_tma_allowed", _NAN),
        )
    else:
        values += (stages, _NAN, _NAN, _NAN, _NAN, _log(kernel.facts.get("split_k")), _NAN)
    values += _waves(*dims, rows, columns, processors)
    values += _waves(*dims, columns, rows, processors)
    blocks = float(math.prod(launch.grid)) if launch.grid else _NAN
    threads = float(math.prod(launch.block)) if launch.block else _NAN
    resident = _NAN
    if threads > 0:
        resident = min(2048 // threads, 32)
        if launch.registers:
            resident = min(resident, 65536 // (launch.registers * threads))
        if launch.shared_bytes:
            resident = min(resident, 233472 // (launch.shared_bytes + 1024))
        resident = max(resident, 1.0)
    waves = blocks / (processors * resident)
    helpers = kernel.facts.get("with") or {}
    values += (
        _log(blocks), _log(threads), _NAN if launch.registers is None else launch.registers, _log(launch.shared_bytes),
        _log(launch.local_bytes), threads * resident / 2048, min(waves, 64.0),
        waves / math.ceil(waves) if waves > 0 else _NAN, _log(total / blocks) if blocks > 0 else _NAN,
        _log(total / blocks / threads) if blocks * threads > 0 else _NAN, sum(helpers.values()),
        sum(count for name, count in helpers.items() if not name.startswith("[")),
    )


@cache
def _group(op: str) -> str | None:
    return _GROUPS.get(token(op))


@lru_cache(maxsize=4096)
def _counts(operations: tuple[str, ...], counted: tuple[str, ...]) -> tuple[float, ...]:
    found = [_group(each) for each in operations]
    return tuple(float(found.count(name)) for name in counted)


@lru_cache(maxsize=4096)
def _words(name: str) -> tuple[float, ...]:
    return tuple(float(pattern.search(name.lower()) is not None) for pattern in _PATTERNS)


@lru_cache(maxsize=4096)
def _tile_of(name: str) -> tuple[float, ...]:
    """Return rows, columns, depth and stages of the tile that a library's kernel name holds."""
    for pattern in _TILES:
        if found := pattern.search(name):
            return tuple(float(group) if group else _NAN for group in found.groups())
    return (_NAN,) * 4


@lru_cache(maxsize=4096)
def _config_of(text: str) -> Mapping[str, float]:
    """Return Inductor's configuration from its words, "XBLOCK: 1024, num_warps: 4"."""
    return {name: float(value) for name, value in re.findall(r"(\w+): (\d+)", text)}


def _tile_in(config: Mapping[str, Any]) -> tuple[float, float, float]:
    depth = _first(config, ("BLOCK_K",))
    tiles = config.get("output_tiles")
    if isinstance(tiles, (list, tuple)) and tiles and isinstance(tiles[0], (list, tuple)) and tiles[0]:
        contracting = config.get("contracting_tiles")
        while isinstance(contracting, (list, tuple)) and contracting:
            contracting = contracting[-1]
        depth = float(contracting) if isinstance(contracting, (int, float)) else depth
        return float(math.prod(tiles[0][:-1])), float(tiles[0][-1]), depth
    rows = _first(config, ("BLOCK_M", "ROWS", "BLOCK_Q"))
    return rows, _first(config, ("BLOCK_N", "COLUMNS", "BLOCK_KV", "BLOCK_SIZE", "BLOCK")), depth


def _first(config: Mapping[str, Any], names: Sequence[str], otherwise: float = _NAN) -> float:
    for name in names:
        if isinstance(value := config.get(name), (int, float)):
            return float(value)
    return otherwise


def _waves(m: float, n: float, batch: float, rows: float, columns: float, processors: int) -> tuple[float, float]:
    """Return the waves of output tiles, and the share of their work that the result needs."""
    if not (m > 0 and n > 0 and rows > 0 and columns > 0):
        return _NAN, _NAN
    waves = math.ceil(m / rows) * math.ceil(n / columns) * batch / processors
    return min(waves, 64.0), m * n * batch / (math.ceil(waves) * processors * rows * columns)


def _attention_flops(kernel: Kernel, views: Mapping[int, _View | None], named: bool) -> float | None:
    """Return the FLOPs of a causal attention with these arrays; None where they are not those of an attention.

    The axis of the sequence is the longest one before the last. A forward kernel computes two products, one that reads
    the gradient of the output three, four or five: for the queries' gradient, for keys' and values', for all three.
    n documents of random lengths in a sequence have 2 / (n + 1) of its pairs.

    named: the kernel's operations say that it is an attention. Otherwise its arrays must.
    """
    operands = [view for access in kernel.inputs or () if (view := views[id(access)]) and len(view.shape) > 2]
    if not operands:
        return None
    query = operands[0]
    same = [view for view in operands if view.shape[-1] == query.shape[-1]]
    if not named and (len(same) < 3 or query.shape[-1] > _LARGEST_HEAD):
        return None
    backward = len(same) > 3 if not named else any("backward" in op.op or "bwd" in op.op for op in kernel.source_ops)
    keys = same[1:3] or [query]
    key = keys[-1] if backward else keys[0]
    products = 2
    if backward:
        made = [view for access in kernel.outputs or () if (view := views[id(access)]) and len(view.shape) > 2]
        products = 5 if named else 2 + min(sum(view.shape[-1] == query.shape[-1] for view in made), 3)
    documents = [
        view.shape[0] - 1 for access in kernel.inputs or ()
        if (view := views[id(access)]) and len(view.shape) == 1 and view.width == 4 and view.shape[0] > 2
    ]
    share = 2 / (max(documents) + 1) if documents else 1.0
    return products * query.elements * max(key.shape[:-1]) * share


def _product_flops(kernel: Kernel, views: Mapping[int, _View | None]) -> float | None:
    """Return the FLOPs of a product of the two largest inputs; None where the arrays are not those of a product."""
    inputs, outputs = (sorted(side or (), key=_bytes, reverse=True) for side in (kernel.inputs, kernel.outputs))
    arrays = [view.shape for access in (*inputs[:2], *outputs[:1]) if (view := views[id(access)])]
    if len(arrays) < 3 or arrays[0] == arrays[1] == arrays[2]:
        return None
    left, right = sorted(arrays[:2], key=len)  # the second may be one matrix for each group of rows
    batch = math.prod(left[:-2])
    if len(left) < 2 or left[:-2] != arrays[2][: len(left) - 2]:
        return None
    for rows, depth in (left[-2:], left[:-3:-1]):
        for columns, contracted in (right[-2:], right[:-3:-1]):
            if contracted == depth and rows in arrays[2] and columns in arrays[2]:
                return 2.0 * batch * rows * columns * depth
    return None


def _view(access: Access, buffers: Mapping[str, Buffer]) -> _View | None:
    buffer = buffers.get(access.buffer)
    if buffer is None:
        return None
    shape = buffer.shape if access.shape is None else access.shape
    strides = None if access.shape is None else access.strides
    run, axis = _NAN, -1
    if strides is not None:
        run = 1.0
        for stride, size, index in sorted(zip(strides, shape, range(len(shape)), strict=True)):
            if size < 2 or not stride:
                continue
            axis = index if axis < 0 else axis
            if stride != run:
                break
            run *= size
    row = shape[axis] if shape else 1
    return _View(shape, strides, _WIDTHS.get(buffer.dtype, 1), float(math.prod(shape)), max(row, 1), run, axis)


def _log(value: float | None) -> float:
    return _NAN if value is None or math.isnan(value) else math.log2(value + 1.0)
