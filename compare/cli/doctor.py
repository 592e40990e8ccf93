"""What this machine can run, what is missing, and the command that installs it.

Asks package metadata, in the interpreters that the workers would run in; imports no framework.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from triton_side import versions as torch_versions
from xlafuse import versions as jax_versions

from .. import targets
from ..base.host import distribution, gpu_present, interpreter_problem, lacks
from ..spec.blocks import BLOCKS, requirements
from ..workers.client import PROJECT, interpreter

PYTHON = (3, 11)
REPLAY = ((3, 12), "0.11.2")  # Python and jax that recorded the target's autotuning results
# TorchInductor for a GPU that is not there reaches into torch, so it takes known builds alone.
DEVICELESS_TORCH = tuple(
    f"{release}+{'cu' + cuda.replace('.', '') if cuda else 'cpu'}" for release, cuda in torch_versions.TORCH_BUILDS
)
PYPI_CUDA = "+cu130"  # the build behind a version without a suffix: PyPI's of these releases


@dataclass(frozen=True)
class Package:
    """A distribution and the versions that work: at least `low`, below `high`, compared by their first two numbers."""

    name: str
    low: tuple[int, ...]
    high: tuple[int, ...] | None = None

    @property
    def requirement(self) -> str:
        upper = "" if self.high is None else f",<{self.high[0]}.{self.high[1]}"
        return f"{self.name}>={self.low[0]}.{self.low[1]}{upper}"

    def problem(self, version: str | None) -> str | None:
        if version is None:
            return f"{self.name} is not installed"
        number = _numbers(version)
        if number < self.low or (self.high is not None and number >= self.high):
            return f"{self.name} {version} is outside {self.requirement.removeprefix(self.name)}"
        return None


def _tested(name: str, versions: Iterable[str]) -> Package:
    """The package from the oldest of these series on, up to the newest of them."""
    series = sorted(map(_numbers, versions))
    major, minor = series[-1]
    return Package(name, series[0], (major, minor + 1))


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: "2.11.0+cu130" is (2, 11)."""
    numbers = []
    for word in version.partition("+")[0].split(".")[:2]:
        digits = word[: next((i for i, c in enumerate(word) if not c.isdigit()), len(word))]
        numbers.append(int(digits or 0))
    return tuple(numbers)


TORCH = _tested("torch", (release for release, _ in torch_versions.TORCH_BUILDS))
TRITON = _tested("triton", torch_versions.TRITON)
XLA_PACKAGES = tuple(_tested(name, jax_versions.JAX) for name in ("jax", "jaxlib", "jax-cuda13-pjrt"))
XLA_GPU_PACKAGES = (*XLA_PACKAGES, _tested("jax-cuda13-plugin", jax_versions.JAX))
CUDA_PACKAGES = (
    Package("cuda-core", (0, 3)), Package("cuda-bindings", (13, 0)), Package("nvidia-cuda-nvrtc", (13, 0)),
)
CUPTI = Package("cupti-python", (13, 0))
SHOWN = {
    "xla": (*(p.name for p in XLA_GPU_PACKAGES), "flax", "cupti-python"),
    "torch": (
        "torch", "triton", "numpy", *(p.name for p in CUDA_PACKAGES), "nvidia-cuda-runtime", "cupti-python",
        "nvidia-ml-py",
    ),
}


@dataclass(frozen=True)
class Interpreter:
    """The Python of a side's workers and the packages in it; `problem` where it does not start."""

    path: str
    python: str | None
    packages: dict[str, str | None]
    cuda_tools: bool
    problem: str | None = None


@dataclass(frozen=True)
class Machine:
    gpu: bool
    gpus: list[str]
    cuda_driver: str | None
    compiler: str | None


@dataclass(frozen=True)
class Verdict:
    """What becomes of a group of implementations here. `verdict` begins with "not here" where nothing does."""

    group: str
    implementations: list[str]
    verdict: str
    command: str | None = None

    @property
    def runs(self) -> bool:
        return not self.verdict.startswith("not here")


@dataclass(frozen=True)
class Diagnosis:
    machine: Machine
    interpreters: dict[str, Interpreter]
    verdicts: list[Verdict]
    remarks: list[str] = field(default_factory=list)

    @property
    def anything_runs(self) -> bool:
        return any(verdict.runs for verdict in self.verdicts)


def examine() -> Diagnosis:
    """Look at this machine and at the interpreters of both sides."""
    machine = Machine(gpu_present(), _gpus(), _cuda_driver(), shutil.which("g++"))
    interpreters = {side: probe(interpreter(side), (*SHOWN[side], *optional(side))) for side in SHOWN}
    return Diagnosis(machine, interpreters, judge(machine, interpreters), remarks(machine, interpreters))


def optional(side: str) -> tuple[str, ...]:
    """The packages that single implementations of this side need, by name."""
    return tuple(map(distribution, requirements(side)))


def probe(path: str, packages: tuple[str, ...]) -> Interpreter:
    """Ask a Python which packages it has, through their metadata."""
    try:
        process = subprocess.run(
            [path, "-c", _PROBE, str(PROJECT), *packages], capture_output=True, text=True, timeout=60, check=True
        )
        return Interpreter(path=path, **json.loads(process.stdout))
    except subprocess.CalledProcessError as problem:
        reason = problem.stderr.strip().splitlines()[-1:] or [f"exit code {problem.returncode}"]
        return Interpreter(path, None, dict.fromkeys(packages), False, reason[0])
    except (OSError, ValueError, subprocess.TimeoutExpired) as problem:
        return Interpreter(path, None, dict.fromkeys(packages), False, str(problem))


_PROBE = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
sys.path.insert(0, sys.argv[1])
def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
cuda_tools = False
if sys.version_info >= (3, 11):
    from xlafuse.compile.environment import find_cuda_tools
    cuda_tools = find_cuda_tools() is not None
packages = {name: found(name) for name in sys.argv[2:]}
print(json.dumps({"python": platform.python_version(), "packages": packages, "cuda_tools": cuda_tools}))
"""


def judge(machine: Machine, interpreters: Mapping[str, Interpreter]) -> list[Verdict]:
    """A verdict for each group of implementations that need the same things."""
    return [_verdict(group, names, machine, interpreters) for group, names in _groups().items()]


@dataclass(frozen=True)
class _Needs:
    """What tells groups of implementations apart. compiler: its first word, but for those in LABELS; packages: the
    requirements of single implementations."""

    compiler: str
    gpu: bool
    packages: tuple[str, ...]


def remarks(machine: Machine, interpreters: Mapping[str, Interpreter]) -> list[str]:
    xla, result = interpreters["xla"], []
    jax = xla.packages.get("jax")
    if not machine.gpu and xla.python and (_numbers(xla.python) < REPLAY[0] or jax != REPLAY[1]):
        result.append(
            f"XLA's recorded choices on the {targets.DEFAULT} are replayed only by Python >= 3.12 with jax {REPLAY[1]} "
            f"in the XLA worker (here: Python {xla.python}, jax {jax}). Without them kernels around matrix products "
            "are \"not autotuned\". Point XLAFUSE_XLA_PYTHON at such a Python: "
            f'python3.12 -m venv xla && xla/bin/pip install "jax=={REPLAY[1]}" "jax-cuda13-pjrt=={REPLAY[1]}" '
            f'"{TRITON.requirement}" numpy'
        )
    if not machine.gpu and (problem := interpreter_problem(interpreters["torch"].packages)):
        result.append(f"Triton's kernels are compiled, and not checked here: {problem}")
    if machine.gpus and not machine.gpu:
        result.append("nvidia-smi lists a GPU but CUDA sees none: look at CUDA_VISIBLE_DEVICES and the driver")
    return result


def _groups() -> dict[_Needs, list[str]]:
    """Names of implementations by what they need."""
    groups: dict[_Needs, list[str]] = {}
    for block in BLOCKS.values():
        for i in block.implementations:
            # xla-unfused is XLA all the same
            compiler = i.compiler if i.compiler in LABELS else i.compiler.partition("-")[0]
            key = _Needs(compiler, i.needs_gpu is not None, i.requires)
            if i.name not in groups.setdefault(key, []):
                groups[key].append(i.name)
    return groups


LABELS = {
    "xla": "XLA", "eager": "PyTorch", "flex": "FlexAttention", "inductor": "TorchInductor", "triton": "Triton",
    "triton-library": "Triton", "cuda": "raw CUDA C++", "xla-triton": "XLA with hand-written Triton",
}
WITHOUT_GPU = {
    "xla": f"compiles for {targets.DEFAULT}, checked on the CPU",
    "xla-triton": f"compiles for {targets.DEFAULT}, not checked: the kernels run on a GPU alone",
    "inductor": f"compiles for {targets.DEFAULT}, checked on the CPU",
    "triton": f"compiles for {targets.DEFAULT}, checked on the CPU (by Triton's interpreter)",
    "cuda": f"compiles for {targets.DEFAULT}, not checked: raw CUDA runs on a GPU alone",
    "triton-library": f"compiles for {targets.DEFAULT}, not checked: its kernels run on a GPU alone",
    "eager": "checked on the CPU; its kernels come prebuilt, so nothing is compiled",
}
UNCHECKED = ("xla-unfused", "inductor-max")  # of those that are checked on the CPU


def _verdict(
    group: _Needs, names: list[str], machine: Machine, interpreters: Mapping[str, Interpreter]
) -> Verdict:
    compiler = group.compiler
    # After == is what was tested, and any will do; >= is asked for.
    packages = " and ".join(r if ">=" in r else distribution(r) for r in group.packages)
    label = LABELS[compiler] + (f", with {packages}" if packages else "") + (", GPU only" if group.gpu else "")
    if group.gpu and not machine.gpu:
        return Verdict(label, names, "not here: needs an NVIDIA GPU, and none is visible")
    problems, commands = _problems(compiler, machine, interpreters)
    side = interpreters["xla" if compiler.startswith("xla") else "torch"]
    absent = {r: lack for r in group.packages if (lack := lacks(r, side.packages.get(distribution(r))))}
    if absent:
        problems += absent.values()
        commands.append(_pip(side, [_bounded(r) for r in absent]))
    if problems:
        reasons = "; ".join(dict.fromkeys(problems))
        return Verdict(label, names, f"not here: {reasons}", " && ".join(commands) or None)
    if not machine.gpu:
        unchecked = " and ".join(name for name in names if name in UNCHECKED)
        return Verdict(label, names, WITHOUT_GPU[compiler] + (f" ({unchecked}: compiled only)" if unchecked else ""))
    if problem := CUPTI.problem(side.packages.get(CUPTI.name)):
        command = _pip(side, [_cupti_pin(machine)])
        return Verdict(label, names, f"runs here, device time not measured: {problem}", command)
    return Verdict(label, names, "runs and is timed here")


def _problems(
    compiler: str, machine: Machine, interpreters: Mapping[str, Interpreter]
) -> tuple[list[str], list[str]]:
    """What stands in the way of a compiler's implementations, and the commands that clear it."""
    xla, torch = interpreters["xla"], interpreters["torch"]
    wanted: list[tuple[Interpreter, tuple[Package, ...]]] = [(torch, (TORCH,))]  # the reference is computed by PyTorch
    if compiler.startswith("xla"):
        wanted.append((xla, XLA_GPU_PACKAGES if machine.gpu else XLA_PACKAGES))
    if compiler in ("inductor", "flex", "triton", "triton-library", "xla-triton"):
        wanted.append((torch, (TRITON,)))
    if compiler == "cuda":
        wanted.append((torch, CUDA_PACKAGES))

    problems: list[str] = []
    commands: list[str] = []
    for side, packages in wanted:
        if side.python is None:
            problems.append(f"{side.path} does not start: {side.problem}")
            continue
        if _numbers(side.python) < PYTHON:
            problems.append(f"{side.path} is Python {side.python}, 3.11 or newer is needed")
            continue
        faults = {p: fault for p in packages if (fault := p.problem(side.packages.get(p.name)))}
        problems += faults.values()
        if faults:
            commands.append(_pip(side, [p.requirement for p in faults]))
    version = torch.packages.get("torch") or ""
    if machine.gpu and version.endswith("+cpu"):
        problems.append(f"torch {version} is a CPU build")
        commands.append(_pip(torch, ["--force-reinstall", TORCH.requirement]))
    if compiler.startswith("xla") and xla.python and not xla.cuda_tools:
        problems.append("CUDA's ptxas and libdevice are missing")
        commands.append(_pip(xla, [TRITON.requirement]))
    build = version if "+" in version else version + PYPI_CUDA
    pretending = {"xla-triton": "planning launches"}
    if not machine.gpu:
        pretending["inductor"] = "without a GPU TorchInductor"
    if compiler in pretending and version and build not in DEVICELESS_TORCH:
        problems.append(f"{pretending[compiler]} needs torch {' or '.join(DEVICELESS_TORCH)}, not {version}")
        commands.append(_pip(torch, [f"torch=={torch_versions.TORCH_BUILDS[0][0]}"]))
    if compiler in ("inductor", "xla-triton") and machine.compiler is None:
        problems.append("g++ is missing")
        commands.append("apt-get install g++")
    return list(dict.fromkeys(problems)), list(dict.fromkeys(commands))


def _pip(side: Interpreter, requirements: list[str]) -> str:
    return f"{side.path} -m pip install " + " ".join(r if r.startswith("-") else f'"{r}"' for r in requirements)


def _bounded(requirement: str) -> str:
    """With the end of what works here, where it is of torch: pip takes the newest."""
    end = TORCH.requirement.partition(",")[2]
    return f"{requirement},{end}" if distribution(requirement) == TORCH.name else requirement


def _cupti_pin(machine: Machine) -> str:
    """cupti-python must match the driver's CUDA: 13.0 is read by cupti-python 13.0."""
    return f"cupti-python=={machine.cuda_driver}.*" if machine.cuda_driver else CUPTI.requirement


def _gpus() -> list[str]:
    """"name, driver, memory" of each GPU that nvidia-smi lists; none where there is no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.split("\n")[:-1]


def _cuda_driver() -> str | None:
    """The newest CUDA that the driver speaks, as "13.0"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def as_json(diagnosis: Diagnosis) -> str:
    return json.dumps(asdict(diagnosis), indent=1)


def as_text(diagnosis: Diagnosis) -> str:
    machine = diagnosis.machine
    lines = [
        f"GPU: {'; '.join(machine.gpus) or ('visible to CUDA' if machine.gpu else 'none')}",
        f"CUDA driver: {machine.cuda_driver or 'none'}",
        f"g++: {machine.compiler or 'none'}",
    ]
    for side, found in diagnosis.interpreters.items():
        lines += ["", f"{side} side: {found.path} (Python {found.python or 'unknown: ' + str(found.problem)})"]
        lines.append(f"  chosen by {_chosen_by(side)}")
        lines += [f"  {name:20}{version or '-'}" for name, version in found.packages.items()]
    for verdict in diagnosis.verdicts:
        lines += ["", f"{verdict.group} ({', '.join(verdict.implementations)})", f"  {verdict.verdict}"]
        if verdict.command:
            lines.append(f"  install: {verdict.command}")
    for remark in diagnosis.remarks:
        lines += ["", *textwrap.wrap(f"note: {remark}", 98, subsequent_indent="  ", break_long_words=False)]
    return "\n".join(lines)


def _chosen_by(side: str) -> str:
    variable = f"XLAFUSE_{side.upper()}_PYTHON"
    return variable if os.environ.get(variable) else f"default, this Python ({variable} is not set)"
