"""`Explained`: the result of `xlafuse.explain`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import atomic_write
from ..base.text import printable
from ..graph import formats, store
from ..graph.analyse.call_time import call_time
from ..graph.model import FusionGraph
from ..predict.times import with_predictions
from ..record.record_fields import TimesOfPhase
from . import provenance
from .result import Result, reader_of
from .source import Source
from .target_ceilings import own_ceilings

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.explained/1"
MOST_FINDINGS = 8


@dataclass(frozen=True)
class Agreement:
    """One function's results against another one's, on the CPU.

    error: max|y - y'| / rms(y') of the worst result, y' being the other function's. tolerance: 16 roundings of the
    coarsest dtype among the results.
    """

    name: str
    other: str
    error: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        found = "agree" if self.agrees else "DISAGREE"
        return (
            f"{self.name} and {self.other} {found} on the CPU: the error is {self.error:.2g}, and up to "
            f"{self.tolerance:.2g} may be rounding"
        )


@dataclass(frozen=True, repr=False)
class Explained:
    """Fusion graphs by name.

    notes: assumptions of the compile, and how the call looked to the compiler. agreement: the numerical checks of
    `explain(..., check=True)`. times: by name, the samples of each round; empty where nothing was timed. `a | b` joins
    the graphs of two results, to compare them.
    """

    graphs: Mapping[str, FusionGraph]
    notes: tuple[str, ...] = ()
    agreement: tuple[Agreement, ...] = ()
    times: Mapping[str, TimesOfPhase] = field(default_factory=dict)

    @property
    def graph(self) -> FusionGraph:
        """The only graph. Raises ValueError where there are several."""
        if len(self.graphs) != 1:
            raise ValueError(f"there are {len(self.graphs)} graphs; take one of .graphs: {', '.join(self.graphs)}")
        return next(iter(self.graphs.values()))

    def __or__(self, other: Explained) -> Explained:
        if taken := self.graphs.keys() & other.graphs.keys():
            raise ValueError(f"both have a graph {', '.join(sorted(taken))}; give one of them another name=")
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        times = {**self.times, **other.times}
        return Explained({**self.graphs, **other.graphs}, notes, self.agreement + other.agreement, times)

    @cached_property
    def predicted(self) -> Mapping[str, FusionGraph]:
        """The graphs with a predicted time for each kernel, or why it has none; measured graphs as they are."""
        return {
            name: graph if graph.measured else with_predictions(graph, own_ceilings(graph)[0])
            for name, graph in self.graphs.items()
        }

    def align(self) -> Any:
        """Align all graphs by one list of stages (`xlafuse.compare.graph.analyse.align.Alignment`)."""
        from ..graph.analyse.align import align

        return align(list(self.graphs.values()))

    def findings(self) -> Any:
        """Return findings about the graphs, most costly first. Those for several devices have no price in common."""
        from ..graph.findings.collect import findings

        first, *others = self.graphs.values()
        same = all(graph.target == first.target for graph in others)
        return findings(self.predicted, own_ceilings(first)[0] if same else None)

    def provenance(self) -> dict[str, dict[str, int]]:
        """Return how many kernels of each graph are "replayed", "device", "not autotuned" and "compiled"."""
        return {name: provenance.counts(graph) for name, graph in self.graphs.items()}

    def source(self) -> Source:
        """Return the graphs as one case, for the views of `xlafuse inspect`."""
        results = tuple(
            Result(name, number, Path(name), read=reader_of(graph), label=name)
            for number, (name, graph) in enumerate(self.graphs.items(), 1)
        )
        return Source("file", Path(" and ".join(self.graphs)), results, self.notes)

    def to_json(self) -> dict[str, Any]:
        """Return the graphs with predicted times, and the time of a call of each."""
        graphs = {name: store.to_json(graph) for name, graph in self.predicted.items()}
        sums = {
            name: None if graph.measured else asdict(call_time(graph))
            for name, graph in self.predicted.items()
        }
        checked = {"agreement": [{**asdict(one), "agrees": one.agrees} for one in self.agreement]}
        found = {
            "schema": SCHEMA, "graphs": graphs, "predicted": sums, "provenance": self.provenance(),
            "notes": list(self.notes),
        }
        return found | (checked if self.agreement else {})

    def save(self, path: str | Path) -> None:
        """Write one JSON file; .gz compresses. Raises OSError.

        One graph is written as `xlafuse.load` reads it, several as `to_json` has them. `xlafuse inspect` shows both.
        """
        path = Path(path)
        if len(self.graphs) == 1:
            store.save(self.graph, path)
            return
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        atomic_write.write(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text + b"\n")

    def __getitem__(self, name: str) -> Explained:
        """Return one of several graphs with all notes, and its times."""
        times = {name: self.times[name]} if name in self.times else {}
        return Explained({name: self.graphs[name]}, self.notes, times=times)

    def views(self, width: int = 80, *, every: bool = False) -> Iterator[RenderableType]:
        """Yield views: the graph, or several by stages with findings; then the notes. every: as in `overview`."""
        from ..graph.render import align_view, text_view

        first, *others = self.predicted.values()
        if others:
            yield align_view.table(list(self.graphs), [first, *others], self.align())
            if found := list(map(str, self.findings()[:MOST_FINDINGS])):
                yield text_view.plain("")
                yield text_view.titled("what stands out", found)
            if about := [*self._graphs_notes(), *self._times(), *self._configurations(), *self._unread()]:
                yield text_view.plain("")
                yield text_view.plain("\n".join(about))
        else:
            ceilings, _ = own_ceilings(first)
            notes, remarks = text_view.totals_lines(first, ceilings), text_view.finding_lines(first, ceilings)
            notes += filter(None, [provenance.sentence(first)])
            yield text_view.overview(first, width=width, every=every, notes=notes, remarks=remarks)
        if self.agreement:
            yield text_view.plain("")
            yield text_view.plain("\n".join(map(str, self.agreement)))
        for note in self.notes:
            yield text_view.plain("")
            yield text_view.plain(f"note: {note}")

    def _configurations(self) -> list[str]:
        said = {name: provenance.sentence(graph) for name, graph in self.graphs.items()}
        return [f"{name}: {sentence}" for name, sentence in said.items() if sentence]

    def _graphs_notes(self) -> list[str]:
        return [f"{name}: {note}" for name, graph in self.graphs.items() for note in graph.notes]

    def _times(self) -> Iterator[str]:
        """Yield the predicted time of a call of each graph, or why there is none."""
        from ..graph.render.text_view import predicted_words

        for name, graph in self.predicted.items():
            if total := predicted_words(graph):
                yield f"{name}: a call is predicted to take {total} on the device"
            elif reasons := {kernel.predicted.reason for kernel in graph.kernels or () if kernel.predicted}:
                yield f"{name}: no predicted times: {'; '.join(sorted(reasons))}"

    def _unread(self) -> Iterator[str]:
        for name, graph in self.graphs.items():
            if graph.unparsed:
                first = printable(graph.unparsed[0], 100)
                yield f"{name}: {formats.count(len(graph.unparsed), 'thing')} could not be read: {first}"

    def text(self, width: int = 80) -> str:
        """Return the views as plain text of that width."""
        from ..graph.render import text_view

        return "\n".join(text_view.render(view, width) for view in self.views(width))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Explained: {', '.join(self.graphs)}>"

    def _repr_html_(self) -> str:
        from ..graph.render import notebook, text_view

        few = all(len(graph.kernels or ()) <= notebook.MOST_KERNELS for graph in self.graphs.values())
        views = list(self.views(every=few))
        if len(self.graphs) > 1:
            views += [
                text_view.overview(graph, every=few, notes=text_view.totals_lines(graph))
                for graph in self.predicted.values()
            ]
        return f'<div class="xlafuse">{"".join(map(notebook.html, views))}</div>'
