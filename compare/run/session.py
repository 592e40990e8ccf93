"""What the two kinds of run share: scratch space, the crew, records written as they come, archives of artifacts."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..base import archive, host
from ..graph import store
from ..graph.analyse import summary
from ..graph.analyse.roofline import Ceilings
from ..graph.model import FusionGraph
from ..measure import timeline
from ..numerics.errors import Verdict, describe
from ..numerics.tolerance import alike
from ..record import run_folder
from ..record.record import Record, record_id
from ..record.run_folder import RunFolderError
from ..sources.target_ceilings import target_ceilings
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..workers.client import WorkerDied, WorkerError, WorkerTimeout
from ..workers.pool import Asked, Crew
from .progress import Progress

SEEDS = (0, 1)  # two input sets: a result cached from the first is wrong for the second


@dataclass
class Data:
    """A case's stored inputs, one folder a seed; and of its references, once they are stored, each tensor's Scale as a
    dict."""

    case: Case
    folders: list[Path]
    scales: list[dict[str, Any]] | None = None


class Session:
    """One run in progress. `done` are records of an earlier part of the run that stand."""

    def __init__(
        self, folder: Path, scratch: Path, crew: Crew, progress: Progress, done: dict[str, Record], target: str | None
    ) -> None:
        self.folder, self.scratch, self.crew, self.progress, self.target = folder, scratch, crew, progress, target
        self._done = done
        self._check_data: dict[str, Data] = {}
        self._check_lock = threading.Lock()
        self.segment = ""
        self.timers: dict[str, str | None] = {}
        self._ceilings = target_ceilings(target) if target else None

    def begin_segment(
        self, workers: dict[str, Any], ceilings: dict[str, Any] | None, clocks: dict[str, float] | None = None,
        lanes: int = 1, beside: int = 0, uncalibrated: Sequence[str] = (),
    ) -> None:
        """A stretch on one machine with one environment and its own ceilings; ratios exist only within one.

        clocks: what each worker's clock made of the calibration kernel, in seconds. lanes: how many compile at once.
        beside: how many of each framework go on compiling while something is timed. uncalibrated: workers whose clocks
        nobody could hold against the others.
        """
        run = run_folder.read_run(self.folder)
        run.setdefault("segments", [])
        self.segment = f"s{len(run['segments']) + 1}"
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.timers = {role: found.get("timer") for role, found in workers.items()}
        if ceilings is not None:
            self._ceilings = Ceilings.from_json(ceilings)
        environment = {"host": host.host(), "workers": workers}
        run["segments"].append(
            {
                "id": self.segment, "started": started, "environment": environment, "ceilings": ceilings,
                "clocks": clocks or {}, "lanes": lanes, "compiling_beside": beside,
                **({"uncalibrated": [*uncalibrated]} if uncalibrated else {}),
            }
        )
        run_folder.write_run(self.folder, run)

    def describe_workers(self, workers: dict[str, Any]) -> None:
        """Say of this segment what some more of its workers are, once they have started."""
        run = run_folder.read_run(self.folder)
        environment = run["segments"][-1]["environment"]
        environment["workers"] = dict(sorted((environment["workers"] | workers).items()))
        run_folder.write_run(self.folder, run)

    def pending(self, case: Case, implementations: tuple[Implementation, ...]) -> list[Implementation]:
        """Those to be done; the others are counted as done.

        Times are compared only within one segment, and each stretch of a run is its own: a case of which anything is
        missing is measured again whole. Compiles for a target stand alone.
        """
        left = [i for i in implementations if record_id(case, i.name) not in self._done]
        if left and self.target is None:
            left = list(implementations)
        for _ in range(len(implementations) - len(left)):
            self.progress.skip()
        return left

    def new(self, case: Case, implementation: Implementation) -> Record:
        """A record that says nothing yet."""
        block = BLOCKS[case.block]
        return Record(
            case=case, implementation=implementation.name, compiler=implementation.compiler, status="failed",
            segment=self.segment, target=self.target, bytes_compulsory=block.bytes_compulsory(case),
            flops=block.part_flops(case),
        )

    def write(self, finished: Record) -> None:
        """Append the record. What was `ok` and cannot be run here any more, as without a package that the machine of an
        earlier stretch had, keeps its record instead, of that stretch's segment."""
        stands = self._done.get(finished.id)
        if finished.status == "skipped" and stands is not None and stands.status == "ok":
            self.progress.kept(stands, finished.detail)
            return
        run_folder.append(self.folder, finished)
        self.progress.done(finished)

    def check_data(self, case: Case) -> Data:
        """Of a small check case: made once and kept, and safe to ask for from several threads."""
        case = widest(case)
        with self._check_lock:
            if case.id not in self._check_data:
                data = self.draw(case, self.crew)
                self.refer(data, self.crew)
                self._check_data[case.id] = data
            return self._check_data[case.id]

    def draw(self, case: Case, crew: Asked) -> Data:
        """The first inputs of a `widest` case, on which it is compiled, from the crew's reference worker, which keeps
        them for `refer`. Raises what the crew raises."""
        folders = [self.scratch / "data" / case.id.replace("/", "-") / str(seed) for seed in SEEDS]
        crew.ask("reference", "draw", case=case.to_json(), seed=SEEDS[0], folder=str(folders[0]), keep=True)
        return Data(case, folders)

    def refer(self, data: Data, crew: Asked) -> None:
        """The other inputs, and float64 references of all. Raises what the crew raises."""
        data.scales = alike(
            [
                crew.ask("reference", "produce", case=data.case.to_json(), seed=seed, folder=str(path))
                for seed, path in zip(SEEDS, data.folders, strict=True)
            ]
        )

    def keep_graph(self, entry: Record, graph: FusionGraph) -> None:
        """Write a record's fusion graph into the run folder; the record names it and says what it comes to."""
        name = f"graphs/{entry.id.replace('/', '-')}.json.gz"
        try:
            store.save(graph, self.folder / name)
        except OSError as problem:
            raise RunFolderError(f"{self.folder / name}: cannot be written: {problem.strerror}") from problem
        entry.graph = name
        entry.kernels = summary.summary(graph, entry.case.parts, self._ceilings, entry.case.precision)

    def keep_trace(self, entry: Record, document: timeline.Document) -> None:
        """Write a record's timeline into the run folder; the record names it."""
        name = f"traces/{entry.id.replace('/', '-')}.json.gz"
        try:
            timeline.save(document, self.folder / name)
        except OSError as problem:
            raise RunFolderError(f"{self.folder / name}: cannot be written: {problem.strerror}") from problem
        entry.trace = {"file": name}

    def dumps_folder(self, entry: Record) -> Path:
        return self.scratch / "dumps" / entry.id.replace("/", "-")

    def archive(self, entry: Record) -> None:
        """Pack the artifacts of a record's compile into one archive and name it in the record."""
        source = self.dumps_folder(entry)
        name = f"dumps/{source.name}.zip"
        try:
            if archive.pack(source, self.folder / name):
                entry.dumps = name
        except OSError as problem:
            raise RunFolderError(f"{self.folder / name}: cannot be written: {problem.strerror}") from problem
        shutil.rmtree(source, ignore_errors=True)


def widest(case: Case) -> Case:
    """The case in the direction whose data holds all that the block's other direction needs."""
    differentiating = (d for d in BLOCKS[case.block].directions if replace(case, direction=d).differentiates)
    return replace(case, direction=next(differentiating, case.direction))


def judge(entry: Record, errors: list[dict[str, Any]]) -> None:
    """Put the check's numbers into the record; status `wrong` with the reason where one is over its tolerance."""
    entry.errors = errors
    problem = describe([Verdict(**e) for e in errors])
    if problem:
        entry.status, entry.detail = "wrong", problem


def note_failure(entry: Record, problem: Exception) -> None:
    """What a worker's error makes of its record."""
    if isinstance(problem, WorkerTimeout):
        entry.status, entry.detail = "timeout", str(problem)
    elif isinstance(problem, WorkerError):
        entry.status, entry.detail = problem.kind, problem.message
    elif isinstance(problem, WorkerDied):
        entry.status, entry.detail = "failed", str(problem)
    else:
        raise problem
