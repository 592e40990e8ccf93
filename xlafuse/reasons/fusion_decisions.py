"""Why XLA's GPU compiler left two kernels apart, in its own words, under the names of the finished module.

Names in the fusion log are those of the moment; the passes after it rename, renumber and merge fusions, and the
autotuner replaces some. What survives is the name of the instruction whose result a fusion is ("mul.16.0" is the root
"mul.16.1" or "mul.16.1.clone.1" of a finished fusion). The join is by that root's name, opcode and shape, and so needs
neither instruction ids nor protos.
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
    """XLA on one missed fusion.

    producer, consumer: kernels (instructions that run) of the finished module; "" where the log's name leads to none.
    text: XLA's words; for a fusion that its cost model rejected, the numbers as it wrote them.
    fusion_pass: who speaks: "priority-fusion" or "multi_output_fusion".
    fused_us, unfused_us: the cost model's estimate of the producer fused into all its consumers, and of all of them
        apart; only where that estimate decided.
    barrier: why the log's producer or consumer is "not fusible": a matrix product ("gemm"), a library call, the
        module's output (which is no kernel), another opcode ("unsupported").
    refused_by: the log's name of a third kernel that refused. XLA fuses a producer into all its consumers or into none,
        so one consumer can refuse for all.
    log_producer, log_consumer: the names as the log has them; the latter "" where the autotuner or a later pass made
        the consumer.
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
    """Verdicts on the module of a dump folder or archive, or on these artifacts, in the order of the finished module;
    at the end those with a producer alone (see `decisions`) and, with producer and consumer "", what was not joined.

    An empty list where no fusion log was kept. Raises FileNotFoundError where the finished module is missing,
    hlo_read.UnreadableHlo or LogError that names a file that cannot be read, ValueError where a folder holds several
    modules.
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
    """`read_decisions` on what was read already. module: after all passes.

    A decision with a producer and no consumer is on what leaves a computation (a loop, or what precedes it), for
    whichever kernel reads it elsewhere.
    """
    replay = Replay(parse(log.module), log.steps)
    words = _Words(replay, pairs)
    roots = _Roots(module, replay)
    found: dict[FusionDecision, None] = {}
    for producer, node, consumer in roots.edges():
        readers = replay.readers(node)
        for reader in [reader for reader in dict.fromkeys(roots.nodes(consumer)) if reader in readers] or [""]:
            found.update(dict.fromkeys(words.on(node, reader, producer, consumer)))
    inside = _inside(module)
    for node in replay.last:
        if node not in replay or replay.key(node)[1] in NO_KERNEL:
            continue
        if node in roots.kernel_of:
            # To a kernel in another computation, no path is followed here.
            leaves = any(replay.barrier(reader) in ("output", "unsupported") for reader in replay.readers(node))
            said = words.on(node, "", roots.kernel_of[node], "") if leaves else ()
        elif replay.key(node) in inside or all(replay.barrier(reader) == "output" for reader in replay.readers(node)):
            continue  # multi-output fusion has fused it after all, or it has no consumer to be fused into
        else:
            said = words.on(node, "", "", "")
        found.update(dict.fromkeys(said))
    return list(found)


def _inside(module: Module) -> set[Key]:
    bodies = (fusion_body(module, i) for c in kernel_computations(module) for i in c.instructions.values())
    return {stable_key(instruction) for inside in bodies if inside for instruction in inside.instructions.values()}


class _Words:
    """What XLA says of an edge between two nodes of the log."""

    def __init__(self, replay: Replay, pairs: Iterable[Refusal]) -> None:
        self._replay = replay
        self._refusing: dict[str, dict[str, Barrier]] = {}  # node -> which of its readers are not fusible
        self._pairs: dict[tuple[str, str, str], str] = {}  # pass and roots -> the last word
        for pair in pairs:
            ends = (replay.origin.get(pair.producer, ""), replay.origin.get(pair.consumer, ""))
            self._pairs[pair.fusion_pass, *ends] = pair.reason

    def on(self, node: str, reader: str, producer: str, consumer: str) -> Iterator[FusionDecision]:
        """First the pass that came first. reader: "" where the log does not know the consumer."""
        origin = self._replay.origin
        ends = (origin[node], origin.get(reader, ""))
        last = self._replay.last.get(node)
        if isinstance(last, Ineligible):
            pair = self._pairs.get(("priority-fusion", *ends))
            barrier, refused_by = self._refusal(node, reader, pair or last.reason, said_of_pair=pair is not None)
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

    def _refusal(self, node: str, reader: str, reason: str, said_of_pair: bool) -> tuple[Barrier, str]:
        """(what makes one side not fusible, the name of a third one that refused)."""
        replay = self._replay
        if reason == "the producer is not fusible":
            return replay.barrier(node), ""
        readers = replay.readers(node)
        if reason not in ("the consumer is not fusible", "not fusing because there are only bitcast users"):
            return "", "one of its consumers" if not said_of_pair and len(readers) > 1 else ""
        if node not in self._refusing:
            self._refusing[node] = {other: barrier for other in readers if (barrier := replay.barrier(other))}
        refusing = self._refusing[node]
        if reader in refusing:
            return refusing[reader], ""
        third = next(iter(refusing), "")
        return (refusing[third], third) if third else ("", "")


_Source = tuple[str, int]  # a kernel, and which array of its result


class _Roots:
    """Kernels of the finished module and nodes of the log. kernel_of: node -> the kernel whose result it is."""

    def __init__(self, module: Module, replay: Replay) -> None:
        self._module = module
        self._replay = replay
        self.kernel_of: dict[str, str] = {}
        self._nodes: dict[str, tuple[str, ...]] = {}  # kernel -> node of each element of its result, "" for none
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
                return name  # it went through all passes under its name
            found = by_key.get(stable_key(root), [])
            if found:
                return found[0] if len(found) == 1 else ""
        return ""

    def nodes(self, kernel: str) -> tuple[str, ...]:
        return self._nodes.get(kernel, ())

    def edges(self) -> Iterator[tuple[str, str, str]]:
        """(producer, the log's node for what is passed, consumer), in the order of the module."""
        for computation in kernel_computations(self._module):
            for (producer, element), consumer in _reads(self._module, computation):
                nodes = self.nodes(producer)
                node = nodes[element] if element < len(nodes) else ""
                if not node and not any(nodes):
                    node = self._replaced_product(producer, consumer)
                if node:
                    yield producer, node, consumer

    def _replaced_product(self, producer: str, consumer: str) -> str:
        """The matrix product of the log for which the autotuner put another kernel (a library call) that has no name in
        common with it: one of that shape which the consumer reads, and which has no kernel."""
        for reader in self.nodes(consumer):
            for operand in self._replay.operands(reader):
                alike = self._replay.barrier(operand) == "gemm" and self._replay.key(operand)[2] == self._dims[producer]
                if alike and self.kernel_of.get(operand, producer) == producer:
                    self.kernel_of[operand] = producer
                    return operand
        return ""


def _results(module: Module, kernel: Instruction) -> list[list[Instruction]]:
    """For each array of a kernel's result the instruction that computes it, and what that one only copies: XLA's
    copy_fusion puts copies behind roots."""
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
    """(what a kernel made, who reads it), through tuples and bitcasts; a kernel that starts asynchronously under the
    name it has in its own computation."""
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
    """Of `a` or `a#1`, an element of a tuple; nothing is known of tuples within tuples."""
    name, *path = text.split("#")
    held = holds.get(name, [])
    if not path:
        return held
    index = int(path[0]) if len(path) == 1 and path[0].isdecimal() and len(path[0]) < 9 else len(held)
    return held[index : index + 1]


def _started(module: Module, kernel: Instruction) -> str:
    called = kernel.called("calls", "to_apply") if kernel.opcode == "async-start" else []
    inside = module.computations.get(called[0]) if called else None
    return inside.root.name if inside is not None and inside.root is not None else kernel.name
