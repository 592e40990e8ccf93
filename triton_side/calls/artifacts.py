"""A compiled kernel's intermediate representations, machine code and resources.

Triton gives TTIR, TTGIR, LLIR, PTX and a cubin; NVRTC gives PTX and a cubin. cuobjdump, from Triton's wheel or from
PATH, reads SASS, registers and spills from the cubin. No GPU or driver is needed. Triton's compiled kernel is not
public API (versions.py lists the tested series).
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
import triton.backends.nvidia

from xlafuse.triton_side import versions

if TYPE_CHECKING:
    from xlafuse.triton_side.calls.cuda_program import Kernel

TRITON_TEXTS = ("ttir", "ttgir", "llir", "ptx")
_SASS, _USAGE = "--dump-sass", "--dump-resource-usage"

# "  REG:56 STACK:0 SHARED:1056 LOCAL:0 CONSTANT[0]:556 TEXTURE:0 SURFACE:0 SAMPLER:0" (cuobjdump 12.8 and 13.0)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# From sm_90 on, cuobjdump counts the 1 KiB that the driver reserves in every block which has shared memory.
RESERVED_SHARED_BYTES = 1024


class UnsupportedTriton(RuntimeError):
    """The installed Triton is not of a tested series."""


def check_triton() -> None:
    """Raise UnsupportedTriton unless the installed Triton is of a tested series."""
    if ".".join(triton.__version__.split(".")[:2]) not in versions.TRITON:
        known = " or ".join(versions.TRITON)
        raise UnsupportedTriton(f"reading compiled kernels needs triton {known}, found {triton.__version__}")


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    registers: per thread. spill_bytes: local memory per thread, for spilled registers and stack.
    shared_bytes: per block, static and dynamic, without the driver's own. num_warps: per block.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int


@dataclass(frozen=True)
class Artifacts:
    """One compiled kernel.

    name: as the driver and profilers call it. arch: such as "sm_90".
    texts: its representations by file suffix, from the highest to PTX.
    dynamic_shared_bytes: shared memory that a launch requests in addition to the cubin's.
    """

    name: str
    arch: str
    texts: Mapping[str, str]
    cubin: bytes
    num_warps: int
    dynamic_shared_bytes: int

    @functools.cached_property
    def sass(self) -> str:
        """The machine code, disassembled. Raises FileNotFoundError without cuobjdump."""
        return _cuobjdump(self.cubin, _SASS)

    @functools.cached_property
    def resources(self) -> Resources:
        """The kernel's resources.

        Raises FileNotFoundError without cuobjdump, ValueError if the cubin does not hold exactly one kernel.
        """
        found = USAGE.findall(_cuobjdump(self.cubin, _USAGE))
        if len(found) != 1:
            raise ValueError(f"the cubin of {self.name} must hold one kernel, cuobjdump reports {len(found)}")
        registers, stack, shared, local = map(int, found[0])
        if shared and int(re.sub(r"\D", "", self.arch)) >= 90:
            shared -= RESERVED_SHARED_BYTES
        return Resources(registers, stack + local, shared + self.dynamic_shared_bytes, self.num_warps)

    def write(self, folder: Path, stem: str | None = None) -> list[Path]:
        """Write every text, the SASS and the cubin into `folder` as <stem>.<suffix>; `stem` is `name` unless given."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = stem or self.name
        written = []
        for suffix, text in {**self.texts, "sass": self.sass}.items():
            written.append(folder / f"{stem}.{suffix}")
            written[-1].write_text(text)
        written.append(folder / f"{stem}.cubin")
        written[-1].write_bytes(self.cubin)
        return written


def disassemble(kernels: Iterable[Artifacts]) -> None:
    """Read SASS and resources of several kernels in parallel and cache them; cuobjdump takes 0.2 s for each."""
    _read_beside(kernels, _SASS, _USAGE)


def read_resources(kernels: Iterable[Artifacts]) -> None:
    """Read resources of several kernels in parallel and cache them."""
    _read_beside(kernels, _USAGE)


def _read_beside(kernels: Iterable[Artifacts], *options: str) -> None:
    with ThreadPoolExecutor() as threads:
        for kernel in kernels:
            for option in options:
                threads.submit(_cuobjdump, kernel.cubin, option)


def of_triton(kernel: Any) -> Artifacts:
    """Return the artifacts of a kernel that `triton.compile` or a launch `fn[grid](...)` returned.

    Raises:
        UnsupportedTriton: the installed Triton is not of a tested series.
        ValueError: the kernel was not compiled for an NVIDIA GPU.
    """
    check_triton()
    metadata = kernel.metadata
    if metadata.target.backend != "cuda":
        raise ValueError(f"{metadata.name} was compiled for {metadata.target.backend}; only NVIDIA targets are read")
    texts = {suffix: kernel.asm[suffix] for suffix in TRITON_TEXTS if suffix in kernel.asm}  # Gluon has no TTIR
    arch = f"sm_{metadata.target.arch}"
    return Artifacts(metadata.name, arch, texts, kernel.asm["cubin"], metadata.num_warps, metadata.shared)


def of_cuda(kernel: Kernel, threads: int) -> Artifacts:
    """Return the artifacts of a CUDA C++ kernel that is launched with `threads` threads per block."""
    texts = {"cu": kernel.source.read_text(), "ptx": kernel.ptx}
    return Artifacts(kernel.symbol, kernel.arch, texts, kernel.cubin, -(-threads // 32), 0)


@functools.cache
def _tool(name: str) -> str:
    bundled = Path(triton.backends.nvidia.__file__).parent / "bin" / name
    if bundled.is_file():
        return str(bundled)
    on_path = shutil.which(name)
    if on_path is None:
        raise FileNotFoundError(f"{name} is neither at {bundled} nor on PATH; install Triton's wheel or a CUDA toolkit")
    return on_path


@functools.lru_cache(maxsize=128)
def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool("cuobjdump"), option, file.name], capture_output=True, text=True)
    if done.returncode != 0 or not done.stdout:
        raise ValueError(f"cuobjdump {option} could not read a cubin of {len(cubin)} bytes: {done.stderr.strip()}")
    return done.stdout
