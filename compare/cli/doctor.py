"""`xlafuse doctor`: what this machine can run, what is missing, and the command that installs it.

It reads package metadata in the interpreters that the workers would use, and imports no framework.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from xlafuse import versions as jax_versions
from xlafuse.triton_side import versions as torch_versions

from .. import targets
from ..backends import BACKENDS, Backend
from ..base.host import (
    distribution,
    gpu_present,
    installed,
    interpreter_problem,
    missing,
    packages_of,
    python_problem,
    requirement_problem,
)
from ..base.paths import PROJECT
from ..base.usage import UsageError
from ..measure import machine_remarks
from ..run import ray_cluster
from ..spec.blocks import BLOCKS, requirements
from ..workers.client import interpreter
from .options import json_option
from .terminal import echo_json, warn

PYTHON, UNTRIED_PYTHON = Version("3.11"), Version("3.14")
# The Python and jax that recorded the target's autotune results.
REPLAY_PYTHON, REPLAY_JAX = Version("3.12"), "0.11.2"
# Compiling with TorchInductor for an absent GPU uses torch's private names, so only tested builds work.
DEVICELESS_TORCH = tuple(
    f"{release}+{'cu' + cuda.replace('.', '') if cuda else 'cpu'}" for release, cuda in torch_versions.TORCH_BUILDS
)
PYPI_CUDA = "+cu130"  # PyPI's builds of these releases, whose versions have no suffix


def _tested(name: str, versions: Iterable[str]) -> str:
    """Return the requirement of the package from the oldest to the newest tested series."""
    series = sorted(Version(version).release[:2] for version in versions)
    (low_major, low_minor), (major, minor) = series[0], series[-1]
    return f"{name}>={low_major}.{low_minor},<{major}.{minor + 1}"


def _release(version: str) -> Version:
    """Return a version without its suffix: 2.11.0 for "2.11.0rc1+cu130". A Python of a checkout ends in "+"."""
    return Version(Version(version.removesuffix("+")).base_version)


def _problem(requirement: str, version: str | None) -> str | None:
    """Return why the installed version does not meet the requirement, or None."""
    name = distribution(requirement)
    if version is None:
        return f"{name} is not installed"
    bounds = requirement.removeprefix(name)
    return None if _release(version) in SpecifierSet(bounds) else f"{name} {version} is outside {bounds}"


TORCH = _tested("torch", (release for release, _ in torch_versions.TORCH_BUILDS))
TRITON = _tested("triton", torch_versions.TRITON)
XLA_PACKAGES = tuple(_tested(name, jax_versions.JAX) for name in ("jax", "jaxlib", "jax-cuda13-pjrt"))
XLA_GPU_PACKAGES = (*XLA_PACKAGES, _tested("jax-cuda13-plugin", jax_versions.JAX))
CUDA_PACKAGES = ("cuda-core>=0.3", "cuda-bindings>=13.0", "nvidia-cuda-nvrtc>=13.0")
CUPTI = "cupti-python>=13.0"
LIBTPU = "libtpu"
TRIALS = 100
SHOWN = {
    "xla": (*map(distribution, XLA_GPU_PACKAGES), LIBTPU, "flax", "cupti-python"),
    "torch": (
        "torch", "triton", "numpy", *map(distribution, CUDA_PACKAGES), "nvidia-cuda-runtime", "cupti-python",
        "nvidia-ml-py",
    ),
}


@dataclass(frozen=True)
class Interpreter:
    """The Python that a framework's workers use, and its packages. problem: why it does not start."""

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
class Diagnosis:
    """This machine's result for a group of implementations. result: begins with "not here" where it can do
    nothing. command: installs what is missing."""

    group: str
    implementations: list[str]
    result: str
    command: str | None = None

    @property
    def runs(self) -> bool:
        return not self.result.startswith("not here")


@dataclass(frozen=True)
class Examination:
    machine: Machine
    interpreters: dict[str, Interpreter]
    diagnoses: list[Diagnosis]
    remarks: list[str] = field(default_factory=list)

    @property
    def anything_runs(self) -> bool:
        return any(diagnosis.runs for diagnosis in self.diagnoses)


@click.command("doctor")
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN RUN]")
@click.option("--clock", is_flag=True, help="Check instead that this GPU's measurements are sound.")
@click.option("--peers", is_flag=True, help="Make instead a small call of each optional peer on this GPU.")
@json_option
@click.pass_context
def command(
    ctx: click.Context, runs: tuple[Path, ...], clock: bool, peers: bool, as_json: bool
) -> None:
    """Show what this machine can run.

    Also shows what is missing, with the command that installs it. Exit code 1 when nothing can run.

    With --clock, two rows of identical code must tie or stay unresolved in 98% of trials. A planted slowdown of 3% must
    be found in 95%. Trials use the same protocol that times implementations. With the folders of two runs of one suite,
    --clock checks instead that no comparison has opposite winners, which needs no GPU. Exit code 1 when a check fails,
    2 without a GPU to time.

    With --peers, kernels of FlashAttention-4, quack, Liger, tokamax and JAX's Pallas examples are each called once, on
    a small case, and checked. A peer that is missing is named with the command that installs it. Exit code 1 when one
    is missing or fails, 2 without a GPU.
    """
    if (clock or peers) and as_json:
        raise UsageError(f"{'--clock' if clock else '--peers'} prints no JSON")
    if peers:
        if clock or runs:
            raise UsageError("--peers goes with no other option")
        from ..run import peers_check

        records = peers_check.check(peers_check.every_peer())
        click.echo("\n".join(map(peers_check.in_words, records)))
        ctx.exit(0 if all(record.status == "ok" for record in records) else 1)
    if clock:
        ctx.exit(0 if _is_sound(runs) else 1)
    if runs:
        raise UsageError("runs go with --clock")
    examination = examine()
    if as_json:
        echo_json({"schema": "xlafuse.doctor/1", **asdict(examination)})
    else:
        click.echo(as_text(examination))
    ctx.exit(0 if examination.anything_runs else 1)


def _is_sound(runs: tuple[Path, ...]) -> bool:
    """Print a check of the measurements of this GPU, or of two runs. Return whether it passed."""
    from ..run import clock_check

    if not runs:
        outcome = clock_check.check(TRIALS)
        click.echo(clock_check.as_text(outcome))
        return not outcome.problems
    if len(runs) != 2:
        raise UsageError(f"--clock compares two runs, got {len(runs)}: xlafuse doctor --clock RUN RUN")
    agreement = clock_check.agreement(*runs)
    warn(agreement.warnings)
    click.echo(agreement)
    return not agreement.contradictions


def examine() -> Examination:
    """Examine this machine and the interpreters of both frameworks' workers."""
    machine = Machine(gpu_present(), _gpus(), _cuda_driver(), shutil.which("g++"))
    interpreters = {side: probe(interpreter(side), (*SHOWN[side], *optional(side))) for side in SHOWN}
    diagnoses = [*diagnose(machine, interpreters), tpu_diagnosis(interpreters["xla"])]
    notes = [*remarks(machine, interpreters), *machine_remarks.remarks(machine.gpus), several_machines()]
    return Examination(machine, interpreters, diagnoses, notes)


def optional(side: str) -> tuple[str, ...]:
    """Return the names of packages that single implementations of this framework need."""
    return tuple(map(distribution, packages_of(requirements(side))))


def probe(path: str, packages: tuple[str, ...]) -> Interpreter:
    """Ask a Python for the versions of these packages, which it reads from their metadata."""
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


def diagnose(machine: Machine, interpreters: Mapping[str, Interpreter]) -> list[Diagnosis]:
    """Return a diagnosis of each group of implementations with the same needs."""
    return [_diagnosis(group, names, machine, interpreters) for group, names in _groups().items()]


def tpu_diagnosis(side: Interpreter) -> Diagnosis:
    """Return the diagnosis of the TPU targets, which need no GPU and no CUDA tools."""
    label = f"XLA for TPUs that are not here: {', '.join(name for name in targets.names() if targets.is_tpu(name))}"
    rows = [i for block in BLOCKS.values() for i in block.implementations if not i.refused_by("tpu")]
    names = list(dict.fromkeys(i.name for i in rows))
    if side.packages.get(LIBTPU) is None:
        jax = side.packages.get("jax")
        wanted = f"jax[tpu]=={jax}" if jax else f"jax[tpu]{XLA_PACKAGES[0].removeprefix('jax')}"
        return Diagnosis(label, names, f"not here: {LIBTPU} is not installed", _pip(side, [wanted]))
    return Diagnosis(label, names, "compiles for them; nothing runs")


@dataclass(frozen=True)
class _Needs:
    """The needs of a group of implementations. family: of backends. packages: requirements of its implementations."""

    family: str
    gpu: bool
    packages: tuple[str, ...]


def remarks(machine: Machine, interpreters: Mapping[str, Interpreter]) -> list[str]:
    xla, result = interpreters["xla"], []
    jax = xla.packages.get("jax")
    if not machine.gpu and xla.python and (_release(xla.python) < REPLAY_PYTHON or jax != REPLAY_JAX):
        result.append(
            f"XLA's autotune results of the {targets.DEFAULT} are replayed only by Python >= {REPLAY_PYTHON} with jax "
            f"{REPLAY_JAX} in the XLA worker (here: Python {xla.python}, jax {jax}). Without them, kernels around "
            "matrix products are \"not autotuned\". Point XLAFUSE_XLA_PYTHON at such a Python: "
            f'python{REPLAY_PYTHON} -m venv xla && xla/bin/pip install "jax=={REPLAY_JAX}" '
            f'"jax-cuda13-pjrt=={REPLAY_JAX}" "{TRITON}" numpy'
        )
    for side, python in interpreters.items():
        if python.python and _release(python.python) >= UNTRIED_PYTHON:
            result.append(f"Python {python.python} of the {side} workers was not tried; 3.11 to 3.13 were")
    if platform.machine() != "x86_64":
        result.append(f"nothing was tried on {platform.machine()}, only on x86_64")
    if not machine.gpu and (problem := interpreter_problem(interpreters["torch"].packages)):
        result.append(f"Triton's kernels are compiled but not checked here: {problem}")
    return result


def several_machines() -> str:
    """Return whether `xlafuse run --on` finds Ray in this interpreter, or the command that installs it."""
    lack = missing([ray_cluster.REQUIREMENT])
    return f"several machines (xlafuse run --on): {lack or 'ray ' + installed('ray')['ray']}"


def _groups() -> dict[_Needs, list[str]]:
    """Return the names of implementations by their needs. Those over several GPUs need what those of one do."""
    groups: dict[_Needs, list[str]] = {}
    for block in BLOCKS.values():
        for i in block.implementations if not block.spans_gpus else ():
            key = _Needs(i.backend.family, i.needs_gpu is not None, i.requires)
            if i.name not in groups.setdefault(key, []):
                groups[key].append(i.name)
    return groups


def _without_gpu(backend: Backend, names: list[str]) -> str:
    if backend.prebuilt:
        return "checked on the CPU; its kernels come prebuilt, so nothing is compiled"
    compiles = f"compiles for {targets.DEFAULT}, "
    if backend.cpu_check_worker is None:
        return compiles + "not checked: its kernels run on a GPU only"
    unchecked = [name for name in names if name in BACKENDS and BACKENDS[name].cpu_check_worker is None]
    by_triton, by_pallas = backend.cpu_check_worker == "interpreter", "interpreter" in backend.options
    interpreted = f" (by {'Triton' if by_triton else 'Pallas'}'s interpreter)" if by_triton or by_pallas else ""
    but = f" ({' and '.join(unchecked)}: compiled only)" if unchecked else ""
    return compiles + "checked on the CPU" + interpreted + but


def _diagnosis(
    group: _Needs, names: list[str], machine: Machine, interpreters: Mapping[str, Interpreter]
) -> Diagnosis:
    backend = BACKENDS[group.family]
    # == names the tested version, and any version works; >= is a real bound.
    required = packages_of(group.packages)
    packages = " and ".join(r if ">=" in r else distribution(r) for r in required)
    label = backend.label + (f", with {packages}" if packages else "") + (", GPU only" if group.gpu else "")
    if group.gpu and not machine.gpu:
        return Diagnosis(label, names, "not here: needs an NVIDIA GPU, and none is visible")
    problems, commands = _problems(backend, machine, interpreters)
    side = interpreters[backend.worker]
    if old := python_problem(group.packages, side.python):
        return Diagnosis(label, names, f"not here: {'; '.join([*problems, old])}", " && ".join(commands) or None)
    absent = {r: lack for r in required if (lack := requirement_problem(r, side.packages.get(distribution(r))))}
    if absent:
        problems += absent.values()
        commands.append(_pip(side, [_bounded(r) for r in absent]))
    if problems:
        reasons = "; ".join(dict.fromkeys(problems))
        return Diagnosis(label, names, f"not here: {reasons}", " && ".join(commands) or None)
    if not machine.gpu:
        return Diagnosis(label, names, _without_gpu(backend, names))
    if problem := _problem(CUPTI, side.packages.get(distribution(CUPTI))):
        command = _pip(side, [_cupti_pin(machine)])
        return Diagnosis(label, names, f"runs here, device time not measured: {problem}", command)
    return Diagnosis(label, names, "runs and is timed here")


def _problems(
    backend: Backend, machine: Machine, interpreters: Mapping[str, Interpreter]
) -> tuple[list[str], list[str]]:
    """Return the problems of a backend's implementations on this machine, and the commands that solve them."""
    xla, torch = interpreters["xla"], interpreters["torch"]
    wanted: list[tuple[Interpreter, tuple[str, ...]]] = [(torch, (TORCH,))]  # PyTorch computes the reference
    if backend.worker == "xla":
        wanted.append((xla, XLA_GPU_PACKAGES if machine.gpu else XLA_PACKAGES))
    if "triton" in backend.requires:
        wanted.append((torch, (TRITON,)))
    if "nvrtc" in backend.requires:
        wanted.append((torch, CUDA_PACKAGES))

    problems: list[str] = []
    commands: list[str] = []
    for side, packages in wanted:
        if side.python is None:
            problems.append(f"{side.path} does not start: {side.problem}")
            continue
        if _release(side.python) < PYTHON:
            problems.append(f"{side.path} is Python {side.python}, {PYTHON} or newer is needed")
            continue
        faults = {p: fault for p in packages if (fault := _problem(p, side.packages.get(distribution(p))))}
        problems += faults.values()
        if faults:
            commands.append(_pip(side, list(faults)))
    version = torch.packages.get("torch") or ""
    if machine.gpu and version.endswith("+cpu"):
        problems.append(f"torch {version} is a CPU build")
        commands.append(_pip(torch, ["--force-reinstall", TORCH]))
    if backend.worker == "xla" and xla.python and not xla.cuda_tools:
        problems.append("CUDA's ptxas and libdevice are missing")
        commands.append(_pip(xla, [TRITON]))
    build = version if "+" in version else version + PYPI_CUDA
    deviceless = "planning launches" if "launch planning" in backend.requires else ""
    if not machine.gpu and backend.family == "inductor":
        deviceless = "without a GPU TorchInductor"
    if deviceless and version and build not in DEVICELESS_TORCH:
        problems.append(f"{deviceless} needs torch {' or '.join(DEVICELESS_TORCH)}, not {version}")
        commands.append(_pip(torch, [f"torch=={torch_versions.TORCH_BUILDS[0][0]}"]))
    if "g++" in backend.requires and machine.compiler is None:
        problems.append("g++ is missing")
        commands.append("apt-get install g++")
    return list(dict.fromkeys(problems)), list(dict.fromkeys(commands))


def _pip(side: Interpreter, requirements: list[str]) -> str:
    return f"{side.path} -m pip install " + " ".join(r if r.startswith("-") else f'"{r}"' for r in requirements)


def _bounded(requirement: str) -> str:
    """Return a torch requirement with the upper bound of tested versions, because pip takes the newest."""
    end = TORCH.partition(",")[2]
    return f"{requirement},{end}" if distribution(requirement) == distribution(TORCH) else requirement


def _cupti_pin(machine: Machine) -> str:
    """Return the cupti-python requirement for this driver: CUDA 13.0 needs cupti-python 13.0."""
    return f"cupti-python=={machine.cuda_driver}.*" if machine.cuda_driver else CUPTI


def _gpus() -> list[str]:
    """Return "name, driver, memory" of each GPU that nvidia-smi lists, or [] without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.split("\n")[:-1]


def _cuda_driver() -> str | None:
    """Return the newest CUDA version that the driver supports, as "13.0"."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def as_text(examination: Examination) -> str:
    machine = examination.machine
    lines = [
        f"GPU: {'; '.join(machine.gpus) or ('visible to CUDA' if machine.gpu else 'none')}",
        f"CUDA driver: {machine.cuda_driver or 'none'}",
        f"g++: {machine.compiler or 'none'}",
    ]
    for side, python in examination.interpreters.items():
        lines += ["", f"{side} workers: {python.path} (Python {python.python or f'unknown: {python.problem}'})"]
        lines.append(f"  chosen by {_chosen_by(side)}")
        lines += [f"  {name:20}{version or '-'}" for name, version in python.packages.items()]
    for diagnosis in examination.diagnoses:
        lines += ["", f"{diagnosis.group} ({', '.join(diagnosis.implementations)})", f"  {diagnosis.result}"]
        if diagnosis.command:
            lines.append(f"  install: {diagnosis.command}")
    for remark in examination.remarks:
        lines += ["", *textwrap.wrap(f"note: {remark}", 98, subsequent_indent="  ", break_long_words=False)]
    return "\n".join(lines)


def _chosen_by(side: str) -> str:
    variable = f"XLAFUSE_{side.upper()}_PYTHON"
    if os.environ.get(variable):
        return variable
    default = "this Python" if interpreter(side) == sys.executable else "the environment that set-up made for it"
    return f"default, {default} ({variable} is not set)"
