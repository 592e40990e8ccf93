"""Two runs of a user's program: as it is, and with a switch of `switches`."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..base.usage import UsageError, one_of
from ..plan.speedup import LEAST_ROUNDS, Sample, Speedup, compare_runs
from . import capture, capture_command, loss_agreement, switch_effect
from .captured_run import CapturedRun
from .switches import MEANINGS, is_of_pytorch

BEFORE, AFTER = "before", "after"  # folders of the two captures


@dataclass(frozen=True)
class Trial:
    """Both runs of a program, and the switch of the second."""

    switch: str
    before: CapturedRun
    after: CapturedRun

    @property
    def runs(self) -> tuple[CapturedRun, CapturedRun]:
        return self.before, self.after

    @cached_property
    def effect(self) -> switch_effect.Effect:
        return switch_effect.effect(self.switch, self.before, self.after)

    @cached_property
    def losses(self) -> loss_agreement.LossAgreement:
        old, new = (run.recorded["losses"] for run in self.runs)
        tf32 = {loss_agreement.TF32} if self._may_use_tf32 else set()
        return loss_agreement.agreement(old, new, sorted(self.before.dtypes | tf32))

    def speedup(self, tie: float) -> Speedup | None:
        """Return the time of a step after over that before; None for too few steps. tie: what counts as no change.

        A disturbance outlasts a step, so steps are not independent: blocks of consecutive ones are resampled.
        """
        after, before = (
            Sample(times, [LEAST_ROUNDS * at // len(times) for at in range(len(times))])
            for times in (self.after.step_seconds, self.before.step_seconds)
        )
        return compare_runs(after, before, tie)

    @property
    def _may_use_tf32(self) -> bool:
        """True where products of float32 arrays may be in TF32, which is JAX's default on a GPU."""
        matmul = self.before.recorded["matmul"]
        if self.switch == "matmul:tf32" or matmul.get("torch", "highest") != "highest":
            return True
        return not self.before.on_cpu and matmul.get("jax", "highest") not in ("highest", "float32")


def check_name(name: str) -> None:
    """Raise UsageError for a switch that does not exist."""
    if not name.startswith("xla:"):
        one_of("--try name", name, MEANINGS)
    elif not re.fullmatch(r"xla:--xla_\w+=\S*", name):
        raise UsageError(f"--try {name}: expected xla:--xla_FLAG=VALUE")


def run(
    name: str, out: Path, steps: tuple[int, int], words: Sequence[str], environment: Mapping[str, str], *,
    output: int | None = None, progress: Callable[[str], None],
) -> Trial:
    """Run a program without and with a switch. output: a file descriptor for its standard output.

    Raises UsageError where the program cannot be run or compared.
    """
    check_name(name)
    if capture_command.rank_of(environment) is not None:
        raise UsageError("--try compares two runs of one process, and this process is one of several ranks")
    # PyTorch's cache of compiled graphs does not distinguish SDPA's backends.
    environment = {**environment, "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    flags = f"{environment.get('XLA_FLAGS', '')} {name.removeprefix('xla:')}".strip()
    changed = {**environment, "XLA_FLAGS": flags} if name.startswith("xla:") else environment
    plans = [
        capture_command.plan(out / BEFORE, steps, words, environment, switch=""),
        capture_command.plan(out / AFTER, steps, words, changed, switch=name),
    ]
    if not plans[0].profiled:
        raise UsageError(f"--try needs a command that starts Python, such as python train.py; {words[0]} is none")
    for planned in plans:
        capture_command.prepare(planned, words, steps)
    runs: list[CapturedRun] = []
    for number, (planned, which) in enumerate(zip(plans, ("as it is", f"with {name}"), strict=True), 1):
        progress(f"run {number} of 2, the program {which}")
        try:
            done = subprocess.run(planned.command, env=dict(planned.environment), stdout=output)
        except OSError as problem:
            raise UsageError(f"{words[0]}: cannot be started: {problem.strerror}") from None
        if code := done.returncode:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise UsageError(f"the program {which} ended with {how}, so nothing is compared")
        runs.append(_captured(planned.folder))
        if is_of_pytorch(name) and runs[0].is_of_jax:
            raise UsageError(f"--try {name}: a switch for PyTorch, and the program's steps are JAX's; it ran once")
    old, new = (run.facts["finished_steps"] for run in runs)
    if old != new:
        raise UsageError(f"the program made {old} steps as it is and {new} with {name}, so nothing is compared")
    return Trial(name, *runs)


def _captured(folder: Path) -> CapturedRun:
    """Return a run that ended. Raises UsageError where its program made no step."""
    facts = json.loads((folder / capture.NAME).read_text())
    if "trial" not in facts:
        raise UsageError(f"{folder}: the program ended before Python did, as by os._exit, so nothing was recorded")
    if not facts["finished_steps"]:
        raise UsageError(facts["message"])
    return CapturedRun(folder, facts)
