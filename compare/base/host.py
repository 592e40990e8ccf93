"""Facts about this machine that need no framework: GPU, packages, processor, environment variables."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .paths import PROJECT

if TYPE_CHECKING:
    from xlafuse.compile.gpus import Gpu


def gpus() -> list[Gpu]:
    """Return the devices that CUDA's driver sees, [] without a driver."""
    from xlafuse.compile import gpus

    return gpus.gpus()


def gpu_present() -> bool:
    """Return whether CUDA's driver is installed and sees at least one device."""
    return bool(gpus())


def gpu_count() -> int:
    """Return the number of devices that CUDA's driver sees, 0 without a driver."""
    return len(gpus())


def xlafuse_version() -> str:
    """Return the version of the installed distribution, else of the running checkout."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("xlafuse")
    except PackageNotFoundError:
        return str(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the versions installed in this interpreter, None for a missing package."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and reading a run needs none

    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of the installed packages among these."""
    return {package: found for package, found in versions(packages).items() if found}


def missing(requirements: Iterable[str]) -> str | None:
    """Return the packages that are missing or too old here and the command that installs them, or None.

    requirements: "liger-kernel==0.8.5", "torch>=2.12". == names the tested version, and any version works.
    "python>=3.12" is a bound of the interpreter, which no command raises.
    """
    requirements = list(requirements)
    if problem := python_problem(requirements, platform.python_version()):
        return problem
    requirements = packages_of(requirements)
    found = versions(map(distribution, requirements))
    problems = {r: problem for r in requirements if (problem := requirement_problem(r, found[distribution(r)]))}
    if not problems:
        return None
    quoted = " ".join(f'"{requirement}"' for requirement in problems)
    return f"{' and '.join(problems.values())} ({sys.executable} -m pip install {quoted})"


def packages_of(requirements: Iterable[str]) -> list[str]:
    """Return the requirements that pip can meet: all but the interpreter's."""
    return [requirement for requirement in requirements if distribution(requirement) != "python"]


def python_problem(requirements: Iterable[str], found: str | None) -> str | None:
    """Return why an interpreter of this version is too old for the requirements (see `missing`), or None."""
    requirements = list(requirements)
    packages = packages_of(requirements)
    for bound in (r for r in requirements if r not in packages):
        if found is not None and (problem := requirement_problem(bound, found)):
            return f"{problem}: set XLAFUSE_XLA_PYTHON to an interpreter with {bound} and {' and '.join(packages)}"
    return None


def requirement_problem(requirement: str, found: str | None) -> str | None:
    """Return why an installed version does not meet the requirement (see `missing`), or None."""
    from packaging.version import Version

    name = distribution(requirement)
    least = re.search(r">=([\w.]+)", requirement)
    if found is None:
        return f"{name} is not installed"
    return f"{name} {found} is too old" if least and Version(found) < Version(least[1]) else None


def interpreter_problem(packages: Mapping[str, str | None]) -> str | None:
    """Return why Triton's interpreter does not work with these versions, or None.

    The interpreter checks kernels on a CPU. Triton 3.6 uses arrays of one element as numbers; numpy 2.4 and later
    raise an error there.
    """
    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    triton, numpy = packages.get("triton"), packages.get("numpy")
    if triton is None or numpy is None or release(triton) >= (3, 7) or release(numpy) < (2, 4):
        return None
    return f"the interpreter of Triton {triton} does not work with numpy {numpy}; pip install 'numpy<2.4'"


def distribution(requirement: str) -> str:
    """Return the package that a requirement names, without extras and version."""
    return re.split(r"[\[=<>~! ]", requirement, maxsplit=1)[0]


# Variables that compilers and libraries read, and that may change their code.
_FLAGS = re.compile(
    r"XLA_FLAGS|JAX_(?:ENABLE|DEFAULT|DISABLE|NUMPY|THREEFRY|COMPILER|USE)_\w+|TORCHINDUCTOR_(?!CACHE_DIR)\w+"
    r"|TORCHDYNAMO_\w+|TRITON_(?:ALLOW|DISABLE|DEFAULT|F32|ENABLE)_\w+|PYTORCH_(?:CUDA_)?ALLOC_CONF"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|CUDA_LAUNCH_BLOCKING"
    r"|CUDA_MODULE_LOADING"
)


def host() -> dict[str, Any]:
    """Return the operating system, processor, cores, NVIDIA driver and the set variables that compilers read.

    Options that name a folder are left out of the variables.
    """
    driver = Path("/proc/driver/nvidia/version")
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": usable_cores(),
        "nvidia_driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "variables": {
            name: " ".join(word for word in value.split() if "=/" not in word)
            for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)
        },
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use. Runs that share a machine divide them (taskset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scratch_root() -> Path | None:
    """Return /dev/shm for input and reference arrays if it has over 16 GiB free, else None: the temporary folder."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        free = os.statvfs(memory)
        if free.f_bavail * free.f_frsize > 16 << 30:
            return memory
    return None
