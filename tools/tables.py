"""Write the generated tables of README.md and docs/: `python -m tools.tables`."""

from __future__ import annotations

import json
import lzma
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from tabulate import tabulate

from tools import gpus, links, predicted_times, side_by_side, xla_cost_model
from tools.benchmarks.missed_fusions import tables as missed_fusions
from xlafuse.compare.base.exchange_kernels import PEER_COPY
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.text import number
from xlafuse.compare.measure.overlap import overlap
from xlafuse.compare.plan.peers import is_a
from xlafuse.compare.record import run_folder
from xlafuse.compare.report import (
    at_a_glance,
    authorship,
    block_list,
    columns,
    parts_view,
    peers,
    ranks,
    remedies_view,
    roofline,
)
from xlafuse.compare.report.columns import Column
from xlafuse.compare.report.graph_views import Shown, steps
from xlafuse.compare.report.profile_view import ProfileView
from xlafuse.compare.sources.opening import open_source
from xlafuse.compare.sources.row import Row
from xlafuse.compare.sources.run_source import open_run
from xlafuse.compare.spec.blocks import BLOCKS, REPLAYS

COLUMNS = {
    "records": columns.COLUMNS, "kernels": roofline.KERNEL_COLUMNS, "authorship": authorship.COLUMNS,
    "findings": columns.FINDING_COLUMNS, "peers": peers.COLUMNS,
    "ranks": ranks.COLUMNS, "parts": parts_view.COLUMNS,
    "remedies": remedies_view.COLUMNS,
}
TOUR = PROJECT / "tests" / "data" / "runs" / "tour"
CAPTURES = PROJECT / "tests" / "data" / "profiles"  # of training steps on an H200
SCREENS = ("nnx", "gpt", "bert", "olmoe_grouped", "gemma")
PACKED = PROJECT / "tests" / "data" / "captures"  # the same, packed
RUN = PROJECT / "reports" / "h200"
GPUS = PROJECT / "docs" / "gpus.json"
PARALLEL = PROJECT / "docs" / "parallel.json"
MISSED_FUSIONS = PROJECT / "docs" / "missed-fusions.json"  # of the benchmark on an H200
COST_MODELS = PROJECT / "docs" / "xla-cost-model.json"
OVER_GPUS = PROJECT / "reports" / "h200-x2"
RANK_COLUMNS = (
    "device_time_us", "imbalance_us", "exposed_us", "communication_us", "overlap_share", "sent_bytes",
    "least_sent_bytes",
)
LAUNCH_BOUND = 1.05  # device time over the time in which kernels ran: launches cost 5% from there on
BEHIND, AHEAD = 0.95, 1.2  # the best other time over Triton's: the cases that the table of wins and losses shows


ATTENTION = (
    "attention/llama-8b", "attention/llama-3-8b-8k", "attention/window-16k", "attention/gqa-window",
    "attention/gemma-2-9b", "attention/full", "attention/gpt2", "attention_packed/llama-3-8b-4k",
    "attention_packed/llama-3-8b-8k",
)

# Implementations of the page that lays languages side by side.
LANGUAGES = {
    "rmsnorm": ["triton", "pallas", "cuda", "xla"],
    "attention": ["triton", "pallas", "sdpa-cudnn", "fa4", "xla-cudnn", "xla"],
}


def with_tables(text: str) -> str:
    """Return the document with each table between its `<!-- table: NAME -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text, flags=re.DOTALL,
    )


def wins_and_losses() -> list[tuple[str, str, str, str, str]]:
    """Return the main cases of RUN in which Triton is far ahead or behind: case, Triton, Pallas, best other, ratio.

    Triton's time is that of its calls or of their CUDA graph, the shorter one. Others are those that this project did
    not write. Times are in µs: a call's device time, and in brackets the time in which kernels ran.
    """
    main = {(name, block.shapes[0].name) for name, block in BLOCKS.items()}
    cases: dict[str, list[Row]] = {}
    for row in rows_of(RUN):
        if (row.block, row.case_name) in main and row.device_time_us is not None:
            cases.setdefault(f"`{row.block}`{_direction(row)}", []).append(row)
    found = []
    for label, members in cases.items():
        ratio, triton, best = _ours_and_best(members)
        pallas = next((_both(row) for row in members if row.implementation == "pallas"), "")
        if ratio <= BEHIND or ratio >= AHEAD:
            own = _both(triton) + (" graph" if _replayed(triton) else "")
            other = f"{_both(best)} `{best.implementation}`"
            found.append((ratio, (label, own, pallas, other, f"{ratio:.2f}")))
    return [row for _, row in sorted(found, reverse=True)]


def leads() -> list[tuple[str, int, float]]:
    """Return for each dtype in RUN the number of cases, and the geometric mean of the best other time over Triton's."""
    found: dict[str, list[float]] = {}
    for members in _cases().values():
        row = members[0]
        dtype = f"{row.dtype} in TF32" if row.precision == "tf32" else row.dtype
        found.setdefault(dtype, []).append(_ours_and_best(members)[0])
    means = [(dtype, len(ratios), geometric_mean(ratios)) for dtype, ratios in found.items()]
    return sorted(means, key=lambda mean: -mean[1])


def largest_losses(most: int) -> list[tuple[str, str, str, str]]:
    """Return the cases of RUN in which Triton is furthest behind: case, Triton, best other, times as long."""
    found = [
        (ratio, (label, number(triton.device_time_us), f"{number(best.device_time_us)} `{best.implementation}`"))
        for label, members in _cases().items() for ratio, triton, best in [_ours_and_best(members)]
    ]
    return [(*cells, f"{1 / ratio:.1f}") for ratio, cells in sorted(found)[:most]]


def _leads_and_losses() -> str:
    means = ", ".join(f"{mean:.2f} in {cases} cases of {dtype}" for dtype, cases, mean in leads())
    losses = _markdown(["case", "Triton, µs", "best other, µs", "times as long"], largest_losses(5))
    return f"The best other time over ours, in the geometric mean: {means}. The five largest losses:\n\n{losses}"


def _cases() -> dict[str, list[Row]]:
    """Return the rows with a time of each case of RUN that Triton and a peer ran, by a label."""
    cases: dict[str, list[Row]] = {}
    for row in rows_of(RUN):
        if row.device_time_us is not None:
            precision = f" in {row.precision.upper()}" if row.precision != "ieee" else ""
            label = f"`{row.block}/{row.case_name}`, {row.dtype}{precision}{_direction(row)}"
            cases.setdefault(label, []).append(row)
    return {label: members for label, members in cases.items() if _has_both(members)}


def _direction(row: Row) -> str:
    return "" if row.direction == "fwd" else f", {row.direction}"


def _is_ours(row: Row) -> bool:
    return "triton" in (row.implementation, _replayed(row))


def _is_others(row: Row) -> bool:
    return is_a("peer", row.block, row.implementation)


def _has_both(members: Sequence[Row]) -> bool:
    return any(map(_is_ours, members)) and any(map(_is_others, members))


def _ours_and_best(members: Sequence[Row]) -> tuple[float, Row, Row]:
    """Return the best other time over Triton's, with both rows."""
    triton, best = _fastest(filter(_is_ours, members)), _fastest(filter(_is_others, members))
    return (best.device_time_us or 0.0) / (triton.device_time_us or 1.0), triton, best


def attention_times() -> list[list[str]]:
    """Return a line for each case of ATTENTION in RUN: our times, one by one and replayed, and those of `fa4`."""
    found = {row.id: row for row in rows_of(RUN)}

    def time(case: str, direction: str, implementation: str, column: str = "device_time_us") -> str:
        return number(getattr(found[f"{case}/bf16/{direction}/{implementation}"], column))

    return [
        [
            f"`{case}`", time(case, "fwd", "triton"), time(case, "train", "triton"),
            time(case, "train", "triton-cudagraphs"), time(case, "train", "triton", "busy_time_us"),
            time(case, "fwd", "fa4"), time(case, "train", "fa4"),
        ]
        for case in ATTENTION
    ]


def _attention_times() -> str:
    headers = ["case", "forward", "train, one by one", "train, replayed", "busy in train", "fa4 forward", "fa4 train"]
    return _markdown(headers, attention_times())


@cache
def rows_of(run: Path) -> list[Row]:
    """Return the rows of a committed run."""
    return [result.row for result in open_run(run).results]


def _replayed(row: Row) -> str | None:
    """Return the implementation whose launches the row's replays as a CUDA graph."""
    return REPLAYS.get(row.implementation)


def _fastest(found: Iterable[Row]) -> Row:
    return min(found, key=lambda row: row.device_time_us or 0.0)


def launch_gaps() -> list[tuple[str, str, str, str, str]]:
    """Return, for each block, the largest launch gaps of `triton` and `inductor` in the realistic cases of RUN.

    A gap is the ratio of device time to the time in which kernels ran. The last two values are "yes" where one is at
    least LAUNCH_BOUND, and where the block has the implementations that replay CUDA graphs.
    """
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    for row in rows_of(RUN):
        case, implementation = row.id.rpartition("/")[::2]
        if implementation not in ("triton", "inductor") or not peers.is_realistic(row.block, row.case_name):
            continue
        if row.device_time_us and row.busy_time_us:
            found = row.device_time_us / row.busy_time_us, f"`{case.partition('/')[2]}`: {_both(row)}"
            key = row.block, implementation
            largest[key] = max(largest.get(key, found), found)
    table = []
    for name, block in BLOCKS.items():
        if block.spans_gpus:
            continue
        (triton, of_triton), (inductor, of_inductor) = largest[name, "triton"], largest[name, "inductor"]
        over = "yes" if max(triton, inductor) >= LAUNCH_BOUND else ""
        has = "yes" if any(i.backend.replays_graphs for i in block.implementations) else ""
        table.append((f"`{name}`", f"{of_triton}, {triton:.2f}", f"{of_inductor}, {inductor:.2f}", over, has))
    return table


def _both(row: Row) -> str:
    return f"{number(row.device_time_us)} ({number(row.busy_time_us)}) {columns.marks(row)}".rstrip()


def _markdown(headers: list[str], body: Iterable[Iterable[str]]) -> str:
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def _columns(of: Iterable[Column]) -> str:
    lines = [f"| `{column.name}` | {column.unit} | {column.doc} |" for column in of]
    return "\n".join(["| column | unit | meaning |", "|---|---|---|", *lines])


def over_gpus(direction: str) -> list[list[str]]:
    """Return a line for each implementation of OVER_GPUS, the fastest of a block first; values by rank."""
    by_record: dict[tuple[str, str], list[ranks.Rank]] = {}
    results = open_run(OVER_GPUS).results
    for rank in ranks.of(result for result in results if result.row.direction == direction):
        by_record.setdefault((rank.row.block, rank.row.implementation), []).append(rank)
    slowest = {key: max(rank.fields.device_time for rank in of_ranks) for key, of_ranks in by_record.items()}
    shown = [column for column in ranks.COLUMNS if column.name in RANK_COLUMNS]
    return [
        [f"`{block}`", f"`{name}`", *(", ".join(filter(None, map(column.text, of_ranks))) for column in shown)]
        for (block, name), of_ranks in sorted(by_record.items(), key=lambda one: (one[0][0], slowest[one[0]]))
    ]


def _over_gpus(direction: str) -> str:
    headers = [column.header for column in ranks.COLUMNS if column.name in RANK_COLUMNS]
    return _markdown(["block", "implementation", *headers], over_gpus(direction))


def calls_over_gpus() -> list[list[str]]:
    """Return a line for each implementation of OVER_GPUS whose exchanges are copies, of rank 0's median call.

    For each direction it has the share of the exchanges' time in which another kernel ran, and the time in which
    nothing ran.
    """
    lines: dict[tuple[str, str], list[str]] = {}
    records, _ = run_folder.read_records(OVER_GPUS)
    for record in records:
        found = [ran for times in record.times.values() for ran in times.records or ()]
        times = overlap(found)
        if any(each.name == PEER_COPY for each in found):
            span = max(each.end for each in found) - min(each.start for each in found)
            idle = span - (times.communication + times.compute - times.both)
            lines.setdefault((record.case.block, record.implementation), []).extend((
                f"{times.both / times.communication:.0%} of {number(times.communication * 1e6)} µs",
                number(idle * 1e6),
            ))
    return [[f"`{block}`", f"`{name}`", *cells] for (block, name), cells in lines.items()]


def _calls_over_gpus() -> str:
    headers = ["inference: hidden", "nothing runs, µs", "training step: hidden", "nothing runs, µs"]
    return _markdown(["block", "implementation", *headers], calls_over_gpus())


def _tour() -> str:
    return f"```\n{at_a_glance.render(rows_of(TOUR), 'H200')}\n```"


def _capture(framework: str, shown: int) -> str:
    """Return the first `shown` lines of what `xlafuse inspect` shows of a capture below the parts of the model."""
    source = open_source(CAPTURES / framework)
    assert source.profile is not None
    profile = source.profile.profile
    name = str(Path("step") / Path(profile.source).relative_to(CAPTURES / framework))
    opened = replace(source.profile, path=Path("step"), profile=replace(profile, source=name))
    return _printed([ProfileView(opened, opened.ceilings(None)).text(width=100)], shown)


def _first_screen(name: str) -> str:
    """Return the first screen of a packed capture: parts of the model, and changes to it."""
    with tempfile.TemporaryDirectory() as folder:
        with lzma.open(PACKED / f"{name}.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
            archive.extractall(folder, filter="data")
        *screen, _ = steps(open_source(Path(folder) / name), Shown(width=132)).trees()
        return _printed(screen, width=132)


def _printed(trees: Iterable[Any], shown: int | None = None, width: int = 100) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as text:
        for tree in trees:
            console.print(tree)
    lines = [line.rstrip() for line in text.get().splitlines()[:shown]]
    return "\n".join(["```", *lines, "```"])


def _languages(block: str) -> str:
    return _markdown(side_by_side.HEADERS, side_by_side.summary(RUN, block, LANGUAGES[block]))


def _kernels_of(block: str, direction: str) -> str:
    return _markdown(side_by_side.KERNEL_HEADERS, side_by_side.kernels(RUN, block, LANGUAGES[block], direction))


def _cost_models(by: str) -> str:
    return _markdown(xla_cost_model.HEADERS, xla_cost_model.lines(json.loads(COST_MODELS.read_text()), by))


def _decisions() -> str:
    found = xla_cost_model.decision_lines(json.loads(COST_MODELS.read_text()))
    return _markdown(xla_cost_model.DECISION_HEADERS, found)


def _predicted(heading: str, group: str, split: str) -> str:
    return _markdown([heading, *predicted_times.HEADERS["group"][1:]], predicted_times.by(group, split))


@cache
def _forced() -> list[missed_fusions.Forced]:
    return missed_fusions.read(MISSED_FUSIONS)


def _gpus(implementation: str) -> str:
    return _markdown(gpus.HEADERS, gpus.fusion_lines(json.loads(GPUS.read_text()), implementation))


def _exchanges_of_gpus() -> str:
    return _markdown(gpus.EXCHANGE_HEADERS, gpus.exchange_lines(json.loads(PARALLEL.read_text()), "xla"))


def _resources_of_gpus() -> str:
    return _markdown(gpus.RESOURCE_HEADERS, gpus.resource_lines(json.loads(GPUS.read_text())))


def _targets() -> str:
    headers = ["target", "device", "capability", "SMs", "copy bandwidth", "bf16 products", "rates"]
    return _markdown(headers, gpus.target_lines())


TABLES: dict[str, Callable[[], str]] = {
    "cost models of XLA": partial(_cost_models, ""),
    "cost models of XLA by emitter": partial(_cost_models, "emitter"),
    "cost models of XLA by kind": partial(_cost_models, "kind"),
    "cost models of XLA by size": partial(_cost_models, "size"),
    "fusion decisions of XLA": _decisions,
    "targets": _targets,
    "gpus xla": partial(_gpus, "xla"),
    "gpus inductor": partial(_gpus, "inductor"),
    "gpus triton": _resources_of_gpus,
    "tour": _tour,
    **{f"first screen of {name}": partial(_first_screen, name) for name in SCREENS},
    "capture of jax": partial(_capture, "jax", 20),
    "capture of torch": partial(_capture, "torch", 22),
    "leads and losses": _leads_and_losses,
    "wins and losses": lambda: _markdown(["main case", "Triton", "Pallas", "best other", "ratio"], wins_and_losses()),
    "attention against FlashAttention": _attention_times,
    "launch gaps": lambda: _markdown(["block", "`triton`", "`inductor`", "5%", "rows"], launch_gaps()),
    **{f"languages of {block}": partial(_languages, block) for block in LANGUAGES},
    "kernels of rmsnorm train": partial(_kernels_of, "rmsnorm", "train"),
    "kernels of attention fwd": partial(_kernels_of, "attention", "fwd"),
    "rmsnorm in triton": lambda: side_by_side.python(
        PROJECT / "triton_side/kernels/rmsnorm.py", "rmsnorm_forward_kernel"
    ),
    "rmsnorm in pallas": lambda: side_by_side.python(PROJECT / "xlafuse/pallas/rmsnorm.py", "rmsnorm_kernel"),
    "rmsnorm in cuda": lambda: side_by_side.cuda(PROJECT / "triton_side/cuda/rmsnorm.cu", "rmsnorm_forward"),
    "over gpus fwd": partial(_over_gpus, "fwd"),
    "over gpus joint": partial(_over_gpus, "joint"),
    "calls over gpus": _calls_over_gpus,
    "rates of exchanges": lambda: _markdown(links.RATES, links.rate_lines()),
    "predicted exchanges": lambda: _markdown(links.PROGRAMS, links.program_lines()),
    "predicted exchanges by gpu": _exchanges_of_gpus,
    "predicted exchanges by kind": lambda: _markdown(links.KINDS, links.kind_lines()),
    "predicted summary": lambda: _markdown(predicted_times.HEADERS["summary"], predicted_times.summary()),
    **{
        f"predicted by {group}": partial(_predicted, group, group, "blocks") for group in ("kind", "compiler", "size")
    },
    "predicted by compiler left out": partial(_predicted, "compiler left out", "compiler", "compilers"),
    "predicted on another GPU": partial(_predicted, "kind", "kind", "to other GPU"),
    "predicted worst": lambda: _markdown(predicted_times.HEADERS["worst"], predicted_times.worst()),
    "predicted choices": lambda: _markdown(predicted_times.HEADERS["choices"], predicted_times.choices()),
    "predicted calls": lambda: _markdown(predicted_times.HEADERS["calls"], predicted_times.call_lines()),
    "predicted steps": lambda: _markdown(predicted_times.HEADERS["steps"], predicted_times.steps()),
    "forced fusions": lambda: _markdown(missed_fusions.CASES, missed_fusions.cases(_forced())),
    "forced fusions by size": lambda: _markdown(missed_fusions.SIZES, missed_fusions.sizes(_forced())),
    "forced fusions by price": lambda: _markdown(missed_fusions.METHODS, missed_fusions.methods(_forced())),
    "unpredicted": lambda: _markdown(predicted_times.HEADERS["unknown"], predicted_times.unknown()),
    "blocks": lambda: block_list.as_markdown(list(BLOCKS.values())),
    **{name: partial(_columns, of) for name, of in COLUMNS.items()},
}
DOCUMENTS = [
    path for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md")))
    if "<!-- table: " in path.read_text()
]

if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(with_tables(document.read_text()))
