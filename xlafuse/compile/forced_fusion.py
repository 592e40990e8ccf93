"""Two kernels of a scheduled HLO module made one fusion, in the form that XLA's own fusion passes would give it.

`hlo_edit` applies it within a compile, behind the fusion passes, so every other kernel stays as it is.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xlafuse.compile import _jax_private
from xlafuse.hlo import kernel_extract
from xlafuse.hlo.proto_reader import message_type
from xlafuse.hlo.text_reader import parse

NAME = "forced_fusion"  # of the one kernel
MOST_BYTES = 256 << 20  # of the inputs of a check
_PASSING = ("get-tuple-element", "tuple", "opt-barrier", "bitcast")  # they launch nothing
_BEHIND_A_HERO = ("bitcast", "convert", "copy", "get-tuple-element")  # XLA's emitter of reductions computes them, too
_IN_PLACE = ("dynamic-update-slice", "scatter")
_UNFUSIBLE = (
    "custom-call", "sort", "fft", "cholesky", "triangular-solve", "rng", "while", "conditional", "call", "infeed",
    "outfeed", "send", "recv", "all-", "async-", "collective-", "reduce-scatter", "partition-id", "replica-id", "topk",
)
_MOST_IN_A_BLOCK = 1 << 20  # elements of a tensor in Triton
# Elements of a tile, and the warps of its block: XLA's rule for normalizations.
_WARPS = ((512, 1), (1024, 2), (16384, 4), (32768, 8), (65536, 16))


class NotForced(ValueError):
    """Two kernels cannot be made one; the message says why, in one line."""


def fuse(serialized: bytes, module: str, first: str, second: str) -> bytes | None:
    """Return a serialized HloModuleProto in which the two instructions are one fusion called NAME.

    None for a module of another name: XLA compiles candidates for kernels as modules of their own. A result that
    others use stays a result of the fusion. The barriers of the computation around the two vanish; behind the fusion
    passes they have no effect any more.

    Raises NotForced.
    """
    proto = message_type("xla.HloModuleProto").FromString(serialized)
    if proto.name != module:
        return None
    named = {row.name: each for each in proto.computations for row in each.instructions}
    if missing := [name for name in (first, second) if name not in named]:
        raise NotForced(f"XLA makes {missing[0]} behind its scheduler, where two kernels cannot be one any more")
    if named[first] is not named[second]:
        raise NotForced(f"{first} and {second} are not in one computation: a loop or a branch runs one of them")
    _Edit(proto, named[first]).fuse(first, second)
    return bytes(proto.SerializeToString())


class NotChecked(Exception):
    """The results could not be compared; the message says why."""


def error(default: str, forced: str, first: str, second: str) -> tuple[float, str]:
    """Return how far the forced fusion's results are from those of the two kernels, and their coarsest dtype.

    default, forced: the optimized HLO of the two compiles. XLA compiles both for the CPU, one operation after the
    other, and runs them on random inputs. The error is that of the worst result: max|y - y'| / rms(y').

    Raises NotChecked.
    """
    try:
        before = kernel_extract.extract_two(parse(default, statements=True), first, second)
        after = kernel_extract.extract(parse(forced, statements=True), NAME)
    except kernel_extract.NotExtracted as problem:
        raise NotChecked(str(problem)) from None
    size = sum(math.prod(shape) * np.dtype(jnp.dtype(dtype)).itemsize for shape, dtype, _ in after.inputs)
    if size > MOST_BYTES:
        raise NotChecked(f"their inputs hold {size / 1e6:.0f} MB, and a check takes at most {MOST_BYTES / 1e6:.0f} MB")
    if {*before.operands} != {*after.operands}:
        raise NotChecked(f"XLA gives them other inputs: {', '.join({*before.operands} ^ {*after.operands})}")
    generator = np.random.default_rng(0)
    inputs = {name: _drawn(generator, *each) for name, each in zip(after.operands, after.inputs, strict=True)}
    wanted, found = (
        _jax_private.run_on_cpu(each.operations, [inputs[name] for name in each.operands]) for each in (before, after)
    )
    if [y.shape for y in wanted] != [y.shape for y in found]:
        return math.inf, after.dtype
    return max((_distance(y, want) for y, want in zip(found, wanted, strict=True)), default=0.0), after.dtype


def _drawn(generator: np.random.Generator, shape: tuple[int, ...], dtype: str, values: int | None) -> Any:
    kind = jnp.dtype(dtype)
    if not jnp.issubdtype(kind, jnp.inexact):
        return generator.integers(0, 2 if dtype == "bool" else values or 100, shape).astype(kind)
    return generator.standard_normal(shape, dtype=np.float32).astype(kind)


def _distance(y: Any, wanted: Any) -> float:
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    y, wanted = y.astype(wide), wanted.astype(wide)
    with np.errstate(all="ignore"):
        apart = np.abs(np.where((y == wanted) | (np.isnan(y) & np.isnan(wanted)), 0, y - wanted))
        scale = math.sqrt(np.mean(np.abs(np.where(np.isfinite(wanted), wanted, 0)) ** 2)) if wanted.size else 0.0
    worst = float(np.max(apart, initial=0.0))
    return math.inf if math.isnan(worst) else worst / (scale or 1.0)


class _Edit:
    """A computation whose two instructions become one.

    rows: its instructions by id, in the order of the schedule. inner: those of the fusion. operands: the fusion's.
    values: for outer instructions, their ids in the fusion; a list of them for a tuple.
    """

    def __init__(self, module: Any, around: Any) -> None:
        self.module, self.around = module, around
        self.bodies = {each.id: each for each in module.computations}
        by_id = {row.id: _copy(row) for row in around.instructions}
        scheduled = around.id in module.schedule.sequences
        order = module.schedule.sequences[around.id].instruction_ids if scheduled else by_id
        self.rows: dict[int, Any] = {id: by_id[id] for id in order}
        self.id = max(self.bodies) + 1  # of the fusion's computation
        self.inner: dict[int, Any] = {}
        self.operands: list[int] = []
        self.values: dict[int, Any] = {}
        self.between: set[int] = set()  # instructions that need the first of the two, and that the second needs

    def fuse(self, first: str, second: str) -> None:
        self._resolve()
        named = {row.name: row for row in self.rows.values()}
        a, b = named[first], named[second]
        if list(self.rows).index(a.id) > list(self.rows).index(b.id):
            a, b = b, a
        for row in (a, b):
            self._require_fusible(row)
        after = self._reached(a.id)
        self.between = {id for id in after if b.id in self._reached(id)}
        for id in self.between:
            if (other := self.rows[id]).opcode not in _PASSING:
                raise NotForced(
                    f"one kernel would make a cycle: {other.name} needs {a.name}, and {b.name} needs {other.name}"
                )
        self.values[a.id] = self._inlined(a)
        self.values[b.id] = self._inlined(b)
        order = list(self.rows)
        waiting = [id for id in order[: order.index(b.id)] if id in after]
        before = [id for id in order[: order.index(b.id)] if id not in after and id != a.id]
        behind = waiting + order[order.index(b.id) + 1 :]
        del self.rows[a.id], self.rows[b.id]
        self._drop_unused(self.between)
        results = [*self._results(a), *self._results(b)]
        fusion = self._fusion(a, b, [inner for *_, inner in results])
        self._replace(a, b, fusion, results, before, behind)

    def _resolve(self) -> None:
        """Let each instruction take its operands from where they are computed, not through barriers and tuples."""

        def source(id: int) -> int:
            row = self.rows[id]
            if row.opcode == "opt-barrier":
                return source(row.operand_ids[0])
            if row.opcode == "get-tuple-element":
                made = self.rows[source(row.operand_ids[0])]
                if made.opcode == "tuple":
                    return source(made.operand_ids[row.tuple_index])
            return id

        for row in self.rows.values():
            row.operand_ids[:] = [source(id) for id in row.operand_ids]
        self.around.root_id = source(self.around.root_id)
        self._drop_unused(set(self.rows))

    def _drop_unused(self, among: set[int]) -> None:
        for id in reversed(list(self.rows)):
            unused = id in among and id != self.around.root_id and not self._users(id)
            if unused and self.rows[id].opcode in _PASSING:
                del self.rows[id]

    def _users(self, id: int) -> list[Any]:
        return [row for row in self.rows.values() if id in row.operand_ids]

    def _reached(self, id: int) -> set[int]:
        """Return the instructions that need this one. They come behind it in the schedule."""
        reached = {id}
        for row in self.rows.values():
            if reached.intersection((*row.operand_ids, *row.control_predecessor_ids)):
                reached.add(row.id)
        return reached - {id}

    def _require_fusible(self, row: Any) -> None:
        body = self.bodies[row.called_computation_ids[0]].instructions if row.opcode == "fusion" else [row]
        kind = _fusion_config(row).get("kind", "")
        for opcode in (part.opcode for part in body):
            if opcode in ("dot", "scaled-dot", "ragged-dot", "convolution") or "gemm" in kind:
                raise NotForced(f"{row.name} is a matrix product, whose code comes from a template or a library")
            if opcode.startswith(_UNFUSIBLE) or kind not in ("", "__triton"):
                what = f"call of {row.custom_call_target}" if row.custom_call_target else kind or opcode
                raise NotForced(f"{row.name} is a {what}, into which XLA fuses nothing")
            if opcode in _IN_PLACE:
                raise NotForced(f"{row.name} updates an array in place, and fusing it could reorder reads of the array")

    # The operations of the fusion

    def _inside(self, id: int) -> Any:
        """Return the value of an outer instruction in the fusion."""
        if id not in self.values:
            row = self.rows[id]
            if id not in self.between:
                self.values[id] = self._add("parameter", "param", row.shape, parameter_number=len(self.operands))
                self.operands.append(id)
            elif row.opcode == "get-tuple-element":
                self.values[id] = self._elements(self.rows[row.operand_ids[0]])[row.tuple_index]
            else:
                self.values[id] = self._copied(row, [self._inside(operand) for operand in row.operand_ids])
        return self.values[id]

    def _inlined(self, row: Any) -> Any:
        """Copy a kernel's operations into the fusion, and return its value there."""
        if row.opcode != "fusion":
            return self._copied(row, [self._inside(id) for id in row.operand_ids])
        body = self.bodies[row.called_computation_ids[0]]
        values: dict[int, Any] = {}
        for part in body.instructions:
            if part.opcode == "parameter":
                values[part.id] = self._inside(row.operand_ids[part.parameter_number])
            elif part.opcode == "tuple" and part.id == body.root_id:
                values[part.id] = [values[id] for id in part.operand_ids]
            else:
                values[part.id] = self._copied(part, [values[id] for id in part.operand_ids])
        return values[body.root_id]

    def _elements(self, row: Any) -> list[int]:
        """Return the ids of a kernel's results in the fusion."""
        value = self.values[row.id]
        if not isinstance(value, list):
            shapes = list(row.shape.tuple_shapes)
            value = [
                self._add("get-tuple-element", row.name, shape, [value], tuple_index=index)
                for index, shape in enumerate(shapes)
            ] if shapes else [value]
            self.values[row.id] = value if shapes else value[0]
        return value

    def _copied(self, row: Any, operands: Sequence[int]) -> int:
        id = self._add(row.opcode, row.name, row.shape)
        self.inner[id].MergeFrom(type(row)(metadata=row.metadata, id=id))
        own = _copy(row)
        own.id, own.name, own.operand_ids[:] = id, self.inner[id].name, operands
        own.ClearField("control_predecessor_ids")
        self.inner[id] = own
        return id

    def _add(self, opcode: str, name: str, shape: Any, operands: Iterable[int] = (), **fields: int) -> int:
        id = (self.id << 32) + len(self.inner)  # XLA's ids: the computation's, and a number within it
        name = f"{name}.{NAME}.{len(self.inner)}"
        self.inner[id] = _row(opcode=opcode, name=name, id=id, shape=shape, operand_ids=operands, **fields)
        return id

    def _results(self, row: Any) -> list[tuple[int, int, int]]:
        """Return (the kernel's id, index, id in the fusion) of each result of a kernel that others use."""
        taken = {user.tuple_index for user in self._users(row.id) if user.opcode == "get-tuple-element"}
        found = enumerate(self._elements(row))
        if row.id == self.around.root_id or (not row.shape.tuple_shapes and self._users(row.id)):
            return [(row.id, index, inner) for index, inner in found]
        return [(row.id, index, inner) for index, inner in found if row.shape.tuple_shapes and index in taken]

    # The fusion

    def _fusion(self, a: Any, b: Any, results: Sequence[int]) -> Any:
        shape = _tuple_of([self.inner[id].shape for id in results])
        kind, config = self._kind(a, b, results)
        root = results[0] if len(results) == 1 else self._add("tuple", "results", shape, results)
        parameters = [row for row in self.inner.values() if row.opcode == "parameter"]
        body = type(self.around)(
            id=self.id, name="forced_computation", is_fusion_computation=True, root_id=root,
            instructions=self.inner.values(), execution_thread=self.around.execution_thread,
        )
        body.program_shape.result.CopyFrom(shape)
        body.program_shape.parameters.extend(row.shape for row in parameters)
        body.program_shape.parameter_names.extend(row.name for row in parameters)
        before = {*a.control_predecessor_ids, *b.control_predecessor_ids} - {a.id, b.id}
        kept = [_copy(each) for each in self.module.computations if each.id not in self._left(a, b)]
        at = next(index for index, each in enumerate(kept) if each.id == self.around.id)
        del self.module.computations[:]
        self.module.computations.extend([*kept[:at], body, *kept[at:]])  # callees come first
        return _row(
            opcode="fusion", name=NAME, id=max(*self.rows, a.id, b.id) + 1, shape=shape, metadata=b.metadata,
            fusion_kind=kind, backend_config=config, operand_ids=self.operands, control_predecessor_ids=sorted(before),
            called_computation_ids=[self.id],
        )

    def _left(self, a: Any, b: Any) -> set[int]:
        """Return the computations of the two kernels that nothing else calls."""
        own = {id for row in (a, b) if row.opcode == "fusion" for id in row.called_computation_ids}
        others = (row for each in self.bodies.values() for row in each.instructions if row.id not in (a.id, b.id))
        return own - {id for row in others for id in row.called_computation_ids}

    def _kind(self, a: Any, b: Any, results: Sequence[int]) -> tuple[str, bytes]:
        """Return the fusion's kind and configuration.

        Where an operation waits for a reduction, XLA's other emitters would compute the reduction again for each
        element, so Triton computes a row in each block.
        """
        passed = [self._inside(id) for id in b.operand_ids if id == a.id or id in self.between]
        waited = [row for row in self._needed(passed) if row.opcode == "reduce"]
        if waited or any(_fusion_config(row) for row in (a, b)):
            return "kCustom", self._triton((b, a), waited, results)
        heroes = [self._hero(id) for id in results]
        reduces = {(*self._loop(hero), tuple(hero.dimensions)) for hero in heroes if hero.opcode == "reduce"}
        loops = {self._loop(hero)[1:] for hero in heroes}
        if len(loops) > 1 or len(reduces) > 1:
            listed = sorted({f"[{','.join(map(str, self._loop(hero)[0]))}]" for hero in heroes})
            along = " along different dimensions" if len(listed) == 1 else ""
            needed = f"{' and '.join(listed)}{along}"
            raise NotForced(f"a kernel of XLA has one loop, and the results of these two need {needed}")
        return ("kInput" if any(hero.opcode in ("reduce", "transpose") for hero in heroes) else "kLoop"), b""

    def _needed(self, ids: Iterable[int]) -> list[Any]:
        """Return the operations in the fusion that compute these values."""
        needed: dict[int, Any] = {}
        waiting = list(ids)
        while waiting:
            if (id := waiting.pop()) not in needed:
                needed[id] = self.inner[id]
                waiting += self.inner[id].operand_ids
        return list(needed.values())

    def _hero(self, id: int) -> Any:
        """Return the operation whose emitter XLA takes for a result."""
        row = self.inner[id]
        return self._hero(row.operand_ids[0]) if row.opcode in _BEHIND_A_HERO else row

    def _loop(self, hero: Any) -> tuple[tuple[int, ...], Any]:
        """Return the extents of the loop for a result, and what those of several results must have in common.

        Row-major arrays of one size need one loop, whatever their shapes.
        """
        shape = self.inner[hero.operand_ids[0]].shape if hero.opcode == "reduce" else hero.shape
        order, extents = list(shape.layout.minor_to_major), tuple(shape.dimensions)
        return extents, math.prod(extents) if order == sorted(order, reverse=True) else (extents, tuple(order))

    def _triton(self, pair: Sequence[Any], waited: Sequence[Any], results: Sequence[int]) -> bytes:
        """Return the configuration that XLA chose for one of the two, if it fits; else that of one row in each block.
        """
        if len(results) > 1:
            raise NotForced("XLA needs Triton for these two in one kernel, and others read the result of both of them")
        reduces = waited or [row for row in self._needed(results) if row.opcode == "reduce"]
        rows = set()
        for each in reduces:
            extents = self.inner[each.operand_ids[0]].shape.dimensions
            first = len(extents) - len(each.dimensions)
            if sorted(each.dimensions) != list(range(first, len(extents))):
                raise NotForced("XLA's Triton emitter computes whole rows, and a reduction is along another dimension")
            rows.add(math.prod(extents[first:]))
        if len(rows) != 1 or max(rows) > _MOST_IN_A_BLOCK:
            raise NotForced(f"XLA's Triton emitter needs rows of one size; these have {sorted(rows)} elements")
        (row,) = rows
        extents = self.inner[results[0]].shape.dimensions
        for kernel in pair:
            tiles = _fusion_config(kernel).get("block_level_fusion_config", {}).get("output_tiles", ())
            sizes = [math.prod(map(int, tile["sizes"])) for tile in tiles]
            if len(sizes) == 1 and sizes[0] % row == 0 and kernel.shape.dimensions == extents:
                return bytes(kernel.backend_config)
        tiles = [{"sizes": [*map(str, _row_of(extents, row))]}]
        warps = next((warps for most, warps in _WARPS if row <= most), 32)
        blocks = {"num_warps": str(warps), "output_tiles": tiles, "num_ctas": 1, "num_stages": 1}
        config = {"fusion_backend_config": {"kind": "__triton", "block_level_fusion_config": blocks}}
        return json.dumps(config).encode()

    # The computation around it

    def _replace(
        self, a: Any, b: Any, fusion: Any, results: Sequence[tuple[int, int, int]], before: list[int],
        behind: list[int],
    ) -> None:
        """Put the fusion between what comes before and behind it, and its results in the place of the former ones."""
        new = {fusion.id: fusion}
        stands: dict[tuple[int, int], int] = {}
        former = {a.id: a, b.id: b}
        for number, (kernel, index, _) in enumerate(results):
            stands[kernel, index] = id = fusion.id + number + 1 if len(results) > 1 else fusion.id
            if len(results) > 1:
                name = former[kernel].name + (f".{index}" if former[kernel].shape.tuple_shapes else "")
                new[id] = _row(
                    opcode="get-tuple-element", name=name, id=id, shape=fusion.shape.tuple_shapes[number],
                    operand_ids=[fusion.id], tuple_index=number,
                )
        replaced = {kernel: id for (kernel, index), id in stands.items() if not former[kernel].shape.tuple_shapes}
        for id, row in list(self.rows.items()):
            if row.opcode == "get-tuple-element" and row.operand_ids[0] in former:
                replaced[id] = stands[row.operand_ids[0], row.tuple_index]
                del self.rows[id]
        if (root := self.around.root_id) in former and root not in replaced:
            elements = [id for (kernel, _), id in stands.items() if kernel == root]
            replaced[root] = fusion.id + len(results) + 1
            shape = former[root].shape
            new[replaced[root]] = _row(
                opcode="tuple", name="results", id=replaced[root], shape=shape, operand_ids=elements
            )
        for row in self.rows.values():
            row.operand_ids[:] = [replaced.get(id, id) for id in row.operand_ids]
            row.control_predecessor_ids[:] = [
                fusion.id if id in former else id for id in row.control_predecessor_ids
            ]
        rows = {id: self.rows[id] for id in before if id in self.rows} | new
        rows |= {id: self.rows[id] for id in behind if id in self.rows}
        around = next(each for each in self.module.computations if each.id == self.around.id)
        around.root_id = replaced.get(root, root)
        del around.instructions[:]
        around.instructions.extend(rows.values())
        if self.around.id in self.module.schedule.sequences:
            self.module.schedule.sequences[self.around.id].instruction_ids[:] = rows


def _fusion_config(row: Any) -> Mapping[str, Any]:
    config = json.loads(row.backend_config or b"{}") if row.opcode == "fusion" else {}
    found: Mapping[str, Any] = config.get("fusion_backend_config", {})
    return found


def _row_of(dims: Sequence[int], row: int) -> list[int]:
    """Return the tile of a result that has one row of `row` elements, or one element for each row."""
    sizes = [1] * len(dims)
    for at in reversed(range(len(dims))):
        if math.prod(sizes) < row and row % (math.prod(sizes) * dims[at]) == 0:
            sizes[at] = dims[at]
    return sizes if math.prod(sizes) == row else [1] * len(dims)


def _tuple_of(shapes: Sequence[Any]) -> Any:
    if len(shapes) == 1:
        return shapes[0]
    return type(shapes[0])(element_type="TUPLE", tuple_shapes=shapes)


def _row(**fields: Any) -> Any:
    return message_type("xla.HloInstructionProto")(**fields)


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
