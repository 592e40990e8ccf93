"""This machine, without a framework: is there a GPU, and what should a run remember of the host."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xlafuse.compile.environment import gpu_present

from .paths import PROJECT

__all__ = [
    "distribution", "gpu_present", "host", "installed", "interpreter_problem", "lacks", "missing", "runs",
    "scratch_root", "usable_cores", "versions", "xlafuse_version",
]


def xlafuse_version() -> str:
    """Of the installed distribution, else of the checkout that is running."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("xlafuse")
    except PackageNotFoundError:
        return str(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions in this interpreter, None where a package is missing."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and reading a run needs none

    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def installed(*packages: str) -> dict[str, str]:
    """`versions` of those that are there."""
    return {package: found for package, found in versions(packages).items() if found}


def missing(requirements: Iterable[str]) -> str | None:
    """Which of the packages ("liger-kernel==0.8.5", "torch>=2.12") this interpreter lacks or has too old, and the
    command that installs them. A version after == is the one that was tested, and any will do."""
    absent = {r: lack for r in requirements if (lack := lacks(r, versions([distribution(r)])[distribution(r)]))}
    if not absent:
        return None
    quoted = " ".join(f'"{requirement}"' for requirement in absent)
    return f"{' and '.join(absent.values())} ({sys.executable} -m pip install {quoted})"


def lacks(requirement: str, found: str | None) -> str | None:
    """Why an installed version is not what is required, as `missing` means it; None where it is."""
    from packaging.version import Version

    name = distribution(requirement)
    least = re.search(r">=([\w.]+)", requirement)
    if found is None:
        return f"{name} is not installed"
    return f"{name} {found} is too old" if least and Version(found) < Version(least[1]) else None


def interpreter_problem(packages: Mapping[str, str | None]) -> str | None:
    """Why Triton's interpreter, which checks its kernels on a CPU, does not work with these versions; None where it
    does. Triton 3.6 takes arrays of one element for numbers, which is an error from numpy 2.4 on."""
    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    triton, numpy = packages.get("triton"), packages.get("numpy")
    if triton is None or numpy is None or release(triton) >= (3, 7) or release(numpy) < (2, 4):
        return None
    return f"the interpreter of Triton {triton} does not work with numpy {numpy}; pip install 'numpy<2.4'"


def distribution(requirement: str) -> str:
    """The package that a requirement names, without extras and version."""
    return re.split(r"[\[=<>~! ]", requirement, maxsplit=1)[0]


# What compilers and libraries read, and what they make may depend on.
_FLAGS = re.compile(
    r"XLA_FLAGS|JAX_(?:ENABLE|DEFAULT|DISABLE|NUMPY|THREEFRY|COMPILER|USE)_\w+|TORCHINDUCTOR_(?!CACHE_DIR)\w+"
    r"|TORCHDYNAMO_\w+|TRITON_(?:ALLOW|DISABLE|DEFAULT|F32|ENABLE)_\w+|PYTORCH_(?:CUDA_)?ALLOC_CONF"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|CUDA_LAUNCH_BLOCKING"
    r"|CUDA_MODULE_LOADING"
)


def host() -> dict[str, Any]:
    """Operating system, processor, cores, the NVIDIA driver where there is one, and by name the variables that are set
    and compilers read ("variables"), without options that name a folder."""
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


def runs(process: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def usable_cores() -> int:
    """Those that this process may run on: where several runs share a machine, each is given some (taskset)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def scratch_root() -> Path | None:
    """Memory-backed storage for input and reference arrays where there is plenty, else the default temporary folder."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        free = os.statvfs(memory)
        if free.f_bavail * free.f_frsize > 16 << 30:
            return memory
    return None
