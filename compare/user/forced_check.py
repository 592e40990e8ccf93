"""The check that a forced fusion computes the results of its two kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base.usage import UsageError
from ..graph.analyse.forced_fusion import FORCED
from ..graph.analyse.totals import known_declared_bytes
from ..graph.model import FusionGraph
from ..sources.explained import Agreement
from ..spec.dtype import EPS
from .agreement import MOST_BYTES, ROUNDINGS
from .extract import inductor_program

_SECONDS = 300.0
_CHECKED = re.compile(r"^(?:ok|WRONG) \S+: error (\S+), tolerance (\S+) \(\w*\)(?:, on (\S+) of .*)?$", re.MULTILINE)


def checked(name: str, found: Mapping[str, Any], graph: FusionGraph) -> Agreement | str:
    """Return the check of a variant's forced kernel, or a note that says why there is none.

    found: what the compiling process knows of it (`compare.workers.explaining.Answer`). A kernel of Inductor is checked
    here, as by the program that `xlafuse extract` writes.
    """
    if "error" in found:
        return Agreement(name, "the two kernels", found["error"], ROUNDINGS * EPS.get(found["dtype"], 0.0))
    try:
        program = inductor_program([found["code"]], found["kernel"], "")
    except UsageError as problem:
        return f"{name}: not checked: {problem}"
    size = max(known_declared_bytes(kernel) for kernel in graph.kernels or () if FORCED in kernel.facts)
    if size > MOST_BYTES:
        return f"{name}: not checked: its arrays hold {size / 1e6:.0f} MB, and a check takes {MOST_BYTES / 1e6:.0f} MB"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "repro.py"
        file.write_text(program.text)
        try:
            ran = subprocess.run(
                [sys.executable, str(file)], capture_output=True, text=True, timeout=_SECONDS, env=environment,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return f"{name}: not checked: it took longer than {_SECONDS:g} s"
    if (match := _CHECKED.search(ran.stdout)) is None:
        last = next(reversed((ran.stdout + ran.stderr).strip().splitlines()), "no message")
        why = next((line for line in ran.stdout.splitlines() if line.startswith("not ")), last)
        return f"{name}: not checked: {why}"
    share = "" if match[3] in (None, "100.0%") else f" ({match[3]} of the results)"
    return Agreement(name, f"the ATen operations of its kernel{share}", float(match[1]), float(match[2]))
