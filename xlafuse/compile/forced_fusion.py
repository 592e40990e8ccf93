"""Two kernels of a scheduled HLO module made one fusion, in the form that XLA's own fusion passes would give it.

`hlo_edit` applies it within a compile, behind the fusion passes, so every other kernel stays as it is.
"""

import json
import math
from collections.abc import Iterable, Sequence
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
_PRODUCTS = ("dot", "scaled-dot", "ragged-dot", "convolution")
_UNFUSIBLE = (
    "custom-call", "sort", "fft", "cholesky", "triangular-solve", "rng", "while", "conditional", "call", "infeed",
    "outfeed", "send", "recv", "all-", "async-", "collective-", "reduce-scatter", "partition-id", "replica-id", "topk",
)
_MOST_IN_A_BLOCK = 1 << 20  # elements of a tensor in Triton
_WARPS = ((512, 1), (1024, 2), (16384, 4), (32768, 8), (65536, 16))  # XLA's for a row of at most so many elements


class NotForced(ValueError):
    """Two kernels cannot be made one; the message says why, in one line."""


def fuse(serialized: bytes, module: str, first: str, second: str, *, nested: bool = False) -> bytes | None:
    """Return a serialized HloModuleProto in which the two instructions are one fusion called NAME.

    None for a module of another name: XLA compiles candidates for kernels as modules of their own. A result that
    others use stays a result of the fusion. The barriers of the computation around the two vanish; behind the fusion
    passes they have no effect any more. nested: the fusion calls the two, which no emitter takes.

    Raises NotForced.
    """
    proto = message_type("xla.HloModuleProto").FromString(serialized)
    if proto.name != module:
        return None
    around = {row.name: each for each in proto.computations for row in each.instructions}
    if missing := [name for name in (first, second) if name not in around]:
        raise NotForced(f"XLA makes {missing[0]} behind its scheduler, where two kernels cannot be one any more")
    if around[first] is not around[second]:
        raise NotForced(f"{first} and {second} are not in one computation: a loop or a branch runs one of them")
    _Edit(proto, around[first], nested).fuse(first, second)
    return bytes(proto.SerializeToString())


class NotChecked(Exception):
    """The results could not be compared; the message says why."""


def error(before: bytes, after: bytes) -> tuple[float, str]:
    """Return how far the results of the fusion in two modules are apart, and their coarsest dtype.

    before: the module in which it calls the two kernels. XLA compiles both for the CPU, operation by operation, and
    runs them on random inputs. The error is that of the worst result: max|y - y'| / rms(y). Raises NotChecked.
    """
    try:
        wanted, found = (
            kernel_extract.extract(parse(_jax_private.hlo_text(module), statements=True), NAME)
            for module in (before, after)
        )
    except kernel_extract.NotExtracted as problem:
        raise NotChecked(str(problem)) from None
    size = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype, _ in found.inputs)
    if size > MOST_BYTES:
        raise NotChecked(f"their inputs hold {size / 1e6:.0f} MB, and a check takes at most {MOST_BYTES / 1e6:.0f} MB")
    generator = np.random.default_rng(0)
    inputs = []
    for shape, dtype, values in found.inputs:
        real = jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
        most = 2 if dtype == "bool" else values or 100
        drawn = generator.standard_normal(shape, np.float32) if real else generator.integers(0, most, shape)
        inputs.append(np.asarray(drawn).astype(jnp.dtype(dtype)))
    results = [_jax_private.run_on_cpu(each.operations, inputs) for each in (wanted, found)]
    return max((_distance(*pair) for pair in zip(*results, strict=True)), default=0.0), found.dtype


def _distance(wanted: Any, found: Any) -> float:
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    wanted, found = wanted.astype(wide), found.astype(wide)
    with np.errstate(all="ignore"):
        apart = np.abs(np.where((wanted == found) | (np.isnan(wanted) & np.isnan(found)), 0, wanted - found))
        scale = math.sqrt(np.mean(np.abs(np.where(np.isfinite(wanted), wanted, 0)) ** 2)) if wanted.size else 0.0
    worst = float(np.max(apart, initial=0.0))
    return math.inf if math.isnan(worst) else worst / (scale or 1.0)


class _Edit:
    """A computation whose two instructions become one.

    rows: its instructions by id, in the order of the schedule. inner: those of the fusion. operands: the fusion's.
    values: for an outer instruction, the ids of its results in the fusion. between: instructions that need the first of
    the two, and that the second needs.
    """

    def __init__(self, module: Any, around: Any, nested: bool) -> None:
        self.module, self.around, self.nested = module, around, nested
        self.bodies = {each.id: each for each in module.computations}
        by_id = {row.id: _copy(row) for row in around.instructions}
        scheduled = around.id in module.schedule.sequences
        order = module.schedule.sequences[around.id].instruction_ids if scheduled else by_id
        self.rows: dict[int, Any] = {id: by_id[id] for id in order}
        self.id = max(self.bodies) + 1  # of the fusion's computation
        self.inner: dict[int, Any] = {}
        self.operands: list[int] = []
        self.values: dict[int, list[int]] = {}
        self.between: set[int] = set()

    def fuse(self, first: str, second: str) -> None:
        self._resolve()
        a, b = (row for row in self.rows.values() if row.name in (first, second))
        for row in (a, b):
            self._require_fusible(row)
        after = self._needing(a.id)
        self.between = {id for id in after if b.id in self._needing(id)}
        for id in self.between:
            if (other := self.rows[id]).opcode not in _PASSING:
                raise NotForced(
                    f"one kernel would make a cycle: {other.name} needs {a.name}, and {b.name} needs {other.name}"
                )
        for row in (a, b):
            self.values[row.id] = self._inlined(row)
        order = list(self.rows)
        at = order.index(b.id)
        before = [id for id in order[:at] if id not in after and id != a.id]
        behind = [id for id in order[:at] if id in after] + order[at + 1 :]
        del self.rows[a.id], self.rows[b.id]
        self._drop_unused(self.between)
        results = [result for row in (a, b) for result in self._results(row)]
        self._replace(a, b, self._fusion(a, b, [inner for *_, inner in results]), results, before, behind)

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

    def _needing(self, id: int) -> set[int]:
        """Return the instructions that need this one. They come behind it in the schedule."""
        found = {id}
        for row in self.rows.values():
            if found.intersection((*row.operand_ids, *row.control_predecessor_ids)):
                found.add(row.id)
        return found - {id}

    def _require_fusible(self, row: Any) -> None:
        body = self.bodies[row.called_computation_ids[0]].instructions if row.opcode == "fusion" else [row]
        kind = _fusion_config(row).get("kind", "")
        for opcode in (part.opcode for part in body):
            if opcode in _PRODUCTS or "gemm" in kind:
                raise NotForced(f"{row.name} is a matrix product, whose code comes from a template or a library")
            if opcode.startswith(_UNFUSIBLE) or kind not in ("", "__triton"):
                what = f"call of {row.custom_call_target}" if row.custom_call_target else kind or opcode
                raise NotForced(f"{row.name} is a {what}, into which XLA fuses nothing")
            if opcode in ("dynamic-update-slice", "scatter"):
                raise NotForced(f"{row.name} updates an array in place, and fusing it could reorder reads of the array")

    # The operations of the fusion

    def _inside(self, id: int) -> int:
        """Return the id of an outer instruction's value in the fusion."""
        if id not in self.values:
            row = self.rows[id]
            if id not in self.between:
                inner = self._add(row, "parameter", parameter_number=len(self.operands))
                self.operands.append(id)
            elif row.opcode == "get-tuple-element":
                inner = self.values[row.operand_ids[0]][row.tuple_index]
            else:
                inner = self._copied(row, [self._inside(operand) for operand in row.operand_ids])
            self.values[id] = [inner]
        return self.values[id][0]

    def _inlined(self, row: Any) -> list[int]:
        """Copy a kernel's operations into the fusion, and return the ids of its results there."""
        operands = [self._inside(id) for id in row.operand_ids]
        if row.opcode != "fusion" or self.nested:
            return self._elements(row, self._copied(row, operands))
        body = self.bodies[row.called_computation_ids[0]]
        ids: dict[int, int] = {}
        for part in body.instructions:
            if part.opcode == "parameter":
                ids[part.id] = operands[part.parameter_number]
            elif part.opcode == "tuple" and part.id == body.root_id:
                return [ids[id] for id in part.operand_ids]
            else:
                ids[part.id] = self._copied(part, [ids[id] for id in part.operand_ids])
        return self._elements(row, ids[body.root_id])

    def _elements(self, row: Any, value: int) -> list[int]:
        shapes = list(row.shape.tuple_shapes)
        return [
            self._add(row, "get-tuple-element", shape, [value], tuple_index=index) for index, shape in enumerate(shapes)
        ] or [value]

    def _copied(self, row: Any, operands: Sequence[int]) -> int:
        id = self._add(row, row.opcode)
        name = self.inner[id].name
        self.inner[id] = _copy(row)
        self.inner[id].id, self.inner[id].name, self.inner[id].operand_ids[:] = id, name, operands
        self.inner[id].ClearField("control_predecessor_ids")
        return id

    def _add(self, row: Any, opcode: str, shape: Any = None, operands: Iterable[int] = (), **fields: int) -> int:
        id = (self.id << 32) + len(self.inner)  # XLA's ids: the computation's, and a number within it
        name = f"{row.name}.{NAME}.{len(self.inner)}"
        self.inner[id] = _row(opcode=opcode, name=name, id=id, shape=shape or row.shape, operand_ids=operands, **fields)
        return id

    def _results(self, row: Any) -> list[tuple[int, int, int]]:
        """Return (the kernel's id, index, id in the fusion) of each result of a kernel that others use."""
        users = self._users(row.id)
        taken = {user.tuple_index for user in users} if row.shape.tuple_shapes else {0} if users else set()
        whole = row.id == self.around.root_id
        return [(row.id, n, inner) for n, inner in enumerate(self.values[row.id]) if whole or n in taken]

    # The fusion

    def _fusion(self, a: Any, b: Any, results: Sequence[int]) -> Any:
        kind, config = self._kind(a, b, results)
        shapes = [self.inner[id].shape for id in results]
        shape = shapes[0] if len(shapes) == 1 else type(shapes[0])(element_type="TUPLE", tuple_shapes=shapes)
        root = results[0] if len(results) == 1 else self._add(b, "tuple", shape, results)
        body = type(self.around)(
            id=self.id, name="forced_computation", is_fusion_computation=True, root_id=root,
            instructions=self.inner.values(),
        )
        own = set() if self.nested else {*a.called_computation_ids, *b.called_computation_ids}
        others = (row for each in self.bodies.values() for row in each.instructions if row.id not in (a.id, b.id))
        unused = own - {id for row in others for id in row.called_computation_ids}
        kept = [_copy(each) for each in self.module.computations if each.id not in unused]
        kept.insert([each.id for each in kept].index(self.around.id), body)  # callees come first
        del self.module.computations[:]
        self.module.computations.extend(kept)
        before = {*a.control_predecessor_ids, *b.control_predecessor_ids} - {a.id, b.id}
        return _row(
            opcode="fusion", name=NAME, id=max(*self.rows, a.id, b.id) + 1, shape=shape, metadata=b.metadata,
            fusion_kind=kind, backend_config=config, operand_ids=self.operands, control_predecessor_ids=sorted(before),
            called_computation_ids=[self.id],
        )

    def _kind(self, a: Any, b: Any, results: Sequence[int]) -> tuple[str, bytes]:
        """Return the fusion's kind and configuration.

        Where an operation waits for a reduction, XLA's other emitters would compute the reduction again for each
        element, so Triton computes whole rows in each block.
        """
        if self.nested:
            return "kLoop", b""
        passed = [self._inside(id) for id in b.operand_ids if id == a.id or id in self.between]
        waited = self._reduces(passed)
        if waited or any(_fusion_config(row) for row in (a, b)):
            return "kCustom", self._triton((b, a), waited or self._reduces(results), results)
        heroes = [self._hero(id) for id in results]
        reduces = {(self._extents(hero), tuple(hero.dimensions)) for hero in heroes if hero.opcode == "reduce"}
        loops = {self._loop(hero) for hero in heroes}
        if len(loops) > 1 or len(reduces) > 1:
            listed = " and ".join(sorted({f"[{','.join(map(str, self._extents(hero)))}]" for hero in heroes}))
            raise NotForced(f"a kernel of XLA has one loop, and the results of these two need {listed}")
        return ("kInput" if any(hero.opcode in ("reduce", "transpose") for hero in heroes) else "kLoop"), b""

    def _reduces(self, ids: Iterable[int]) -> list[Any]:
        """Return the reductions in the fusion that these values need."""
        needed: set[int] = set()
        waiting = list(ids)
        while waiting:
            if (id := waiting.pop()) not in needed:
                needed.add(id)
                waiting += self.inner[id].operand_ids
        return [self.inner[id] for id in needed if self.inner[id].opcode == "reduce"]

    def _hero(self, id: int) -> Any:
        """Return the operation whose emitter XLA takes for a result."""
        row = self.inner[id]
        return self._hero(row.operand_ids[0]) if row.opcode in _BEHIND_A_HERO else row

    def _shape(self, hero: Any) -> Any:
        """Return the shape over which the loop for a result runs."""
        return self.inner[hero.operand_ids[0]].shape if hero.opcode == "reduce" else hero.shape

    def _extents(self, hero: Any) -> tuple[int, ...]:
        return tuple(self._shape(hero).dimensions)

    def _loop(self, hero: Any) -> Any:
        """Return what the loops of results must have in common. Row-major arrays of one size need one loop."""
        order = list(self._shape(hero).layout.minor_to_major)
        extents = self._extents(hero)
        return math.prod(extents) if order == sorted(order, reverse=True) else (extents, tuple(order))

    def _triton(self, pair: Sequence[Any], reduces: Sequence[Any], results: Sequence[int]) -> bytes:
        """Return the configuration that XLA chose for one of the two, if it fits; else that of a row in each block."""
        if len(results) > 1:
            raise NotForced("XLA needs Triton for these two in one kernel, and others read the result of both of them")
        rows = set()
        for each in reduces:
            extents = self._extents(each)
            first = len(extents) - len(each.dimensions)
            if sorted(each.dimensions) != list(range(first, len(extents))):
                raise NotForced("XLA's Triton emitter computes whole rows, and a reduction is along another dimension")
            rows.add(math.prod(extents[first:]))
        if len(rows) != 1 or max(rows) > _MOST_IN_A_BLOCK:
            raise NotForced(f"XLA's Triton emitter needs rows of one size; these have {sorted(rows)} elements")
        (row,) = rows
        dims = self.inner[results[0]].shape.dimensions
        for kernel in pair:
            blocks = _fusion_config(kernel).get("block_level_fusion_config", {})
            sizes = [math.prod(map(int, tile["sizes"])) for tile in blocks.get("output_tiles", ())]
            if len(sizes) == 1 and sizes[0] % row == 0 and kernel.shape.dimensions == dims:
                return bytes(kernel.backend_config)
        tile = [1] * len(dims)
        for at in reversed(range(len(dims))):
            if math.prod(tile) < row and row % (math.prod(tile) * dims[at]) == 0:
                tile[at] = dims[at]
        sizes = tile if math.prod(tile) == row else [1] * len(dims)  # a result of the row, or of one element for it
        warps = next((warps for most, warps in _WARPS if row <= most), 32)
        tiles = [{"sizes": [*map(str, sizes)]}]
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
            replaced[root] = fusion.id + len(results) + 1
            new[replaced[root]] = _row(
                opcode="tuple", name="results", id=replaced[root], shape=former[root].shape,
                operand_ids=[id for (kernel, _), id in stands.items() if kernel == root],
            )
        for row in self.rows.values():
            row.operand_ids[:] = [replaced.get(id, id) for id in row.operand_ids]
            row.control_predecessor_ids[:] = [fusion.id if id in former else id for id in row.control_predecessor_ids]
        rows = {id: self.rows[id] for id in before if id in self.rows} | new
        rows |= {id: self.rows[id] for id in behind if id in self.rows}
        around = next(each for each in self.module.computations if each.id == self.around.id)
        around.root_id = replaced.get(root, root)
        del around.instructions[:]
        around.instructions.extend(rows.values())
        if self.around.id in self.module.schedule.sequences:
            self.module.schedule.sequences[self.around.id].instruction_ids[:] = rows


def _fusion_config(row: Any) -> dict[str, Any]:
    config = json.loads(row.backend_config or b"{}") if row.opcode == "fusion" else {}
    return dict(config.get("fusion_backend_config", {}))


def _row(**fields: Any) -> Any:
    return message_type("xla.HloInstructionProto")(**fields)


def _copy(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
