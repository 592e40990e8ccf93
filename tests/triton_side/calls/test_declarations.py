"""Hand-written kernels' declarations agree with their code and with the stages of the plain blocks.

Launches are compiled for an H200 in a separate process, on a machine that need not have one.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from full_marks import first_of_each

ROOT = Path(__file__).parents[3]
PROPERTIES = ROOT / "compare/targets/h200/cuda_device_properties.json"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build fake_cuda_hooks.cpp"),
]

MLP = {
    "x": (64, 128), "norm_weight": (128,), "gate_weight": (128, 256), "up_weight": (128, 256),
    "down_weight": (256, 128),
}
def layer(sequence: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        "x": (2, sequence, width), "positions": (2, sequence), "attention_norm": (width,), "w_qkv": (width, 512),
        "w_o": (256, width), "mlp_norm": (width,), "w_gate": (width, 2 * width), "w_up": (width, 2 * width),
        "w_down": (2 * width, width),
    }


def gpt2_layer(sequence: int, width: int) -> dict[str, tuple[int, ...]]:
    vectors = ("attention_norm_weight", "attention_norm_bias", "mlp_norm_weight", "mlp_norm_bias", "b_o", "b_down")
    return {
        "x": (2, sequence, width), "seed": (2, 2), "w_qkv": (width, 384), "b_qkv": (384,), "w_o": (128, width),
        "w_up": (width, 2 * width), "b_up": (2 * width,), "w_down": (2 * width, width),
        **dict.fromkeys(vectors, (width,)),
    }


LAYER = layer(64, 128)
MATMUL = {"a": (64, 128), "b": (128, 256)}
MATMUL_FP8 = {"a": (64, 128), "b": (256, 128), "a_scale": (), "b_scale": ()}
LINEAR_GELU = {"x": (64, 128), "weight": (128, 256), "bias": (256,)}
LINEAR_RESIDUAL = {"x": (64, 128), "weight": (128, 256), "residual": (64, 256)}
ATTENTION = dict.fromkeys("qkv", (1, 2, 128, 64))
SHARED = {"q": (1, 4, 128, 64), "k": (1, 2, 128, 64), "v": (1, 2, 128, 64)}
GATED = {"gate": (64, 128), "up": (64, 128)}
MOE = {
    "x": (64, 128), "router": (8, 128), "w_gate": (8, 128, 256), "w_up": (8, 128, 256), "w_down": (8, 256, 128),
}
ROPE = {"q": (2, 9, 128, 64), "k": (2, 2, 128, 64), "positions": (2, 128)}
FEW_HEADS = {"q": (1, 16, 512, 64), "k": (1, 1, 512, 64), "v": (1, 1, 512, 64)}
BIASED = ATTENTION | {"bias": (2, 128, 128)}
BIASED_BATCH = dict.fromkeys("qkv", (3, 2, 128, 64)) | {"bias": (2, 128, 128)}
PACKED = {"q": (300, 4, 64), "k": (300, 2, 64), "v": (300, 2, 64), "cu_seqlens": (6,)}
DECODE = {"q": (2, 6, 64), "k_cache": (2, 2, 640, 64), "v_cache": (2, 2, 640, 64), "lengths": (2,)}
QUERIES = DECODE | {"q": (2, 6, 5, 64)}
SHORT = DECODE | {"k_cache": (2, 2, 64, 64), "v_cache": (2, 2, 64, 64)}
PAGED = {
    "q": (2, 6, 64), "k_pages": (90, 16, 2, 64), "v_pages": (90, 16, 2, 64), "page_table": (2, 40), "lengths": (2,),
}
PAGED_QUERIES = PAGED | {"q": (2, 5, 6, 64)}
PARAMETERS = {  # of a training step with two layers
    "table": (96, 128), "final_norm": (128,), "w_head": (96, 128),
    **{name: (2, *shape) for name, shape in LAYER.items() if name not in ("x", "positions")},
}
STEP = {
    **dict.fromkeys(("tokens", "labels", "positions"), (2, 64)), "step": (), **PARAMETERS,
    **{f"{moment}_{name}": shape for moment in ("mu", "nu") for name, shape in PARAMETERS.items()},
}
FORWARD_ONLY = ("vector_add", "adamw", "lm_step", "matmul_fp8", "decode_attention", "decode_attention_paged")
OWN_DTYPES = {  # independent of the case's dtype
    **dict.fromkeys(("positions", "ids", "tokens", "labels", "seed", "step"), "int32"),
    **dict.fromkeys(("lengths", "page_table", "cu_seqlens"), "int32"),
    **dict.fromkeys(("a_scale", "b_scale", *(name for name in STEP if name.startswith(("mu_", "nu_")))), "float32"),
}
UPDATED = {"counter_ptr", "dq_sum_ptr"}  # by atomic operations
EPS = {"eps": 1e-6}
LLAMA = {"heads": 4, "kv_heads": 2, "theta": 500000.0} | EPS
OPTIMIZER = {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decay": 0.1}
ADAMW = {"step": (), **dict.fromkeys(("param", "gradient", "mu", "nu"), (4096,))}
ENTROPY = {"logits": (64, 128), "labels": (64,)}
PROJECTED = {"h": (8192, 4096), "w": (128256, 4096), "labels": (8192,)}
def chain(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    matrices, vectors = dict.fromkeys(("x", "residual"), (rows, columns)), ("bias", "weight", "shift")
    return matrices | dict.fromkeys(vectors, (columns,)) | {"seed": (2,)}


CHAIN, LONG_CHAIN = chain(64, 128), chain(4, 16384)


def affine(rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {"x": (rows, columns), "weight": (columns,), "bias": (columns,)}


# Folder, block, shapes, attributes, dtype. The long rows select the kernels that loop over a row.
CASES: dict[str, tuple[str, str, dict[str, tuple[int, ...]], dict[str, float], str]] = {
    "vector_add": ("kernels", "vector_add", {"x": (4096,), "y": (4096,)}, {}, "bfloat16"),
    "adamw": ("kernels", "adamw", ADAMW, OPTIMIZER, "float32"),
    "gelu": ("kernels", "gelu", {"x": (64, 128)}, {}, "bfloat16"),
    "swiglu": ("kernels", "swiglu", GATED, {}, "bfloat16"),
    "geglu": ("kernels", "geglu", GATED, {}, "bfloat16"),
    "bias_gelu": ("kernels", "bias_gelu", {"x": (64, 128), "bias": (128,)}, {}, "bfloat16"),
    "softmax": ("kernels", "softmax", {"x": (64, 128)}, {}, "bfloat16"),
    "softmax, one reduction": ("kernels", "softmax", {"x": (2, 32768)}, {}, "bfloat16"),
    "softmax, long rows": ("kernels", "softmax", {"x": (2, 50257)}, {}, "bfloat16"),
    "rmsnorm": ("kernels", "rmsnorm", {"x": (64, 128), "weight": (128,)}, EPS, "bfloat16"),
    "rmsnorm, long rows": ("kernels", "rmsnorm", {"x": (4, 20000), "weight": (20000,)}, EPS, "bfloat16"),
    "layernorm": ("kernels", "layernorm", affine(64, 128), EPS, "bfloat16"),
    "layernorm, halves of rows": ("kernels", "layernorm", affine(4, 16384), EPS, "bfloat16"),
    "layernorm, long rows": ("kernels", "layernorm", affine(4, 20000), EPS, "bfloat16"),
    "dropout_residual_norm": ("kernels", "dropout_residual_norm", CHAIN, {"p": 0.1} | EPS, "bfloat16"),
    "matmul": ("kernels", "matmul", MATMUL, {}, "bfloat16"),
    "matmul, pointers": ("kernels", "matmul", MATMUL, {}, "float32"),
    "matmul_fp8": ("kernels", "matmul_fp8", MATMUL_FP8, {}, "float8_e4m3fn"),
    "linear": ("kernels", "linear", LINEAR_GELU, {}, "bfloat16"),
    "linear_residual": ("kernels", "linear_residual", LINEAR_RESIDUAL, {}, "bfloat16"),
    "linear_gelu": ("kernels", "linear_gelu", LINEAR_GELU, {}, "bfloat16"),
    "linear_gelu, pointers": ("kernels", "linear_gelu", LINEAR_GELU, {}, "float32"),
    "swiglu_mlp": ("kernels", "swiglu_mlp", MLP, EPS, "bfloat16"),
    "swiglu_mlp, pointers": ("kernels", "swiglu_mlp", MLP, EPS, "float32"),
    "moe": ("kernels", "moe", MOE, {"top_k": 2}, "bfloat16"),
    "moe, pointers": ("kernels", "moe", MOE, {"top_k": 2}, "float32"),
    "moe, few tokens": ("kernels", "moe", MOE | {"x": (16, 128)}, {"top_k": 2}, "bfloat16"),
    "rope": ("kernels", "rope", ROPE, {"theta": 500000.0}, "bfloat16"),
    "decoder_block": ("kernels", "decoder_block", layer(4096, 2048), LLAMA, "bfloat16"),
    "decoder_block, few tiles": ("kernels", "decoder_block", LAYER, LLAMA, "bfloat16"),
    "gpt2_block": ("kernels", "gpt2_block", gpt2_layer(4096, 1024), {"heads": 2, "p": 0.1} | EPS, "bfloat16"),
    "gpt2_block, few tiles": ("kernels", "gpt2_block", gpt2_layer(64, 128), {"heads": 2, "p": 0.1} | EPS, "bfloat16"),
    "attention": ("kernels", "attention", ATTENTION, {}, "bfloat16"),
    "attention, portable": ("kernels", "attention", ATTENTION, {"kernels": "portable"}, "bfloat16"),
    "attention, pointers": ("kernels", "attention", ATTENTION, {}, "float32"),
    "attention, few tokens": ("kernels", "attention", dict.fromkeys("qkv", (1, 2, 3, 64)), {}, "bfloat16"),
    "attention, window": ("kernels", "attention", SHARED, {"causal": 1, "window": 32}, "bfloat16"),
    "attention, splits": ("kernels", "attention", FEW_HEADS, {}, "bfloat16"),
    "attention, deterministic": ("kernels", "attention", ATTENTION, {"apply": "apply_deterministic"}, "bfloat16"),
    "attention_bias": ("kernels", "attention_bias", BIASED, {}, "bfloat16"),
    "attention_bias, batch": ("kernels", "attention_bias", BIASED_BATCH, {}, "bfloat16"),
    "attention, wide heads": ("kernels", "attention", dict.fromkeys("qkv", (1, 2, 128, 256)), {}, "bfloat16"),
    "attention_packed": ("kernels", "attention_packed", PACKED, {"longest": 90}, "bfloat16"),
    "attention_packed, pointers": ("kernels", "attention_packed", PACKED, {"longest": 90}, "float32"),
    "decode_attention": ("kernels", "decode_attention", DECODE, {}, "bfloat16"),
    "decode_attention, one chunk": ("kernels", "decode_attention", SHORT, {}, "bfloat16"),
    "decode_attention_paged": ("kernels", "decode_attention_paged", PAGED, {}, "bfloat16"),
    "decode_attention, queries": ("kernels", "decode_attention", QUERIES, {}, "bfloat16"),
    "decode_attention_paged, queries": ("kernels", "decode_attention_paged", PAGED_QUERIES, {}, "bfloat16"),
    "embedding": ("kernels", "embedding", {"table": (512, 128), "ids": (64,)}, {}, "bfloat16"),
    "cross_entropy": ("kernels", "cross_entropy", ENTROPY, {"smoothing": 0.1, "z_loss": 1e-4}, "bfloat16"),
    "linear_cross_entropy": (
        "kernels", "linear_cross_entropy", PROJECTED, {"smoothing": 0.1, "z_loss": 1e-4}, "bfloat16",
    ),
    "cuda vector_add": ("cuda", "vector_add", {"x": (4096,), "y": (4096,)}, {}, "bfloat16"),
    "cuda gelu": ("cuda", "gelu", {"x": (64, 128)}, {}, "bfloat16"),
    "cuda bias_gelu": ("cuda", "bias_gelu", {"x": (64, 128), "bias": (128,)}, {}, "bfloat16"),
    "cuda matmul": ("cuda", "matmul", MATMUL, {}, "bfloat16"),
    "cuda softmax": ("cuda", "softmax", {"x": (64, 128)}, {}, "bfloat16"),
    "cuda softmax, clusters": ("cuda", "softmax", {"x": (2, 32768)}, {}, "bfloat16"),
    "cuda softmax, long rows": ("cuda", "softmax", {"x": (2, 200000)}, {}, "bfloat16"),
    "cuda dropout_residual_norm": ("cuda", "dropout_residual_norm", CHAIN, {"p": 0.1} | EPS, "bfloat16"),
    "cuda dropout_residual_norm, clusters": ("cuda", "dropout_residual_norm", LONG_CHAIN, {"p": 0.1} | EPS, "bfloat16"),
    "cuda layernorm": ("cuda", "layernorm", affine(64, 128), EPS, "bfloat16"),
    "cuda layernorm, long rows": ("cuda", "layernorm", affine(4, 20000), EPS, "bfloat16"),
}
# Both passes in one phase.
WHOLE_STEP = {
    "lm_step": (
        "kernels", "lm_step", STEP, {"optimizer": OPTIMIZER} | LLAMA, "bfloat16",
    ),
}
SCRIPT = """
import importlib, json, sys
from xlafuse.triton_side.deviceless import for_target as deviceless
deviceless.activate(json.load(open(sys.argv[1])))
from xlafuse.triton_side.calls.dispatch import Operation, record_call

def described(event):
    if isinstance(event, Operation):
        return dict(op=event.op, stage=event.stage, backward=event.backward)
    return dict(
        label=event.label, kind=event.kind, flops=event.flops, parameters=event.parameters, source=str(event.source),
        operations=[dict(op=o.op, stage=o.stage, backward=o.backward, again=o.rematerialized, site=o.site)
                    for o in event.operations],
        reads=[t.parameter for t in event.reads], writes=[t.parameter for t in event.writes],
        tensors=[t.parameter for t in event.tensors], sizes={t.storage: t.bytes for t in event.tensors},
        names=[t.name for t in event.writes], bytes=sum(t.bytes_used for t in (*event.reads, *event.writes)),
    )

found = {}
cases, own_dtypes, forward_only = map(json.loads, sys.argv[2:])
for name, (folder, block, shapes, attributes, dtype) in cases.items():
    module = importlib.import_module(f"xlafuse.triton_side.{folder}.{block}")
    apply = getattr(module, attributes.pop("apply", "apply"))
    train = block not in forward_only
    with deviceless.fake_mode():
        specs = {k: (tuple(s), own_dtypes.get(k, dtype)) for k, s in shapes.items()}
        inputs = deviceless.fake_inputs(specs, requires_grad=train)
        recorded = record_call(lambda i: apply(i, **attributes), inputs, train=train, compile_only=True)
    found[name] = {part: [described(event) for event in events] for part, events in recorded.parts.items()}
print(json.dumps(found))
"""


IN_MAKE_TEST = {value.values[0] for value in first_of_each(CASES, lambda case: CASES[case][:2]) if not value.marks}
each_case = pytest.mark.parametrize("case", first_of_each(CASES, lambda case: CASES[case][:2]))


def recorded(case: str) -> dict[str, list[dict[str, Any]]]:
    """Return the events of a case by phase. Cases of `make test` are recorded together, and so are the others."""
    return _recorded(case in IN_MAKE_TEST)[case]


@cache
def _recorded(in_make_test: bool) -> dict[str, dict[str, list[dict[str, Any]]]]:
    cases = {name: case for name, case in (CASES | WHOLE_STEP).items() if (name in IN_MAKE_TEST) == in_make_test}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = map(json.dumps, (cases, OWN_DTYPES, FORWARD_ONLY))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(PROPERTIES), *given],
        env=environment, capture_output=True, text=True, timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def launches(case: str) -> Iterator[dict[str, Any]]:
    for events in recorded(case).values():
        yield from (event for event in events if "label" in event)


def torch_stages(block: str) -> set[str]:
    """Return the stages of the plain block, as a recorder reports them."""
    import importlib

    import torch
    from torch._subclasses import FakeTensorMode

    from xlafuse.triton_side.calls.dispatch import record_call

    _, _, shapes, attributes, _ = CASES[block]
    apply = importlib.import_module(f"xlafuse.triton_side.blocks.{block}").apply
    with FakeTensorMode():
        dtypes = {name: getattr(torch, OWN_DTYPES.get(name, "bfloat16")) for name in shapes}
        inputs = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
        events = record_call(lambda given: apply(given, **attributes), inputs, train=False).parts["forward"]
    return {event.stage for event in events if hasattr(event, "stage")} - {""}


def jax_stages(block: str) -> set[str]:
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax.extend.core")
    import importlib

    _, _, shapes, attributes, _ = CASES[block]
    apply = importlib.import_module(f"xlafuse.blocks.{block}").apply
    dtypes = {name: OWN_DTYPES.get(name, "bfloat16") for name in shapes}
    inputs = {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes.items()}

    def stacks(jaxpr: Any, around: str) -> Iterator[str]:
        for equation in jaxpr.eqns:
            here = "/".join(filter(None, (around, str(equation.source_info.name_stack))))
            parts = here.split("/")  # einsum opens its own scope inside the stage
            yield from ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from stacks(inner, here)

    return set(stacks(jax.make_jaxpr(lambda given: apply(given, **attributes))(inputs).jaxpr, "")) - {""}


@each_case
def test_every_launch_declares_its_operations(case: str) -> None:
    parts = recorded(case)
    assert set(parts) == ({"forward"} if CASES[case][1] in FORWARD_ONLY else {"forward", "backward"})
    for part, events in parts.items():
        assert events
        for event in events:
            operations = event.get("operations", [event])
            assert operations and all(operation["stage"] for operation in operations), event
            backward = {operation["backward"] or operation.get("again", False) for operation in operations}
            if CASES[case][1] not in ("linear_cross_entropy", "lm_step"):  # whose forward pass computes gradients
                assert backward == {part == "backward"}, event
            moves = {operation["op"] for operation in operations} <= {"gather", "sort"}
            by_data = CASES[case][1] == "attention_packed" and event.get("label") != "attention_delta_kernel"
            if "label" in event:
                assert event["flops"] is None if by_data else (event["flops"] > 0) != moves, event


@each_case
def test_a_repeated_operation_exists_in_the_forward_pass(case: str) -> None:
    forward = {o["site"] for event in recorded(case)["forward"] for o in event.get("operations", ())}
    sites = [o["site"] for event in recorded(case)["forward"] for o in event.get("operations", ())]
    if CASES[case][1] not in ("linear_cross_entropy", "lm_step"):  # which loop over chunks of tokens
        assert len(sites) == len(forward), "an operation is declared twice"
    for event in recorded(case).get("backward", ()):
        operations = event.get("operations", ())
        assert {o["site"] for o in operations if o["again"]} <= forward, event["label"]
        assert not {o["site"] for o in operations if o["backward"]} & forward, event["label"]
        assert len({o["site"] for o in operations}) == len(operations), event["label"]


def test_attention_declares_operations_that_backward_kernels_repeat() -> None:
    _, keys, queries = (
        {o["site"] for o in event["operations"]} for event in recorded("attention, portable")["backward"]
    )
    assert len(keys & queries) == 8
    assert {site.rpartition(":")[2] for site in keys - queries} == {"dk", "dv"}
    assert {site.rpartition(":")[2] for site in queries - keys} == {"dq"}


@each_case
def test_declared_stages_are_those_of_the_jax_block(case: str) -> None:
    stages = jax_stages(CASES[case][1])
    declared = {o["stage"] for events in recorded(case).values() for e in events for o in e.get("operations", [e])}
    assert declared <= stages
    forward = {o["stage"] for event in recorded(case)["forward"] for o in event.get("operations", [event])}
    missing = [s for s in stages if not any(f"{f}/".startswith(f"{s}/") or s.startswith(f"{f}/") for f in forward)]
    assert not missing


@each_case
def test_declared_stages_are_those_of_the_pytorch_block_or_within_them(case: str) -> None:
    stages = torch_stages(CASES[case][1])
    declared = {o["stage"] for events in recorded(case).values() for e in events for o in e.get("operations", [e])}
    outside = {stage for stage in declared if not any(f"{stage}/".startswith(f"{s}/") for s in stages)}
    # PyTorch's product with a bias has only the stage around both.
    events = [event for events in recorded(case).values() for event in events]
    around = {event["stage"] for event in events if event.get("op") == "aten.addmm.default"}
    outside -= {stage for stage in around if any(s.startswith(f"{stage}/") for s in stages)}
    assert not outside, (outside, stages)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] == "cuda"])
def test_cuda_kernels_write_their_non_const_parameters(case: str) -> None:
    for launch in launches(case):
        template = launch["label"].partition("<")[0]
        (head,) = re.findall(rf"{template}\(([^)]*)\)\s*{{", Path(launch["source"]).read_text())
        pointers = {p.split()[-1]: "const" in p for p in head.split(",") if "*" in p}
        assert launch["reads"] == [name for name, const in pointers.items() if const]
        assert launch["writes"] == [name for name, const in pointers.items() if not const]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] == "kernels"])
def test_triton_kernels_read_or_write_every_tensor_argument(case: str) -> None:
    for launch in launches(case):
        assert set(launch["reads"]) | set(launch["writes"]) == set(launch["tensors"]), launch["label"]
        assert set(launch["reads"]) & set(launch["writes"]) <= UPDATED, launch["label"]


def test_reads_and_writes_through_descriptors_helpers_and_loops() -> None:
    found = {launch["label"]: (launch["reads"], launch["writes"]) for launch in launches("attention, portable")}
    assert found["attention_forward_kernel"] == (["q_ptr", "k_ptr", "v_ptr"], ["out_ptr", "logsumexp2_ptr"])
    inputs = ["q_ptr", "k_ptr", "v_ptr", "dout_ptr", "logsumexp2_ptr", "delta_ptr"]
    assert found["attention_dk_dv_kernel"] == (inputs, ["dk_ptr", "dv_ptr"])
    assert found["attention_dq_kernel"] == (inputs, ["dq_ptr"])
    down = recorded("swiglu_mlp")["forward"][-1]
    assert (down["reads"], down["writes"]) == (["a_ptr", "b_ptr", "residual_ptr"], ["c_ptr"])
    for case, of_pointers in (("swiglu_mlp", "swiglu_mlp, pointers"), ("attention, portable", "attention, pointers")):
        pointers = {launch["label"]: (launch["reads"], launch["writes"]) for launch in launches(of_pointers)}
        through = {launch["label"]: (launch["reads"], launch["writes"]) for launch in launches(case)}
        assert pointers == through


def test_deterministic_gradients_need_no_atomics() -> None:
    found = list(launches("attention, deterministic"))
    assert found[0]["label"] == "hopper_attention_forward_kernel"
    assert [launch["label"] for launch in found[1:]] == [
        "attention_delta_kernel", "attention_dk_dv_kernel", "attention_dq_kernel",
    ]
    assert not any(set(launch["reads"]) & set(launch["writes"]) for launch in found[1:])


def test_splits_store_sums_that_another_launch_reads() -> None:
    *_, gradient, total, _ = launches("attention, splits")
    sums = {"dk_sums", "dv_sums"}
    assert gradient["label"] == "hopper_attention_backward_kernel" and sums < set(gradient["names"])
    assert total["label"] == "attention_sum_splits_kernel" and total["names"] == ["dk", "dv"]
    assert total["bytes"] == 2 * (16 * 4 + 2) * 512 * 64
    assert {(o["stage"], o["op"]) for o in total["operations"]} == {("scores", "reduce_sum"), ("values", "reduce_sum")}


def test_a_sum_over_rows_names_its_vectors() -> None:
    *_, last = recorded("dropout_residual_norm")["backward"]
    assert last["label"] == "sum_columns_kernel" and last["names"] == ["dbias", "dweight", "dshift"]
    assert {(o["stage"], o["op"]) for o in last["operations"]} == {("bias", "reduce_sum"), ("affine", "reduce_sum")}


def test_the_linear_layer_names_its_outputs() -> None:
    parts = recorded("linear_gelu")
    names = {part: [n for event in events for n in event.get("names", ())] for part, events in parts.items()}
    assert names == {"forward": ["pre", "y"], "backward": ["dpre", "dbias", "dx", "dweight"]}
    *_, product = recorded("linear")["backward"]
    assert product["names"] == ["dweight", "dbias"] and product["flops"] == 2 * 128 * 256 * 64 + 64 * 256


def test_linear_layers_of_few_rows_move_compulsory_bytes() -> None:
    m, k, n = 64, 128, 256
    x, weight, y, bias = (2 * elements for elements in (m * k, k * n, m * n, n))
    moved = {
        case: [sum(event["bytes"] for event in events) for events in recorded(case).values()]
        for case in ("linear", "linear_residual")
    }
    products = (y + weight + x) + (x + y + weight)
    assert moved["linear_residual"] == [x + weight + y + y, products]
    forward, backward = moved["linear"]
    assert forward == x + weight + bias + y
    assert backward == products + bias


def test_an_fp8_product_reads_one_byte_per_element_and_writes_two() -> None:
    (product,) = recorded("matmul_fp8")["forward"]
    assert product["reads"] == ["a_ptr", "b_ptr", "a_scale_ptr", "b_scale_ptr"] and product["names"] == ["c"]
    assert product["bytes"] == 64 * 128 + 256 * 128 + 2 * 4 + 2 * 64 * 256
    assert product["flops"] == 2 * 64 * 128 * 256 + 64 * 256


def test_the_mlp_names_its_intermediates() -> None:
    parts = recorded("swiglu_mlp")
    names = {part: [n for event in events for n in event.get("names", ())] for part, events in parts.items()}
    assert names["forward"] == ["h", "rstd", "gate", "up", "act", "y"]
    assert names["backward"] == [
        "dact", "dgate", "dup", "act", "ddown_weight", "dgate_weight", "dup_weight", "dh_of_gate", "dh", "dx",
        "partial", "dweight",
    ]


def test_a_layer_fuses_residuals_and_rotation_into_other_kernels() -> None:
    forward, backward = recorded("decoder_block").values()
    copies = [event["op"] for event in (*forward, *backward) if "op" in event and "mm" not in event["op"]]
    assert copies == []  # attention's kernels write rows of tokens, so nothing is copied
    names = [n for event in (*forward, *backward) for n in event.get("names", ())]
    assert names == [
        "h1", "rstd", "q_out", "k_out", "out", "logsumexp2", "counter", "h2", "x1", "rstd", "act", "y",
        "dgate", "dup", "act", "dh2", "dx1", "partial", "dweight", "stats", "dq_sum", "dq_sum", "dk_sums", "dv_sums",
        "dk", "dv", "dq", "dq", "dk", "dx", "partial", "dweight",
    ]
    tokens = 2 * 4096 * 2048 * 2  # bytes of x
    sums = [event["bytes"] for event in forward if event.get("label") == "rmsnorm_forward_kernel"]
    assert sums[1] - sums[0] == 2 * tokens


def test_rope_rotates_queries_and_keys_in_one_launch() -> None:
    (forward,), (backward,) = recorded("rope").values()
    assert (forward["reads"], forward["names"]) == (["q_ptr", "k_ptr", "positions_ptr"], ["q_out", "k_out"])
    assert (backward["reads"], backward["names"]) == (forward["reads"], ["dq", "dk"])
    bytes = 2 * 2 * (2 * (9 + 2) * 128 * 64) + 4 * 2 * 128  # bfloat16 read once and written once, plus positions
    assert forward["bytes"] == backward["bytes"] == bytes


def test_adamw_reads_and_writes_a_parameter_and_its_moments_once() -> None:
    (launch,) = recorded("adamw")["forward"]
    assert launch["names"] == ["new_param", "new_mu", "new_nu"] and launch["bytes"] == 7 * 4 * 4096 + 4


def test_a_step_updates_all_parameters_in_one_launch_that_moves_each_once() -> None:
    (update,) = (event for event in recorded("lm_step")["forward"] if event.get("label") == "adamw_kernel")
    elements = sum(math.prod(shape) for shape in PARAMETERS.values())
    assert update["flops"] == 16 * elements
    assert update["bytes"] == (3 * 2 + 4 * 4) * elements + 4  # bfloat16 parameters and gradients, float32 moments
    assert {operation["stage"] for operation in update["operations"]} == {
        f"adamw/{name}/{stage}" for name in PARAMETERS for stage in ("mu", "nu", "update")
    }


def test_a_lookup_reads_as_much_as_it_returns_and_its_gradient_writes_the_table_once() -> None:
    (forward,), backward = recorded("embedding")["forward"], recorded("embedding")["backward"]
    assert forward["bytes"] == 2 * 64 * (2 * 128) + 4 * 64
    order, dtable = (event["bytes"] for event in backward)
    assert order == 3 * 4 * 64
    assert dtable == 2 * 512 * 128 + 2 * 64 * 128 + 2 * 4 * 64


def test_decoding_reads_every_key_once_and_stores_partial_results_per_chunk() -> None:
    keys, statistics = 2 * 2 * (2 * 2 * 640 * 64), 4 * 2
    for (name, table), (more, count) in itertools.product(
        (("decode_attention", 0), ("decode_attention_paged", 4 * 2 * 40)), (("", 1), (", queries", 5))
    ):
        queries = 2 * 2 * 6 * count * 64
        attend, combine = recorded(name + more)["forward"]
        assert (attend["names"], combine["names"]) == (["partial", "max", "sum"], ["out"])
        # Two per cache element and row; three heads share a cache.
        assert attend["flops"] == 2 * 3 * count * keys / 2
        partials = attend["bytes"] - (queries + keys + statistics + table)
        splits, left_over = divmod(partials, 4 * 2 * 6 * count * (64 + 2))
        assert splits == 10 and left_over == 0
        assert combine["bytes"] == partials + statistics + queries
    (alone,) = recorded("decode_attention, one chunk")["forward"]
    assert alone["names"] == ["out"] and alone["bytes"] == 2 * (2 * 2 * 6 * 64) + keys / 10 + statistics


def test_flops_are_those_of_the_products() -> None:
    def declared(case: str, part: str) -> float:
        return sum(event.get("flops", 0) for event in recorded(case)[part])

    causal = 2 * 2 * 1 * 2 * 128 * 128 * 64 / 2
    assert declared("attention", "forward") == declared("attention, portable", "forward") == causal
    # Forward has two products. Backward has five on a Hopper GPU, and seven in the portable kernels; plus delta.
    assert declared("attention", "backward") == pytest.approx(2.5 * causal, rel=0.01)
    assert declared("attention, portable", "backward") == pytest.approx(3.5 * causal, rel=0.01)
    windowed = 2 * 2 * 1 * 4 * (128 * 32 - 32 * 32 / 2) * 64
    assert declared("attention, window", "forward") == windowed
    assert declared("attention, window", "backward") == pytest.approx(2.5 * windowed, rel=0.03)
    products = 3 * 2 * 64 * 128 * 256
    assert declared("swiglu_mlp", "forward") == pytest.approx(products, rel=0.02)
    assert declared("swiglu_mlp", "backward") == pytest.approx(2 * products, rel=0.03)
    for case in ("matmul", "cuda matmul"):
        assert declared(case, "forward") == products / 3
        assert declared(case, "backward") == 2 * products / 3
    assert declared("linear", "forward") == declared("linear_residual", "forward") == products / 3 + 64 * 256
    assert declared("linear", "backward") == pytest.approx(2 * products / 3, rel=0.01)
    assert declared("linear_gelu", "forward") == products / 3 + 10 * 64 * 256
    assert declared("linear_gelu", "backward") == pytest.approx(2 * products / 3, rel=0.04)
    assert declared("rmsnorm", "forward") == 4 * 64 * 128
    assert declared("layernorm", "forward") == declared("cuda layernorm", "forward") == 7 * 64 * 128


def test_the_fused_loss_needs_little_memory() -> None:
    parts, sizes = recorded("linear_cross_entropy"), dict[str, int]()
    for event in (*parts["forward"], *parts["backward"]):
        for storage, size in event.get("sizes", {}).items():
            sizes[storage] = max(sizes.get(storage, 0), size)
    h, w = 2 * 8192 * 4096, 2 * 128256 * 4096
    assert sum(sizes.values()) - 2 * (h + w) < 0.8e9 < 2 * 8192 * 128256
    chunk, classes = 2048, 128256
    first = next(event for event in parts["forward"] if event["label"] == "projected_statistics_kernel")
    statistics, logits = 3 * 4 * (classes // 256) * chunk, 2 * chunk * classes
    assert first["bytes"] == h * chunk // 8192 + w + 4 * chunk + statistics + 4 * chunk + logits


def test_a_step_projects_in_the_stage_head() -> None:
    events = recorded("lm_step")["forward"]
    operations = [(event, o) for event in events for o in event.get("operations", [event])]
    products = [event.get("label", o["op"]) for event, o in operations if o["stage"] == "head"]
    assert products == ["projected_statistics_kernel", "aten.mm.out", "aten.mm.out"]  # logits, then dh and dw
    assert {o["stage"] for _, o in operations if o["stage"].startswith("loss")} == {
        f"loss/{stage}" for stage in ("logsumexp", "smoothing", "target", "z_loss", "mean")
    }


@pytest.mark.parametrize("case", ["layernorm", "cuda layernorm"])
def test_layernorm_moves_compulsory_bytes_and_a_few_partial_sums(case: str) -> None:
    """In addition to compulsory bytes: mean and rstd per row, and partial sums of dweight and dbias, twice."""
    rows, columns = 64, 128
    matrix, vector, statistics = 2 * rows * columns, 2 * columns, 2 * 4 * rows
    forward, backward = (sum(event["bytes"] for event in recorded(case)[part]) for part in ("forward", "backward"))
    assert forward == 2 * matrix + 2 * vector + statistics
    partials, left_over = divmod(backward - (3 * matrix + 3 * vector + statistics), 2 * 2 * 4 * columns)
    assert 1 <= partials <= rows and left_over == 0
    names = [event["names"] for event in recorded(case)["backward"]]
    assert names == [["dx", "partial"], ["dweight", "dbias"]]


def test_the_mixture_computes_only_chosen_experts_and_names_its_intermediates() -> None:
    parts = recorded("moe")
    products = 3 * 2 * (64 * 2) * 128 * 256
    declared = {part: sum(event["flops"] for event in events) for part, events in parts.items()}
    assert declared["forward"] == pytest.approx(products, rel=0.03)
    assert declared["backward"] == pytest.approx(2 * products, rel=0.03)
    names = {part: [n for event in events for n in event["names"]] for part, events in parts.items()}
    few = recorded("moe, few tokens")["forward"]
    assert sum(operation["op"] == "sort" for event in few for operation in event["operations"]) == 2  # top_k and slots
    assert len(few) == len(parts["forward"]) - 2
    assert all("x_in_slots" not in event["names"] for event in few)
    assert names["forward"][-6:] == ["x_in_slots", "gate", "up", "act", "out", "y"]
    assert names["backward"] == [
        "dy_in_slots", "dout", "dgate", "dup", "weighted_act", "dweights", "dw_down", "x_in_slots", "dw_gate", "dw_up",
        "dx_of_experts", "dlogits", "partial", "drouter", "dx",
    ]


def test_a_layer_uses_our_products_if_they_fuse_more_and_fill_the_gpu() -> None:
    def ours(case: str) -> list[str]:
        return [event["label"] for event in launches(case) if event["label"] == "matmul_kernel"]

    def pytorch_s(case: str) -> list[str]:
        return [event["op"] for events in recorded(case).values() for event in events if "op" in event]

    assert (len(ours("decoder_block")), len(ours("gpt2_block"))) == (2, 1)
    assert ours("decoder_block, few tiles") == ours("gpt2_block, few tiles") == []
    for case in ("gpt2_block", "gpt2_block, few tiles"):
        assert [event["names"] for event in launches(case)][3][-1] == "act"
    assert Counter(pytorch_s("decoder_block")) == {"aten.mm.default": 13}
    assert Counter(pytorch_s("decoder_block, few tiles")) == {"aten.mm.default": 15, "aten.add_.Tensor": 2}
    assert Counter(pytorch_s("gpt2_block, few tiles")) - Counter(pytorch_s("gpt2_block")) == {"aten.addmm.default": 1}
