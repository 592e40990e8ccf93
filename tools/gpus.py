"""Collect the same run for several targets: `python -m tools.gpus RUN... -o docs/gpus.json`.

`python -m tools.tables` makes the tables of docs/gpus.md from that file, and one of docs/parallel.md from
docs/parallel.json, which has the runs of suite `parallel`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from xlafuse.compare.base import atomic_write
from xlafuse.compare.base.text import number
from xlafuse.compare.graph import formats
from xlafuse.compare.graph.analyse.exchange import Exchange, exchange_of
from xlafuse.compare.predict.links import fitted
from xlafuse.compare.report.target_list import rows as targets
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.targets import load

HEADERS = ["case", "A100", "L4", "H200", "B200"]
COLUMNS = ("a100-80gb", "l4", "h200", "b200")
RESOURCE_HEADERS = ["kernel", *HEADERS[1:]]
LINKED = {"A100": "a100-80gb", "H100": "h100", "H200": "h200", "B200": "b200"}
EXCHANGE_HEADERS = ["block", "direction", "GPUs", "exchanges", "sent MB", *(f"{name}, µs" for name in LINKED)]


def summary(run: Path) -> dict[str, Any]:
    """Return each compiled record's kernels and bytes, and each hand-written kernel's registers and shared memory.

    "exchanges" has [opcode, GPUs, sent bytes, whether other kernels run meanwhile, launches] of the exchanges between
    GPUs, where all of a record are known.
    """
    source = open_source(run)
    records: dict[str, list[Any]] = {}
    kernels: dict[str, list[Any]] = {}
    exchanges: dict[str, list[Any]] = {}
    versions: dict[str, str] = {}
    for result in source.results:
        row, graph = result.row, result.graph
        if result.record is None or graph is None or graph.kernels is None:
            continue
        records[result.record.id] = [row.kernels, row.bytes_declared, row.bytes_compulsory]
        versions |= graph.versions
        launches: Counter[Exchange | None] = Counter()
        for kernel in graph.kernels:
            if kernel.kind == "collective":
                launches[exchange_of(kernel) if kernel.launches else None] += kernel.launches or 1
        if launches and None not in launches:
            exchanges[result.record.id] = [[*vars(one).values(), count] for one, count in launches.items()]
        for kernel in graph.kernels if row.implementation == "triton" else ():
            resources = [kernel.launch.registers, kernel.launch.shared_bytes]
            kernels.setdefault(f"{row.block} {row.direction}: {kernel.name}", resources)
    return {"versions": versions, "records": records, "kernels": kernels, "exchanges": exchanges}


def fusion_lines(collected: dict[str, Any], implementation: str) -> Iterator[list[str]]:
    """Yield a line a case: kernels, and declared bytes over compulsory bytes, for each target."""
    for record in collected["h200"]["records"]:
        block, case, _, direction, name = record.split("/")
        if name == implementation:
            found = [collected[target]["records"].get(record) for target in COLUMNS]
            yield [f"`{block}` {case}, {direction}", *(_fused(each) for each in found)]


def _fused(found: list[Any] | None) -> str:
    if found is None:
        return "-"
    kernels, declared, compulsory = found
    return f"{kernels}, {declared / compulsory:.2f}x"


def resource_lines(collected: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a line a kernel whose shared memory differs between targets, or that not every target has."""
    for kernel in dict.fromkeys(name for target in COLUMNS for name in collected[target]["kernels"]):
        found = [collected[target]["kernels"].get(kernel) for target in COLUMNS]
        if len({each and each[1] for each in found}) > 1:
            shown = ("-" if each is None else f"{each[0]}, {formats.size(each[1])}" for each in found)
            yield [f"`{kernel}`", *shown]


def exchange_lines(collected: dict[str, Any], implementation: str) -> Iterator[list[str]]:
    """Yield a line for each block, direction and number of GPUs: the predicted time of a call's exchanges by target."""
    for record in collected["h200"]["exchanges"]:
        block, _, _, direction, name = record.split("/")
        if name == implementation:
            found = {target: collected[target]["exchanges"][record] for target in LINKED.values()}
            own = found["h200"]
            yield [
                f"`{block}`", direction, str(max(gpus for _, gpus, *_ in own)),
                str(sum(launches for *_, launches in own)),
                number(sum(sent * launches for _, _, sent, _, launches in own) / 1e6),
                *(f"~{number(_predicted_us(each, target))}" for target, each in found.items()),
            ]


def _predicted_us(exchanges: list[Any], target: str) -> float:
    link = load(target).link
    assert link is not None
    return sum(fitted().us(Exchange(*each), link.rate) * launches for *each, launches in exchanges)


def target_lines() -> Iterator[list[str]]:
    """Yield a line a target of an NVIDIA GPU."""
    for row in targets():
        if row["compute_capability"] is not None:
            flops = f"{row['bf16_flop_per_s'] / 1e12:.0f} TFLOP/s"
            yield [
                f"`{row['target']}`", row["device"], row["compute_capability"], str(row["multiprocessors"]),
                f"{formats.size(row['bandwidth'])}/s", flops, row["rates"],
            ]


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def main(runs: Sequence[Path], out: Path) -> None:
    """Collect runs, one for each target, into one file."""
    found = {json.loads((run / "run.json").read_text())["target"]: summary(run) for run in runs}
    lines = (f" {json.dumps(target)}: {json.dumps(values)}" for target, values in sorted(found.items()))
    atomic_write.write(out, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


if __name__ == "__main__":
    main()
