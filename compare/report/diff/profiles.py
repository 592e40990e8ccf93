"""The kernels of two profiles: new, gone, slower and faster per step.

Two profiles share no step, so no noise cancels between them. A time counts as changed only if the ranges of the steps
are apart and the medians differ by more than a tolerance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...profiles.kernel_times import KernelTimes, Times
from ..profile_view import ProfileView

SCHEMA = "xlafuse.profile-diff/1"

Word = Literal["new", "gone", "slower", "faster", "same"]
WORDS: tuple[Word, ...] = ("slower", "faster", "new", "gone")


@dataclass(frozen=True)
class Change:
    """A kernel's time in a step, before and after; None where it did not run.

    name: as the profiler shows it, after where it ran there. was: the name before, if another.
    """

    name: str
    word: Word
    before: Times | None
    after: Times | None
    launches: tuple[int, int]
    operations: tuple[str, ...]
    was: str = ""

    @property
    def lost_us(self) -> float:
        """Return how much longer a step's launches take after than before."""
        return (self.after.median if self.after else 0.0) - (self.before.median if self.before else 0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "was": self.was or None, "change": self.word, "lost_us": self.lost_us,
            "before_us": self.before and self.before.to_json(), "after_us": self.after and self.after.to_json(),
            "launches": list(self.launches), "operations": list(self.operations),
        }


@dataclass(frozen=True)
class ProfileDiff:
    """Changes between two profiles. step, busy: of a step's time on the device, and of the time in which kernels ran.

    kernels: all of them, those with the largest change first. notes: differences of device and versions. other_card:
    True where the GPUs are known and differ.
    """

    step: Change
    busy: Change
    kernels: tuple[Change, ...]
    notes: tuple[str, ...]
    other_card: bool = False

    @property
    def regressed(self) -> bool:
        """True where the kernels of a step take longer on the same GPU."""
        return self.busy.word == "slower" and not self.other_card

    def of(self, word: Word) -> list[Change]:
        return [each for each in self.kernels if each.word == word]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "step": self.step.to_json(), "busy": self.busy.to_json(), "notes": list(self.notes),
            "kernels": [each.to_json() for each in self.kernels],
        }


def compare(before: ProfileView, after: ProfileView, tolerance: float) -> ProfileDiff:
    """Compare the median steps of two profiles. tolerance: the share by which a median may differ."""
    pairs = _pairs(_Kernel.all_of(before), _Kernel.all_of(after))
    kernels = [_change(old, new, tolerance) for old, new in pairs]
    return ProfileDiff(
        _of_times("step", before.device_us, after.device_us, tolerance),
        _of_times("busy", before.busy_us, after.busy_us, tolerance),
        tuple(sorted(kernels, key=lambda each: -abs(each.lost_us))), tuple(_notes(before, after)),
        _other_card(before, after),
    )


@dataclass(frozen=True)
class _Kernel:
    """Lines of a profile with one name, grid and work. operations: with their stages, without a layer's number."""

    name: str
    grid: tuple[int, ...] | None
    operations: tuple[str, ...]
    step: Times
    launches: int

    @classmethod
    def all_of(cls, view: ProfileView) -> list[_Kernel]:
        alike: dict[object, list[KernelTimes]] = {}
        for each in view.kernels:
            alike.setdefault((each.name, each.grid, view.operations(each)), []).append(each)
        return [
            cls(lines[0].name, lines[0].grid, view.operations(lines[0]), Times.sum(line.step for line in lines),
                sum(line.launches for line in lines))
            for lines in alike.values()
        ]


Pair = tuple[_Kernel | None, _Kernel | None]


def _pairs(old: Sequence[_Kernel], new: Sequence[_Kernel]) -> list[Pair]:
    """Pair kernels by name, grid and work. Kernels that are left are paired by their work, if it is unlike others'."""
    found: list[Pair] = []
    for key in (lambda kernel: (kernel.name, kernel.grid, kernel.operations), lambda kernel: kernel.operations):
        pairs = _unique_pairs(old, new, key)
        found += pairs
        old = [each for each in old if all(each is not before for before, _ in pairs)]
        new = [each for each in new if all(each is not after for _, after in pairs)]
    return [*found, *((each, None) for each in old), *((None, each) for each in new)]


def _unique_pairs(old: Sequence[_Kernel], new: Sequence[_Kernel], key: Callable[[_Kernel], Any]) -> list[Pair]:
    counts = [Counter(map(key, kernels)) for kernels in (old, new)]
    by_key = {key(each): each for each in new}
    return [(each, by_key[k]) for each in old if (k := key(each)) and counts[0][k] == counts[1][k] == 1]


def _change(old: _Kernel | None, new: _Kernel | None, tolerance: float) -> Change:
    kernel = new or old
    assert kernel is not None
    before, after = None if old is None else old.step, None if new is None else new.step
    launches = (old.launches if old else 0, new.launches if new else 0)
    was = old.name if old and old.name != kernel.name else ""
    return Change(kernel.name, _word(before, after, tolerance), before, after, launches, kernel.operations, was)


def _of_times(name: str, before: Times, after: Times, tolerance: float) -> Change:
    return Change(name, _word(before, after, tolerance), before, after, (1, 1), ())


def _word(before: Times | None, after: Times | None, tolerance: float) -> Word:
    if before is None or after is None:
        return "new" if before is None else "gone"
    if after.least > before.most and after.median > before.median * (1 + tolerance):
        return "slower"
    if after.most < before.least and after.median < before.median * (1 - tolerance):
        return "faster"
    return "same"


def _other_card(before: ProfileView, after: ProfileView) -> bool:
    """Return whether both profiles name their GPU, and differently; a number is no name."""
    devices = {view.opened.profile.device for view in (before, after)}
    return len(devices) == 2 and not any(re.fullmatch(r"GPU \d+|", device) for device in devices)


def _notes(before: ProfileView, after: ProfileView) -> Iterable[str]:
    old, new = before.opened.profile, after.opened.profile
    if _other_card(before, after):
        yield f"another card: {old.device} → {new.device}; no change between them counts as a regression"
    elif old.device != new.device:
        yield f"device: {old.device} → {new.device}"
    if old.tool != new.tool:
        yield f"profiler: {old.tool} → {new.tool}"
    yield from _versions(old.versions, new.versions)
    for words, view in (("before", before), ("after", after)):
        if len(view.steps) == 1:
            yield f"{words}: one step, so its times have no spread"


def _versions(old: Mapping[str, str], new: Mapping[str, str]) -> Iterable[str]:
    for package in {**old, **new}:
        if old.get(package) != new.get(package):
            yield f"{package}: {old.get(package, 'unknown')} → {new.get(package, 'unknown')}"
