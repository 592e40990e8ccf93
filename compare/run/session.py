"""A session: one run in progress, with its folder, scratch space, workers, data, records and archives."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..base import archive, host
from ..graph import store
from ..graph.analyse import summary
from ..graph.model import FusionGraph
from ..measure import timeline
from ..numerics.errors import ErrorCheck, describe
from ..numerics.tolerance import share_worst_error
from ..record import run_folder
from ..record.record import Record, Status, record_id
from ..record.record_fields import TimelineFields
from ..record.run_folder import RunFolderError
from ..spec.blocks import BLOCKS
from ..spec.case import Case
from ..spec.implementation import Implementation
from ..workers.client import WorkerDied, WorkerError, WorkerTimeout
from ..workers.pool import WorkerPool
from .batches import widest
from .progress import Progress

SEEDS = (0, 1)  # two input sets: a result cached from the first is wrong for the second


@dataclass
class Data:
    """A case's stored inputs, one folder a seed. scales: each reference's Scale, once stored."""

    case: Case
    folders: list[Path]
    scales: list[dict[str, Any]] | None = None


class TimeIsUp(Exception):
    """The end of the time that --stop-after gives a run."""


class Session:
    """One run in progress. done: records of an earlier stretch of the run that stay."""

    def __init__(
        self, folder: Path, scratch: Path, workers: WorkerPool, progress: Progress, done: dict[str, Record],
        target: str | None,
    ) -> None:
        self.folder, self.scratch, self.workers, self.progress, self.target = folder, scratch, workers, progress, target
        self._done = done
        self._check_data: dict[str, Data] = {}
        self._check_lock = threading.Lock()
        self.segment = ""
        self.timers: dict[str, str | None] = {}

    def begin_segment(
        self, workers: dict[str, Any], ceilings: dict[str, Any] | None, clocks: dict[str, float] | None = None,
        runners: int = 1, uncalibrated: Sequence[str] = (),
    ) -> None:
        """Begin a stretch on one machine with one environment and its own ceilings; ratios exist only within one.

        workers: each role's environment. clocks: the calibration kernel's seconds by each worker's clock. runners: how
        many groups are prepared at once. uncalibrated: roles whose clock gave no calibration.
        """
        run = run_folder.read_run(self.folder)
        run.setdefault("segments", [])
        self.segment = f"s{len(run['segments']) + 1}"
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self.timers = {role: found.get("timer") for role, found in workers.items()}
        environment = {"host": host.host(), "workers": workers}
        run["segments"].append(
            {
                "id": self.segment, "started": started, "environment": environment, "ceilings": ceilings,
                "clocks": clocks or {}, "runners": runners,
                **({"uncalibrated": [*uncalibrated]} if uncalibrated else {}),
            }
        )
        run_folder.write_run(self.folder, run)

    def describe_workers(self, workers: dict[str, Any]) -> None:
        """Add the environments of more workers to this segment, once they have started."""
        run = run_folder.read_run(self.folder)
        environment = run["segments"][-1]["environment"]
        environment["workers"] = dict(sorted((environment["workers"] | workers).items()))
        run_folder.write_run(self.folder, run)

    def pending(self, case: Case, implementations: tuple[Implementation, ...]) -> list[Implementation]:
        """Return the implementations to be done; the others are counted as done."""
        left = unfinished(case, implementations, self._done, self.target)
        for _ in range(len(implementations) - len(left)):
            self.progress.skip(case.block)
        return list(left)

    def new(self, case: Case, implementation: Implementation) -> Record:
        """Return a record without a result; its status is `failed`, with a detail, until one is known."""
        block = BLOCKS[case.block]
        return Record(
            case=case, implementation=implementation.name, compiler=implementation.backend_name, status="failed",
            detail="it has no result yet", segment=self.segment, target=self.target,
            bytes_compulsory=block.bytes_compulsory(case), flops=block.phase_flops(case),
        )

    def write(self, finished: Record) -> None:
        """Append the record, flushed to the disk.

        An earlier stretch's `ok` record stays where this machine skips the implementation, as for a missing package.
        """
        finished.require_fields_of_status()
        earlier = self._done.get(finished.id)
        if earlier is not None and stays(earlier, finished):
            self.progress.kept(earlier, finished.detail)
            return
        run_folder.append(self.folder, finished)
        self.progress.done(finished)

    def check_data(self, case: Case) -> Data:
        """Return the data of a small check case: made once, kept, safe to ask for from several threads."""
        case = widest(case)
        with self._check_lock:
            if case.id not in self._check_data:
                data = self.draw(case, self.workers)
                self.refer(data, self.workers)
                self._check_data[case.id] = data
            return self._check_data[case.id]

    def draw(self, case: Case, workers: WorkerPool) -> Data:
        """Draw the first inputs of a `widest` case, on which it is compiled; the reference worker keeps them for
        `refer`. Raises the worker's failure."""
        folders = [self.scratch / "data" / case.id.replace("/", "-") / str(seed) for seed in SEEDS]
        workers.ask("reference", "draw", case=case.to_json(), seed=SEEDS[0], folder=str(folders[0]), keep=True)
        return Data(case, folders)

    def refer(self, data: Data, workers: WorkerPool) -> None:
        """Draw the other inputs, and store float64 references of all, once. Raises the worker's failure."""
        data.scales = data.scales or share_worst_error(
            [
                workers.ask("reference", "produce", case=data.case.to_json(), seed=seed, folder=str(path))
                for seed, path in zip(SEEDS, data.folders, strict=True)
            ]
        )

    def keep_graph(self, record: Record, graph: FusionGraph) -> None:
        """Write the record's fusion graph into the run folder; the record gets its name and its sums."""
        record.graph = f"graphs/{_file_name(record)}.json.gz"
        with self._writing(record.graph) as path:
            store.save(graph, path)
        record.kernels = summary.summary(graph, record.case.phases)

    def keep_trace(self, record: Record, document: timeline.Document) -> None:
        """Write the record's timeline into the run folder; the record gets its name."""
        name = f"traces/{_file_name(record)}.json.gz"
        record.trace = TimelineFields(file=name)
        with self._writing(name) as path:
            timeline.save(document, path)

    def dumps_folder(self, record: Record) -> Path:
        """Return the scratch folder that a record's compiler writes its artifacts to."""
        return self.scratch / "dumps" / _file_name(record)

    def archive(self, record: Record) -> None:
        """Pack the artifacts of the record's compile into one archive; the record gets its name."""
        source = self.dumps_folder(record)
        name = f"dumps/{source.name}.zip"
        with self._writing(name) as path:
            if archive.pack(source, path):
                record.dumps = name
        shutil.rmtree(source, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self.folder / name
        except OSError as problem:
            raise RunFolderError(f"{self.folder / name}: cannot be written: {problem.strerror}") from problem


def unfinished(
    case: Case, implementations: tuple[Implementation, ...], done: Collection[str], target: str | None
) -> tuple[Implementation, ...]:
    """Return the implementations whose records are missing among `done`; without a target, all where any is missing.

    Times are compared only within one segment, and each stretch of a run is a segment. So a case of which any record is
    missing is measured whole again. Compiles for a target stand alone.
    """
    left = tuple(i for i in implementations if record_id(case, i.name) not in done)
    return implementations if left and target is None else left


def stays(earlier: Record | None, finished: Record) -> bool:
    """Return whether the earlier record stays: it is `ok`, and this machine skips the implementation."""
    return finished.status == "skipped" and earlier is not None and earlier.status == "ok"


def _file_name(record: Record) -> str:
    return record.id.replace("/", "-")


def judge(record: Record, errors: list[ErrorCheck]) -> None:
    """Put the check's numbers into the record; its status is `wrong` where one exceeds its tolerance."""
    record.errors = errors
    if problem := describe(errors):
        record.status, record.detail = "wrong", problem


def note_failure(record: Record, problem: Exception) -> None:
    """Put a worker's failure into its record. Raises any other exception."""
    if isinstance(problem, WorkerTimeout):
        record.status, record.detail = "timeout", str(problem)
    elif isinstance(problem, WorkerError):
        kinds: dict[str, Status] = {"wrong": "wrong", "skipped": "skipped"}
        record.status, record.detail = kinds.get(problem.kind, "failed"), problem.message
    elif isinstance(problem, WorkerDied):
        record.status, record.detail = "failed", str(problem)
    else:
        raise problem


_NO_PRODUCT = ("not supported in this architecture", "only supported on CUDA devices with compute capability")


def note_absence(record: Record, implementation: Implementation, gpu: Mapping[str, Any]) -> None:
    """Make a failed record `skipped` where the GPU lacks what the kernels are written for. gpu: its properties."""
    detail = record.detail or ""
    if record.status != "failed" or (gpu["major"], gpu["minor"]) == (9, 0):
        return
    if "pallas" in implementation.backend_name:
        reason = f"its Pallas kernels are written for Hopper, and Mosaic does not compile them for a {gpu['name']}"
    elif any(words in detail for words in _NO_PRODUCT):
        reason = f"a {gpu['name']} has no products of this dtype"
    else:
        return
    record.status, record.detail = "skipped", f"not here: {reason}: {detail.rstrip().rpartition(chr(10))[2]}"
