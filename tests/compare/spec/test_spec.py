"""Blocks as data: names, cases, and the bytes that no implementation can avoid."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest

from xlafuse.compare.backends import BACKENDS
from xlafuse.compare.base import host
from xlafuse.compare.base.paths import PROJECT
from xlafuse.compare.base.worker_protocol import ROLES
from xlafuse.compare.numerics import input_arrays
from xlafuse.compare.spec.block import Block
from xlafuse.compare.spec.blocks import BLOCKS, attention, decode_attention, requirements
from xlafuse.compare.spec.case import Case
from xlafuse.compare.spec.tensor import Tensor


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_a_block_is_consistent(block: Block) -> None:
    axes = {axis for t in block.inputs for axis in t.axes}
    assert all({*t.optional} <= {*t.axes} for t in (*block.inputs, *block.outputs))
    names = [t.name for t in (*block.inputs, *block.outputs)]
    assert len(names) == len(set(names))
    assert set(block.backward_needs) <= set(names)
    assert bool(block.backward_needs) == ("train" in block.directions)
    assert {axis for s in block.slices for axis in ([s] if isinstance(s, str) else s)} <= axes
    assert len({i.name for i in block.implementations}) == len(block.implementations)
    assert len({s.name for s in block.shapes}) == len(block.shapes)
    for shape in block.shapes:
        assert {axis for t in block.inputs for axis in t.axes_in(shape.sizes)} <= set(shape.sizes), shape.name
        assert {*shape.implementations} <= {i.name for i in block.implementations}, shape.name
    for suite in ("quick", "full", "check"):
        cases = block.cases(suite)
        assert cases and len({c.id for c in cases}) == len(cases)
    assert {c.id for c in block.cases("quick")} <= {c.id for c in block.cases("full")}
    assert {c.direction for c in block.cases("quick")} == set(block.directions)
    assert block.shapes[0].quick and block.shapes[0].dtypes == ("bfloat16",)


def test_a_tpu_takes_jax_programs_alone_and_refuses_others_with_a_reason() -> None:
    rows = [i for block in BLOCKS.values() for i in block.implementations]
    taken = [i for i in rows if i.refused_by("tpu-v5e") is None]
    assert {"xla", "xla-remat"} <= {i.name for i in taken}
    assert all(i.target.startswith("xlafuse.blocks.") for i in taken)
    for name in ("triton", "pallas", "xla-cudnn", "xla-unfused", "eager", "inductor", "cuda", "tokamax"):
        refusals = [i.refused_by("tpu-v5e") for i in rows if i.name == name]
        assert refusals and all(each and each.startswith("tpu-v5e is not a GPU: ") for each in refusals), name


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_hand_written_kernels_take_the_main_cases(block: Block) -> None:
    main = [case for case in block.cases("full") if case.name == block.shapes[0].name]
    refused = {
        (i.name, case.id): reason
        for case in main for i in block.implementations
        if not i.is_peer and case.direction in i.directions and (reason := i.unsupported(case))
    }
    assert refused == {}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_replays_of_graphs_stand_beside_the_calls_that_they_replay(block: Block) -> None:
    targets = {i.name: i.target for i in block.implementations}
    for implementation in block.implementations:
        assert {*implementation.static_inputs} <= {t.name for t in block.inputs}
        if implementation.backend.replays_graphs:
            assert implementation.target == targets[implementation.name.removesuffix("-cudagraphs")]
            assert implementation.needs_gpu


@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: b.name)
def test_edge_cases_are_in_no_timed_suite(block: Block) -> None:
    assert not {c.id for c in block.cases("check")} & {c.id for c in block.cases("full")}
    small = [c.id for c in block.cpu_check_cases()]
    assert small and set(small) <= {c.id for c in block.cases("check")}
    assert all(Case.from_json(c.to_json()) == c for c in block.cases("check"))


@pytest.mark.parametrize("name", ["gelu", "softmax", "rmsnorm", "swiglu_mlp", "attention", "cross_entropy"])
def test_main_blocks_are_timed_in_every_dtype_in_quick(name: str) -> None:
    assert {c.dtype for c in BLOCKS[name].cases("quick")} == {"bfloat16", "float16", "float32"}


def test_quick_autotunes_the_forward_case_of_seven_blocks() -> None:
    taken = [
        c.id for block in BLOCKS.values() for c in block.cases("quick") for i in block.implementations
        if i.backend.autotunes_for_minutes and block.takes(c, i, "quick")
    ]
    assert [case.split("/")[0] for case in taken] == [
        "gelu", "softmax", "rmsnorm", "matmul", "swiglu_mlp", "attention", "cross_entropy",
    ]
    assert {case.split("/", 2)[2] for case in taken} == {"bf16/fwd"}


def test_backends_name_code_that_exists() -> None:
    for backend in BACKENDS.values():
        for target in filter(None, (backend.prepare, backend.compile_for_target)):
            module, _, function = target.partition(":")
            source = (PROJECT / f"compare{module.replace('.', '/')}.py").read_text()
            assert f"def {function}(" in source, target
        assert {backend.worker, backend.target_worker, backend.cpu_check_worker} <= {*ROLES, None}


def test_compulsory_bytes_of_softmax() -> None:
    case = Case("softmax", "x", {"rows": 3, "columns": 5}, "bfloat16", "train")
    # forward reads x and writes y; backward reads dy and y and writes dx
    assert BLOCKS["softmax"].bytes_compulsory(case) == {"forward": 2 * 2 * 15, "backward": 3 * 2 * 15}


def test_a_joint_program_counts_shared_bytes_and_flops_once() -> None:
    block, elements = BLOCKS["softmax"], 4 * 7 * 257
    train = Case("softmax", "x", {"rows": 7, "columns": 257}, "float32", "train")
    joint = replace(train, direction="joint")
    # x and dy are read, y and dx are written; apart, backward would read y again
    assert block.compulsory_traffic(joint) == {"forward": (2 * elements, 2 * elements)}
    assert sum(block.bytes_compulsory(train).values()) == 5 * elements
    assert block.phase_flops(joint) == {"forward": sum(block.phase_flops(train).values())}


def test_a_gradient_that_is_the_cotangent_is_not_written() -> None:
    case = Case("linear_residual", "x", {"m": 3, "k": 5, "n": 7}, "bfloat16", "train")
    x, weight, y = 2 * 3 * 5, 2 * 5 * 7, 2 * 3 * 7
    assert BLOCKS["linear_residual"].compulsory_traffic(case) == {
        "forward": (x + weight + y, y), "backward": (y + x + weight, x + weight),
    }


def test_compulsory_bytes_of_vector_add() -> None:
    case = Case("vector_add", "x", {"elements": 7}, "float16", "fwd")
    block = BLOCKS["vector_add"]
    assert block.bytes_compulsory(case) == {"forward": 3 * 2 * 7}
    assert block.phase_flops(case)["forward"] / block.bytes_compulsory(case)["forward"] == pytest.approx(1 / 6)


LOOKUP = Block(
    name="lookup", summary="", reference=lambda xp, i: {"loss": i["table"][i["ids"]].sum()}, shapes=(),
    inputs=(
        Tensor("table", ("rows", "columns"), read=lambda s: s["tokens"] * s["columns"]),
        Tensor("ids", ("tokens",), dtype="int32", draw=lambda g, s: g.integers(0, s["rows"], s["tokens"])),
    ),
    outputs=(Tensor("loss", (), dtype="float32"),), implementations=(), flops=lambda s: 0.0, backward_needs=("ids",),
)


def test_integers_are_drawn_and_have_no_gradient() -> None:
    case = Case("lookup", "x", {"rows": 100, "columns": 3, "tokens": 7}, "bfloat16", "train")
    table, ids = LOOKUP.inputs
    drawn = input_arrays.draw(case, ids, seed=0)
    assert drawn.shape == (7,) and drawn.min() >= 0 and drawn.max() < 100
    assert (drawn == input_arrays.draw(case, ids, seed=0)).all()
    assert (drawn != input_arrays.draw(case, ids, seed=1)).any()
    assert table.differentiable and not ids.differentiable
    # forward reads 7 rows of 3 and 7 ids and writes the loss; backward reads dloss and ids and writes all of dtable
    assert LOOKUP.compulsory_traffic(case) == {
        "forward": (2 * 21 + 4 * 7, 4), "backward": (4 + 4 * 7, 2 * 300),
    }


def test_logits_of_ignored_tokens_are_no_compulsory_reads() -> None:
    sizes = {"tokens": 40, "classes": 10, "ignored_percent": 5}
    case = Case("cross_entropy", "x", sizes, "bfloat16", "train")
    labels = input_arrays.draw(case, BLOCKS["cross_entropy"].tensor("labels"), 0)
    assert (labels == -100).sum() == 2 and labels[labels != -100].min() >= 0 and labels.max() < 10
    # forward reads 38 rows and all labels and writes the loss; backward reads dloss, too, and writes every gradient
    assert BLOCKS["cross_entropy"].compulsory_traffic(case) == {
        "forward": (2 * 380 + 4 * 40, 4), "backward": (4 + 2 * 380 + 4 * 40, 2 * 400),
    }


def test_a_draw_of_another_shape_is_refused() -> None:
    case = Case("lookup", "x", {"rows": 100, "columns": 3, "tokens": 7}, "bfloat16", "train")
    with pytest.raises(ValueError, match=r"ids was drawn in shape \(3,\), expected \(7,\)"):
        wrong = Tensor("ids", ("tokens",), dtype="int32", draw=lambda g, s: g.integers(0, 9, 3))
        input_arrays.draw(case, wrong, seed=0)


def test_attention_flops_are_half_the_square() -> None:
    def flops(**more: int) -> dict[str, float]:
        case = Case("attention", "x", attention.sizes(2, 3, 8, 16, **more), "bfloat16", "train")
        return BLOCKS["attention"].phase_flops(case)

    assert flops()["forward"] == 2 * 3 * (2 * 2 * 8 * 8 * 16) / 2
    assert flops()["backward"] == 2.5 * flops()["forward"]
    assert flops(kv_heads=1) == flops(window=8) == flops(window=100) == flops()
    assert flops(causal=0)["forward"] == 2 * flops()["forward"]
    assert flops(window=2)["forward"] == 2 * 3 * 2 * 2 * 16 * (8 * 2 - 2)


def test_several_queries_read_the_keys_once_and_see_pairs_under_the_diagonal() -> None:
    block = BLOCKS["decode_attention"]

    def case(queries: int, shortest: int = 9) -> Case:
        sizes = decode_attention.sizes(2, 6, 2, 9, 4, shortest, queries)
        return Case("decode_attention", "x", sizes, "bfloat16", "fwd")

    keys = 2 * 2 * (2 * 9 * 2 * 4)  # bytes of k and v
    for queries in (1, 3):
        read = keys + 2 * (2 * 6 * queries * 4) + 4 * 2
        assert block.compulsory_traffic(case(queries))["forward"] == (read, 2 * (2 * 6 * queries * 4))
    assert block.phase_flops(case(1))["forward"] == 2 * 2 * 6 * 4 * (9 + 9)
    assert block.phase_flops(case(3))["forward"] == 2 * 2 * 6 * 4 * 2 * (7 + 8 + 9)
    assert block.phase_flops(case(3, shortest=1))["forward"] == 2 * 2 * 6 * 4 * (1 + 7 + 8 + 9)
    assert case(1).sizes.keys() == {**block.shapes[0].sizes}.keys()


def test_a_case_survives_json() -> None:
    for block in BLOCKS.values():
        for case in block.cases("full"):
            assert Case.from_json(case.to_json()) == case


def test_attributes_include_the_sizes_that_are_parameters() -> None:
    block = replace(LOOKUP, attributes={"scale": 0.5}, parameters=("window",))
    case = Case("lookup", "x", {"rows": 100, "columns": 3, "tokens": 7, "window": 4}, "bfloat16", "fwd")
    assert block.attributes_of(case) == {"scale": 0.5, "window": 4}


def test_optional_packages_are_those_of_the_extra_peers() -> None:
    """`pip install xlafuse[peers]` installs the versions that the implementations were tested with."""
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {*requirements("xla"), *requirements("torch")}
    peers = {requirement.partition(";")[0] for requirement in extras["peers"]}
    assert peers == {r for r in needed if host.distribution(r) not in ("python", "jax", "torch")}


def test_a_missing_package_is_named_with_its_remedy() -> None:
    assert host.missing(("numpy>=1",)) is None
    problem = host.missing(("numpy>=1", "no-such-package[extra]==1.2"))
    assert problem is not None and problem.startswith("no-such-package is not installed")
    assert '-m pip install "no-such-package[extra]==1.2"' in problem


def test_an_old_package_is_refused_and_an_untested_version_is_not() -> None:
    assert host.missing(("numpy==0.1", "numpy>=1.9")) is None
    problem = host.missing(("numpy>=1000.0",))
    assert problem is not None and re.match(r"numpy [\d.]+ is too old \(.* -m pip install \"numpy>=1000.0\"\)", problem)


def test_no_pip_command_is_named_for_an_old_python() -> None:
    assert host.missing(("python>=3.11", "numpy>=1")) is None
    problem = host.missing(("python>=3.99", "no-such-package==1.2"))
    assert problem is not None and "XLAFUSE_XLA_PYTHON" in problem and "pip" not in problem
