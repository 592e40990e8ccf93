"""The effect of a switch on a user's program: whether it was used, the losses, the time of a step, and its parts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.text import printable
from ...graph import formats
from ...graph.render import text_view
from ...plan.speedup import LEAST_ROUNDS, Speedup
from ...sources.source import Source
from ...user.loss_agreement import LossAgreement
from ...user.trial import Trial
from ..outline import Outline
from ..profile_view import ProfileView
from . import profiles

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "xlafuse.trial/1"
_NO_LOSS = (
    "no loss was seen, so the results are not compared: PyTorch's is a scalar on which backward() is called, JAX's a "
    "scalar array that a step made and left"
)


def outline(trial: Trial, tolerance: float) -> Outline:
    """Return the comparison. A switch without effect has no gain, so nothing else is compared then.

    tolerance: the share by which times differ from process to process.
    """
    took = trial.effect.took
    speedup, change = (trial.speedup(tolerance), _change(trial, tolerance)) if took else (None, None)

    def document() -> dict[str, Any]:
        return {
            "schema": SCHEMA, "switch": trial.switch, "took_effect": took, "effect": trial.effect.text,
            "losses": trial.losses.to_json() if took else None, "step": _step_json(trial, speedup) if took else None,
            "profiles": None if change is None else change.to_json(),
        }

    def trees() -> Iterator[RenderableType]:
        lines = [f"it {'took' if took else 'had no'} effect: {trial.effect.text}"]
        if took:
            lines += [*_losses(trial), _step(trial, speedup), *_remarks(trial, change)]
        yield text_view.titled(f"--try {trial.switch}", lines)
        if change is not None:
            folders = f"{trial.before.folder} {trial.after.folder}"
            yield profiles.tree(replace(change, kernels=()), "the profiled steps")
            yield text_view.plain(f"kernels: xlafuse diff {folders}")

    return Outline(document, trees)


def _change(trial: Trial, tolerance: float) -> profiles.ProfileDiff | None:
    opened = [run.source.profile if isinstance(run.source, Source) else None for run in trial.runs]
    before, after = (None if each is None else ProfileView(each, each.ceilings(None)) for each in opened)
    return None if before is None or after is None else profiles.compare(before, after, tolerance)


def _losses(trial: Trial) -> Iterator[str]:
    yield _verdict(trial.losses) if trial.losses.steps else _NO_LOSS
    if trial.losses.agree is False:
        yield "a program without a fixed seed has other losses in each run"
    for run in trial.runs:
        if problem := run.recorded["problem"]:
            yield f"{run.folder.name}: not all was recorded: {printable(problem, 200)}"


def _verdict(losses: LossAgreement) -> str:
    worst = max(losses.steps, key=lambda step: step.error - step.allowed)
    shown = [
        f"step {each.step}: {' → '.join(f'{value:.7g}' for value in each.worst)}, {each.error:.1e} apart, "
        f"{each.allowed:.1e} allowed" for each in dict.fromkeys((losses.steps[0], worst, losses.steps[-1]))
    ]
    word, steps = "agree" if losses.agree else "differ", formats.count(len(losses.steps), "step")
    return f"the losses of {steps} {word}, by the rounding of {losses.dtype}; {'; '.join(shown)}"


def _step(trial: Trial, speedup: Speedup | None) -> str:
    timed = formats.count(min(len(run.step_seconds) for run in trial.runs), "step")
    least = trial.before.facts["steps"][1] + 1 + LEAST_ROUNDS
    if not all(run.step_seconds for run in trial.runs):
        return f"the times of a step are not compared: none was without profiler; a program of {least} steps has enough"
    before, after = (1e6 * statistics.geometric_mean(run.step_seconds) for run in trial.runs)
    ratio = after / before if speedup is None else speedup.ratio
    times = f"a step: {formats.span(before)} → {formats.span(after)}, {ratio:.3f} times as long"
    if speedup is None:
        return (
            f"{times}; no verdict from {timed} without profiler: it needs {LEAST_ROUNDS}, so a program of {least} steps"
        )
    word = _word(trial, speedup) or "no verdict on a CPU, which other programs disturb"
    return f"{times} ({speedup.low:.3f} to {speedup.high:.3f}): {word}; {timed} without profiler"


def _step_json(trial: Trial, speedup: Speedup | None) -> dict[str, Any]:
    times = {f"{run.folder.name}_us": [1e6 * seconds for seconds in run.step_seconds] for run in trial.runs}
    if speedup is None:
        return times
    return {**times, "word": _word(trial, speedup), "ratio": speedup.ratio, "low": speedup.low, "high": speedup.high}


def _word(trial: Trial, speedup: Speedup) -> str | None:
    """Return the verdict. On a CPU there is none: for 16 pairs of equal programs on a busy one, two were wrong."""
    return None if trial.before.on_cpu else speedup.word


def _remarks(trial: Trial, change: profiles.ProfileDiff | None) -> Iterator[str]:
    """Yield why no parts are compared, or that the switch changed no kernel."""
    if change is not None:
        if not change.of("new") and not change.of("gone"):
            yield "the same kernels ran in both"
        return
    for run in trial.runs:
        if "profiled_steps" not in run.facts:
            yield f"{run.folder.name}: {run.facts['message']}"
        elif isinstance(run.source, str) or run.source.profile is None:
            reason = "has no kernels of a GPU" if run.on_cpu else "cannot be read; xlafuse inspect says why"
            yield f"{run.folder.name}: no parts are compared: its profile {reason}"
