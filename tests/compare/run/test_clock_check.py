"""`xlafuse doctor --clock` accepts clocks that agree and names the problem of those that do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from click.testing import CliRunner

from xlafuse.compare.cli.main import cli
from xlafuse.compare.run import clock_check


class Workers:
    """Fake workers: times with 0.3% noise. bias: a clock's relative error by role. blind: no slowdown shows."""

    bias: dict[str, float] = {}
    blind = False

    def __init__(self, *ignored: Any) -> None:
        self.random = random.Random(0)

    def start(self, roles: list[str]) -> None: ...

    def stop(self) -> None: ...

    def ask(self, role: str, method: str, slower: float = 0.0, samples: int = 1) -> Any:
        scale = 1 + self.bias.get(role, 0.0)
        if method == "calibrate":
            return 1e-3 * scale
        slower = 0.0 if self.blind else slower
        return [6e-5 * scale * (1 + slower) * self.random.gauss(1, 0.003) for _ in range(samples)]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_check, "WorkerPool", Workers)
    monkeypatch.setattr(Workers, "bias", {})
    monkeypatch.setattr(Workers, "blind", False)


def test_clocks_that_agree_pass() -> None:
    seen: list[int] = []
    outcome = clock_check.run(40, seen.append)
    assert outcome.problems == [] and seen == list(range(1, 41))
    text = clock_check.as_text(outcome)
    assert "all checks passed" in text and "xla against torch" in text


def test_clocks_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "bias", {"xla": 0.02})
    problems = clock_check.run(20, lambda done: None).problems
    assert "clocks differ by 2.00%" in problems[0]
    assert any(problem.startswith("xla against torch: identical code won or lost in 100%") for problem in problems)


def test_an_undetected_slowdown_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "blind", True)
    assert "found in only 0% of trials" in str(clock_check.run(20, lambda done: None).problems)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--clock"], "needs an NVIDIA GPU"), (["--clock", "--json"], "prints no JSON"),
        (["one", "other"], "go with --clock"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.setattr("xlafuse.compare.base.host.gpu_present", lambda: False)
    result = CliRunner().invoke(cli, ["doctor", *words])
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
