"""The fusion graph of what XLA compiled in this process: one module, or the two halves of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from xlafuse.compile.compiler import Compilation
from xlafuse.dumps import artifacts
from xlafuse.hlo import gpu_program
from xlafuse.reasons.fusion_decisions import read_decisions

from ...graph.build.epilogues import with_epilogues
from ...graph.build.from_hlo import from_program
from ...graph.build.phases import join_phases
from ...graph.build.xla_reasons import reasons
from ...graph.model import FusionGraph, Phase


class Compiled(Protocol):
    """What a graph is made from; xlafuse.compile.compiler.Compilation and xlafuse.compile.user_functions.CompiledCall
    have it."""

    @property
    def hlo_text(self) -> str: ...

    @property
    def autotuning(self) -> Mapping[str, str]: ...


def of_module(
    compiled: Compiled, dumps: Path, *, target: str, versions: Mapping[str, str], phase: Phase = "forward"
) -> tuple[FusionGraph, gpu_program.Program]:
    """The graph of one compile, with XLA's reasons from its folder of artifacts, and the program it was made from."""
    module = gpu_program.parse(compiled.hlo_text)
    program = gpu_program.program(module)
    graph = from_program(
        program, phase=phase, target=target, versions=versions, provenance=compiled.autotuning,
        unparsed=tuple(f"line {number}: {text[:1000]}" for number, text in module.unparsed),
    )
    graph = with_epilogues(graph, gpu_program.parse((dumps / artifacts.ARTIFACTS["hlo_before"][0]).read_text()))
    return replace(graph, reasons=reasons(graph, read_decisions(dumps))), program


def of_halves(
    forward: Compilation, backward: Compilation, dumps: Path, *, outputs: int, target: str, versions: Mapping[str, str]
) -> FusionGraph:
    """One graph of a training step. The first `outputs` leaves that forward returns are its caller's; the others are
    backward's first parameters, leaf by leaf. `dumps` holds a folder for each half."""
    first, saving = of_module(forward, dumps / "forward", target=target, versions=versions)
    second, using = of_module(backward, dumps / "backward", target=target, versions=versions, phase="backward")

    def held(leaf: tuple[str, int]) -> str | None:
        kind, index = leaf
        return None if kind == "constant" else (saving.outputs if kind == "computed" else saving.inputs)[index]

    residuals = [held(leaf) for leaf in forward.leaves[outputs:]]
    # The parameters that follow are cotangents.
    passed = {name: buffer for name, buffer in zip(using.inputs, residuals, strict=False) if buffer is not None}
    visible = {buffer for leaf in forward.leaves[:outputs] if (buffer := held(leaf)) is not None}
    return join_phases(first, second, passed, outputs=visible)

