"""Shapes of instructions that are written without one: add(a, b). XLA's parser infers the same shapes."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from xlafuse.hlo.shape import Element, Malformed, Shape, array_element, of_dtype, read_integer, tuple_element
from xlafuse.hlo.window import read_dimensions, read_window

_ELEMENTWISE = frozenset(
    "abs acos acosh asin asinh atanh cbrt ceil count-leading-zeros clz cosine cosh erf exponential "
    "exponential-minus-one floor imag log log-plus-one logistic negate not popcnt real round-nearest-afz "
    "round-nearest-even rsqrt sign sine sinh sqrt tan tanh".split()
)
_SAME_AS_FIRST = _ELEMENTWISE | frozenset(
    "add-dependency all-reduce broadcast cholesky copy domain "
    "opt-barrier reverse select-and-scatter set-dimension-size while".split()
)
_BINARY = frozenset(
    "add and atan2 compare complex divide maximum minimum multiply or power remainder shift-left "
    "shift-right-arithmetic shift-right-logical subtract xor".split()
)
_SECOND = frozenset(("clamp", "triangular-solve"))
_CALLED = {"call": ("to_apply",), "conditional": ("branch_computations", "true_computation")}
_COMPLEX = {"f32": "c64", "f64": "c128"}
_PARTS = {"c64": "f32", "c128": "f64"}
_LABELS = re.compile(r"([0-9a-z?]+)_([0-9a-z?]+)->([0-9a-z?]+)$")
# f32, or f8e4m3fn: bits, bits of the exponent, bits of the mantissa
_DTYPE = re.compile(r"(bf|[a-z]+?)(\d{1,3})(?:e(\d{1,2})m(\d{1,2}))?")
_EXPONENTS = {"bf16": 8, "f16": 5, "f32": 8, "f64": 11}


def infer(
    opcode: str, operands: Sequence[Element], attributes: Mapping[str, str], called: Mapping[str, Element]
) -> Element:
    """Return the result of an instruction. called: attribute -> the result of the first computation that it names.

    Raises Malformed for opcodes whose shape XLA's parser does not infer, and for a few rare ones.
    """
    try:
        return _infer(opcode, operands, attributes, called)
    except (IndexError, KeyError):  # too few operands, or a missing attribute
        raise Malformed(f"{opcode} without a shape") from None


def _infer(
    opcode: str, operands: Sequence[Element], attributes: Mapping[str, str], called: Mapping[str, Element]
) -> Element:
    match opcode:
        case "abs" | "real" | "imag" if _array(operands[0]).dtype in _PARTS:
            return of_dtype(_array(operands[0]), _PARTS[_array(operands[0]).dtype])
        case _ if opcode in _SAME_AS_FIRST:
            return operands[0]
        case _ if opcode in _SECOND:
            return operands[1]
        case _ if opcode in _BINARY:
            return _binary(opcode, _array(operands[0]), _array(operands[1]))
        case "select":
            return _select(*(_array(operand) for operand in operands[:3]))
        case _ if opcode in _CALLED:
            return called[next((key for key in _CALLED[opcode] if key in called), "")]
        case "is-finite":
            return of_dtype(_array(operands[0]), "pred")
        case "after-all":
            return array_element("token", ())
        case "partition-id" | "replica-id":
            return array_element("u32", ())
        case "get-dimension-size":
            return array_element("s32", ())
        case "tuple":
            return tuple_element(operands)
        case "get-tuple-element":
            return operands[0].elements[read_integer(attributes["index"])]
        case "sort":
            return _one_or_tuple(operands)
        case "scatter":
            return _one_or_tuple(operands[: len(operands) // 2])
        case "map":
            return _applied(_array(operands[0]).dims, called)
        case "reduce":
            return _applied(_without(_array(operands[0]).dims, read_dimensions(attributes["dimensions"])), called)
        case "scan":
            return _scanned(_array(operands[0]), attributes, called)
        case "reduce-window":
            return _applied(_windowed(_array(operands[0]).dims, attributes.get("window", "")), called)
        case _:
            return _ARRAYS[opcode]([_array(operand) for operand in operands], attributes)


def _array(element: Element) -> Shape:
    if element.shape is None:
        raise Malformed("a tuple instead of an array")
    return element.shape


def _one_or_tuple(elements: Sequence[Element]) -> Element:
    return elements[0] if len(elements) == 1 else tuple_element(elements)


def _without(dims: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for at, size in enumerate(dims) if at not in removed)


def _wider(left: str, right: str) -> str:
    """Return the dtype of a product or sum of two dtypes: complex before float before integer, then the wider one."""
    return right if _width(right) > _width(left) else left


def _width(dtype: str) -> tuple[int, ...]:
    parts = _DTYPE.match(dtype)
    if not parts:  # pred
        return (0,)
    kind, bits, exponent, mantissa = parts.groups()
    match kind:
        case "c":
            return 3, int(bits)
        case "f" | "bf" if exponent:
            return 2, int(exponent), int(mantissa)
        case "f" | "bf":
            return 2, _EXPONENTS.get(parts[0], 0), int(bits) - _EXPONENTS.get(parts[0], 0) - 1
        case _:
            return 1, int(bits), kind == "s"


def _select(predicate: Shape, left: Shape, right: Shape) -> Element:
    return of_dtype(predicate if predicate.dims else left, _wider(left.dtype, right.dtype), left.bits)


def _binary(opcode: str, left: Shape, right: Shape) -> Element:
    dtype = _wider(left.dtype, right.dtype)
    dtype = {"compare": "pred", "complex": _COMPLEX.get(left.dtype, left.dtype)}.get(opcode, dtype)
    if left.dims == right.dims:
        return of_dtype(left, dtype)
    dims = left.dims or right.dims
    if left.dims and right.dims:
        if len(left.dims) != len(right.dims):
            raise Malformed("operands of different ranks")
        dims = tuple(b if a == 1 else a for a, b in zip(left.dims, right.dims, strict=True))
    return array_element(dtype, dims)


def _applied(dims: Sequence[int], called: Mapping[str, Element]) -> Element:
    """Return arrays of the dtypes that a function returns for scalars."""
    result = called["to_apply"]
    if result.shape is not None:
        return array_element(result.shape.dtype, dims)
    return tuple_element([array_element(_array(part).dtype, dims) for part in result.elements])


def _scanned(array: Shape, attributes: Mapping[str, str], called: Mapping[str, Element]) -> Element:
    """Return what a function returns, its outputs once for each step, its carries once."""
    (axis,) = read_dimensions(attributes["dimensions"]) or (0,)
    results = [_array(part) for part in called["to_apply"].elements]
    outputs = len(results) - read_integer(attributes["num_carries"])
    steps = (array.dims[axis],)
    stacked = [array_element(part.dtype, part.dims[:axis] + steps + part.dims[axis:]) for part in results[:outputs]]
    return tuple_element([*stacked, *called["to_apply"].elements[outputs:]])


def _windowed(dims: Sequence[int], text: str) -> tuple[int, ...]:
    return tuple(
        window.positions(size) for size, window in zip(dims, read_window(text), strict=False)
    )


def _concatenate(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    (axis,) = read_dimensions(attributes["dimensions"]) or (0,)
    dims = list(arrays[0].dims)
    dims[axis] = sum(array.dims[axis] for array in arrays)
    return array_element(functools.reduce(_wider, [array.dtype for array in arrays]), dims)


def _transpose(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    """Permute dims and layout alike, so the bytes in memory stay as they are."""
    array = arrays[0]
    dims = tuple(array.dims[at] for at in read_dimensions(attributes["dimensions"]))
    return Element(array.bytes, shape=replace(array, dims=dims))


def _dot(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    left, right = arrays[:2]
    batch, right_batch, left_sum, right_sum = (
        read_dimensions(attributes.get(key, ""))
        for key in ("lhs_batch_dims", "rhs_batch_dims", "lhs_contracting_dims", "rhs_contracting_dims")
    )
    groups = read_dimensions(attributes.get("rhs_group_dims", ""))
    dims = [left.dims[at] for at in batch]
    dims += [*_without(left.dims, (*batch, *left_sum)), *_without(right.dims, (*right_batch, *right_sum, *groups))]
    return array_element(_wider(left.dtype, right.dtype), dims)


def _ragged_dot(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    """Groups of summed terms give a product for each group."""
    product = _dot(arrays, attributes)
    (ragged,) = read_dimensions(attributes["lhs_ragged_dims"]) or (0,)
    if ragged not in read_dimensions(attributes.get("lhs_contracting_dims", "")):
        return product
    return array_element(_array(product).dtype, (arrays[2].dims[-1], *_array(product).dims))


def _convolution(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    labels = _LABELS.match(attributes["dim_labels"])
    if not labels:
        raise Malformed("dim_labels")
    left, right = (dict(zip(labels[at + 1], arrays[at].dims, strict=False)) for at in (0, 1))
    groups = read_integer(attributes.get("batch_group_count", "1"))
    sizes = {"b": left["b"] // max(groups, 1), "f": right["o"]}
    for at, window in enumerate(read_window(attributes.get("window", ""))):
        sizes[str(at)] = window.positions(left[str(at)])
    return array_element(_wider(arrays[0].dtype, arrays[1].dtype), [sizes[label] for label in labels[3]])


def _pad(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    dims = []
    for size, text in zip(arrays[0].dims, attributes["padding"].split("x"), strict=False):
        low, high, *interior = (int(part) for part in text.split("_") if len(part) < 18)
        dims.append(size + low + high + max(size - 1, 0) * (interior[0] if interior else 0))
    return array_element(_wider(arrays[0].dtype, arrays[1].dtype), dims)


def _gather(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    data, indices = arrays[:2]
    sizes, offsets = read_dimensions(attributes["slice_sizes"]), read_dimensions(attributes["offset_dims"])
    removed = (
        *read_dimensions(attributes.get("collapsed_slice_dims", "")),
        *read_dimensions(attributes.get("operand_batching_dims", "")),
    )
    kept = iter(_without(sizes, removed))
    batch = iter(_without(indices.dims, (read_integer(attributes["index_vector_dim"]),)))
    rank = len(offsets) + len(indices.dims) - (read_integer(attributes["index_vector_dim"]) < len(indices.dims))
    return array_element(data.dtype, [next(kept if at in offsets else batch, 0) for at in range(rank)])


def _fft(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    array, lengths, kind = arrays[0], read_dimensions(attributes["fft_length"]), attributes["fft_type"]
    if kind == "RFFT":
        return array_element(_COMPLEX[array.dtype], [*array.dims[:-1], lengths[-1] // 2 + 1])
    if kind == "IRFFT":
        return array_element(_PARTS[array.dtype], [*array.dims[:-1], lengths[-1]])
    return Element(array.bytes, shape=array)


def _normalization(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    array = arrays[0]
    feature = array_element(array.dtype, (array.dims[read_integer(attributes["feature_index"])],))
    return tuple_element((Element(array.bytes, shape=array), feature, feature))


def _topk(arrays: Sequence[Shape], attributes: Mapping[str, str]) -> Element:
    dims = (*arrays[0].dims[:-1], read_integer(attributes["k"]))
    return tuple_element((array_element(arrays[0].dtype, dims), array_element("s32", dims)))


_ARRAYS: dict[str, Callable[[Sequence[Shape], Mapping[str, str]], Element]] = {
    "batch-norm-grad": _normalization,
    "batch-norm-inference": lambda arrays, _: Element(arrays[0].bytes, shape=arrays[0]),
    "batch-norm-training": _normalization,
    "concatenate": _concatenate,
    "convolution": _convolution,
    "dot": _dot,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "ragged-dot": _ragged_dot,
    "scaled-dot": _dot,
    "topk": _topk,
    "transpose": _transpose,
}
