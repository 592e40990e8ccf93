"""The table of one GPU: for kernels and shape classes, the launch configuration that this GPU measured as fastest.

    {
     "gpu": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132, "triton": "3.6.0",
     "entries": {
      "rmsnorm.configure_forward": [
       {"class": {...}, "config": {...}, "shared_bytes": 0, "us": 33.1, "before_us": 35.0}
      ]
     }
    }

A kernel is named by the function that chooses its configuration, a class by that function's arguments (tuned.py).
`shared_bytes`: shared memory of a block. `us`, `before_us`: the time with this configuration, and with the one that it
replaced. Only a configuration that was faster than that one is in a table, so a table need not be complete.

The file of a GPU has its name: NVIDIA H200 has h200.json.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

ShapeClass = Mapping[str, Any]
_Key = tuple[str, frozenset[tuple[str, Any]]]


class TableError(ValueError):
    """A table that cannot be used; the message names the file and the problem."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. shared_bytes: the most shared memory that a block may have."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True)
class Entry:
    """A measured configuration, as in the file.

    config: the fields of the kernel's configuration. before_us: None if the replaced one could not run, or if
    the configuration of another GPU's table stayed the fastest.
    """

    config: Mapping[str, Any]
    shared_bytes: int
    us: float
    before_us: float | None


@dataclass
class Table:
    """The entries of one GPU. file: where they were read, None for a new table."""

    gpu: str
    capability: tuple[int, int]
    multiprocessors: int
    triton: str = ""
    entries: dict[_Key, Entry] = field(default_factory=dict)
    file: Path | None = None

    def find(self, kernel: str, shape_class: ShapeClass) -> Entry | None:
        return self.entries.get(_key(kernel, shape_class))

    def put(self, kernel: str, shape_class: ShapeClass, entry: Entry) -> None:
        self.entries[_key(kernel, shape_class)] = entry

    def write(self, path: Path) -> None:
        """Write or replace the file; a process that is killed meanwhile leaves the old one. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(self.text())
        os.replace(fresh, path)

    def text(self) -> str:
        """Return the file's text, with one line an entry."""
        lines: dict[str, list[str]] = {}
        for (kernel, shape_class), entry in self.entries.items():
            data: dict[str, Any] = {"class": dict(sorted(shape_class)), "config": dict(entry.config)}
            data |= {"shared_bytes": entry.shared_bytes, "us": entry.us, "before_us": entry.before_us}
            lines.setdefault(kernel, []).append(f"   {json.dumps(data)}")
        facts = {"gpu": self.gpu, "capability": self.capability, "multiprocessors": self.multiprocessors}
        head = json.dumps(facts | {"triton": self.triton})[1:-1]
        kernels = ",\n".join(
            f"  {json.dumps(kernel)}: [\n" + ",\n".join(sorted(lines[kernel])) + "\n  ]" for kernel in sorted(lines)
        )
        return f"{{\n {head},\n \"entries\": {{\n{kernels}\n }}\n}}\n"


def file_of(gpu: str, folder: Path) -> Path:
    """Return the file of the GPU's table in a folder, which may not exist."""
    return folder / (re.sub(r"\W+", "-", gpu.lower().removeprefix("nvidia ")).strip("-") + ".json")


def read(path: Path) -> Table:
    """Return the table in a file. Raises TableError."""
    try:
        data = json.loads(path.read_text())
        table = Table(
            data["gpu"], (data["capability"][0], data["capability"][1]), data["multiprocessors"], data["triton"],
            file=path,
        )
        for kernel, entries in data["entries"].items():
            for each in entries:
                entry = Entry(dict(each["config"]), each["shared_bytes"], each["us"], each["before_us"])
                table.put(kernel, each["class"], entry)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as problem:
        raise TableError(
            f"{path} is no table of launch configurations ({type(problem).__name__}: {problem}); remove it, and fill "
            "a new one with: xlafuse tune"
        ) from None
    return table


def of_gpu(gpu: Gpu, folder: Path) -> Table | None:
    """Return the GPU's own table, else the table of the most similar GPU, with a warning; None if there is no table.

    Most similar: the nearest major compute capability, then minor one, then number of multiprocessors.
    Raises TableError.
    """
    own = file_of(gpu.name, folder)
    if own.is_file():
        table = read(own)
        if table.gpu != gpu.name:
            raise TableError(
                f"{own} is the table of {table.gpu}, not of {gpu.name}; move it to {file_of(table.gpu, folder).name}"
            )
        return table
    others = [table for path in sorted(folder.glob("*.json")) if (table := read(path)).entries]
    if not others:
        return None

    def distance(table: Table) -> tuple[int, ...]:
        facts = (*table.capability, table.multiprocessors), (*gpu.capability, gpu.multiprocessors)
        return tuple(abs(theirs - ours) for theirs, ours in zip(*facts, strict=True))

    nearest = min(others, key=distance)
    warnings.warn(
        f"no launch configurations were measured on {gpu.name}; those of {nearest.gpu} are used. "
        "To measure some here: xlafuse tune",
        stacklevel=2,
    )
    return nearest


def _key(kernel: str, shape_class: ShapeClass) -> _Key:
    return kernel, frozenset(shape_class.items())
