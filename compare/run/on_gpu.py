"""A run on this machine's GPU: lanes compile and check side by side; those that are ready are timed in turn, each alone
on the GPU, while the others wait but for a few that compile.

Of a quick run's time on an H200 half went by compiling, a third by references and checks and an eighth by timing, one
core busy: so as many groups of cases as the machine has room for are made ready at once. Once a share of the lanes is
ready, the others finish what their workers are at, and wait: so nobody waits for the longest group, but who has it is
last. What takes longest begins first, after what takes much of the GPU's memory, beside which little else can be.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from xlafuse.compile.autotune import merge_results

from ..base import atomic_write, host
from ..measure.clock_calibration import AGREEMENT, disagreement
from ..plan.plan import Plan
from ..workers import autotune_lock
from ..workers.client import WORKER_FAILURES
from ..workers.pool import Crew
from .clerk import Clerk
from .gate import Gate
from .lane import Lane
from .room import Room, needs
from .session import Session
from .shards import Group, effort, groups_of, tuned

READY_SHARE = 0.4  # of the lanes with a group: so many are timed in a row, while the others wait
INDUCTORS, MOST_INDUCTORS = "TORCHINDUCTOR_COMPILE_THREADS", 4  # processes of a lane's that compile kernels
TUNED_BY = 0.75  # of the other groups are begun when the last one that tunes is


def environment(folder: Path) -> dict[str, str]:
    """XLA writes what its autotuner chose into the run's own target pack, to be replayed where there is no GPU.
    Inductor would compile in as many processes as there are cores, in each lane."""
    lock = autotune_lock.lock_of(folder)
    for needed in (folder / "target" / "xla", lock.parent):
        needed.mkdir(parents=True, exist_ok=True)
    return {
        "XLAFUSE_TARGET_PACK": str((folder / "target").resolve()), autotune_lock.VARIABLE: str(lock.resolve()),
        INDUCTORS: os.environ.get(INDUCTORS, str(min(MOST_INDUCTORS, host.usable_cores()))),
    }


def take_choices(folder: Path, choices: Sequence[Path]) -> None:
    """What XLA chose elsewhere becomes what this run's own processes find chosen, and do not tune again."""
    pack = folder / "target" / "xla"
    pack.mkdir(parents=True, exist_ok=True)
    for path in choices:
        shutil.copyfile(path, pack / path.name)


def run(plan: Plan, session: Session) -> None:
    """Write one record for each case and implementation of the plan."""
    _join_autotune_results(session.folder / "target" / "xla")  # of a stretch that was stopped
    groups = _groups(plan, session)
    crews, room = _crews(plan, session, len(groups))
    gate = Gate(autotune_lock.lock_of(session.folder), room.beside)
    lanes: list[Lane] = []
    with Clerk() as clerk:
        lanes += [Lane(session, crew, plan.timing, gate, clerk, partial(_end_idle, lanes, session)) for crew in crews]
        try:
            wanting = _Rota(lanes, room, gate, clerk, session).work_off(_large_first(groups, room))
            for group in wanting:
                session.progress.say("making room: what found no memory beside other cases is done again alone")
                _make_room(lanes, session)
                _Rota(lanes[:1], room, gate, clerk, session, alone=True).work_off([group])
            _join_autotune_results(session.folder / "target" / "xla", running=True)
        except BaseException:
            clerk.close()
            raise
        finally:
            gate.stop()


def _groups(plan: Plan, session: Session) -> list[Group]:
    """What is left of the plan, first what takes longest; what tunes is spread over the others, as it waits for its
    turns while those keep the processor busy."""
    left = [(case, found) for case, implementations in plan.work if (found := session.pending(case, implementations))]
    groups = sorted(groups_of(left), key=effort, reverse=True)
    tuning_ones = [group for group in groups if tuned(group)]
    others = [group for group in groups if not tuned(group)]
    places = [(TUNED_BY * (at + 0.5) / len(tuning_ones), group) for at, group in enumerate(tuning_ones)]
    places += [((at + 0.5) / len(others), group) for at, group in enumerate(others)]
    return [group for _, group in sorted(places, key=lambda each: each[0])]


def _large_first(groups: Sequence[Group], room: Room) -> list[Group]:
    """What takes much of the memory before the others, most first: beside it there is room for small ones alone, of
    which none would be left (the last thirteen groups of a full run on an H200 took a seventh of its time)."""
    large = [group for group in groups if room.large(group)]
    return sorted(large, key=needs, reverse=True) + [group for group in groups if group not in large]


class _Rota:
    """Which lane has which group, and when those that are ready are timed."""

    def __init__(
        self, lanes: Sequence[Lane], room: Room, gate: Gate, clerk: Clerk, session: Session, *, alone: bool = False
    ) -> None:
        """alone: no other lane has processes, whose memory could be had."""
        self._lanes, self._room, self._gate, self._clerk, self._session = lanes, room, gate, clerk, session
        self._alone = alone or len(lanes) == 1
        self._left: list[Group] = []
        self._held: dict[Lane, Group] = {}
        self._ready: list[Lane] = []
        self._starved: list[Group] = []  # what wanted for memory, and is tried again
        self._wanting: list[Group] = []  # what does so even then

    def work_off(self, groups: Sequence[Group]) -> list[Group]:
        """Returns those that want for memory and would do so if they were tried again, without a record of them where
        other lanes had some."""
        self._left = list(groups)
        running: dict[Future[None], Lane] = {}
        pool = ThreadPoolExecutor(len(self._lanes))
        took = _Stopwatch()
        self._restart_those_that_keep_memory()
        try:
            while self._left or self._held:
                for lane in self._lanes:
                    if lane not in self._held and (group := self._next()):
                        self._left.remove(group)
                        self._held[lane] = group
                        lane.take(group)
                        running[pool.submit(lane.prepare)] = lane
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    self._ready.append(running.pop(future))
                if len(self._ready) < READY_SHARE * len(self._held) and running:
                    continue
                took.lap("compiling")
                self._session.progress.say("waiting for what compiles, to time what is ready")
                with self._gate.shut():
                    took.lap("waiting for the rest")
                    again = self._have_timed(took)
                self._clerk.answer()
                running |= {pool.submit(lane.prepare_again): lane for lane in again}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt waits for nobody: their workers end
        return self._wanting

    def _next(self) -> Group | None:
        return self._room.next(self._left, list(self._held.values()), self._starved)

    def _have_timed(self, took: _Stopwatch) -> list[Lane]:
        """Time those that are ready, one by one, alone on the GPU; returns those that go on in fresh processes."""
        names = ", ".join(_name(self._held[lane]) for lane in self._ready)
        holding = [lane for lane in reversed(self._lanes) if lane in self._ready and not self._wants(lane)]
        for lane in sorted(holding, key=lambda lane: needs(self._held[lane])):  # who has most when others can make room
            lane.measure()
            if lane.measured and not self._wants(lane):
                lane.finish()
                del self._held[lane]
        self._ready = []
        again = [lane for lane in holding if lane in self._held]
        if again:
            self._session.progress.say("starting fresh workers")
            _at_once([lane.dismiss for lane in again])
            # With the files of the leaving processes joined, the fresh ones find XLA's choices instead of tuning again.
            _join_autotune_results(self._session.folder / "target" / "xla")
        if self._left:
            self._restart_those_that_keep_memory()
        took.lap("timing")
        self._session.progress.announce(f"{names}: {took}")
        took.clear()
        return again

    def _wants(self, lane: Lane) -> bool:
        """Whether its group wants for memory, which others have; it lets go of it then, for the others, and for another
        try if it was the first and there is more to be had beside them."""
        if self._alone or not lane.starved():
            return False
        lane.abandon()
        group = self._held.pop(lane)
        if group in self._starved or needs(group) >= self._room.bytes:
            self._wanting.append(group)
        else:
            self._starved.append(group)
            self._left.insert(0, group)
        return True

    def _restart_those_that_keep_memory(self) -> None:
        """Restart of processes in lanes without a group, if they keep memory that other lanes need."""
        if (kept := self._room.kept) is None:
            return
        idle = [lane for lane in self._lanes if lane not in self._held]
        keeping = [(lane, roles) for lane in idle if (roles := lane.needs_restart(kept))]
        if keeping:
            self._session.progress.say("starting fresh workers, to free the GPU's memory")
            _at_once([partial(lane.crew.dismiss, roles) for lane, roles in keeping])
            _join_autotune_results(self._session.folder / "target" / "xla")


def _name(group: Group) -> str:
    return group[0][0].id.rpartition("/")[0]  # a shape's, in all its directions


class _Stopwatch:
    """How long each kind of work took."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def lap(self, what: str) -> None:
        """What was done since the last lap."""
        now = time.perf_counter()
        self._seconds[what] += now - self._last
        self._last = now

    def clear(self) -> None:
        self._seconds.clear()

    def __str__(self) -> str:
        return ", ".join(f"{what} {seconds:.0f} s" for what, seconds in self._seconds.items())


def _at_once(tasks: Sequence[Callable[[], None]]) -> None:
    """Each in a thread; an interrupt does not wait for them, as the end of their workers ends them."""
    pool = ThreadPoolExecutor(len(tasks))
    try:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _crews(plan: Plan, session: Session, most: int) -> tuple[list[Crew], Room]:
    """One for each lane, of `most` at most, and the room that they have. Begins the segment: the environment of each
    worker that the plan needs, this GPU's ceilings, and what the clock of every lane's workers makes of the calibration
    kernel. What one of these fails to tell costs what rests on it, and a warning."""
    roles = {implementation.framework for _, group in plan.work for implementation in group}
    session.crew.start({*roles, "reference"})
    session.progress.say("measuring this GPU's ceilings")
    workers: dict[str, Any] = {}
    clocks: dict[str, float] = {}
    uncalibrated: list[str] = []
    ceilings = None
    for role in sorted(roles):
        try:
            workers[role] = session.crew.ask(role, "environment")
        except WORKER_FAILURES as problem:
            workers[role] = {"unavailable": str(problem)}
            session.progress.warn(f"the {role} worker is not available: {problem}")
            continue
        try:
            if (seconds := session.crew.ask(role, "calibrate")) is not None:
                clocks[role] = seconds
        except WORKER_FAILURES as problem:
            uncalibrated.append(role)
            session.progress.warn(
                f"the {role} worker's clock could not be calibrated: no ratio between workers will be given: {problem}"
            )
        if role == "torch":
            ceilings = _for_pack(session, "ceilings", "ceilings.json", "no share of them will be given")
            _for_pack(
                session, "device_properties", "cuda_device_properties.json",
                "Inductor cannot compile for this GPU elsewhere",
            )
    if words := _of_other_versions(session.folder / "target" / "xla", workers.get("xla", {}).get("jax")):
        session.progress.warn(words)
    memory = max((found["memory_bytes"] for found in workers.values() if "memory_bytes" in found), default=None)
    room = Room.of(memory, most)
    siblings = [session.crew.sibling() for _ in range(room.lanes - 1)]
    if siblings:
        _at_once([partial(crew.start, {*roles, "reference"}) for crew in siblings])
    for number, crew in enumerate(siblings, 2):
        for role in sorted(roles):
            with contextlib.suppress(*WORKER_FAILURES):  # whoever fails here fails again, in a record
                if (seconds := crew.ask(role, "calibrate")) is not None:
                    clocks[f"{role} {number}"] = seconds
    if (apart := disagreement(clocks)) > AGREEMENT:
        session.progress.warn(f"the workers' clocks differ by {apart:.1%}: no ratio between them will be given")
    session.begin_segment(
        workers, ceilings, clocks, lanes=1 + len(siblings), beside=room.beside, uncalibrated=uncalibrated
    )
    return [session.crew, *siblings], room


def _of_other_versions(pack: Path, jax: str | None) -> str | None:
    """Why choices that were taken over do not serve this jax. A process's own, of a jax whose files cannot be joined,
    are none that are taken over (`selection.recorded_choices`)."""
    found = (path.stem.removeprefix("autotune-") for path in sorted(pack.glob("autotune-*.textproto")))
    have = [version for version in found if version.count(".") == 2]
    if jax is None or not have or jax in have:
        return None
    return f"XLA's recorded choices are of jax {', '.join(have)}, and this is {jax}: it tunes all anew"


def _join_autotune_results(folder: Path, *, running: bool = False) -> None:
    """One file a jax version of what each XLA worker's process left (`autotune-<version>.<process>.textproto`), which
    those that run may be reading. running: also of what they leave, while none compiles: each rewrites its own then."""
    parts: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("autotune-*.*.textproto"), key=lambda p: p.stat().st_mtime):
        stem, _, process = path.name.removesuffix(".textproto").rpartition(".")
        if process.isdigit() and stem.count(".") == 2 and (running or not host.runs(int(process))):
            parts.setdefault(stem, []).append(path)
    for stem, paths in parts.items():
        joined = folder / f"{stem}.textproto"
        texts = [path.read_text() for path in ([joined] if joined.is_file() else []) + paths]
        try:
            atomic_write.write(joined, merge_results(texts).encode())
        except ValueError:  # of a jax whose files cannot be joined: each stays by itself
            continue
        for path in paths:
            path.unlink()


def _for_pack(session: Session, what: str, name: str, without: str) -> dict[str, Any] | None:
    """What PyTorch's worker measures of this GPU, left in the run's target pack under that name; None with a warning
    where it fails. without: what there will not be then."""
    try:
        content: dict[str, Any] = session.crew.ask("torch", what)
    except WORKER_FAILURES as problem:
        session.progress.warn(f"this GPU's {what.replace('_', ' ')} could not be measured: {without}: {problem}")
        return None
    (session.folder / "target" / name).write_text(json.dumps(content, indent=1) + "\n")
    return content


def _end_idle(lanes: Sequence[Lane], session: Session) -> bool:
    """End the processes of lanes that are done with their groups, for the memory that those keep; whether there were
    any."""
    idle = [lane for lane in lanes if not lane.busy and not lane.crew.empty]
    if idle:
        session.progress.say("making room: processes that are done end")
        _make_room(idle, session)
    return bool(idle)


def _make_room(lanes: Sequence[Lane], session: Session) -> None:
    """End all processes, which keep memory that they once had; the next ones find what XLA's chose."""
    _at_once([lane.crew.dismiss for lane in lanes])
    _join_autotune_results(session.folder / "target" / "xla")
