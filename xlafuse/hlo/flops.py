"""FLOPs of one HLO instruction, counted as XLA's HloCostAnalysis counts them.

| instruction | FLOPs |
|---|---|
| elementwise, also conversions and transcendental functions (XLA lists these separately) | 1 a result element |
| reduction | 1 application of its function for each element that disappears |
| product | 2 for each multiply-add |
| data movement | 0 |
| cuBLAS products, cuDNN convolutions, cuDNN attention (XLA counts none) | from the call's configuration |
| other library calls | None, not 0 |
"""

import math
import re

from xlafuse.hlo.shape import MAX_DIGITS, UNBOUNDED, Shape
from xlafuse.hlo.text_reader import Computation, Instruction, Module, WindowDimension

_ELEMENTWISE = frozenset(  # prose: ok
    "abs add and atan2 bitcast-convert cbrt ceil clamp clz compare complex convert cosine count-leading-zeros divide "
    "erf exp exponential exponential-minus-one expm1 floor imag is-finite log log-plus-one log1p logistic maximum "
    "minimum multiply negate not or popcnt power real reduce-precision remainder rng rng-bit-generator "
    "round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign "
    "sine sqrt stochastic-convert subtract tan tanh xor acos acosh asin asinh atanh cosh sinh".split()
)
_MOVEMENT = frozenset(
    "add-dependency after-all all-gather all-to-all bitcast broadcast collective-broadcast collective-permute "
    "concatenate constant copy domain dynamic-reshape dynamic-slice dynamic-update-slice gather get-dimension-size "
    "get-tuple-element infeed iota opt-barrier outfeed pad parameter partition-id ragged-all-to-all recv "
    "reduce-scatter replica-id reshape reverse rng-get-and-update-state send set-dimension-size slice transpose "
    "tuple".split()
)  # reduce-scatter adds, but XLA counts none
_MAX_CONVOLUTION_STEPS = 1 << 22  # kernel positions in one module; further convolutions stay uncounted

# "dot_dimension_numbers":{...,"lhs_contracting_dimensions":["1"],
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([\d", ]*)\]')
# "intermediate_tensor_shape":{"dimensions":["4","16","512","512"],
_SCORES = re.compile(r'"intermediate_tensor_shape":\{"dimensions":\[([\d", ]*)\]')
_MASK = re.compile(r'"mask_type":"(\w+)"')
_WINDOW = re.compile(r'"sliding_window_length":"?([1-9]\d{0,8})\b')


class Flops:
    """FLOP counts in one module; the function of a reduction is counted once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._applied: dict[str, int | None] = {}
        self._steps_left = _MAX_CONVOLUTION_STEPS

    def of(self, computation: Computation, instruction: Instruction) -> int | None:
        """Return the FLOPs of one execution of an instruction other than a fusion; None if they are unknown."""
        opcode = instruction.synchronous_opcode
        if opcode in _MOVEMENT:
            return 0
        shapes = instruction.shapes
        operands = [computation.operand_shape(name) for name in instruction.operands]
        if not shapes or any(UNBOUNDED in shape.dims for shape in shapes):
            return None
        if opcode in _ELEMENTWISE:
            return sum(_elements(shape) for shape in (shapes if opcode == "rng-bit-generator" else shapes[:1]))
        if opcode == "all-reduce":  # as between two devices
            return sum(map(_elements, shapes))
        if opcode == "custom-call":
            return self._library(instruction, operands)
        if not operands or any(shape is None for shape in operands):
            return None
        known = [shape for shape in operands if shape is not None]
        if any(UNBOUNDED in shape.dims for shape in known):
            return None
        match opcode:
            case "dot" | "scaled-dot":
                return _product(known[0], shapes[0], instruction.contracting)
            case "ragged-dot":
                return _ragged(known, shapes[0], instruction.contracting)
            case "convolution" if len(known) >= 2:
                return self._convolution(instruction, known[0], known[1], shapes[0])
            case "reduce":
                return self._times("to_apply", instruction, _elements(known[0]) - _elements(shapes[0]))
            case "map":
                return self._times("to_apply", instruction, _elements(shapes[0]))
            case "scatter":
                return self._times("to_apply", instruction, _elements(known[-1]))
            case "reduce-window":
                return self._times("to_apply", instruction, (_window_size(instruction) - 1) * _elements(shapes[0]))
            case "select-and-scatter" if len(known) >= 2:
                sources = _elements(known[1])
                chosen = self._times("select", instruction, (_window_size(instruction) - 1) * sources)
                added = self._times("scatter", instruction, sources)
                return None if chosen is None or added is None else chosen + added
            case "sort":
                count = _elements(known[0])
                return count * max(count - 1, 0).bit_length()
            case "triangular-solve" if len(known) >= 2 and known[0].dims:
                return 2 * known[0].dims[-1] * _elements(known[1])
            case "cholesky" if known[0].dims:
                return known[0].dims[-1] * _elements(known[0]) // 3
            case _:
                return None

    def _library(self, instruction: Instruction, operands: list[Shape | None]) -> int | None:
        target, config = instruction.custom_call_target, instruction.backend_config
        if not operands or operands[0] is None:
            return None
        left, result = operands[0], instruction.shapes[0]
        if target.startswith("__cublas"):
            dimensions = _CONTRACTING.search(config)
            contracting = _integers(dimensions[1]) if dimensions else None
            if contracting is None:
                return None
            if "groupedMatmul" in target:
                known = [shape for shape in operands if shape is not None]
                return _ragged(known, result, contracting) if len(known) == len(operands) else None
            return _product(left, result, contracting)
        right = operands[1] if len(operands) > 1 else None
        if right is None:
            return None
        if target.startswith("__cudnn$conv"):  # labels and window describe the forward convolution
            if "BackwardInput" in target:
                return self._convolution(instruction, result, right, left)
            if "BackwardFilter" in target:
                return self._convolution(instruction, left, result, right)
            return self._convolution(instruction, left, right, result)
        if target.startswith("__cudnn$fmha"):
            return _attention(instruction, left)
        return None

    def _convolution(self, instruction: Instruction, left: Shape, right: Shape, result: Shape) -> int | None:
        """Return twice the multiply-adds on elements of the input; padding and gaps of a dilated input do not count."""
        labels = re.fullmatch(r"([a-z0-9?]+)_([a-z0-9?]+)->([a-z0-9?]+)", instruction.dim_labels)
        groups = instruction.feature_groups, instruction.batch_groups
        if not labels or 0 in groups:
            return None
        sizes = [
            dict(zip(label, shape.dims, strict=False))
            for label, shape in zip(labels.groups(), (left, right, result), strict=True)
        ]
        window = instruction.window
        spatial = [str(number) for number in range(len(window))]
        wanted = [("b", "f", *spatial), ("i", "o", *spatial), ("b", "f", *spatial)]
        if any(name not in size for names, size in zip(wanted, sizes, strict=True) for name in names):
            return None
        steps = sum(sizes[1][name] for name in spatial)
        if steps > self._steps_left:
            return None
        self._steps_left -= steps
        positions = 1
        for name, dimension in zip(spatial, window, strict=True):
            valid = _valid_positions(dimension, *(size[name] for size in sizes))
            if valid is None:
                return None
            positions *= valid
        return 2 * (sizes[0]["f"] // groups[0]) * sizes[2]["f"] * (sizes[0]["b"] // groups[1]) * positions

    def _times(self, attribute: str, instruction: Instruction, count: int) -> int | None:
        """Return the FLOPs of `count` applications of the function that the attribute names."""
        name = next(iter(instruction.called(attribute)), "")
        if name not in self._applied:
            function = self._module.computations.get(name)
            self._applied[name] = None if function is None else _scalar_operations(function)
        each = self._applied[name]
        return None if each is None else each * max(count, 0)


def _scalar_operations(function: Computation) -> int | None:
    """Return the FLOPs of one application; None if the function applies other functions."""
    total = 0
    for part in function.instructions.values():
        if part.opcode in _ELEMENTWISE:
            total += _elements(part.shapes[0]) if part.shapes else 0
        elif part.opcode not in _MOVEMENT:
            return None
    return total


def _elements(shape: Shape) -> int:
    return math.prod(shape.dims)


def _window_size(instruction: Instruction) -> int:
    return math.prod(dimension.size for dimension in instruction.window)


def _contracted_size(left: Shape, contracting: tuple[int, ...]) -> int | None:
    """Return the number of products that add up to one result element."""
    if any(dimension >= len(left.dims) for dimension in contracting):
        return None
    return math.prod(left.dims[dimension] for dimension in contracting)


def _product(left: Shape, result: Shape, contracting: tuple[int, ...]) -> int | None:
    """Return 2 * batch * M * N * K."""
    size = _contracted_size(left, contracting)
    return None if size is None else 2 * _elements(result) * size


def _ragged(operands: list[Shape], result: Shape, contracting: tuple[int, ...]) -> int | None:
    """Return the FLOPs of a grouped product; operands are left, right and group sizes.

    Each row belongs to one group, a row of the result or a summed row.
    """
    size = _contracted_size(operands[0], contracting)
    if size is None or len(operands) < 3 or not operands[2].dims:
        return None
    groups = operands[2].dims[-1]
    flops = 2 * _elements(result) * size
    summed = _elements(result) * size**2 == groups * _elements(operands[0]) * _elements(operands[1])
    return flops // groups if summed and groups else flops


def _valid_positions(window: WindowDimension, inputs: int, kernel: int, outputs: int) -> int | None:
    """Return the number of (kernel index, output index) pairs that read an element of the input.

    Such a pair reads index i = output * stride - padding + kernel * dilation of the dilated input. i must be a multiple
    of the base dilation d, and 0 <= i <= (inputs - 1) d.
    """
    if not (window.stride and window.base_dilation):
        return None
    base = window.base_dilation
    step = math.gcd(window.stride, base)
    period = base // step  # every period-th output reads a multiple of the base dilation
    inverse = pow(window.stride // step, -1, period) if period > 1 else 0
    total = 0
    for offset in (k * window.window_dilation - window.padding_low for k in range(kernel)):
        if offset % step:
            continue
        first = -(offset // step) * inverse % period if period > 1 else 0
        lowest = max(0, -(offset // window.stride))  # ceil(-offset / stride)
        highest = min(outputs - 1, ((inputs - 1) * base - offset) // window.stride)
        lowest += (first - lowest) % period
        if highest >= lowest:
            total += (highest - lowest) // period + 1
    return total


def _attention(instruction: Instruction, query: Shape) -> int | None:
    """Return the FLOPs of the products in cuDNN attention; None under a mask that depends on data.

    Forward has two products, q k^T and p v. Backward has five: q k^T again, and those for dv, dp, dq and dk. A causal
    mask halves the scores, and a window keeps that many of a row. query has batch * heads * rows * d elements, scores
    have batch * heads * rows * columns, and v's heads have size d too.
    """
    dimensions = _SCORES.search(instruction.backend_config)
    scores = _integers(dimensions[1]) if dimensions else None
    if scores is None or len(scores) != 4 or 0 in scores:
        return None
    batch, heads, rows, columns = scores
    found, window = _MASK.search(instruction.backend_config), _WINDOW.search(instruction.backend_config)
    mask = found[1] if found else "NO_MASK"
    if window:
        if mask != "CAUSAL" or rows != columns:
            return None
        width = min(int(window[1]), columns)
        kept = width * (2 * rows - width)  # twice the scores
    elif (halves := {"NO_MASK": 2, "ALIBI": 2, "CAUSAL": 1}.get(mask)) is not None:
        kept = halves * rows * columns
    else:
        return None
    head = _elements(query) // (batch * heads * rows)
    products = 5 if "Backward" in instruction.custom_call_target else 2
    return products * batch * heads * kept * head


def _integers(text: str) -> tuple[int, ...] | None:
    words = [word.strip().strip('"') for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and len(word) <= MAX_DIGITS for word in words):
        return None
    return tuple(map(int, words))
