"""One function, compiled with several settings of its compiler, and timed in turns where a GPU is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.usage import UsageError
from ..graph.analyse.call_time import call_time
from ..graph.analyse.diff import GraphDiff, diff
from ..graph.analyse.forced_fusion import FORCED, Saving, pair, saving
from ..graph.analyse.totals import predicted_sum
from ..graph.model import FusionGraph
from ..graph.render.text_view import launch_words
from ..plan.paired_rounds import counted, median_us, round_medians
from ..plan.speedup import Speedup
from ..plan.speedup import compare as compare_times
from ..sources.explained import Explained
from ..sources.target_ceilings import own_ceilings
from .explain import TIMEOUT, Framework, explain_all

DEFAULT = "default"  # the name of the compile without settings
_OPTIONS: dict[Framework, str] = {"jax": "--xla-flag", "torch": "--inductor"}
_NEXT = re.compile(r",(?=\s*-{0,2}[A-Za-z_][\w.]*=)")  # a comma before another NAME=; values may hold commas
_SETTING = re.compile(r"\s*-{0,2}([A-Za-z_][\w.]*)=(.*?)\s*", re.DOTALL)


@dataclass(frozen=True)
class Variant:
    """Settings of a compiler by name, their values as text; or two kernels to be one, "KERNEL+KERNEL".

    name: as the user wrote it. framework: None for kernels, which every compiler has.
    """

    name: str
    framework: Framework | None
    settings: Mapping[str, str]
    force: str = ""


def parse_variants(
    xla_flags: Sequence[str], inductor: Sequence[str], force: Sequence[str] = ()
) -> tuple[Variant, ...]:
    """Return a variant for each text such as "NAME=VALUE,NAME=VALUE", and for each "KERNEL+KERNEL" of `force`.

    Raises UsageError.
    """
    texts = {"jax": xla_flags, "torch": inductor}
    if all(texts.values()):
        raise UsageError("--xla-flag and --inductor are of two compilers; a function has one: choose one of them")
    framework: Framework = "jax" if xla_flags else "torch"
    found = [Variant(text, framework, _settings(_OPTIONS[framework], text)) for text in texts[framework]]
    if len({tuple(sorted(each.settings.items())) for each in found}) < len(found):
        raise UsageError(f"{_OPTIONS[framework]}: two variants have the same settings")
    if len({*force}) < len(force):
        raise UsageError("--force: two variants have the same kernels")
    return (*found, *(Variant(text, None, {}, text) for text in force))


def _settings(option: str, text: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for piece in _NEXT.split(text):
        match = _SETTING.fullmatch(piece)
        if match is None:
            raise UsageError(f"{option} {text!r}: expected NAME=VALUE, or several with commas between them")
        if match[1] in settings:
            raise UsageError(f"{option} {text!r}: {match[1]} is given twice")
        settings[match[1]] = match[2]
    return settings


@dataclass(frozen=True)
class Difference:
    """One variant against the default: the change of the graph and, where both were timed, of the device time.

    saving: of a forced fusion, with its price.
    """

    graph: GraphDiff
    speedup: Speedup | None
    saving: Saving | None = None


@dataclass(frozen=True)
class Comparison:
    """The graphs of all variants, the default's first, and how each differs from it."""

    explained: Explained
    differences: Mapping[str, Difference]

    @property
    def first(self) -> FusionGraph:
        return next(iter(self.explained.graphs.values()))

    def device_time_us(self, name: str) -> float | None:
        """Return the device time of a call, or None where nothing was timed."""
        times = self.explained.times.get(name)
        return None if times is None else median_us(counted(times).device_time)

    def predicted_verdict(self, name: str) -> str:
        """Return "~1.13x faster" for a variant's predicted time against the default's; "" without both.

        "unresolved" where the predicted intervals of the kernels that differ overlap.
        """
        change = self.differences[name].graph
        graphs = [self.explained.predicted[which] for which in (DEFAULT, name)]
        before, after = (graph.kernels or () for graph in graphs)
        default, own = map(call_time, graphs)
        if not change.kernels or not default.us or not own.us:
            return ""
        old = predicted_sum(before[index] for each in change.kernels for index in each.before)
        new = predicted_sum(after[index] for each in change.kernels for index in each.after)
        if (old.low_us or 0.0) <= (new.high_us or 0.0) and (new.low_us or 0.0) <= (old.high_us or 0.0):
            return "unresolved"
        ratio = default.us / own.us
        return f"~{ratio:.2f}x faster" if ratio >= 1 else f"~{1 / ratio:.2f}x slower"


def compare(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], variants: Sequence[Variant], *, grad: bool = False,
    target: str | None = None, timeout: float = TIMEOUT, devices: int = 1,
    framework: Framework | None = None, progress: Callable[[str], None] = lambda message: None,
    again: Callable[[], tuple[Any, Any, Any]] | None = None,
) -> Comparison:
    """Compile `function(*args, **kwargs)` without settings and with each variant's. Raises ExplainError.

    target, devices, framework, again: as for `explain_all`. Without a target, on a machine with a GPU, all compiles are
    timed in turns.
    """
    explained = explain_all(
        {DEFAULT: function, **{each.name: function for each in variants}}, args, kwargs, grad=grad, target=target,
        framework=variants[0].framework or framework, timeout=timeout, devices=devices, progress=progress,
        settings={each.name: each.settings for each in variants}, force={each.name: each.force for each in variants},
        timed=True,
        again={} if again is None else dict.fromkeys([DEFAULT, *(each.name for each in variants)], again),
    )
    default = explained.graphs[DEFAULT]
    found = {
        each.name: Difference(
            diff(default, explained.graphs[each.name]), _speedup(explained, each.name), _saving(explained, each)
        )
        for each in variants
    }
    savings = [f"{name}: {each.saving}" for name, each in found.items() if each.saving is not None]
    launches = filter(None, (_launches(explained, each) for each in variants if each.force))
    notes = (*savings, *launches, *map(str, explained.agreement), *explained.notes)
    return Comparison(replace(explained, notes=notes), found)


def compare_targets(explained: Explained) -> Comparison:
    """Return how a function's kernels for each target differ from those for the first one."""
    first, *others = explained.graphs.values()
    return Comparison(explained, {other.name: Difference(diff(first, other), None) for other in others})


def _saving(explained: Explained, variant: Variant) -> Saving | None:
    if not variant.force:
        return None
    default, forced = explained.predicted[DEFAULT], explained.graphs[variant.name]
    found = saving(default, forced, pair(default, variant.force), own_ceilings(default)[0])
    if not explained.times:
        return found
    before, after = (median_us(counted(explained.times[name]).device_time) for name in (DEFAULT, variant.name))
    return replace(found, device_us=before - after)


def _launches(explained: Explained, variant: Variant) -> str:
    """Return how the two kernels are launched, and the one; "" where nothing says it."""
    default, forced = explained.graphs[DEFAULT], explained.graphs[variant.name]
    kernels = [(default.kernels or ())[index] for index in pair(default, variant.force)]
    kernels += [kernel for kernel in forced.kernels or () if FORCED in kernel.facts]
    words = ["".join(launch_words(replace(kernel.launch, config=None, differing=None))) for kernel in kernels]
    named = [f"{kernel.name}: {text}" for kernel, text in zip(kernels, words, strict=True)]
    return f"{variant.name}: launches: {'; '.join(named)}" if all(words) else ""


def _speedup(explained: Explained, name: str) -> Speedup | None:
    if not explained.times:
        return None
    own, default = (round_medians([counted(explained.times[which]).device_time]) for which in (name, DEFAULT))
    return compare_times(own, default)
