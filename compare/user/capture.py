"""A profile of some steps of a program, taken inside its process. Two uses:

    with xlafuse.capture("folder"):     # in a program: the profiler runs while the block does
        step()

    python capture.py '{"folder": "run", "steps": [3, 5]}' train.py ...    # made by `xlafuse capture`

`xlafuse capture` runs this file by its path in the program's own interpreter, which may lack xlafuse. So the file
imports the standard library, and a framework only after the program did.

Two events end a step: the end of `torch.optim.Optimizer.step`, and that of a `jax.profiler.StepTraceAnnotation`. Until
the profiler starts, the only additional work is one function call a step.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .step_record import StepRecord

SCHEMA = "xlafuse.capture/1"
NAME = "capture.json"
PROFILE, SOURCES = "profile", "sources"  # folders in a capture's folder: of profiles, of the program's own files
LIBRARIES = "site-packages"  # below SOURCES
MOST_SOURCES, MOST_SOURCE_BYTES = 500, 1 << 20
FRAMEWORKS = ("jax", "torch")
_NO_MODEL = {"functorch", "jax", "jaxlib", "numpy", "torch", "triton", "xlafuse"}
_COMPILED = re.compile(r"# File: (/[^:]*-packages/(?!torch/)[^:]*\.py):\d")


class Profiler(Protocol):
    """A framework's profiler. `prepare` is called one step before `start`, `mark` where a profiled step begins.

    wait: waits until the device is idle.
    """

    def prepare(self) -> None: ...

    def start(self) -> None: ...

    def mark(self, step: int) -> None: ...

    def stop(self) -> None: ...

    def wait(self) -> None: ...

    def device(self) -> str: ...


class TorchProfiler:
    """torch.profiler, without shapes and stacks. Its trace is written as Chrome trace events."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._torch = torch
        self._folder = folder
        self._on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(
            activities=[activity.CPU, *([activity.CUDA] if self._on_gpu else [])], acc_events=True
        )
        self._step: Any = None

    def prepare(self) -> None:
        self._profile.prepare_trace()

    def start(self) -> None:
        self.wait()
        self._profile.start_trace()

    def mark(self, step: int) -> None:
        self._end_step()
        self._step = self._torch.profiler.record_function(f"ProfilerStep#{step}")
        self._step.__enter__()

    def stop(self) -> None:
        self.wait()
        self._end_step()
        self._profile.stop_trace()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self._folder / "torch.json.gz"))

    def device(self) -> str:
        return str(self._torch.cuda.get_device_name()) if self._on_gpu else "cpu"

    def wait(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None


class JaxProfiler:
    """jax.profiler, without its tracer of Python functions. Its folder holds `*.xplane.pb`."""

    def __init__(self, folder: Path) -> None:
        import jax

        self._jax = jax
        self._folder = folder

    def prepare(self) -> None:
        pass

    def start(self) -> None:
        self.wait()
        options = self._jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it slows every Python call down
        self._jax.profiler.start_trace(str(self._folder), profiler_options=options)

    def mark(self, step: int) -> None:
        pass  # jax.profiler.StepTraceAnnotation is in the profile already

    def stop(self) -> None:
        self.wait()
        self._jax.profiler.stop_trace()

    def device(self) -> str:
        first = self._jax.local_devices()[0]
        return "cpu" if first.platform == "cpu" else str(first.device_kind)

    def wait(self) -> None:
        """Wait for the device by waiting for every array that a program can still see."""
        for array in self._jax.live_arrays():
            if not array.is_deleted():
                array.block_until_ready()


def _profiler(framework: str, folder: Path) -> Profiler:
    return TorchProfiler(folder) if framework == "torch" else JaxProfiler(folder)


@contextlib.contextmanager
def capture(folder: str | os.PathLike[str], *, framework: str | None = None) -> Iterator[None]:
    """Profile a block of a program into a folder that `xlafuse inspect` opens.

    framework: "jax" or "torch"; by default the one that the program has imported. Raises ValueError where it imported
    none or both, and FileExistsError for a folder that is not empty. The files of a compiler are not in this folder,
    except the HLO of programs that jax ran; `xlafuse capture` has them, too.
    """
    path = Path(folder)
    if path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; name a new folder")
    if framework is None:
        imported = [name for name in FRAMEWORKS if name in sys.modules]
        if len(imported) != 1:
            found = "both jax and torch are" if imported else "neither jax nor torch is"
            raise ValueError(f"{found} imported; say framework='jax' or framework='torch'")
        framework = imported[0]
    elif framework not in FRAMEWORKS:
        raise ValueError(f"framework is 'jax' or 'torch', not {framework!r}")
    profiler = _profiler(framework, path / PROFILE)
    profiler.prepare()
    profiler.start()
    try:
        yield
    finally:
        profiler.stop()
        write_facts(path, {"framework": framework, "device": profiler.device(), "versions": _versions()})
        keep_sources(path, os.getcwd())


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write what is known of a capture, with what is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    known = json.loads(file.read_text()) if file.exists() else {"schema": SCHEMA}
    new = file.with_name(f"{NAME}.new")
    new.write_text(json.dumps({**known, **facts}, indent=1) + "\n")
    new.replace(file)


def keep_sources(folder: Path, root: str, script: str = "") -> None:
    """Copy the files that the model is written in below `sources`, from which a reader names the calls of the program.

    They are the script and the imported modules, those below its folder and below `root`, where the program began,
    first; without Python's own, installed packages and frameworks. A copy has the name that code objects have:
    "train.py" as it was given, or an absolute path without its first slash. Below `sources/site-packages` are the files
    of installed packages that torch.compile has compiled code of.
    """
    script = script or getattr(sys.modules.get("__main__"), "__file__", None) or ""
    near = (f"{root}/", f"{os.path.dirname(os.path.join(root, script))}/")
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _NO_MODEL]
    names = [script, *(getattr(module, "__file__", None) or "" for module in modules)]
    files = {name: os.path.join(root, name) for name in names if name.endswith(".py")}
    own = {
        name: path for name, path in files.items()
        if "-packages/" not in path and not path.startswith((f"{os.path.dirname(os.__file__)}/", __file__))
    }
    copies = {name.lstrip("/"): own[name] for name in sorted(own, key=lambda name: not own[name].startswith(near))}
    copies |= {f"{LIBRARIES}/{path.rpartition('-packages/')[2]}": path for path in sorted(_compiled_libraries())}
    for name, path in list(copies.items())[:MOST_SOURCES]:
        copy = folder / SOURCES / name
        with contextlib.suppress(OSError):  # a file that is gone has no names to give
            if ".." not in copy.parts and os.path.getsize(path) <= MOST_SOURCE_BYTES:
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(Path(path).read_bytes())


def _compiled_libraries() -> set[str]:
    """Return the files of installed packages, except torch, that the log of this process's torch.compile names."""
    logs = list(Path(os.environ["TORCH_TRACE"]).glob("*.log")) if os.environ.get("TORCH_TRACE") else []
    found: set[str] = set()
    for log in logs:
        with contextlib.suppress(OSError), log.open(errors="replace") as lines:
            found.update(match[1] for line in lines if (match := _COMPILED.search(line)))
    return found


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "jaxlib", "torch", "triton"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


# The program that `xlafuse capture` runs.


class Steps:
    """The count of a program's steps, and the profiler that runs from step `first` until before step `last`.

    Steps are counted from 0. Only the framework that ends the first step is counted. record: of losses and times.
    """

    def __init__(self, folder: Path, first: int, last: int, record: StepRecord | None = None) -> None:
        self._folder = folder
        self._first, self._last = first, last
        self._framework = ""
        self._profiler: Profiler | None = None
        self._running = False
        self._failure = ""
        self._record = record
        self._begun = False
        self.finished = 0

    def begin(self) -> None:
        """Take note of the beginning of a step of JAX."""
        self._begun = True
        if self._record is not None:
            self._record.begin()

    def end(self, framework: str) -> None:
        """Take note of the end of a step."""
        if self.finished == 0:
            self._framework = framework
        if framework != self._framework:
            return
        if self._record is not None:
            self._record.end(framework, None if self._profiler is None else self._profiler.wait)
        self.finished += 1
        if self.finished > self._last or self._failure:
            return
        with self._program_goes_on():
            if self.finished == max(1, self._first - 1):
                self._profiler = _profiler(framework, self._folder / PROFILE)
                self._profiler.prepare()
            if self.finished == self._first and self._profiler is not None:
                self._profiler.start()
                self._running = True
            if self.finished == self._last:
                self._stop()
            elif self._running and self._profiler is not None:
                self._profiler.mark(self.finished)

    @contextlib.contextmanager
    def _program_goes_on(self) -> Iterator[None]:
        """Keep a profiler's error for the report: it must not end the program."""
        try:
            yield
        except Exception as problem:
            self._failure = f"{type(problem).__name__}: {problem}"

    def close(self) -> None:
        """End a profile that the program's end cut short; write what was captured."""
        profiled = self._running or self.finished >= self._last
        last = min(self.finished + self._running, self._last)
        if self._running:
            with self._program_goes_on():
                self._stop()
        facts: dict[str, Any] = {"versions": _versions(), "finished_steps": self.finished}
        if self._failure:
            message = f"nothing was profiled: the profiler failed: {self._failure}"
        elif profiled and self._profiler is not None:
            facts |= {
                "framework": self._framework, "device": self._profiler.device(), "profiled_steps": [self._first, last],
            }
            message = f"profiled steps {self._first} to {last - 1}"
            if last - 1 <= self._first:
                message = f"profiled step {self._first}"
        elif self.finished or self._begun:
            where = f"after {self.finished} step{'s' * (self.finished > 1)}" if self.finished else "in step 0"
            message = f"nothing was profiled: the program ended {where}, before step {self._first}"
        else:
            message = (
                "nothing was profiled: no step ended; a step is a torch.optim.Optimizer.step or a "
                "jax.profiler.StepTraceAnnotation, and `with xlafuse.capture(folder):` needs neither"
            )
        write_facts(self._folder, {**facts, "message": message})
        print(f"xlafuse capture: {message}; xlafuse inspect {self._folder}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        self._running = False
        if self._profiler is not None:
            self._profiler.stop()


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls actions with a module after its import. actions: each with the module's name."""

    def __init__(self, actions: Iterable[tuple[str, Callable[[ModuleType], None]]]) -> None:
        self._actions: dict[str, list[Callable[[ModuleType], None]]] = {}
        for name, action in actions:
            self._actions.setdefault(name, []).append(action)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._actions:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return found
        actions, execute = self._actions.pop(name), found.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            for action in actions:
                action(module)

        found.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return found


def count_optimizer_steps(module: ModuleType, steps: Steps) -> None:
    """Count steps of every optimizer. module: torch.optim.optimizer."""
    module.register_optimizer_step_post_hook(lambda *_: steps.end("torch"))


def count_step_annotations(module: ModuleType, steps: Steps) -> None:
    """Count the ends of step annotations. A step that an exception ends is none. module: jax.profiler."""

    class StepTraceAnnotation(module.StepTraceAnnotation):  # type: ignore[name-defined]
        def __enter__(self) -> Any:
            steps.begin()
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            found = super().__exit__(*error)
            if error[0] is None:
                steps.end("jax")
            return found

    module.StepTraceAnnotation = StepTraceAnnotation  # type: ignore[attr-defined]


def main(settings: str, program: list[str]) -> None:
    """Run a program: ["train.py", ...], ["-m", "package.module", ...] or ["-c", "code", ...]."""
    options = json.loads(settings)
    folder, (first, last) = Path(options["folder"]), options["steps"]
    switch = record = None
    actions: list[tuple[str, Callable[[ModuleType], None]]] = []
    if "try" in options:
        record = _beside("step_record").StepRecord(first, last)
        switch = _beside("switches").Switch(options["try"])
        actions = record.actions() + switch.actions()
    steps = Steps(folder, first, last, record)
    compile_times = _beside("compile_times").CompileTimes()
    sys.meta_path.insert(0, AfterImport([
        ("torch.optim.optimizer", lambda module: count_optimizer_steps(module, steps)),
        ("jax.profiler", lambda module: count_step_annotations(module, steps)), *compile_times.actions(), *actions,
    ]))
    root, kind = os.getcwd(), program[0] if program[0] in ("-m", "-c") else ""
    if not sys.flags.safe_path:  # sys.path[0] is this file's folder; python would have put the program's own there
        sys.path[0] = {"-m": os.getcwd(), "-c": ""}.get(kind, str(Path(program[0]).resolve().parent))
    try:
        if kind == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *program[2:]]
            exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    finally:
        steps.close()
        write_facts(folder, {"compile_s": compile_times.seconds})
        keep_sources(folder, root, "" if kind else program[0])
        if record is not None and switch is not None:
            write_facts(folder, {"trial": record.facts() | switch.facts()})


def _beside(name: str) -> ModuleType:
    """Return a module of this folder, which is no package where this file is run by its path."""
    spec = importlib.util.spec_from_file_location(f"xlafuse_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
