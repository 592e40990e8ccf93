"""Two profiles: the parts of the model, and the kernels that are new, gone, slower and faster, as data and as text.

Two profiles share no step, so no noise cancels between them. A time counts as changed only if the ranges of the steps
are apart and the medians differ by more than a tolerance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...base.text import printable
from ...graph import formats
from ...graph.render import text_view
from ...model import part_changes
from ...model.part_changes import PartChange
from ...model.step import step_of_profile
from ...profiles.kernel_times import KernelTimes, Times
from ..profile_view import ProfileView, time_range

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.profile-diff/1"
MOST_ROWS = 12  # of one word
MOST_OPERATIONS = 3

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
    launches: tuple[int, int] = (1, 1)
    operations: tuple[str, ...] = ()
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

    parts: of the model, those with the largest change first. kernels: the same.
    notes: differences of device and versions. other_card:
    True where the GPUs are known and differ.
    """

    step: Change
    busy: Change
    kernels: tuple[Change, ...]
    notes: tuple[str, ...]
    parts: tuple[PartChange, ...] = ()
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
            "parts": [each.to_json() for each in self.parts],
            "kernels": [each.to_json() for each in self.kernels],
        }


def compare(before: ProfileView, after: ProfileView, tolerance: float) -> ProfileDiff:
    """Compare the median steps of two profiles. tolerance: the share by which a median may differ."""
    kernels = [_change(old, new, tolerance) for old, new in _pairs(_kernels(before), _kernels(after))]
    return ProfileDiff(
        Change("step", _word(before.device_us, after.device_us, tolerance), before.device_us, after.device_us),
        Change("busy", _word(before.busy_us, after.busy_us, tolerance), before.busy_us, after.busy_us),
        tuple(sorted(kernels, key=lambda change: -abs(change.lost_us))), tuple(_notes(before, after)),
        tuple(part_changes.changes(step_of_profile(before.opened), step_of_profile(after.opened))),
        _other_card(before, after),
    )


@dataclass(frozen=True)
class _Kernel:
    """Lines of a profile with one name, grid and work. operations: with their stages, without a layer's number."""

    name: str
    operations: tuple[str, ...]
    step: Times
    launches: int


def _kernels(view: ProfileView) -> dict[object, _Kernel]:
    """Return the kernels by name, grid and work."""
    alike: dict[tuple[str, object, tuple[str, ...]], list[KernelTimes]] = {}
    for line in view.kernels:
        alike.setdefault((line.name, line.grid, view.operations(line)), []).append(line)
    return {
        key: _Kernel(key[0], key[2], Times.sum(line.step for line in lines), sum(line.launches for line in lines))
        for key, lines in alike.items()
    }


Pair = tuple[_Kernel | None, _Kernel | None]


def _pairs(old: Mapping[object, _Kernel], new: Mapping[object, _Kernel]) -> list[Pair]:
    """Pair kernels by name, grid and work. Kernels that are left are paired by their work, if it is unlike others'."""
    found: list[Pair] = [(kernel, new[key]) for key, kernel in old.items() if key in new]
    gone = [kernel for key, kernel in old.items() if key not in new]
    come = [kernel for key, kernel in new.items() if key not in old]
    counts = [Counter(kernel.operations for kernel in kernels) for kernels in (gone, come)]
    by_work = {
        work: kernel for kernel in come if (work := kernel.operations) and counts[0][work] == counts[1][work] == 1
    }
    found += [(kernel, by_work.get(kernel.operations)) for kernel in gone]
    return found + [(None, kernel) for kernel in come if kernel.operations not in by_work]


def _change(old: _Kernel | None, new: _Kernel | None, tolerance: float) -> Change:
    kernel = new or old
    assert kernel is not None
    before, after = None if old is None else old.step, None if new is None else new.step
    launches = (old.launches if old else 0, new.launches if new else 0)
    was = old.name if old and old.name != kernel.name else ""
    return Change(kernel.name, _word(before, after, tolerance), before, after, launches, kernel.operations, was)


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
    for package in {**old.versions, **new.versions}:
        versions = [side.versions.get(package, "unknown") for side in (old, new)]
        if versions[0] != versions[1]:
            yield f"{package}: {versions[0]} → {versions[1]}"
    for words, view in (("before", before), ("after", after)):
        if len(view.steps) == 1:
            yield f"{words}: one step, so its times have no spread"


def tree(found: ProfileDiff, title: str, *, every: bool = False) -> RenderableType:
    """Return the changes, those of most time first. every: all of them."""
    lines = [_line("a step on the device", found.step), _line("kernels in a step", found.busy), *found.notes]
    root = text_view.titled(title, lines)
    if found.parts:
        branch = root.add(text_view.plain("parts of the model, ms a step", "bold"))
        for part in found.parts if every else found.parts[:MOST_ROWS]:
            branch.add(_part(part))
    for word in WORDS:
        changes = found.of(word)
        if not changes:
            continue
        branch = root.add(text_view.plain(f"{formats.count(len(changes), 'kernel')} {word}", "bold"))
        shown = changes if every else changes[:MOST_ROWS]
        for each in shown:
            branch.add(_kernel(each))
        if len(shown) < len(changes):
            rest = sum(each.lost_us for each in changes[len(shown):])
            branch.add(text_view.plain(f"… {len(changes) - len(shown)} more: {_signed(rest)}; --all shows them"))
    if same := len(found.of("same")):
        root.add(text_view.plain(f"{formats.count(same, 'kernel')} within the steps' spread or the tolerance", "dim"))
    return root


def _line(what: str, change: Change) -> str:
    verdict = "no change beyond the steps' spread and the tolerance" if change.word == "same" else change.word
    return f"{what}: {_times(change)}: {verdict}"


def _part(change: PartChange) -> Any:
    where = f" ({change.where})" if change.where else ""
    times = (formats.UNKNOWN if us is None else f"{us / 1e3:.2f}" for us in (change.before_us, change.after_us))
    return text_view.plain(f"{formats.name(change.name)}{where}: {' → '.join(times)}")


def _kernel(change: Change) -> Any:
    name = formats.runtime(change.name, 50) + (f" (was {formats.runtime(change.was, 40)})" if change.was else "")
    operations = ", ".join(dict.fromkeys(change.operations[:MOST_OPERATIONS]))
    launches = " → ".join(map(str, dict.fromkeys(change.launches)))
    facts = [f"{_signed(change.lost_us)} a step: {_times(change)}", f"launches: {launches}"]
    return text_view.plain(" · ".join([name, *facts, *([printable(operations, 80)] if operations else [])]))


def _signed(us: float) -> str:
    return ("+" if us >= 0 else "-") + formats.microseconds(abs(us))


def _times(change: Change) -> str:
    known = [time_range(times) for times in (change.before, change.after) if times is not None]
    return " → ".join(known)
