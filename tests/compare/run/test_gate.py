"""Who is timed has the GPU alone, and nobody waits for ever."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compare.run.gate import Gate
from compare.workers import autotune_lock
from compare.workers.client import WorkerDied

SOON, LONG = 0.05, 20.0


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_who_shuts_waits_for_those_inside_and_others_wait_until_it_opens(lock: Path) -> None:
    gate, leave, inside, shut = Gate(lock), threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with gate.passed():
            inside.set()
            leave.wait(LONG)
            order.append("first leaves")

    def timer() -> None:
        with gate.shut():
            order.append("shut")
            shut.set()
            assert not second_in.wait(SOON)
            order.append("opens")

    second_in = threading.Event()

    def second() -> None:
        with gate.passed():
            second_in.set()
            order.append("second")

    with ThreadPoolExecutor(3) as threads:
        tasks = [threads.submit(first)]
        assert inside.wait(LONG)
        tasks.append(threads.submit(timer))
        assert not shut.wait(SOON)  # not before the first one leaves
        tasks.append(threads.submit(second))
        assert not second_in.wait(SOON)  # nobody passes who comes after
        leave.set()
        for task in tasks:
            task.result(LONG)
    assert order == ["first leaves", "shut", "opens", "second"]


def test_those_inside_are_there_together(lock: Path) -> None:
    gate, met = Gate(lock), threading.Barrier(2)

    def meet() -> None:
        with gate.passed():
            met.wait(LONG)

    with ThreadPoolExecutor(2) as threads:
        for task in [threads.submit(meet), threads.submit(meet)]:
            task.result(LONG)


def test_a_few_compile_while_it_is_shut(lock: Path) -> None:
    gate, order = Gate(lock, beside=1), list[str]()
    shut, opens = threading.Event(), threading.Event()
    leave = {name: threading.Event() for name in ("first", "second", "third")}
    inside = {name: threading.Event() for name in leave}
    left = {name: threading.Event() for name in leave}

    def compile(name: str) -> None:
        with gate.compiling("xla"):
            inside[name].set()
            leave[name].wait(LONG)
            order.append(f"{name} leaves")
        left[name].set()

    def timer() -> None:
        with gate.shut():
            order.append("shut")
            shut.set()
            opens.wait(LONG)
            order.append("opens")

    def user() -> None:
        with gate.passed():
            order.append("user")

    with ThreadPoolExecutor(5) as threads:
        tasks = [threads.submit(compile, name) for name in ("first", "second")]
        assert inside["first"].wait(LONG) and inside["second"].wait(LONG)
        tasks.append(threads.submit(timer))
        assert not shut.wait(SOON)  # two are too many
        tasks += [threads.submit(compile, "third"), threads.submit(user)]
        leave["first"].set()
        assert shut.wait(LONG)
        assert not inside["third"].wait(SOON)  # the second still does
        leave["second"].set()
        assert inside["third"].wait(LONG)
        leave["third"].set()
        assert left["third"].wait(LONG)
        with gate.compiling("torch"):
            assert "opens" not in order  # of another framework, too
        opens.set()
        for task in tasks:
            task.result(LONG)
    assert order == ["first leaves", "shut", "second leaves", "third leaves", "opens", "user"]


def test_while_it_is_shut_nobody_tunes_but_who_has_to_compile_again(lock: Path) -> None:
    gate, tuned = Gate(lock), threading.Event()

    def tune() -> None:
        with autotune_lock.alone(lock):
            tuned.set()

    with ThreadPoolExecutor(1) as threads:
        with gate.shut():
            task = threads.submit(tune)
            assert not tuned.wait(SOON)
            with gate.lent():
                task.result(LONG)
            tuned.clear()
            task = threads.submit(tune)
            assert not tuned.wait(SOON)
        task.result(LONG)


def test_it_opens_after_an_error(lock: Path) -> None:
    gate = Gate(lock)
    with pytest.raises(KeyError), gate.shut():
        raise KeyError("while it was timed")
    with gate.passed(), autotune_lock.alone(lock):
        pass


def test_a_run_that_stops_refuses_who_waits_and_who_comes(lock: Path) -> None:
    gate, refused = Gate(lock), threading.Event()

    def wait() -> None:
        try:
            with gate.passed():
                pass
        except WorkerDied:
            refused.set()

    with ThreadPoolExecutor(1) as threads:
        with gate.shut():
            task = threads.submit(wait)
            assert not refused.wait(SOON)
            gate.stop()
            task.result(LONG)
    assert refused.is_set()
    with pytest.raises(WorkerDied, match="stopped"), gate.passed():
        pass
