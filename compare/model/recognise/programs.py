"""The operations of a program: an HLO module, or what Inductor wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xlafuse.hlo.text_reader import Module

from .from_hlo import from_hlo
from .from_inductor import from_inductor
from .operation_graph import OperationGraph

if TYPE_CHECKING:
    from xlafuse.triton_side.inductor.graph import Program


def operations_of(program: Module | Program) -> OperationGraph:
    """Return the operations in which blocks are recognised."""
    return from_hlo(program) if isinstance(program, Module) else from_inductor(program)
