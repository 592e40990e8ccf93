"""Operations that PyTorch runs between compiled graphs, each in the form of a compiled graph with one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from xlafuse.triton_side.calls.dispatch import Operation
from xlafuse.triton_side.calls.launches import TensorArgument
from xlafuse.triton_side.inductor.graph import DTYPES, Buffer, Call, CompiledGraph, Kernel, Memory, SourceNode

MOST_NAMED = 12
# Their kernels read and write whole tensors once. Any other operation may launch several kernels.
_ONE_PASS = ("elementwise", "reduction", "gemm", "copy", "memset")


def graph_of(
    operation: Operation, unit: int, whole: Mapping[int, TensorArgument], place: Callable[[int, int], int],
    kept: Collection[int],
) -> CompiledGraph:
    """Return an operation as a compiled graph; its bytes are unknown if it may launch several kernels.

    whole: by storage, its largest tensor. place: returns the number of a storage and an offset
    (`CompiledGraph.storages`). kept: storages that later code reads, or that the function returns.
    """
    touched = dict.fromkeys(tensor.storage for tensor in (*operation.reads, *operation.writes))
    names = {storage: f"buf{index}" for index, storage in enumerate(touched)}
    taken, given = (dict.fromkeys(tensor.storage for tensor in side) for side in (operation.reads, operation.writes))
    known = operation.kind in _ONE_PASS
    op = operation.op.rpartition(".")[0]
    source = SourceNode(
        f"{op.rpartition('.')[2]}_{unit}", op, operation.stage or None, operation.line or None, (),
        backward=operation.backward, shapes=tuple(tensor.shape for tensor in operation.writes),
        input_shapes=tuple(tensor.shape for tensor in operation.reads),
    )

    def buffers(tensors: Iterable[TensorArgument]) -> tuple[Buffer, ...]:
        sizes = Counter[int]()
        for tensor in tensors:
            sizes[tensor.storage] += tensor.bytes_used
        return tuple(
            Buffer(names[storage], min(size, whole[storage].bytes) if known else None)
            for storage, size in sizes.items()
        )

    kernel = Kernel(
        name=operation.op, part="forward", kind=operation.kind, ops=(op,), fx_nodes=(),
        stages=tuple(filter(None, [operation.stage])), lines=tuple(filter(None, [operation.line])),
        inputs=buffers(operation.reads), outputs=buffers(operation.writes) if known or operation.writes else None,
        is_template=False, is_extern=True, provenance="eager", config=None,
    )
    return CompiledGraph(
        part="forward",
        unit=unit,
        calls=(Call(kernel, (source,), (source,) if known else ()),),
        memory={name: _memory(name, whole[storage]) for storage, name in names.items()},
        inputs=tuple(names[storage] for storage in taken),
        outputs=tuple(names[storage] for storage in given if storage in kept and storage not in taken),
        storages={name: place(storage, whole[storage].offset) for storage, name in names.items()},
    )


def _memory(name: str, tensor: TensorArgument) -> Memory:
    dtype = DTYPES[tensor.dtype][0] if tensor.dtype in DTYPES else tensor.dtype
    return Memory(name, tensor.shape, dtype, tensor.bytes)


def counted(operations: Iterable[Operation]) -> str:
    """Return the operations' names, the most frequent first: "3 operations (aten.add x2, aten.relu)"."""
    counts = Counter(operation.op.rpartition(".")[0] for operation in operations)
    named = [f"{op} x{number}" if number > 1 else op for op, number in counts.most_common(MOST_NAMED)]
    more = len(counts) - len(named)
    total = counts.total()
    words = ", ".join(named) + (f", and {more} more" if more else "")
    return f"{total} operation{'s' * (total > 1)} ({words})"
