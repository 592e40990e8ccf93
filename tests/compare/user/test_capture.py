"""`xlafuse capture` and `xlafuse.capture` around small programs on the CPU, each in processes of its own."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from xlafuse.compare.base.usage import UsageError
from xlafuse.compare.model.places import Place, sources_beside
from xlafuse.compare.profiles.files import compile_seconds
from xlafuse.compare.user import capture, capture_command

PROJECT = Path(__file__).resolve().parents[3]
TORCH = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("done", sys.argv[1:], __name__)
sys.exit(7)
"""
JAX = """
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sin(x) @ x)
x = jnp.ones((8, 8))
for number in range(6):
    with jax.profiler.StepTraceAnnotation("train", step_num=number):
        x = step(x)
"""
BLOCK = """
import sys, jax, jax.numpy as jnp, xlafuse
with xlafuse.capture(sys.argv[1]):
    jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()
"""


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=PROJECT, capture_output=True, text=True, timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROJECT), **environment},
    )


def captured(folder: Path, program: str, *words: str, steps: str = "2:4") -> subprocess.CompletedProcess[str]:
    script = folder.parent / f"{folder.name}.py"
    script.write_text(program)
    return run("-m", "xlafuse", "capture", "-o", folder, "--steps", steps, "--", sys.executable, script, *words)


def facts(folder: Path) -> Mapping[str, object]:
    return json.loads((folder / capture.NAME).read_text())


@pytest.mark.slow
def test_steps_of_an_optimizer_are_profiled(tmp_path: Path) -> None:
    done = captured(tmp_path / "run", TORCH, "5", "--flag")
    assert done.returncode == 7
    assert done.stdout == "done ['5', '--flag'] __main__\n"
    assert "profiled steps 2 to 3" in done.stderr
    known = facts(tmp_path / "run")
    assert (known["framework"], known["device"], known["profiled_steps"]) == ("torch", "cpu", [2, 4])
    assert known["finished_steps"] == 5
    with gzip.open(tmp_path / "run" / "profile" / "torch.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "aten::addmm"} <= names
    assert not names & {"ProfilerStep#1", "ProfilerStep#4"}


@pytest.mark.slow
def test_a_program_that_ends_within_the_window_keeps_its_profile(tmp_path: Path) -> None:
    captured(tmp_path / "run", TORCH, "3", steps="1:9")
    assert facts(tmp_path / "run")["profiled_steps"] == [1, 4]
    assert (tmp_path / "run" / "profile" / "torch.json.gz").exists()


@pytest.mark.slow
def test_step_annotations_of_jax_are_profiled_and_modules_are_dumped(tmp_path: Path) -> None:
    done = captured(tmp_path / "run", JAX)
    assert done.returncode == 0, done.stderr
    known = facts(tmp_path / "run")
    assert (known["framework"], known["profiled_steps"], known["finished_steps"]) == ("jax", [2, 4], 6)
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    assert list((tmp_path / "run" / "xla").glob("*after_optimizations.txt"))
    assert any("<lambda>" in name and seconds > 0 for name, seconds in compile_seconds(tmp_path / "run").items())
    shown = json.loads(run("-m", "xlafuse", "inspect", tmp_path / "run", "--json").stdout)
    assert shown["compile_s"] == compile_seconds(tmp_path / "run")


@pytest.mark.slow
def test_each_compilation_of_torch_has_its_time(tmp_path: Path) -> None:
    compiled = 'torch.compile(model, backend="eager", dynamic=False)(torch.ones(2 + (step > 1), 4))'
    compiling = TORCH.replace("model(torch.ones(2, 4))", compiled)
    captured(tmp_path / "run", compiling, "5")
    found = compile_seconds(tmp_path / "run")
    assert list(found) == ["torch.compile 0/0", "torch.compile 0/1"] and min(found.values()) > 0


@pytest.mark.parametrize(
    ("finished", "message"), [(0, "in step 0, before step 3"), (1, "after 1 step, before"), (3, "profiled step 3")]
)
def test_a_step_that_an_exception_ends_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: int, message: str
) -> None:
    class Annotation(contextlib.AbstractContextManager[None]):
        def __exit__(self, *error: object) -> None: ...

    module = ModuleType("jax.profiler")
    module.StepTraceAnnotation = Annotation  # type: ignore[attr-defined]
    monkeypatch.setattr(capture, "_profiler", lambda *_: WorkingProfiler())
    counted = capture.Steps(tmp_path / "run", 3, 5)
    capture.count_step_annotations(module, counted)
    for _ in range(finished):
        with module.StepTraceAnnotation():
            pass
    with pytest.raises(ValueError, match="crash"), module.StepTraceAnnotation():
        raise ValueError("crash")
    counted.close()
    known = facts(tmp_path / "run")
    assert known["finished_steps"] == finished and message in str(known["message"])


@pytest.mark.slow
def test_a_block_is_profiled(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(BLOCK)
    done = run(script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert facts(tmp_path / "run")["framework"] == "jax"
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    with pytest.raises(FileExistsError), capture.capture(tmp_path / "run", framework="jax"):
        pass


class WorkingProfiler:
    def prepare(self) -> None: ...

    def start(self) -> None: ...

    def mark(self, step: int) -> None: ...

    def stop(self) -> None: ...

    def wait(self) -> None: ...

    def device(self) -> str:
        return "cpu"


class FailingProfiler:
    def prepare(self) -> None: ...

    def start(self) -> None:
        raise RuntimeError("no CUPTI")


@pytest.mark.parametrize(
    ("first", "steps", "message"),
    [
        (1, 4, "the profiler failed: RuntimeError: no CUPTI"), (3, 2, "the program ended after 2 steps, before step 3"),
        (1, 0, "no step ended; a step is a torch.optim.Optimizer.step or"),
    ],
)
def test_a_program_of_which_nothing_is_profiled_goes_on_and_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    first: int, steps: int, message: str,
) -> None:
    monkeypatch.setattr(capture, "_profiler", lambda *_: FailingProfiler())
    counted = capture.Steps(tmp_path / "run", first, 5)
    for _ in range(steps):
        counted.end("torch")
    counted.close()
    assert f"nothing was profiled: {message}" in capsys.readouterr().err
    known = facts(tmp_path / "run")
    assert message in str(known["message"]) and known["finished_steps"] == steps and "profiled_steps" not in known


def test_a_block_needs_one_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in capture.FRAMEWORKS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError, match="neither jax nor torch is imported"), capture.capture(tmp_path / "run"):
        pass
    with pytest.raises(ValueError, match="not 'numpy'"), capture.capture(tmp_path / "run", framework="numpy"):
        pass


def planned(*words: str, **environment: str) -> capture_command.Planned:
    return capture_command.plan(Path("/captures/run"), (3, 5), words, environment)


@pytest.mark.parametrize("words, at", [
    (("python", "train.py", "-m"), 1),
    (("/usr/bin/python3.12", "-u", "-X", "dev", "-Wignore", "train.py"), 5),
    (("python3", "-m", "package.train", "--x"), 1),
    (("python", "-c", "pass"), 1),
])
def test_the_profiler_is_put_before_the_program(words: tuple[str, ...], at: int) -> None:
    made = planned(*words)
    assert made.profiled
    launched = list(made.command)
    assert launched[at] == capture.__file__
    assert json.loads(launched[at + 1]) == {"folder": "/captures/run", "steps": [3, 5]}
    del launched[at : at + 2]
    assert tuple(launched) == words


@pytest.mark.parametrize("words", [("./train.sh",), ("torchrun", "train.py"), ("python",), ("python", "-m"),
                                   ("python", "-"), ("pythonista", "train.py")])
def test_other_commands_get_the_environment_only(words: tuple[str, ...]) -> None:
    made = planned(*words)
    assert not made.profiled
    assert made.command == words
    assert made.environment["TORCH_TRACE"] == "/captures/run/torch_trace"
    assert made.environment["INDUCTOR_PROVENANCE"] == "1"


def test_flags_of_the_user_come_first() -> None:
    flags = planned("python", "train.py", XLA_FLAGS="--xla_gpu_autotune_level=0").environment["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_autotune_level=0"
    assert "--xla_dump_to=/captures/run/xla" in flags
    assert "--xla_dump_hlo_as_text=true" in flags


def test_programs_do_not_come_from_a_cache_which_has_no_operations() -> None:
    names = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE", "JAX_ENABLE_COMPILATION_CACHE")
    off = planned("python", "train.py").environment
    assert [off[name] for name in names] == ["0", "0", "false"]
    kept = planned("python", "train.py", **dict.fromkeys(names, "1")).environment
    assert [kept[name] for name in names] == ["1", "1", "1"]


def test_each_of_several_ranks_has_a_folder() -> None:
    assert planned("python", "t.py", RANK="1", WORLD_SIZE="2").folder == Path("/captures/run/rank1")
    assert planned("python", "t.py", RANK="0", WORLD_SIZE="1").folder == Path("/captures/run")
    assert planned("python", "t.py", SLURM_PROCID="0", SLURM_NTASKS="4").folder == Path("/captures/run/rank0")


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = capture_command.plan(tmp_path, (3, 5), ["python", "t.py"], {})
    with pytest.raises(UsageError, match="not empty"):
        capture_command.prepare(made, ["python", "t.py"], (3, 5))


@pytest.mark.parametrize("text", ["3", "5:3", "0:2", "3:3", "a:b", "-1:2", ""])
def test_steps_are_checked(text: str) -> None:
    with pytest.raises(UsageError, match="FIRST:END"):
        capture_command.parse_steps(text)
    assert capture_command.parse_steps("3:5") == (3, 5)


def test_a_capture_has_the_programs_own_files_as_they_were(tmp_path: Path) -> None:
    """The script by the name it was given, and its modules, without installed packages."""
    (tmp_path / "layers.py").write_text("def layer(x):\n    return x\n")
    program = f"import sys, os\nsys.path.insert(0, {str(tmp_path)!r})\nimport layers\n{JAX}\nos.chdir('/')\n"
    assert captured(tmp_path / "run", program).returncode == 0
    (tmp_path / "run.py").write_text("changed\n")
    sources = tmp_path / "run" / capture.SOURCES
    kept = {str(path.relative_to(sources)) for path in sources.rglob("*.py")}
    inside = str(tmp_path).lstrip("/")
    assert kept >= {f"{inside}/run.py", f"{inside}/layers.py"} and not [name for name in kept if "-packages/" in name]
    assert (sources / inside / "run.py").read_text() == program
    assert not [name for name in kept if "/compare/" in name or "python3." in name]


def test_a_capture_has_the_files_of_a_library_that_were_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models/bert.py", "models/other.py"):
        (tmp_path / "site-packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site-packages" / name).write_text("class Layer:\n    def forward(self, x):\n        return x\n")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank_0.log").write_text(
        "".join(f"\t# File: {tmp_path}/site-packages/{name}:3 in forward, code: return x\n"
                for name in ("models/bert.py", "torch/nn/functional.py", "models/gone.py"))
    )
    monkeypatch.setenv("TORCH_TRACE", str(tmp_path / "trace"))
    capture.keep_sources(tmp_path / "run", str(tmp_path), "train.py")
    libraries = tmp_path / "run" / capture.SOURCES / capture.LIBRARIES
    assert [str(path.relative_to(libraries)) for path in libraries.rglob("*.py")] == ["models/bert.py"]
    place = Place("models/bert.py", 3, "forward")
    found = sources_beside(tmp_path / "run")
    assert found.label(place) == "Layer.forward" and "models/bert.py" not in found.own_files
