"""Bytes and FLOPs of every kernel against XLA's own cost analysis, on the blocks compiled for an H200.

Each kernel's instruction becomes a separate module, with its operands as parameters, and jaxlib analyses that. The
functions of `_EXPLAINED` compute the intended differences.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from xlafuse.compile import _jax_private, compiler
from xlafuse.hlo import gpu_program, proto_reader
from xlafuse.hlo.text_reader import Computation, Instruction

pytestmark = pytest.mark.slow

CAPTURE = Path(__file__).parents[2] / "data" / "capture.py"


def _cost_analysis(module: Any) -> dict[str, float]:
    """Return XLA's HloCostAnalysis of an HloModuleProto. Private API, tested with jaxlib 0.10.2 and 0.11.2."""
    from jaxlib import _hlo, _jax

    _jax_private.check_version()
    client = jax.devices("cpu")[0].client
    parsed = _hlo.HloModule.from_serialized_hlo_module_proto(module.SerializeToString())
    return _jax.hlo_module_cost_analysis(client, parsed)


@pytest.fixture(scope="module")
def modules(h200: compiler.Target) -> dict[str, bytes]:
    """Serialized modules by name: those that tests/data/capture.py compiles for one H200, from this jax."""
    spec = importlib.util.spec_from_file_location("capture", CAPTURE)
    assert spec and spec.loader
    capture = importlib.util.module_from_spec(spec)
    sys.modules["capture"] = capture
    spec.loader.exec_module(capture)
    return {name: proto for name, _, proto in capture.h200_modules()}


# The bytes that XLA counts and a kernel does not access; `around` is the instruction's computation.


def _gathered(module: gpu_program.Module, around: Computation, instruction: Instruction) -> int:
    """Return the unread bytes of tables: XLA counts a whole table, and a gather reads as much as it returns."""
    return sum(
        body.instructions[part.operands[0]].bytes - part.bytes for body, part in _inside(module, instruction, "gather")
    )


def _scattered(module: gpu_program.Module, around: Computation, instruction: Instruction) -> int:
    """Return the untouched bytes of scattered arrays: XLA counts a whole array as read and written."""
    return sum(
        2 * (part.bytes - body.instructions[part.operands[-1]].bytes)
        for body, part in _inside(module, instruction, "scatter")
    )


def _named_twice(module: gpu_program.Module, around: Computation, instruction: Instruction) -> int:
    """Return the bytes of arrays with two names (bitcasts): XLA counts each name, but they are one buffer."""
    seen, more = set(), 0
    for name in dict.fromkeys(instruction.operands):
        origin = around.instructions[name]
        while origin.opcode == "bitcast":
            origin = around.instructions[origin.operands[0]]
        more += origin.bytes if origin.name in seen else 0
        seen.add(origin.name)
    return more


_EXPLAINED = (_gathered, _scattered, _named_twice)


def _inside(
    module: gpu_program.Module, instruction: Instruction, opcode: str
) -> Iterator[tuple[Computation, Instruction]]:
    for name in instruction.called("calls"):
        body = module.computations[name]
        yield from ((body, part) for part in body.instructions.values() if part.opcode == opcode)


def _compared(proto: bytes) -> Iterator[tuple[gpu_program.Launch, dict[str, float], int]]:
    """Yield (launch, XLA's analysis, explained bytes) of every kernel."""
    module = proto_reader.message_type("xla.HloModuleProto").FromString(proto)
    read = proto_reader.parse_proto(proto)
    found = {part.name: (computation, part) for computation in module.computations for part in computation.instructions}
    for launch in gpu_program.program(read).launches:
        computation, instruction = found[launch.kernel.name]
        around = read.computations[computation.name]
        explained = sum(explain(read, around, launch.instruction) for explain in _EXPLAINED)
        if instruction.opcode == "async-start":
            (computation,) = (c for c in module.computations if c.id == instruction.called_computation_ids[0])
            (instruction,) = (part for part in computation.instructions if part.opcode != "parameter")
        yield launch, _cost_analysis(_alone(module, computation, instruction)), explained


def _alone(module: Any, computation: Any, instruction: Any) -> Any:
    """Return a module whose entry is that instruction on parameters."""
    called = {c.id: c for c in module.computations}
    alone = type(module)(name="alone", stack_frame_index=module.stack_frame_index)
    for id in _callees(called, instruction):
        alone.computations.add().CopyFrom(called[id])
    entry = alone.computations.add(name="alone", id=max(called) + 1)
    alone.entry_computation_name, alone.entry_computation_id = entry.name, entry.id
    first = entry.id << 32  # XLA's instruction ids begin with their computation's
    operands = {part.id: part for part in computation.instructions}
    places: dict[int, int] = {}
    for operand in instruction.operand_ids:
        if operand not in places:
            number = len(places)
            places[operand] = first + number
            parameter = entry.instructions.add(
                name=f"p{number}", opcode="parameter", id=first + number, parameter_number=number
            )
            parameter.shape.CopyFrom(operands[operand].shape)
            entry.program_shape.parameters.add().CopyFrom(parameter.shape)
            entry.program_shape.parameter_names.append(parameter.name)
    root = entry.instructions.add()
    root.CopyFrom(instruction)
    root.id = entry.root_id = first + len(places)
    root.ClearField("control_predecessor_ids")
    root.operand_ids[:] = [places[operand] for operand in instruction.operand_ids]
    entry.program_shape.result.CopyFrom(instruction.shape)
    alone.host_program_shape.CopyFrom(entry.program_shape)
    return alone


def _callees(called: dict[int, Any], instruction: Any) -> list[int]:
    """Return the computations that it calls, directly or not; callees come first, as XLA requires."""
    order: list[int] = []
    for id in instruction.called_computation_ids:
        for part in called[id].instructions:
            order += [inner for inner in _callees(called, part) if inner not in order]
        order.append(id)
    return list(dict.fromkeys(order))


def test_bytes(modules: dict[str, bytes]) -> None:
    compared, explained = 0, 0
    for name, proto in modules.items():
        for launch, account, more in _compared(proto):
            kernel = launch.kernel
            ours = kernel.bytes_read + kernel.bytes_written + more
            # XLA adds in single precision.
            assert ours == pytest.approx(account["bytes accessed"], rel=2**-22), f"{name}: {kernel.name}"
            compared, explained = compared + 1, explained + bool(more)
    assert compared > 80 and explained == 3


def test_flops(modules: dict[str, bytes]) -> None:
    compared = 0
    for name, proto in modules.items():
        for launch, account, _ in _compared(proto):
            if launch.flops is None:
                continue
            theirs = account.get("flops", 0.0) + account.get("transcendentals", 0.0)
            assert launch.flops == pytest.approx(theirs, rel=2**-20), f"{name}: {launch.kernel.name}"
            compared += 1
    assert compared > 80
