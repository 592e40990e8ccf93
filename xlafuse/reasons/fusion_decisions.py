"""XLA's reasons for not fusing two kernels, in its own words, under the kernels' names in the finished module.

The fusion log uses the names of its pass. Later passes rename, renumber and merge fusions, and the autotuner replaces
some. A fusion's root instruction keeps its name: "mul.16.0" in the log is the root "mul.16.1" or "mul.16.1.clone.1" in
the finished module. Log and module are therefore joined by the root's name, opcode and shape, without ids or protos.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from xlafuse.dumps.dump_folder import Artifacts, single_module
from xlafuse.dumps.fusion_log import Estimated, FusionLog, Ineligible, Refusal, read_frames, read_log, refusals
from xlafuse.hlo import file_reader
from xlafuse.hlo.module_walk import NO_KERNEL
from xlafuse.hlo.text_reader import Computation, Instruction, Module, parse
from xlafuse.reasons.fusion_replay import Barrier, Key, Replay, fusion_body, kernel_computations, stable_key


@dataclass(frozen=True)
class FusionDecision:
    """XLA's decision on one missed fusion.

    producer, consumer: kernels of the finished module; "" if the log's name matches none.
    text: XLA's words. If its cost model rejected the fusion, the two estimates as XLA wrote them.
    fusion_pass: the pass that decided, "priority-fusion" or "multi_output_fusion".
    fused_us, unfused_us: the cost model's times with the producer fused into all its consumers, and without fusion.
        Set only if they decided.
    barrier: the cause of "not fusible" for the log's producer or consumer: a matrix product ("gemm"), a library call,
        the module's output (which is not a kernel), an optimization barrier ("order"), another opcode ("unsupported").
    refused_by: the log's name of a third kernel that refused. XLA fuses a producer into all its consumers or into none,
        so one consumer can refuse for all.
    log_producer, log_consumer: the names in the log; log_consumer is "" if the autotuner or a later pass created the
        consumer.
    """

    producer: str
    consumer: str
    text: str
    fusion_pass: str
    fused_us: float | None = None
    unfused_us: float | None = None
    barrier: Barrier = ""
    refused_by: str = ""
    log_producer: str = ""
    log_consumer: str = ""


def read_decisions(source: Path | Artifacts) -> list[FusionDecision]:
    """Return the decisions on the module of a dump folder, an archive or these artifacts.

    They come in the order of the finished module. At the end are decisions with only a producer (see `join_decisions`)
    and those that match no kernel, with producer and consumer "". The list is empty without a fusion log.

    Raises FileNotFoundError if the finished module is missing, file_reader.UnreadableHlo or LogError, which name the
    file, if one cannot be read, and ValueError if a folder holds several modules.
    """
    files = single_module(source) if isinstance(source, Path) else source
    optimized, log_file = files.find("hlo") or files.find("hlo_proto"), files.find("priority_fusion")
    if optimized is None:
        raise FileNotFoundError(f"{files.where}: no optimized HLO; XLA writes it with xla_dump_hlo_as_text")
    if log_file is None:
        return []
    with optimized.local() as path:
        module = file_reader.read(path)
    with log_file.open() as lines:
        log = read_log(lines)
    labels: list[str] = []
    for frames in files.find_all("fusion_frames"):
        with frames.local() as path:
            labels += read_frames(path)
    return join_decisions(module, log, refusals(labels))


def join_decisions(module: Module, log: FusionLog, pairs: Iterable[Refusal] = ()) -> list[FusionDecision]:
    """Return the decisions of a fusion log under the names of `module`, the module after all passes.

    A decision with a producer and no consumer concerns a result that leaves its computation, such as a loop's body. Any
    kernel of another computation may read it.
    """
    replay = Replay(parse(log.module), log.steps)
    statements = _Statements(replay, pairs)
    match = _KernelMatch(module, replay)
    found: dict[FusionDecision, None] = {}
    for producer, node, consumer in match.edges():
        readers = replay.readers(node)
        for reader in [reader for reader in dict.fromkeys(match.nodes(consumer)) if reader in readers] or [""]:
            found.update(dict.fromkeys(statements.on(node, reader, producer, consumer)))
    inside = _keys_inside_fusions(module)
    for node in replay.last:
        if node not in replay or replay.key(node)[1] in NO_KERNEL:
            continue
        if node in match.kernel_of:
            # The consumer may be in another computation; it is not searched for.
            leaves = any(replay.barrier(reader) in ("output", "unsupported") for reader in replay.readers(node))
            decisions = statements.on(node, "", match.kernel_of[node], "") if leaves else ()
        elif replay.key(node) in inside or all(replay.barrier(reader) == "output" for reader in replay.readers(node)):
            continue  # multi-output fusion fused it after all, or it has no consumer
        else:
            decisions = statements.on(node, "", "", "")
        found.update(dict.fromkeys(decisions))
    return list(found)


def _keys_inside_fusions(module: Module) -> set[Key]:
    bodies = (fusion_body(module, i) for c in kernel_computations(module) for i in c.instructions.values())
    return {stable_key(instruction) for inside in bodies if inside for instruction in inside.instructions.values()}


class _Statements:
    """XLA's statements about edges between two nodes of the log."""

    def __init__(self, replay: Replay, pairs: Iterable[Refusal]) -> None:
        self._replay = replay
        self._refusing: dict[str, dict[str, Barrier]] = {}  # node -> its readers that are not fusible
        self._pairs: dict[tuple[str, str, str], str] = {}  # pass and roots -> the last reason
        for pair in pairs:
            ends = (replay.origin.get(pair.producer, ""), replay.origin.get(pair.consumer, ""))
            self._pairs[pair.fusion_pass, *ends] = pair.reason

    def on(self, node: str, reader: str, producer: str, consumer: str) -> Iterator[FusionDecision]:
        """Yield the decisions on an edge, in the order of the passes. reader: "" if the log lacks the consumer."""
        origin = self._replay.origin
        ends = (origin[node], origin.get(reader, ""))
        last = self._replay.last.get(node)
        if isinstance(last, Ineligible):
            pair = self._pairs.get(("priority-fusion", *ends))
            barrier, refused_by = self._refusal(node, reader, pair or last.reason, about_pair=pair is not None)
            yield FusionDecision(
                producer, consumer, pair or last.reason, "priority-fusion",
                barrier=barrier, refused_by=refused_by, log_producer=node, log_consumer=reader,
            )
        elif isinstance(last, Estimated) and last.fused_us > last.unfused_us:
            fused, unfused = round(last.fused_us, 3), round(last.unfused_us, 3)
            yield FusionDecision(
                producer, consumer, f"us_fused: {fused} us_unfused: {unfused}", "priority-fusion", fused, unfused,
                log_producer=node, log_consumer=reader,
            )
        if reader and (pair := self._pairs.get(("multi_output_fusion", *ends))):
            barrier = self._replay.barrier(reader)
            yield FusionDecision(
                producer, consumer, pair, "multi_output_fusion",
                barrier=barrier, log_producer=node, log_consumer=reader,
            )

    def _refusal(self, node: str, reader: str, reason: str, about_pair: bool) -> tuple[Barrier, str]:
        """Return (why the producer or a consumer is not fusible, the name of a third kernel that refused)."""
        replay = self._replay
        if reason == "the producer is not fusible":
            return replay.barrier(node), ""
        readers = replay.readers(node)
        if reason not in ("the consumer is not fusible", "not fusing because there are only bitcast users"):
            return "", "one of its consumers" if not about_pair and len(readers) > 1 else ""
        if node not in self._refusing:
            self._refusing[node] = {other: barrier for other in readers if (barrier := replay.barrier(other))}
        refusing = self._refusing[node]
        if reader in refusing:
            return refusing[reader], ""
        third = next(iter(refusing), "")
        return (refusing[third], third) if third else ("", "")


_Source = tuple[str, int]  # a kernel, and the index of an array in its result


class _KernelMatch:
    """The match between kernels of the finished module and nodes of the log. kernel_of: node -> its kernel."""

    def __init__(self, module: Module, replay: Replay) -> None:
        self._module = module
        self._replay = replay
        self.kernel_of: dict[str, str] = {}
        self._nodes: dict[str, tuple[str, ...]] = {}  # kernel -> the node of each array of its result, or ""
        self._dims: dict[str, tuple[int, ...]] = {}
        by_key: dict[Key, list[str]] = {}
        for node in replay:
            by_key.setdefault(replay.key(node), []).append(node)
        for computation in kernel_computations(module):
            for name, instruction in computation.instructions.items():
                if instruction.opcode not in NO_KERNEL:
                    self._join(by_key, name, instruction)

    def _join(self, by_key: Mapping[Key, list[str]], name: str, kernel: Instruction) -> None:
        nodes = [self._node(by_key, name, candidates) for candidates in _results(self._module, kernel)]
        for node in nodes:
            self.kernel_of.setdefault(node, name)
        self.kernel_of.pop("", None)
        self._nodes[name] = tuple(nodes)
        self._dims[name] = kernel.shapes[0].dims if kernel.shapes else ()

    def _node(self, by_key: Mapping[Key, list[str]], name: str, candidates: list[Instruction]) -> str:
        replay = self._replay
        for root in candidates:
            if replay.origin.get(name) == name and name in replay and replay.key(name)[1:] == stable_key(root)[1:]:
                return name  # its name survived all passes
            found = by_key.get(stable_key(root), [])
            if found:
                return found[0] if len(found) == 1 else ""
        return ""

    def nodes(self, kernel: str) -> tuple[str, ...]:
        return self._nodes.get(kernel, ())

    def edges(self) -> Iterator[tuple[str, str, str]]:
        """Yield (producer, the log's node of the array passed, consumer), in the order of the module."""
        for computation in kernel_computations(self._module):
            for (producer, element), consumer in _reads(self._module, computation):
                nodes = self.nodes(producer)
                node = nodes[element] if element < len(nodes) else ""
                if not node and not any(nodes):
                    node = self._replaced_product(producer, consumer)
                if node:
                    yield producer, node, consumer

    def _replaced_product(self, producer: str, consumer: str) -> str:
        """Return the log's matrix product that the autotuner replaced by `producer`, a library call with another name.

        It is a product of the same shape that the consumer reads and that matches no other kernel.
        """
        for reader in self.nodes(consumer):
            for operand in self._replay.operands(reader):
                is_product = self._replay.barrier(operand) == "gemm"
                same_shape = self._replay.key(operand)[2] == self._dims[producer]
                if is_product and same_shape and self.kernel_of.get(operand, producer) == producer:
                    self.kernel_of[operand] = producer
                    return operand
        return ""


def _results(module: Module, kernel: Instruction) -> list[list[Instruction]]:
    """Return for each array of a kernel's result the instruction that computes it, and the sources of mere copies.

    XLA's copy_fusion adds copies after roots.
    """
    inside = fusion_body(module, kernel)
    root = inside.root if inside is not None else None
    if inside is None or root is None:
        return [[kernel]]
    roots = [inside.instructions.get(o, root) for o in root.operands] if root.opcode == "tuple" else [root]
    return [list(_copied(inside, each)) for each in roots]


def _copied(inside: Computation, instruction: Instruction) -> Iterator[Instruction]:
    yield instruction
    for _ in range(_MAX_COPIES):
        source = inside.instructions.get(instruction.operands[0]) if instruction.operands else None
        if source is None or instruction.opcode not in ("copy", "bitcast"):
            return
        instruction = source
        yield instruction


_MAX_COPIES = 4


def _reads(module: Module, computation: Computation) -> Iterator[tuple[_Source, str]]:
    """Yield (array of a producer, its consumer), through tuples and bitcasts.

    An asynchronous kernel has the name from its own computation.
    """
    holds: dict[str, _Held] = {}

    for name, instruction in computation.instructions.items():
        sources = [_operand(holds, text) for text in instruction.operands]
        arrays = len(instruction.shapes)
        if instruction.opcode == "tuple":
            holds[name] = [source for part in sources for source in part]
        elif instruction.opcode == "get-tuple-element" and sources:
            holds[name] = _operand(holds, f"{instruction.operands[0]}#{instruction.index}")
        elif instruction.opcode in ("bitcast", "opt-barrier", "add-dependency") and sources:
            holds[name] = sources[0]
        elif instruction.opcode == "async-done" and sources and sources[0]:
            made = sources[0][0]
            holds[name] = [(made[0], index) for index in range(arrays)] if made else []
        elif instruction.opcode not in NO_KERNEL:
            kernel = _started(module, instruction)
            for source in dict.fromkeys(source for part in sources for source in part if source):
                yield source, kernel
            holds[name] = [(kernel, index) for index in range(arrays)]
        if len(holds.get(name, ())) != arrays:
            holds[name] = [None] * arrays


_Held = list[_Source | None]  # the kernel behind each array of a result


def _operand(holds: Mapping[str, _Held], text: str) -> _Held:
    """Return the kernels behind `a`, or behind element `a#1` of a tuple; nested tuples are unknown."""
    name, *path = text.split("#")
    held = holds.get(name, [])
    if not path:
        return held
    index = int(path[0]) if len(path) == 1 and path[0].isdecimal() and len(path[0]) < 9 else len(held)
    return held[index : index + 1]


def _started(module: Module, kernel: Instruction) -> str:
    """Return the kernel that an asynchronous start runs. Its computation may return one array of the kernel's tuple."""
    called = kernel.called("calls", "to_apply") if kernel.opcode == "async-start" else []
    inside = module.computations.get(called[0]) if called else None
    root = inside.root if inside is not None else None
    while inside is not None and root is not None and root.opcode == "get-tuple-element":
        root = inside.instructions.get(root.operands[0].partition("#")[0])
    return root.name if root is not None else kernel.name
