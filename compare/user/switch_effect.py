"""The evidence that a program used a switch: what both runs recorded, and what the compilers wrote."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..graph.formats import count
from . import capture, capture_command
from .captured_run import CapturedRun
from .switches import TF32

_NAMES = {"jax": "jax_default_matmul_precision", "torch": "torch.get_float32_matmul_precision()"}


@dataclass(frozen=True)
class Effect:
    """The use of a switch. took: True where the program used it. text: the evidence, or why it did not."""

    took: bool
    text: str


def effect(switch: str, before: CapturedRun, after: CapturedRun) -> Effect:
    """Return the effect of a switch on the second run."""
    kind, _, value = switch.partition(":")
    folders = before.folder, after.folder
    if kind == "xla":
        return _of_flag(value, folders)
    if kind == "matmul":
        if after.on_cpu:
            return Effect(False, "the program ran on a CPU, which has no TF32")
        return _of_precision(before.recorded["matmul"], after.recorded["matmul"])
    recorded = after.recorded
    for_torch = value != "cudnn" or "torch" in recorded["matmul"]
    if kind == "attention" and for_torch and not recorded["used"] + recorded["kept"]:  # JAX's programs may import torch
        return _of_sdpa(value, folders)
    return _of_default("torch.compile" if kind == "compile" else "jax.nn.dot_product_attention", recorded)


def _of_default(function: str, recorded: Mapping[str, Any]) -> Effect:
    used, kept = (count(recorded[name], f"call of {function}", f"calls of {function}") for name in ("used", "kept"))
    if recorded["kept"]:
        return Effect(recorded["used"] > 0, f"{used} took it, and {kept} had another value of the program's own")
    return Effect(recorded["used"] > 0, f"{used} took it")


def _of_precision(before: Mapping[str, str], after: Mapping[str, str]) -> Effect:
    names = [name for name in TF32 if name in after]
    took = any(after[name] == TF32[name] != before.get(name) for name in names)
    words = [f"{_NAMES[name]} at the program's end: {after[name]}, and {before.get(name)} without it" for name in names]
    return Effect(took, "; ".join(words) or "the program imports neither jax nor torch")


def _of_flag(flag: str, folders: Sequence[Path]) -> Effect:
    """XLA writes the options that differ from their defaults beside each module. An empty list differs from none."""
    before, after = (
        [file.read_text() for file in folder.joinpath(capture_command.HLO).glob("*.debug_options")]
        for folder in folders
    )
    if not after:
        return Effect(False, "XLA wrote no module: the program does not use it, sets XLA_FLAGS itself, or has all "
                             "modules from JAX's compilation cache")
    old, new = (
        {line for text in texts for line in text.splitlines() if not line.startswith("xla_dump_")}
        for texts in (before, after)
    )
    if old == new and not flag.endswith("="):
        return Effect(False, "XLA's options are the same without it")
    return Effect(True, f"XLA compiled {count(len(after), 'module')} with it")


def _of_sdpa(backend: str, folders: Sequence[Path]) -> Effect:
    """A CUDA graph's launches have no operations in the profile, but Inductor's code has them."""
    operation = f"aten::_scaled_dot_product_{backend}_attention"
    called = re.compile(rf'aten(::|\.)_scaled_dot_product_{backend}_attention(_for_cpu)?("|\.default\()'.encode())
    files = ((capture.PROFILE, "*.json.gz", "profiled steps"), (capture_command.TRACE, "*.log", "compiled code"))
    for place, pattern, where in files:
        old, new = (sum(_matches(file, called) for file in each.joinpath(place).glob(pattern)) for each in folders)
        if old or new:
            return Effect(new > old, f"{count(new, 'call')} of {operation} in the {where}, and {old} without it")
    return Effect(False, f"{operation} is never called: the program has no attention for SDPA, chooses a backend "
                         "itself, or has inputs that this one does not take")


def _matches(file: Path, pattern: re.Pattern[bytes]) -> int:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        return sum(len(pattern.findall(line)) for line in lines)
