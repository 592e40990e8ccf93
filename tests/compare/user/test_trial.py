"""`xlafuse capture --try`: two runs of small programs on the CPU, and the parts of their comparison."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import xlafuse, xlafuse_process
from output_schemas import assert_valid

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.graph.render import text_view
from xlafuse.compare.report.diff import trials
from xlafuse.compare.user import capture, loss_agreement, switch_effect, trial
from xlafuse.compare.user.captured_run import CapturedRun
from xlafuse.compare.user.switches import MEANINGS, Switch

FLAG = "xla:--xla_cpu_enable_fast_math=true"
JAX = """
import os, sys, jax, jax.numpy as jnp
scale = {scale}
def loss_of(w, x):
    q = (x @ w).reshape(2, 8, 2, 8)
    attended = jax.nn.dot_product_attention(q, q, q, is_causal=True{argument})
    return scale * jnp.mean((attended.reshape(2, 8, 16) - x) ** 2)
@jax.jit
def step(w, x):
    loss, gradient = jax.value_and_grad(loss_of)(w, x)
    return w - 0.01 * gradient, loss
w, x = jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (2, 8, 16))
for number in range(12):
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
        w, loss = step(w, x)
"""
PLAIN = JAX.format(scale=1, argument="")
TORCH = """
import sys, torch
import torch.nn.functional as F
torch.manual_seed(0)
weights = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
x = torch.randn(2, 8, 16)
def loss_of(x):
    q = weights(x).reshape(2, 8, 2, 8).transpose(1, 2)
    return ((F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 8, 16) - x) ** 2).mean()
loss_of = {compiled}
for step in range({steps}):
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


def tried(folder: Path, switch: str, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(program)
    words = ("capture", "-o", str(folder / "out"), "--try", switch, *options, "--", sys.executable, str(script))
    return xlafuse_process(*words)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def one_line(text: str) -> str:
    return " ".join(text.translate(str.maketrans("│├└─", "    ")).split())


# Programs


@pytest.mark.slow
def test_a_switch_that_changes_the_loss_is_reported(tmp_path: Path) -> None:
    wrong = JAX.format(scale="1.01 if 'fast_math' in os.environ['XLA_FLAGS'] else 1.0", argument="")
    done = tried(tmp_path, FLAG, wrong, "--steps", "1:3")
    text = one_line(done.stdout)
    assert done.returncode == 1, done.stderr
    assert "it took effect: XLA compiled" in text
    assert "the losses of 10 steps differ, by the rounding of float32; step 0:" in text
    assert "times as long" in text and "steps without profiler" in text
    assert "parts of the model" in text and "jax.nn.dot_product_attention (train.py:6)" in text


@pytest.mark.slow
def test_a_default_of_torch_compile_takes_effect_and_losses_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the argument is taken, and nothing is compiled
    program = TORCH.format(compiled="torch.compile(loss_of)", steps=12)
    done = tried(tmp_path, "compile:reduce-overhead", program, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("done\n") == 2
    found = json.loads(done.stdout)
    assert_valid(found)
    assert (found["took_effect"], found["losses"]["agree"], found["profiles"]) == (True, True, None)
    assert "1 call of torch.compile took it" in found["effect"]
    assert [step["step"] for step in found["losses"]["steps"]] == [0, 1, 2, *range(5, 12)]
    assert len(found["step"]["before_us"]) == 6 and found["step"]["low"] <= found["step"]["ratio"]
    assert found["step"]["word"] is None  # on a CPU
    assert (tmp_path / "out" / trial.AFTER / capture.NAME).exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "program", "code", "message"),
    [
        (FLAG, PLAIN, 0, "the losses of 10 steps agree"),
        ("xla:--xla_cpu_enable_fast_min_max=true", PLAIN, 1, "options are the same without"),  # jax sets it itself
        ("xla:--xla_no_such_flag=1", PLAIN, 2, "with xla:--xla_no_such_flag=1 ended with"),  # XLA ends the process
        ("attention:cudnn", JAX.format(scale=1, argument=", implementation='xla'"), 1, "0 calls of jax.nn.dot_product"),
        ("matmul:tf32", PLAIN, 1, "a CPU, which has no TF32"),
        ("attention:efficient", TORCH.format(compiled="loss_of", steps=12), 1, "_efficient_attention is never called"),
        ("attention:flash", TORCH.format(compiled="loss_of", steps=12), 1, "profiled steps, and 2 without it"),
        ("compile:max-autotune-no-cudagraphs", TORCH.format(compiled="torch.compile(loss_of)", steps=12), 0, "agree"),
        ("compile:reduce-overhead", TORCH.format(compiled="torch.compile(loss_of, mode='default')", steps=7), 1, "0 c"),
    ],
)
def test_each_switch_in_a_program(tmp_path: Path, switch: str, program: str, code: int, message: str) -> None:
    done = tried(tmp_path, switch, program)
    assert done.returncode == code, done.stderr
    assert message in one_line(done.stdout + done.stderr)
    assert ("times as long" in done.stdout) is (code == 0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "the program as it is ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "the program as it is ended with signal 9"),
        ("import os; os._exit(0)", "nothing was recorded"),
        ("pass", "no step ended"),
    ],
)
def test_a_program_that_cannot_be_compared_is_run_once(tmp_path: Path, program: str, message: str) -> None:
    done = tried(tmp_path, "matmul:tf32", program)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1] and "run 2 of 2" not in done.stderr


def test_other_numbers_of_steps_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((5, 6))

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        folder = Path(json.loads(words[2])["folder"])
        capture.write_facts(folder, {"trial": {}, "finished_steps": next(counts)})
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match="5 steps as it is and 6 with matmul:tf32"):
        trial.run("matmul:tf32", tmp_path / "out", (3, 5), ["python", "t.py"], {}, progress=print)


@pytest.mark.parametrize(
    ("framework", "imported", "runs"), [("jax", ("jax", "torch"), 1), (None, ("jax",), 1), ("torch", ("torch",), 2)]
)
def test_a_switch_for_pytorch_in_a_program_of_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str | None, imported: tuple[str, ...], runs: int
) -> None:
    ran = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(words)
        known = {"trial": {"matmul": dict.fromkeys(imported, "highest")}, "finished_steps": 8}
        folder = Path(json.loads(words[2])["folder"])
        capture.write_facts(folder, known | ({"framework": framework} if framework else {}))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    refused = pytest.raises(UsageError, match="a switch for PyTorch, and the program's steps are JAX's")
    with refused if runs == 1 else contextlib.nullcontext():
        trial.run("attention:flash", tmp_path / "out", (3, 5), ["python", "t.py"], {}, progress=print)
    assert len(ran) == runs


# The command


def test_an_unknown_switch_is_reported_before_a_missing_folder() -> None:
    for name, message in (("wrong", "no --try name 'wrong'"), ("xla:wrong", "expected xla:--xla_FLAG=VALUE")):
        done = xlafuse("capture", "--try", name, "--", "python", "t.py")
        assert done.exit_code == 2 and message in done.output and "--out" not in done.output


def test_the_switches_are_listed() -> None:
    done = xlafuse("capture", "--try", "list")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(MEANINGS)
    unknown = xlafuse("capture", "-o", "out", "--try", "attention:cudn", "--", "python", "t.py")
    assert unknown.exit_code == 2 and all(name in unknown.output for name in MEANINGS)


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (("--try", "matmul:tf32", "--", "python", "t.py"), {"RANK": "0", "WORLD_SIZE": "2"}, "one of several ranks"),
        (("--try", "matmul:tf32", "--", "torchrun", "t.py"), {}, "starts Python"),
        (("--try", "xla:xla_flag", "--", "python", "t.py"), {}, "xla:--xla_FLAG=VALUE"),
        (("--json", "--", "python", "t.py"), {}, "only with --try"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], environment: dict[str, str],
    message: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = xlafuse("capture", "-o", tmp_path / "out", *options)
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "out").exists()


# Switches


def called(switch: Switch) -> dict[str, int]:
    return {name: switch.facts()[name] for name in ("used", "kept")}


def test_a_default_is_taken_where_the_program_gives_none() -> None:
    seen: list[Any] = []
    module = ModuleType("jax.nn")

    def dot_product_attention(query: int, key: int, *, implementation: str | None = None) -> None:
        """Attention."""
        seen.append(implementation)

    module.dot_product_attention = dot_product_attention  # type: ignore[attr-defined]
    switch = Switch("attention:cudnn")
    dict(switch.actions())["jax.nn"](module)
    module.dot_product_attention(1, 2)
    module.dot_product_attention(query=1, key=2, implementation=None)
    module.dot_product_attention(1, 2, implementation="xla")
    assert seen == ["cudnn", "cudnn", "xla"] and called(switch) == {"used": 2, "kept": 1}
    assert module.dot_product_attention.__doc__ == "Attention."
    assert module.dot_product_attention.__code__.co_filename == __file__


def test_compile_is_counted_once_as_a_decorator_and_keeps_options_and_backends() -> None:
    seen: list[Any] = []
    module = ModuleType("torch")

    def compile(model: Any = None, *, mode: str | None = None, options: Any = None, backend: str | None = None) -> Any:
        if model is None:
            return lambda model: module.compile(model, mode=mode, options=options, backend=backend)
        seen.append(mode)
        return model

    module.compile = compile  # type: ignore[attr-defined]
    switch = Switch("compile:max-autotune")
    dict(switch.actions())["torch"](module)
    module.compile()(print)
    module.compile(print)
    for own in ({"options": {"a": 1}}, {"backend": "eager"}, {"mode": "default"}):
        module.compile(print, **own)
    assert seen == ["max-autotune"] * 2 + [None, None, "default"] and called(switch) == {"used": 2, "kept": 3}


def test_no_switch_does_nothing() -> None:
    assert Switch("").actions() == [] and Switch(FLAG).actions() == []


# Effects


def captured(folder: Path, facts: dict[str, Any] | None = None, **files: str | bytes) -> CapturedRun:
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return CapturedRun(folder, facts or {})


@pytest.mark.parametrize(
    ("flag", "options", "took", "words"),
    [
        ("--xla_a=true", ("xla_b: 1\n", "xla_b: 1\nxla_a: true\n"), True, "XLA compiled 1 module"),
        ("--xla_a=true", ("xla_dump_to: x\n", "xla_dump_to: y\n"), False, "are the same without it"),
        ("--xla_list=", ("xla_b: 1\n", "xla_b: 1\n"), True, "XLA compiled 1 module"),
        ("--xla_a=true", (None, None), False, "sets XLA_FLAGS itself"),
    ],
)
def test_a_flag_of_xla_is_seen_in_its_dump(
    tmp_path: Path, flag: str, options: tuple[str | None, str | None], took: bool, words: str
) -> None:
    runs = [
        captured(tmp_path / name, **({} if text is None else {"xla__m_dot_debug_options": text}))
        for name, text in zip(("a", "b"), options, strict=True)
    ]
    found = switch_effect.effect(f"xla:{flag}", *runs)
    assert found.took is took and words in found.text


@pytest.mark.parametrize(
    ("calls", "code", "took", "words"),
    [
        ((0, 2), "", True, "2 calls of aten::_scaled_dot_product_cudnn_attention in the profiled steps, and 0 without"),
        ((2, 2), "", False, "and 2 without it"),
        ((0, 0), "torch.ops.aten._scaled_dot_product_cudnn_attention.default(", True, "1 call of"),
        ((0, 0), "", False, "is never called"),
    ],
)
def test_an_sdpa_backend_is_seen_in_the_profile_or_in_compiled_code(
    tmp_path: Path, calls: tuple[int, int], code: str, took: bool, words: str
) -> None:
    operation = "aten::_scaled_dot_product_cudnn_attention"
    event = f'{{"name": "{operation}"}},\n{{"name": "{operation}_backward"}},\n'
    facts = {"trial": {"matmul": {"torch": "highest"}, "used": 0, "kept": 0}}
    runs = [
        captured(
            tmp_path / name, facts, profile__torch_dot_json_dot_gz=gzip.compress((event * count).encode()),
            torch_trace__a_dot_log=code if name == "b" else "",
        )
        for name, count in zip(("a", "b"), calls, strict=True)
    ]
    found = switch_effect.effect("attention:cudnn", *runs)
    assert found.took is took and words in found.text


@pytest.mark.parametrize(
    ("switch", "used", "kept", "took", "words"),
    [
        ("attention:cudnn", 6, 1, True, "6 calls of jax.nn.dot_product_attention took it, and 1 call of"),
        ("attention:cudnn", 0, 2, False, "2 calls of jax.nn.dot_product_attention had another value"),
        ("attention:flash", 0, 0, False, "flash_attention is never called"),
        ("compile:max-autotune", 0, 0, False, "0 calls of torch.compile took it"),
    ],
)
def test_calls_that_took_a_default_are_counted(
    tmp_path: Path, switch: str, used: int, kept: int, took: bool, words: str
) -> None:
    both = {"jax": "None", "torch": "highest"}  # a program of JAX may load its data by torch
    run = captured(tmp_path, {"trial": {"matmul": both, "used": used, "kept": kept}})
    found = switch_effect.effect(switch, run, run)
    assert found.took is took and words in found.text


@pytest.mark.parametrize(
    ("before", "after", "took"),
    [
        ({"torch": "highest"}, {"torch": "high"}, True), ({"torch": "high"}, {"torch": "high"}, False),
        ({"torch": "highest"}, {"torch": "highest"}, False), ({"jax": "None"}, {"jax": "tensorfloat32"}, True),
        ({}, {}, False),
    ],
)
def test_a_precision_that_the_program_sets_itself_is_kept(
    tmp_path: Path, before: dict[str, str], after: dict[str, str], took: bool
) -> None:
    runs = [captured(tmp_path, {"trial": {"matmul": matmul}}) for matmul in (before, after)]
    assert switch_effect.effect("matmul:tf32", *runs).took is took


# Times


def test_a_disturbance_of_several_steps_is_no_verdict(tmp_path: Path) -> None:
    def tried(*seconds: float) -> trial.Trial:
        runs = [captured(tmp_path, {"trial": {"step_seconds": times}}) for times in ([1.0] * 20, list(seconds))]
        return trial.Trial("matmul:tf32", *runs)

    verdicts = [
        found.word if (found := tried(*times).speedup(0.05)) else None
        for times in ([0.8, 0.82] * 10, [1.0] * 14 + [24.0] * 6, [1.0, 1.01] * 10, [0.8] * 4)
    ]
    assert verdicts == ["faster", "unresolved", "tie", None]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ((), "none was without profiler; a program of 11 steps has enough"),
        ((0.5, 0.5), "0.500 times as long; no verdict from 2 steps without profiler: it needs 5, so a program of 11"),
        ((0.5,) * 5, "0.500 times as long (0.500 to 0.500): faster; 5 steps without profiler"),
    ],
)
def test_the_times_of_few_steps_are_shown_without_a_verdict(
    tmp_path: Path, seconds: tuple[float, ...], words: str
) -> None:
    known = {"matmul": {"torch": "high"}, "losses": [], "problem": "", "used": 1, "kept": 0}
    runs = [
        captured(tmp_path / name, {"steps": [3, 5], "message": "", "trial": {**known, "step_seconds": times}})
        for name, times in (("before", [2 * each for each in seconds]), ("after", list(seconds)))
    ]
    outline = trials.outline(trial.Trial("compile:max-autotune", *runs), 0.05)
    assert words in one_line("".join(text_view.render(each, 400) for each in outline.trees()))
    assert_valid(outline.document())


# Losses


def losses(*values: Any, dtype: str = "float32") -> list[dict[str, Any]]:
    return [
        {"step": step, "dtype": dtype, "values": list(value) if isinstance(value, tuple) else [value]}
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("before", "after", "dtypes", "agree"),
    [
        (losses(10.0, 9.0), losses(10.0, 9.0), [], True),
        (losses(10.0), losses(10.00001), [], True),
        (losses(10.0), losses(10.0001), [], False),
        (losses(10.0), losses(10.0001), ["tf32", "float32"], True),
        (losses(10.0), losses(10.03), ["bfloat16", "float32"], True),
        (losses(10.0), losses(10.05), ["bfloat16", "float32"], False),
        (losses(10.0, 9.0), losses(10.0, 9.01), [], True),  # an update precedes the second loss
        (losses(10.0, 9.0), losses(10.0, 9.02), [], False),
        (losses(10.0, 1e-9), losses(10.0, 3e-9), [], True),
        (losses(10.0), losses(math.nan), ["bfloat16"], False),
        (losses(math.nan), losses(math.nan), [], False),
        (losses((1.0, 10.0)), losses((10.0, 1.0)), [], True),  # JAX has no order of live arrays
        (losses((1.0, 1000.0)), losses((1.01, 1000.0)), [], False),  # as a loss and a gradient's norm
        (losses((1.0, 10.0), 9.0), losses(10.0, 9.0), [], True),  # the first step is not compared
        (losses((1.0, 10.0)), losses(10.0), [], None),
        ([], losses(10.0), [], None),
    ],
)
def test_losses_agree_within_rounding(before: Any, after: Any, dtypes: list[str], agree: bool | None) -> None:
    found = loss_agreement.agreement(before, after, dtypes)
    assert found.agree is agree
    json.dumps(found.to_json(), allow_nan=False)


def test_a_loss_in_bfloat16_is_compared_as_such() -> None:
    found = loss_agreement.agreement(losses(10.0, dtype="bfloat16"), losses(10.5, dtype="bfloat16"), ["float32"])
    assert found.agree and found.dtype == "bfloat16"
