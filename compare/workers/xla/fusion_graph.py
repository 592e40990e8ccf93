"""Fusion graphs of XLA's compiles in this process: of one module, or of a training step's two phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from xlafuse.compile.compiler import Compilation
from xlafuse.dumps import artifacts, thunks
from xlafuse.dumps.dump_folder import single_module
from xlafuse.hlo import gpu_program
from xlafuse.reasons.fusion_decisions import read_decisions

from ...graph.build.epilogues import with_epilogues
from ...graph.build.from_hlo import from_program, with_thunks
from ...graph.build.phases import join_phases
from ...graph.build.xla_reasons import reasons
from ...graph.model import FusionGraph, Phase


class Compiled(Protocol):
    """A compile: a xlafuse.compile.compiler.Compilation or a xlafuse.compile.user_functions.CompiledCall."""

    @property
    def hlo_text(self) -> str: ...

    @property
    def autotuning(self) -> Mapping[str, str]: ...


def of_module(
    compiled: Compiled, dumps: Path, *, target: str, versions: Mapping[str, str], phase: Phase = "forward"
) -> tuple[FusionGraph, gpu_program.Program]:
    """Return the graph of one compile, with XLA's reasons from its artifacts, and its parsed program."""
    module = gpu_program.parse(compiled.hlo_text)
    program = gpu_program.program(module)
    graph = from_program(
        program, phase=phase, target=target, versions=versions, provenance=compiled.autotuning,
        unparsed=tuple(f"line {number}: {text[:1000]}" for number, text in module.unparsed),
    )
    graph = with_epilogues(graph, gpu_program.parse((dumps / artifacts.ARTIFACTS["hlo_before"][0]).read_text()))
    graph = with_thunks(graph, thunks.read(single_module(dumps)))
    return replace(graph, reasons=reasons(graph, read_decisions(dumps))), program


def of_halves(
    forward: Compilation, backward: Compilation, dumps: Path, *, outputs: int, target: str, versions: Mapping[str, str]
) -> FusionGraph:
    """Return one graph of a training step. dumps: a folder with artifacts for each phase.

    Forward returns `outputs` leaves to the caller; its other leaves are backward's first arguments, one by one.
    """
    first, saving = of_module(forward, dumps / "forward", target=target, versions=versions)
    second, using = of_module(backward, dumps / "backward", target=target, versions=versions, phase="backward")

    def held(leaf: tuple[str, int]) -> str | None:
        kind, index = leaf
        return None if kind == "constant" else (saving.outputs if kind == "computed" else saving.inputs)[index]

    residuals = [held(leaf) for leaf in forward.leaves[outputs:]]
    # Closed-over arrays come before the residuals, cotangents after them.
    saved = using.inputs[len(backward.closed_over):]
    passed = {name: buffer for name, buffer in zip(saved, residuals, strict=False) if buffer is not None}
    visible = {buffer for leaf in forward.leaves[:outputs] if (buffer := held(leaf)) is not None}
    return join_phases(first, second, passed, outputs=visible)

