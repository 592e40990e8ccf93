"""Measure the time and memory of reading HLO into a graph: text and proto of 1k, 10k and 100k instructions.

    python tools/benchmarks/hlo_scaling.py [INSTRUCTIONS ...]

A module is a captured SwiGLU MLP (tests/data/hlo), repeated as consecutive layers. Each reading runs in its own
process. The table shows that process's peak memory, and its CPU seconds (one thread) from the file's name to a
`FusionGraph`, best of three. It needs Linux; protos need jaxlib.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LAYER = ROOT / "tests" / "data" / "hlo" / "jax-0.11.2" / "h200-swiglu_mlp-fwd"
INPUT = "inputs__x__.1"  # a layer's input, which is the output of the layer before
SIZES = (1_000, 10_000, 100_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instructions", type=int, nargs="*", default=SIZES)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(_measure(arguments.measure)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.instructions:
            for form, data in (("text", layers_as_text(size)), ("proto", layers_as_proto(size))):
                path = Path(folder) / f"{size}.{form}"
                path.write_bytes(data)
                best = _best(path)
                each = best["seconds"] / best["instructions"] * 1e6
                rows.append((form, best["instructions"], best["kernels"], len(data) / 1e6, best["seconds"], each,
                             best["mebibytes"]))
    headers = ("form", "instructions", "kernels", "MB", "CPU s", "us/instruction", "peak MiB")
    print(tabulate(rows, headers, floatfmt=("", "", "", ".1f", ".2f", ".1f", ".0f")))


def _best(path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", str(path)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    return min(runs, key=lambda run: run["seconds"])


def _measure(path: Path) -> dict[str, Any]:
    from xlafuse.compare.graph.build.from_hlo import from_hlo
    from xlafuse.hlo.file_reader import read

    started = time.process_time()
    module = read(path)
    graph = from_hlo(module)
    seconds = time.process_time() - started
    assert not graph.unparsed, graph.unparsed[0]
    return {
        "seconds": seconds,
        "instructions": sum(len(computation.instructions) for computation in module.computations.values()),
        "kernels": len(graph.kernels or ()),
        "mebibytes": _peak_mebibytes(),
    }


def _peak_mebibytes() -> float:
    """Return this process's peak memory. getrusage's value would include the parent process's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


_NAME = re.compile(r"%([\w.-]+)")


def layers_as_text(instructions: int) -> bytes:
    text = gzip.decompress(LAYER.with_name(LAYER.name + ".hlo.txt.gz").read_bytes()).decode()
    before, entry = text.split("\nENTRY ", 1)
    tables, computations = before.split("\n%", 1)
    header, *body, _ = entry.rstrip().split("\n")
    parameters = [line for line in body if " parameter(" in line]
    body = [line for line in body if line not in parameters]
    shared = {_NAME.search(line)[1] for line in parameters}  # type: ignore[index]
    layers = max(1, round((instructions - len(parameters)) / ((computations + entry).count(" = ") - len(parameters))))

    blocks, lines, output = [], list(parameters), INPUT
    for layer in range(layers):

        def renamed(match: re.Match[str], layer: int = layer, output: str = output) -> str:
            if match[1] == INPUT:
                return f"%{output}"
            return match[0] if match[1] in shared else f"%{match[1]}.l{layer}"

        blocks.append(_NAME.sub(renamed, f"%{computations}"))
        layer_lines = [_NAME.sub(renamed, line) for line in body]
        output = _NAME.search(layer_lines[-1])[1]  # type: ignore[index]
        if layer < layers - 1:
            layer_lines[-1] = layer_lines[-1].replace("ROOT ", "", 1)
        lines += layer_lines
    return "\n".join((tables, "", *blocks, "", f"ENTRY {header}", *lines, "}", "")).encode()


def layers_as_proto(instructions: int) -> bytes:
    from xlafuse.hlo.proto_reader import message_type

    data = gzip.decompress(LAYER.with_name(LAYER.name + ".hlo.pb.gz").read_bytes())
    one = message_type("xla.HloModuleProto").FromString(data)
    (entry,) = (c for c in one.computations if c.id == one.entry_computation_id)
    called = [c for c in one.computations if c.id != entry.id]
    order = list(one.schedule.sequences[entry.id].instruction_ids)
    parameters = {part.id: part for part in entry.instructions if part.opcode == "parameter"}
    (first,) = (id for id, part in parameters.items() if part.name == INPUT)
    body = sorted((p for p in entry.instructions if p.id not in parameters), key=lambda part: order.index(part.id))
    a_layer = sum(len(c.instructions) for c in called) + len(body)
    layers = max(1, round((instructions - len(parameters)) / a_layer))

    module = type(one)()
    module.CopyFrom(one)
    del module.computations[:]
    module.schedule.Clear()
    stride = max(c.id for c in one.computations) + 1  # between layers' computation ids, also in instruction ids >> 32
    whole = type(entry)(name=entry.name, id=layers * stride + 1)
    whole.instructions.extend(parameters.values())
    output = first
    for layer in range(layers):
        at = layer * stride
        for computation in called:
            copy = module.computations.add()
            copy.CopyFrom(computation)
            copy.name, copy.id = f"{copy.name}.l{layer}", copy.id + at
            for part in copy.instructions:
                _renumber(part, layer, at)
        shift = at << 32
        for part in body:
            copy = whole.instructions.add()
            copy.CopyFrom(part)
            _renumber(copy, layer, at)
            copy.id += shift
            copy.operand_ids[:] = [
                output if id == first else id if id in parameters else id + shift for id in part.operand_ids
            ]
        output = whole.root_id = entry.root_id + shift
    module.computations.append(whole)
    module.entry_computation_id = whole.id
    module.schedule.sequences[whole.id].instruction_ids.extend(part.id for part in whole.instructions)
    return module.SerializeToString()


def _renumber(part: Any, layer: int, at: int) -> None:
    part.name = f"{part.name}.l{layer}"
    part.called_computation_ids[:] = [id + at for id in part.called_computation_ids]


if __name__ == "__main__":
    main()
