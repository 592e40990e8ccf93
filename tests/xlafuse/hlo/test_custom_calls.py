"""Declarations of custom calls, read from text and from protos, and malformed ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from xlafuse.compare.base.paths import PROJECT
from xlafuse.hlo import custom_calls, gpu_program
from xlafuse.hlo.source_lines import SourceOp

TEXT = """HloModule m, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

ENTRY main {
  x = f32[4]{0} parameter(0)
  ROOT y = f32[4]{0} custom-call(x), custom_call_target="mine", frontend_attributes={other="a{",ATTRIBUTE}, \
metadata={op_name="jit(f)/ffi_call"}, backend_config={name = "k"}
}
"""
OPERATION = {"op": "dot", "stage": "scores", "line": 'a "b".py:3', "site": "scores:dot:", "backward": True}
DECLARED = json.dumps({"flops": 1e12, "operations": [OPERATION, {"op": "exp", "rematerialized": True}]})
OPERATIONS = (
    SourceOp("dot", "scores", 'a "b".py:3', "scores:dot:", backward=True), SourceOp("exp", rematerialized=True)
)


def program(value: str) -> gpu_program.Program:
    return gpu_program.program(gpu_program.parse(TEXT.replace("ATTRIBUTE", f"{custom_calls.ATTRIBUTE}={value}")))


QUOTED = '"' + DECLARED.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize("value", [DECLARED, QUOTED], ids=["as JSON", "quoted"])
def test_a_declaration_gives_flops_and_source_operations(value: str) -> None:
    found = program(value)
    (launch,) = found.launches
    assert (launch.flops, launch.source_ops) == (1e12, OPERATIONS)
    assert launch.kernel.stages == ("scores",) and launch.kernel.ops == ("dot", "exp")
    assert not found.unresolved


def test_without_a_declaration_flops_are_unknown() -> None:
    (launch,) = gpu_program.program(gpu_program.parse(TEXT.replace(",ATTRIBUTE", ""))).launches
    assert launch.flops is None and [op.op for op in launch.source_ops] == ["ffi_call"]


@pytest.mark.parametrize(
    "data",
    [
        [], {}, {"flops": 1}, {"flops": -1, "operations": []}, {"flops": True, "operations": []},
        {"flops": float("inf"), "operations": []}, {"flops": float("nan"), "operations": []},
        {"flops": "1", "operations": []}, {"operations": ["dot"]}, {"operations": [{"stage": "scores"}]},
        {"operations": [{"op": 1}]}, {"operations": [{"op": "dot", "backward": "yes"}]},
        {"operations": [{"op": "dot", "colour": "red"}]},
    ],
)
def test_a_malformed_declaration_is_reported(data: object) -> None:
    found = program(json.dumps(data))
    (launch,) = found.launches
    assert launch.flops is None and [op.op for op in launch.source_ops] == ["ffi_call"]
    assert [text for text in found.unresolved if text.startswith("y: its declaration cannot be read: ")]


@pytest.mark.parametrize("value", ['{"flops": 1e999999999999, ', "{nonsense}", "{" + '"a":[' * 9000, '"', "{}}"])
def test_hostile_text_gives_no_flops(value: str) -> None:
    module = gpu_program.parse(TEXT.replace("ATTRIBUTE", f"{custom_calls.ATTRIBUTE}={value}"))
    assert all(launch.flops is None for launch in gpu_program.program(module).launches)


def test_deep_nesting_is_reported() -> None:
    nested = "{" + '"a":[' * 90000 + "]" * 90000 + "}"
    found = program(nested)
    assert found.launches[0].flops is None and found.unresolved


LOWERED = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from xlafuse.hlo import custom_calls, proto_reader, text_reader

def f(x):
    with set_xla_metadata(**{custom_calls.ATTRIBUTE: sys.argv[1]}):
        return jax.ffi.ffi_call("mine", jax.ShapeDtypeStruct((4,), jnp.float32))(x) + 1

module = jax.jit(f).lower(jnp.zeros(4)).compiler_ir("hlo")
readings = [text_reader.parse(module.as_hlo_text()), proto_reader.parse_proto(module.as_serialized_hlo_module_proto())]
print(json.dumps([
    part.declared for read in readings for part in read.computations[read.entry].instructions.values()
    if part.opcode == "custom-call"
]))
"""


def test_jax_writes_the_declaration_into_text_and_proto() -> None:
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-c", LOWERED, DECLARED], cwd=PROJECT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(text) for text in json.loads(done.stdout)] == [json.loads(DECLARED)] * 2
