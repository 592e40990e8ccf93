"""One implementation of one case while it is prepared and measured: workers' answers become fields of its record."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msgspec import convert

from ..graph import store
from ..graph.model import FusionGraph
from ..measure import timeline
from ..measure.clock import CallTrace
from ..measure.rounds import joined
from ..plan.paired_rounds import later
from ..plan.timing_modes import ALONE
from ..record.record import Record
from ..record.record_fields import (
    Condition,
    GraphInputs,
    Measurement,
    ParallelFields,
    PeakMemory,
    RankFields,
    TimedMode,
    WarmUp,
)
from ..spec.implementation import Implementation
from ..workers.rank_group import role_of

Answer = dict[str, Any]


@dataclass
class Entry:
    """An implementation and its record. Answers of a case over several GPUs have those of each rank as `ranks`."""

    record: Record
    implementation: Implementation
    sound: bool = True  # neither skipped nor failed nor wrong so far
    prepared: bool = False  # its worker holds its program
    packed: Future[None] | None = None  # the archive of its first compile's artifacts
    compiled: Answer | None = None  # of its first compile
    graph: FusionGraph | None = None
    rounds: list[Answer] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)  # for each round, the number of the process that took it
    conditions: list[Condition | None] = field(default_factory=list)  # the GPU's, right after each round
    modes: dict[str, list[Answer]] = field(default_factory=dict)  # rounds of each mode but the main one
    unavailable: dict[str, str] = field(default_factory=dict)  # modes that cannot be had, each with the reason

    @property
    def role(self) -> str:
        return role_of(self.implementation.backend.worker, self.record.case)

    def keep_first_compile(self, answer: Answer) -> None:
        """Take what the record says of the first compile; later ones only repeat it."""
        if self.compiled is None:
            self.compiled = answer
            self.record.compile_s = answer["compile_s"]
            self.record.cuda_graph = convert(answer["cuda_graph"], GraphInputs | None)
            self.keep_graph(answer["graph"])

    def keep_graph(self, graph: Mapping[str, Any] | None) -> None:
        if graph is not None:
            self.graph = store.from_json(graph)

    def timeline(self, answer: Answer) -> timeline.Document:
        """Return the timeline of a traced call."""
        phases, name = self.record.case.phases, self.record.id
        if "ranks" in answer:
            traces = [convert(rank["forward"], CallTrace) for rank in answer["ranks"]]
            return timeline.of_ranks(traces, self.graph, name=name)
        return timeline.of_call({phase: convert(answer[phase], CallTrace) for phase in phases}, self.graph, name=name)

    def keep_measurement(self, timer: str | None) -> None:
        """Put the rounds into the record."""
        assert self.compiled is not None
        phases = None
        if self.rounds[0]["phases"] is not None:
            described = self.rounds[self.processes.count(0) - 1]["phases"]  # of the process whose compile the graph has
            phases = {
                phase: joined([one["phases"][phase] for one in self.rounds], described[phase]["records"])
                for phase in self.record.case.phases
            }
        if reserved := max(r.get("persisting_l2", 0) for r in self.rounds):
            self.record.detail = (
                f"its calls left {reserved / 1e6:.1f} MB of L2 reserved for persisting accesses, which was given back "
                "before each timed call"
            )
        warm_ups = [r["warm_up"] for r in self.rounds if r["warm_up"]]
        peaks = next((r["peak_memory"] for r in self.rounds if "peak_memory" in r), None)
        self.record.measurement = Measurement(
            timer=timer, phases=phases, wall_time=[r["wall_time"] for r in self.rounds if "wall_time" in r],
            modes={mode: self._mode(mode) for mode in self.modes if mode != ALONE}, processes=self.processes,
            warm_up=WarmUp([w["seconds"] for w in warm_ups], [w["settled"] for w in warm_ups]) if warm_ups else None,
            command_buffers=convert(self.compiled["command_buffers"], dict[str, tuple[int, int]] | None),
            peak_memory=convert(peaks, dict[str, PeakMemory] | None), conditions=self.conditions,
        )
        if "ranks" in self.compiled:
            ranks = [self._rank(number) for number in range(len(self.compiled["ranks"]))]
            self.record.parallel = ParallelFields(ranks, self.unavailable.get(ALONE))

    def _mode(self, mode: str) -> TimedMode:
        if mode in self.unavailable:
            return TimedMode(unavailable=self.unavailable[mode])
        rounds = self.modes[mode]
        if "same_as" in rounds[0]:
            return TimedMode(same_as=rounds[0]["same_as"])
        return TimedMode(
            phases={phase: joined([one["phases"][phase] for one in rounds]) for phase in self.record.case.phases},
            settled=[r["warm_up"]["settled"] for r in rounds],
            command_buffers=convert(rounds[0].get("command_buffers"), dict[str, tuple[int, int]] | None),
        )

    def _rank(self, number: int) -> RankFields:
        """Return a rank's medians over all calls that count."""
        assert self.compiled is not None
        alone = [] if ALONE in self.unavailable else self.modes.get(ALONE, [])
        compiled = self.compiled["ranks"][number]

        def median(rounds: list[Answer], name: str) -> Any:
            calls = [time for one in rounds for time in later(one["ranks"][number]["phases"]["forward"][name])]
            return statistics.median(calls) if calls else None

        return RankFields(
            device_time=median(self.rounds, "device_time"), busy_time=median(self.rounds, "busy_time"),
            communication=median(self.rounds, "communication"), compute=median(self.rounds, "compute"),
            overlap=median(self.rounds, "both"),
            alone_device_time=median(alone, "device_time"), alone_compute=median(alone, "compute"),
            sent_bytes=compiled["sent"], least_sent_bytes=compiled["least_sent"],
        )
