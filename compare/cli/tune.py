"""`xlafuse tune`: search the launch configurations of hand-written Triton kernels on this machine's GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from xlafuse.triton_side.configs import table as tables

from ..backends.kernels import TRITON
from ..base import host
from ..base.usage import UsageError
from ..spec.case import Case
from ..workers.client import WORKER_FAILURES, WorkerDied, WorkerTimeout
from ..workers.pool import WorkerPool
from .options import json_option, names, names_option
from .run import duration
from .terminal import echo_json, one_line

ROLE = "tuning"
COMPILING = 0.4  # the largest share of the time for compiles
LONGEST_SEARCH = 300.0  # seconds of one choice
Ask = Callable[..., Any]  # asks the worker, as WorkerPool.ask does without the role


@dataclass
class Tuned:
    """The result of a search.

    table: with the new entries. changed: the new entries, as JSON. left, failed: how many choices were not searched,
    and how many searches failed. written: the table's file was. lost: how many searches ended the worker.
    """

    table: tables.Table
    searched: int = 0
    changed: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    failed: int = 0
    interrupted: bool = False
    written: bool = False
    lost: int = 0


@click.command("tune")
@click.argument("blocks", nargs=-1, callback=names, metavar="[BLOCK]...")
@click.option(
    "--suite", type=click.Choice(["quick", "full"]), default="quick", show_default=True,
    help="Whose sizes of the blocks count: one to four a block (quick), or every dtype and size (full).",
)
@names_option("--case", "cases", metavar="NAME", help="Only these cases: a name such as llama-8b, or a full id.")
@click.option(
    "--stop-after", "budget", callback=duration, metavar="TIME", help="Stop after about TIME (9m, 540s, 1.5h)."
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Write the table here. Default: where the kernels read it, a file named like the GPU.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context, blocks: list[str], suite: str, cases: list[str], budget: float | None, out: Path | None,
    as_json: bool,
) -> None:
    """Tune the hand-written Triton kernels to this GPU.

    Searches their launch configurations, for the sizes of a suite's cases. Candidates compile in parallel; those that
    spill registers or exceed shared memory are dropped, and the others timed. One that beats the present configuration
    by more than the noise is written to this GPU's table at once, so Ctrl-C loses nothing. Later calls read the table.

    Exit code 1 when a search ended its worker, 2 without a GPU, 3 when the time ended the search, 130 after Ctrl-C.
    """
    from ..measure import machine_remarks
    from ..plan import selection

    work = [
        (case, implementation.name)
        for case, found in selection.resolve(blocks, suite=suite, cases=cases).work if case.direction != "joint"
        for implementation in found if implementation.backend == TRITON
    ]
    machine_remarks.require_gpu("tune times kernels, and needs an NVIDIA GPU")
    with tempfile.TemporaryDirectory(prefix="xlafuse-tune-", dir=host.scratch_root()) as logs:
        workers = WorkerPool(Path(logs), {})
        try:
            gpu = workers.ask(ROLE, "gpu")
            path = out or tables.file_of(gpu["gpu"], tables.FOLDER)
            _require_writable(path)
            table = _table_of(gpu)

            def ask(method: str, **parameters: Any) -> Any:
                return workers.ask(ROLE, method, **parameters)

            found = tune(work, ask, table, path, budget, lambda line: click.echo(line, err=True))
            if found.failed:
                click.echo(f"The worker's log ends with:\n{_end_of(Path(logs) / f'{ROLE}.log')}", err=True)
        except WORKER_FAILURES as problem:
            raise UsageError(f"the tuning worker failed: {problem}") from None
        finally:
            workers.stop()
    if as_json:
        echo_json({
            "schema": "xlafuse.tune/1", "gpu": table.gpu, "file": str(path) if found.written else None,
            "searched": found.searched, "left": found.left, "failed": found.failed, "changed": found.changed,
        })
    else:
        click.echo(as_text(found, path))
    ctx.exit(130 if found.interrupted else 1 if found.lost else 3 if found.left else 0)


def tune(
    work: Iterable[tuple[Case, str]], ask: Ask, table: tables.Table, path: Path, budget: float | None,
    say: Callable[[str], None],
) -> Tuned:
    """Search the choices of these cases and implementations, and write the table to `path` after each change.

    Training comes first, because its calls contain the launches of both directions. A failed choice is left as it is.
    One that ends the worker, as an illegal access does, leaves the others to a new one.
    """
    began = time.monotonic()
    work = sorted(work, key=lambda each: each[0].direction == "fwd")

    def seconds_left() -> float:
        return float("inf") if budget is None else budget - (time.monotonic() - began)

    def choices_of_calls() -> list[dict[str, Any]]:
        return [
            choice for case, implementation in work
            for choice in ask("choices", case=case.to_json(), implementation=implementation)
        ]

    found = Tuned(table)
    try:
        choices = choices_of_calls()
        found.left = len(choices)
        while choices:
            say(f"{len(choices)} choices of kernels; compiling their candidates")
            compiling = 3600.0 if budget is None else COMPILING * max(0.0, seconds_left())
            count = ask("compile", choices=choices, seconds=compiling, timeout=compiling + 300)
            say(f"{count} candidates after {time.monotonic() - began:.0f} s")
            lost = found.lost
            for choice, outcome in _outcomes(tuple(choices), ask, seconds_left):
                choices.remove(choice)
                if outcome is not None:
                    _note(found, choice, outcome, path)
                    say(_line(choice, outcome))
            if found.lost == lost:
                break
            if choices:
                choices_of_calls()  # a new worker knows none
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _note(found: Tuned, choice: dict[str, Any], outcome: dict[str, Any], path: Path) -> None:
    """Count a search, and write the table where it has a new entry."""
    table = found.table
    found.left, found.searched = found.left - 1, found.searched + 1
    found.failed += "problem" in outcome
    found.lost += outcome.get("lost", False)
    if outcome.get("config"):
        before = outcome["before_us"]
        entry = _entry(outcome, outcome["config"], before and round(before, 2))
        found.changed.append(choice | {name: outcome[name] for name in ("case", "before", "config")} | {
            "before_us": entry.before_us, "us": entry.us,
        })
    elif not outcome.get("by_rule", True) and table.find(choice["kernel"], choice["shape_class"]) is None:
        # It came from another GPU's table, which no longer counts once this GPU has a table.
        entry = _entry(outcome, outcome["before"], None)
    else:
        return
    table.put(choice["kernel"], choice["shape_class"], entry)
    table.write(path)
    found.written = True


def _entry(outcome: dict[str, Any], config: dict[str, Any], before_us: float | None) -> tables.Entry:
    return tables.Entry(config, outcome["shared_bytes"], round(outcome["us"], 2), before_us)


def _outcomes(
    choices: Iterable[dict[str, Any]], ask: Ask, seconds_left: Callable[[], float]
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Yield each choice with the outcome of its search, or {"problem": ...}, until no time is left.

    None: its candidates were not compiled in time.
    """
    for choice in choices:
        if seconds_left() <= 0:
            return
        try:
            yield choice, ask("search", **choice, timeout=LONGEST_SEARCH)
        except WORKER_FAILURES as problem:
            lost = isinstance(problem, (WorkerDied, WorkerTimeout))
            yield choice, {"problem": one_line(problem), "lost": lost}
            if lost:
                return  # what was compiled and drawn is lost with the process


def _end_of(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.is_file() else ""


def _require_writable(path: Path) -> None:
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UsageError(f"{path} cannot be written; name another file with --out")


def _table_of(gpu: dict[str, Any]) -> tables.Table:
    """Return the GPU's table, or an empty one."""
    path = tables.file_of(gpu["gpu"], tables.FOLDER)
    try:
        table = tables.read(path) if path.is_file() else tables.Table(
            gpu["gpu"], tuple(gpu["capability"]), gpu["multiprocessors"]
        )
    except tables.TableError as problem:
        raise UsageError(str(problem)) from None
    table.triton = gpu["triton"]
    return table


def _name(choice: dict[str, Any]) -> str:
    return f"{choice['kernel']} {' '.join(f'{k}={v}' for k, v in choice['shape_class'].items())}".rstrip()


def _line(choice: dict[str, Any], outcome: dict[str, Any]) -> str:
    """Return the line of progress of one choice."""
    if problem := outcome.get("problem"):
        return f"{_name(choice)}: failed: {problem}"
    dropped = "".join(f", {count} {problem}" for problem, count in sorted(outcome["dropped"].items()))
    times = f"{_us(outcome['before_us'])} -> {_us(outcome['us'])} us" if outcome["config"] else (
        f"stays at {_us(outcome['us'])} us"
    )
    return f"{_name(choice)}: {times} ({outcome['candidates']} candidates{dropped})"


def _us(time: float | None) -> str:
    return "cannot run" if time is None else f"{time:.1f}"


def as_text(found: Tuned, path: Path) -> str:
    """Return a table of the changes, and the file that has them."""
    from tabulate import tabulate

    rows = [
        [_name(change), _us(change["before_us"]), _us(change["us"]), _differences(change["before"], change["config"])]
        for change in found.changed
    ]
    headers = ("kernel and class", "before, us", "now, us", "configuration")
    lines = [tabulate(rows, headers, disable_numparse=True)] if rows else []
    written = f"; {path} has {len(found.table.entries)} entries" if found.written else ""
    lines.append(f"{len(rows)} of {found.searched} choices changed{written}")
    if found.left:
        lines.append(f"{found.left} choices were not searched; name their blocks, or give more time")
    return "\n".join(lines)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    return ", ".join(f"{name} {before[name]} -> {now[name]}" for name in now if now[name] != before.get(name))
