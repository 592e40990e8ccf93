"""A stopped run loses no finished record, and --resume ends with every record exactly once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_records import made_record

from xlafuse.compare.base import atomic_write, host
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.graph import store
from xlafuse.compare.plan.plan import Plan
from xlafuse.compare.plan.selection import resolve
from xlafuse.compare.record import run_folder
from xlafuse.compare.record.record import Record, record_id
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import RunFolderError
from xlafuse.compare.run import run
from xlafuse.compare.spec.blocks import BLOCKS

IMPLEMENTATIONS = ["xla", "inductor", "triton", "cuda"]  # no optional peers, of which a small call would come first
SELECTION = ["--suite", "full", "--direction", "fwd", "-i", ",".join(IMPLEMENTATIONS)]
SIGKILLED = -9


class Runs:
    """Runs with a scripted pool, one at a time, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.acknowledged_by, self.output_of, self.process_of = (
            folder / name for name in ("acknowledged", "output", "process")
        )
        script = Path(__file__).with_name("scripted_run.py")
        path = os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, script, self.acknowledged_by, self.output_of, self.process_of], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def begin(
        self, *arguments: object, pace: float = 0.0, kill_after: float | None = None, file_limit: int | None = None
    ) -> None:
        request = {
            "arguments": ["run", *map(str, arguments)], "pace": pace, "kill_after": kill_after,
            "file_limit": file_limit,
        }
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def end(self) -> int:
        """The exit status of the run that was begun; minus the signal where one ended it."""
        assert self._process.stdout
        return int(self._process.stdout.readline())

    def run(self, *arguments: object, **options: Any) -> int:
        self.begin(*arguments, **options)
        return self.end()

    def acknowledged(self) -> set[str]:
        return set(self.acknowledged_by.read_text().split()) if self.acknowledged_by.exists() else set()

    def output(self) -> str:
        return self.output_of.read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def begin_runs(tmp_path: Path) -> Iterator[Callable[[], Runs]]:
    begun: list[Runs] = []

    def begin() -> Runs:
        place = tmp_path / f"runs-{len(begun)}"
        place.mkdir()
        begun.append(Runs(place))
        return begun[-1]

    yield begin
    for runs in begun:
        runs.close()


def entry(implementation: str = "xla", **fields: Any) -> Record:
    case = BLOCKS["gelu"].cases("quick")[0]
    return made_record(case, implementation, **fields)


def abandoned() -> list[Path]:
    """Return scratch folders of ended runs: no process holds their lock."""
    found = []
    for folder in (host.scratch_root() or Path(tempfile.gettempdir())).glob("xlafuse-*"):
        with contextlib.suppress(OSError), (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(folder)
    return found


def ids_of(plan: Plan) -> list[str]:
    return [record_id(case, i.name) for case, group in plan.work for i in group]


def complete(folder: Path) -> set[str]:
    """Return the ids of the records in the folder, and check that each is complete."""
    records, _ = run_folder.read_records(folder)
    for each in records:
        assert each.status in ("ok", "skipped"), each
        if each.status == "ok":
            assert set(each.times) == set(each.case.phases), each
            assert store.load(recorded_file(folder, each, str(each.graph))).kernels, each
    return {each.id for each in records}


def test_a_rewritten_file_is_never_partial(tmp_path: Path) -> None:
    """A resumed run writes graphs again that records name; on a full disk the old file stays."""
    path = tmp_path / "graphs" / "g.json.gz"
    atomic_write.write(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError):
            atomic_write.write(path, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    atomic_write.write(path, b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["g.json.gz"]


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    atomic_write.write(link, b"made")  # where the link points there was nothing yet
    before = file.stat().st_ino
    atomic_write.write(link, b"new")
    assert link.is_symlink() and file.read_bytes() == b"new" and file.stat().st_ino != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_pipe_is_written_to(through: str, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # or writing waits for one
    try:
        atomic_write.write(pipe if through == "itself" else link, b"content")
        assert os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        atomic_write.write(tmp_path, b"")


@pytest.mark.full
@pytest.mark.slow
def test_kills_lose_no_finished_record(begin_runs: Callable[[], Runs], tmp_path: Path) -> None:
    runs, chance = begin_runs(), random.Random(50)
    kills = midway = repaired = 0
    folders = [tmp_path / "run"]
    while kills < 12:
        folder = folders[-1]
        arguments = resume_or_begin(folder)
        known = runs.acknowledged()
        status = runs.run(*arguments, "--out", folder, pace=0.0005, kill_after=chance.uniform(0, 0.3))
        if status == 0:  # a fast machine finishes the run before the last kill
            folders.append(tmp_path / f"run-{len(folders)}")
            runs.acknowledged_by.unlink(missing_ok=True)
            continue
        assert status == SIGKILLED, runs.output()
        kills += 1
        midway += runs.acknowledged() > known
        repaired += "a partial record" in runs.output()
        if runs.acknowledged():
            assert runs.acknowledged() <= complete(folder)
            if chance.random() < 0.5 and not has_partial_line(folder):  # as after a power failure; kills rarely do this
                line = json.dumps(entry().to_json()).encode()
                with (folder / "records.jsonl").open("ab") as file:
                    file.write(line[: chance.randrange(1, len(line))])
    assert midway >= 2 and repaired >= 2, "too few kills came while a record was written"
    assert runs.run(*resume_or_begin(folders[-1]), "--out", folders[-1]) == 0, runs.output()
    wanted = ids_of(resolve([], suite="full", directions=["fwd"], implementations=IMPLEMENTATIONS))
    for folder in folders:
        records, warnings = run_folder.read_records(folder)
        assert Counter(each.id for each in records) == Counter(wanted) and warnings == []
        assert complete(folder) == set(wanted)
        assert all(len(segments) == 1 for segments in segments_of_cases(folder).values())
    assert abandoned() == [], "killed runs leave no scratch folder"


def resume_or_begin(folder: Path) -> list[str]:
    if (folder / "run.json").exists():
        return ["--resume"]
    shutil.rmtree(folder, ignore_errors=True)  # killed before run.json was written
    return SELECTION


def segments_of_cases(folder: Path) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for each in run_folder.read_records(folder)[0]:
        found.setdefault(each.case.id, set()).add(each.segment)
    return found


@pytest.mark.slow
def test_an_interrupted_case_is_measured_again_completely(begin_runs: Callable[[], Runs], tmp_path: Path) -> None:
    """Times of two segments are never compared, and each stretch of a run is a segment."""
    folder, runs = tmp_path / "run", begin_runs()
    assert runs.run("gelu", "--direction", "fwd", "--out", folder) == 0, runs.output()
    assert (folder / "graphs.zip").is_file() and not (folder / "graphs").exists()  # each run ends packed
    *earlier, last = segments_of_cases(folder)
    path = folder / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert runs.run("--resume", "--out", folder) == 0, runs.output()
    assert segments_of_cases(folder) == dict.fromkeys(earlier, {"s1"}) | {last: {"s2"}}
    assert complete(folder) == set(ids_of(resolve(["gelu"], suite="quick", directions=["fwd"])))
    kept = path.read_text().splitlines(keepends=True)
    path.write_text("".join(kept[:-1]))
    implementation = json.loads(kept[-1])["implementation"]
    assert runs.run("gelu", "--direction", "fwd", "-i", implementation, "--resume", "--out", folder) == 0, runs.output()
    assert segments_of_cases(folder) == dict.fromkeys(earlier, {"s1"}) | {last: {"s3"}}


def has_partial_line(folder: Path) -> bool:
    return not (folder / "records.jsonl").read_bytes().endswith(b"\n")


def test_a_partial_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first, second = (json.dumps(entry(name).to_json()).encode() + b"\n" for name in ("xla", "eager"))
    for cut in [*range(0, len(second), 29), len(second) - 2, len(second) - 1, len(second)]:
        path.write_bytes(first + second[:cut])
        said = run_folder.repair(tmp_path)
        kept = ["xla"] + ["eager"] * (cut >= len(second) - 1)
        assert (said is None) == (cut in (0, len(second))), cut
        records, warnings = run_folder.read_records(tmp_path)
        assert [r.implementation for r in records] == kept and not warnings, cut
        run_folder.append(tmp_path, entry("triton"))
        records, warnings = run_folder.read_records(tmp_path)
        assert [r.implementation for r in records] == [*kept, "triton"] and not warnings, cut


@pytest.mark.parametrize("tail", [b"\0" * 4096, b'{"id": "gelu/torn', b"\xff\xfe", b"3", b'{"schema": 99}'])
def test_a_malformed_last_line_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    run_folder.append(tmp_path, entry())
    whole = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole + tail)
    assert f"a partial record at the end, {len(tail)} bytes" in str(run_folder.repair(tmp_path))
    assert (tmp_path / "records.jsonl").read_bytes() == whole


def test_nothing_to_repair_changes_nothing(tmp_path: Path) -> None:
    assert run_folder.repair(tmp_path) is None and not (tmp_path / "records.jsonl").exists()
    run_folder.append(tmp_path, entry())
    before = (tmp_path / "records.jsonl").read_bytes()
    assert run_folder.repair(tmp_path) is None and (tmp_path / "records.jsonl").read_bytes() == before


def test_a_record_is_on_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bytes | None]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, path.read_bytes() if path.is_file() else None))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "records.jsonl"
    run_folder.append(tmp_path, entry("xla"))
    first = path.read_bytes()
    assert synced == [(path, first), (tmp_path, None)]  # the file's own name is durable, too
    run_folder.append(tmp_path, entry("eager"))
    assert synced[2:] == [(path, path.read_bytes())] and path.read_bytes().startswith(first)


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    """Only half of the line fits, and the file ends as it did before."""
    run_folder.append(tmp_path, entry("xla", detail="x" * (1 << 20)))
    path = tmp_path / "records.jsonl"
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(RunFolderError, match=r"records\.jsonl: a record could not be written.*is kept: make room"):
            run_folder.append(tmp_path, entry("eager"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    run_folder.append(tmp_path, entry("eager"))
    assert [r.implementation for r in run_folder.read_records(tmp_path)[0]] == ["xla", "eager"]


def test_a_full_disk_is_named_in_the_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "records.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="No space left on device"):
        run_folder.append(tmp_path, entry())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_for_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def write(plan: Plan, session: Any, stop_after: float | None) -> None:
        raise OSError(number, os.strerror(number), str(session.folder / "target" / "ceilings.json"))

    monkeypatch.setattr(run.on_gpu, "run", write)
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    with pytest.raises(RunFolderError, match=rf"ceilings\.json: {os.strerror(number)}; every finished record is kept"):
        run.execute(resolve(["vector_add"], suite="quick"), folder=tmp_path / "run", target=None, resume=False)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_line(begin_runs: Callable[[], Runs], tmp_path: Path) -> None:
    folder, runs = tmp_path / "run", begin_runs()
    blocks = ["gelu", "softmax", "rmsnorm"]
    assert runs.run(*blocks, *SELECTION, "--out", folder, file_limit=100_000) == 2, runs.output()
    *progress, said = runs.output().splitlines()
    assert said.startswith("Error: ") and "records.jsonl: a record could not be written" in said
    assert "--resume goes on" in said and not any("Traceback" in line for line in progress)
    kept = runs.acknowledged()
    assert kept and kept == complete(folder) and not has_partial_line(folder)
    assert runs.run("--resume", "--out", folder) == 0, runs.output()
    assert "a partial record" not in runs.output()
    wanted = ids_of(resolve(blocks, suite="full", directions=["fwd"], implementations=IMPLEMENTATIONS))
    records, warnings = run_folder.read_records(folder)
    assert Counter(each.id for each in records) == Counter(wanted) and complete(folder) and warnings == []


@pytest.mark.slow
def test_a_second_run_into_a_folder_is_refused(begin_runs: Callable[[], Runs], tmp_path: Path) -> None:
    folder, first, second = tmp_path / "run", begin_runs(), begin_runs()
    first.begin("gelu", "--out", folder, pace=600)
    deadline = time.monotonic() + 60
    while not (folder / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    before = (folder / "run.json").read_bytes()
    assert second.run("--resume", "--out", folder) == 2
    (said,) = second.output().splitlines()
    assert said == f"Error: {folder}: another run is writing there; wait for its end, or name another --out"
    assert second.run("gelu", "--out", folder) == 2 and "exists already" in second.output()
    assert (folder / "run.json").read_bytes() == before and not (folder / "records.jsonl").exists()
    os.kill(int(first.process_of.read_text()), signal.SIGKILL)
    assert first.end() == SIGKILLED
    assert second.run("--resume", "--out", folder) == 0, second.output()  # death releases the lock


def test_the_later_of_two_new_runs_is_refused(tmp_path: Path) -> None:
    """Both runs found the folder missing, and the other one made it first."""
    plan = resolve(["vector_add"], suite="quick")
    run_folder.create(tmp_path, {"suite": "other"})
    with pytest.raises(RunFolderError, match="exists already: --resume goes on with it"):
        run.execute(plan, folder=tmp_path, target="h200", resume=False)
    assert run_folder.read_run(tmp_path) == {"suite": "other"}
