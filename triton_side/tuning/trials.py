"""Run a call with another configuration of one choice, and find the launches that the configuration changes.

A call of a block makes many launches, and a choice may count for several of them. A configuration may also replace a
kernel by another one, or change how many partial sums a later kernel adds. So a configuration's time is the time of all
launches that are not the same with every configuration.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xlafuse.triton_side.calls.launches import DoesNotFit, record_launches
from xlafuse.triton_side.calls.replay import Replay, launches_of
from xlafuse.triton_side.configs.tuned import TUNED, class_of, gpu, overridden, rounded
from xlafuse.triton_side.inductor._private import fake_tensor_mode
from xlafuse.triton_side.tuning.spaces import SPACES, Choice

Call = Callable[[], Any]

FEW_BYTES = 64  # of a thread, which may be spilled


@dataclass(frozen=True)
class Compiled:
    """The launches of a call with a configuration, and the most that those take which only this configuration makes.

    problem: why it cannot be used; "" if it can. spill_bytes: of a thread. shared_bytes: of a block. replaced_bytes:
    shared_bytes of the present configuration's launches that it replaces.
    """

    launches: tuple[str, ...]
    spill_bytes: int
    shared_bytes: int
    problem: str = ""
    replaced_bytes: int = 0


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors that take no memory, in this thread."""
    with fake_tensor_mode():
        yield


@contextlib.contextmanager
def using(choice: Choice, config: Any) -> Iterator[None]:
    """Let calls within the context use the configuration for the choice's shape class."""

    def override(name: str, facts: Mapping[str, Any], _: Any) -> Any:
        return config if name == choice.name and class_of(facts) == choice.shape_class else None

    with overridden(override):
        yield


def choices_in(call: Call) -> list[Choice]:
    """Return the choices that a call makes and that have a space, each class once. The call launches nothing."""
    here, found = gpu(), {}
    assert here is not None, "choices are searched on a GPU"

    def note(name: str, facts: Mapping[str, Any], _: Any) -> None:
        if name in SPACES:
            most = rounded(facts)
            choice = Choice(name, most, TUNED[name].__wrapped__(**most), here.multiprocessors)
            found[name, frozenset(choice.shape_class.items())] = choice

    with overridden(note):
        launches_of(call, launch=False)
    return list(found.values())


def present(choice: Choice) -> Any:
    """Return the configuration that the kernel takes now: the table's, or else the rule's."""
    return TUNED[choice.name](*choice.facts.values())


def compile_with(call: Call, choice: Choice, config: Any) -> Compiled:
    """Compile the launches that the configuration changes in a call on fake tensors. Nothing is launched.

    It may spill a little more than the launches that it replaces, if this GPU can run those.
    """
    assert gpu() is not None, "a kernel is compiled for a GPU"
    now, replaced = launches_of(call, launch=False), 0
    try:
        with using(choice, config):
            replays = launches_of(call, launch=False)
        try:
            allowed, replaced = _largest(without(now, _counted(replays)))
        except DoesNotFit as error:
            allowed, replaced = 0, error.shared_bytes
        spilled, shared = _largest(without(replays, _counted(now)))
    except DoesNotFit as error:
        return Compiled((), 0, error.shared_bytes, "exceeds shared memory", replaced)
    except Exception as error:  # the compiler's own errors have many types
        return Compiled((), 0, 0, f"does not compile: {type(error).__name__}")
    problem = "spills registers" if spilled > allowed + FEW_BYTES else ""
    return Compiled(tuple(replay.description for replay in replays), spilled, shared, problem, replaced)


def _largest(replays: Iterable[Replay]) -> tuple[int, int]:
    """Return the most bytes that a thread spills, and the most shared memory of a block, in any of these launches."""
    with record_launches(compile_only=True) as compiled:
        for replay in replays:
            replay()
    resources = [launch.resources for launch in compiled]
    return max((r.spill_bytes for r in resources), default=0), max((r.shared_bytes for r in resources), default=0)


def _counted(replays: Iterable[Replay]) -> Counter[str]:
    return Counter(replay.description for replay in replays)


def same_in_all(compiled: Iterable[Compiled]) -> Counter[str]:
    """Return the launches that all configurations make."""
    counted = [Counter(each.launches) for each in compiled]
    same = counted[0]
    for other in counted[1:]:
        same &= other
    return same


def without(replays: Iterable[Replay], same: Counter[str]) -> list[Replay]:
    """Return the launches left after each of `same` is taken away once."""
    left = Counter(same)
    kept = []
    for replay in replays:
        if left[replay.description] > 0:
            left[replay.description] -= 1
        else:
            kept.append(replay)
    return kept


def launches_with(call: Call, choice: Choice, config: Any, same: Counter[str]) -> Callable[[], None]:
    """Run the call with the configuration; return a function that repeats its launches that are not the same in all.

    Raises triton.OutOfResources.
    """
    with using(choice, config):
        replays = without(launches_of(call), same)

    def launch() -> None:
        for replay in replays:
            replay()

    return launch
