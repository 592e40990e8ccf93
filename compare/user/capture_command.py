"""The command and environment with which `xlafuse capture` runs a program."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xlafuse.dumps.artifacts import dump_options

from ..base.usage import UsageError
from . import capture

_CACHES_OF_TORCH = ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_AUTOGRAD_CACHE")
HLO, TRACE = "xla", "torch_trace"  # folders of the compilers' files in a capture's folder
# A process's rank and the number of processes, as torchrun, Open MPI and Slurm announce them.
_RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
_TAKES_VALUE = ("-X", "-W", "--check-hash-based-pycs")  # options of Python; others have none
# An XLA that does not know a flag ends the process. This flag is not in every version, and only PTX needs it.
_LEFT_OUT = ("xla_dump_emitter_re",)


@dataclass(frozen=True)
class Planned:
    """A program with its environment.

    profiled: False for a program that is not run by `python`, of which only the compilers' files are captured.
    """

    folder: Path
    command: tuple[str, ...]
    environment: Mapping[str, str]
    profiled: bool


def plan(
    folder: Path, steps: tuple[int, int], command: Sequence[str], environment: Mapping[str, str],
    switch: str | None = None,
) -> Planned:
    """Return the program to run. One of several ranks gets a folder of its own within `folder`.

    switch: one of `switches` to set; "" sets none, and losses and times of steps are recorded as with one.
    """
    own = folder.absolute()
    rank = rank_of(environment)
    if rank is not None:
        own = own / f"rank{rank}"
    settings = json.dumps(
        {"folder": str(own), "steps": list(steps)} | ({} if switch is None else {"try": switch})
    )
    at = _program_at(command)
    launched = list(command)
    if at is not None:
        launched[at:at] = [str(Path(capture.__file__)), settings]
    return Planned(own, tuple(launched), _with_dumps(environment, own), at is not None)


def prepare(planned: Planned, command: Sequence[str], steps: tuple[int, int]) -> None:
    """Make the folder. Raises UsageError where it has files already or cannot be made."""
    folder = planned.folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder}: exists already and is not empty; name a new folder")
        for name in (HLO, TRACE):
            (folder / name).mkdir(parents=True, exist_ok=True)
        capture.write_facts(folder, {"command": list(command), "steps": list(steps)})
    except OSError as problem:
        raise UsageError(f"{folder}: cannot be made: {problem.strerror}") from None


def parse_steps(text: str) -> tuple[int, int]:
    """Return (3, 5) of "3:5". Raises UsageError."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) < int(match[2]):
        raise UsageError(
            f"--steps {text!r}: give FIRST:END, such as 3:5 for the steps 3 and 4; steps count from 0, and step 0, "
            "which compiles, is not profiled"
        )
    return int(match[1]), int(match[2])


def rank_of(environment: Mapping[str, str]) -> int | None:
    """Return the process's rank; None for the only process."""
    for rank, size in _RANKS:
        found, count = environment.get(rank, ""), environment.get(size, "")
        if found.isdecimal() and count.isdecimal() and int(count) > 1:
            return int(found)
    return None


def _program_at(command: Sequence[str]) -> int | None:
    """Return where the script, -m or -c stands in a command of Python; None in other commands."""
    if not _PYTHON.fullmatch(os.path.basename(command[0])):
        return None
    at = 1
    while at < len(command):
        word = command[at]
        if word in ("-m", "-c"):
            return at if at + 1 < len(command) else None
        if not word.startswith("-"):
            return at
        if word == "-":  # the program comes from standard input
            return None
        at += 2 if word in _TAKES_VALUE else 1
    return None


def _with_dumps(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment in which both compilers write their files into the folder. XLA takes a flag's last value.

    INDUCTOR_PROVENANCE makes Inductor write which operations each library call is; the code alone does not say it. A
    program from a cache of compiled programs is not dumped, or without its operations, so these are off.
    """
    options = dump_options(folder / HLO)
    flags = [
        f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
        if name not in _LEFT_OUT
    ]
    joined = " ".join([environment.get("XLA_FLAGS", ""), *flags]).strip()
    return {
        "INDUCTOR_PROVENANCE": "1", **dict.fromkeys(_CACHES_OF_TORCH, "0"), "JAX_ENABLE_COMPILATION_CACHE": "false",
        **environment, "XLA_FLAGS": joined, "TORCH_TRACE": str(folder / TRACE),
    }
