"""Options with one meaning in several commands: what to show, and how it is shown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..base.usage import UsageError
from ..report import aligned, views
from ..sources.opening import open_source
from ..sources.source import Source
from .options import record_filters
from .terminal import width

Command = Callable[..., None]

rank_option = click.option(
    "--rank", type=click.IntRange(min=0), help="One of several ranks, or GPUs of a profile. Default: lowest."
)
PRICED = ("kernels", "why", "stages", "steps")
PRICED_AS_JSON = ("why", "steps")


@dataclass(frozen=True)
class ViewChoice:
    """How the user wants it shown. view: a name of compare.report.views; None for the default."""

    view: str | None
    every: bool
    kernel: str | None
    price_as: str | None

    @property
    def given(self) -> bool:
        return self.every or any(value is not None for value in (self.view, self.kernel, self.price_as))

    def view_of(
        self, source: Source, *, selected: bool = False, default: str | None = None, as_json: bool = False
    ) -> str:
        """Return the name of the view. selected: the user chose a module. default: instead of the path's own.

        Raises UsageError for an option that changes nothing in it.
        """
        view = self.view or default or views.default(source, selected or self.kernel is not None)
        if self.kernel is not None and view != "kernels":
            raise UsageError(f"--kernel shows one kernel in the view kernels; leave --view {view} out")
        if self.price_as is not None and view not in PRICED:
            raise UsageError(f"--price-as prices the bytes of graphs, and --view {view} has the run's own prices")
        if self.price_as is not None and as_json and view not in PRICED_AS_JSON:
            raise UsageError(f"--price-as changes nothing here: the JSON of --view {view} has no prices")
        return view

    def shown(self, *, selected: bool = False) -> views.Shown:
        return views.Shown(
            every=self.every, selected=selected, kernel=self.kernel, price_as=self.price_as, width=width()
        )


@dataclass(frozen=True)
class Selection:
    """The share of a path that the user wants: records of a run, a module, a rank. dump: as in `open_source`."""

    filters: Mapping[str, list[str]]
    module: str | None
    rank: int | None
    dump: Path | None

    @property
    def selected(self) -> bool:
        return self.module is not None or any(self.filters.values())

    def open(self, paths: Sequence[Path]) -> Source:
        """Return what one path holds, or several side by side. Raises as open_source and Source.select."""
        sources = [
            open_source(path, rank=self.rank, dump=self.dump).select(self.filters, self.module) for path in paths
        ]
        return sources[0] if len(sources) == 1 else aligned.side_by_side(sources)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def selection_options(command: Command) -> Command:
    """Add the options of a Selection, and pass it on as `selection`."""

    @functools.wraps(command)
    def selected(
        *args: Any, filters: Mapping[str, list[str]], module: str | None, rank: int | None, dump: Path | None,
        **others: Any,
    ) -> None:
        command(*args, selection=Selection(filters, module, rank, dump), **others)

    options = (
        record_filters("For a run: "),
        click.option(
            "--module", metavar="NAME|NUMBER", help="One module of a folder of dumps, or one record of a run by its id."
        ),
        rank_option,
        click.option(
            "--dump", type=click.Path(path_type=Path), metavar="PATH",
            help="For a profile: the compilers' files of its programs, if they are not beside it.",
        ),
    )
    return _with(options, selected)


def view_options(command: Command) -> Command:
    """Add the options of a ViewChoice, and pass it on as `choice`."""

    @functools.wraps(command)
    def viewed(
        *args: Any, view: str | None, why: bool, kernel: str | None, every: bool, price_as: str | None, **others: Any
    ) -> None:
        if why and view not in (None, "why"):
            raise UsageError(f"--why is --view why; leave it or --view {view} out")
        command(*args, choice=ViewChoice("why" if why else view, every, kernel, price_as), **others)

    options = (
        click.option("--view", metavar="NAME", help=f"What to show: {', '.join(views.VIEWS)}."),
        click.option(
            "--why", is_flag=True, help="Missed fusions and the reasons against them, most costly first: --view why."
        ),
        click.option(
            "--kernel", metavar="NAME|NUMBER|STAGE",
            help="One kernel, with the other users of its buffers; or the kernels of a stage of the program.",
        ),
        click.option("--all", "every", is_flag=True, help="Whole lists, not only the costly ones of many."),
        click.option(
            "--price-as", metavar="GPU",
            help="Price bytes by this GPU's bandwidth. Default: the GPU of the run or the compile.",
        ),
    )
    return _with(options, viewed)
