"""Candidates of a choice are compiled for an H200 without one, and those that cannot run are dropped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

COMPILE = """
from dataclasses import replace
from xlafuse.triton_side.tuning import trials
from xlafuse.triton_side.kernels import layernorm, rmsnorm, softmax
from xlafuse.triton_side.kernels.shared.launch import RowConfig

def call():
    x, weight, dy = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ({shape}, {shape}[1:], {shape}))
    {body}

with trials.fake_tensors():
    choice, = [each for each in trials.choices_in(call) if each.name == "{name}"]
    found = [trials.compile_with(call, choice, config) for config in (trials.present(choice), {configs})]
    same = trials.same_in_all(each for each in found if not each.problem)
print(json.dumps([
    choice.shape_class, [[each.problem, each.spill_bytes, each.shared_bytes, len(each.launches)] for each in found],
    sum(same.values()),
]))
"""


def compiled(fake_gpu: Any, name: str, body: str, configs: str, columns: int = 4096) -> Any:
    shape = (8192, columns)
    return fake_gpu.answer(COMPILE.format(name=name, body=body, configs=configs, shape=shape))


def test_spilling_and_too_large_candidates_are_dropped(fake_gpu: Any) -> None:
    configs = (
        "RowConfig(1, 4096, 8, 1, 8192), RowConfig(1, 4096, 1, 1, 8192), RowConfig(8, 4096, 32, 3, 132), "
        "RowConfig(4, 4096, 16, 9, 132)"
    )
    shape_class, (present, good, spilling, large, larger), same = compiled(
        fake_gpu, "rmsnorm.configure_forward", "rmsnorm.forward(x, weight, 1e-5, save_rstd=False)", configs
    )
    assert shape_class == {"rows": 8192, "columns": 4096, "element_bytes": 2}
    assert not present[0] and not good[0] and good[1] == 0
    assert spilling[0] == "spills registers" and spilling[1] > 0
    assert not large[0] and 0 < large[2] <= 232448
    assert larger[0] == "exceeds shared memory" and larger[2] > 232448
    assert same == 0  # the one launch differs between configurations


def test_a_candidate_that_does_not_compile_is_dropped(fake_gpu: Any) -> None:
    _, (present, broken), _ = compiled(
        fake_gpu, "rmsnorm.configure_forward", "rmsnorm.forward(x, weight, 1e-5, save_rstd=False)",
        "RowConfig(3, 4096, 8, 1, 8192)",
    )
    assert not present[0] and "does not compile" in broken[0]


def test_launches_that_depend_on_a_choice_count(fake_gpu: Any) -> None:
    """A backward pass with other partial sums also has another sum of them. The forward pass is the same.

    No table has this number of columns.
    """
    body = """y, rstd = rmsnorm.forward(x, weight, 1e-5, save_rstd=True)
    rmsnorm.backward(x, weight, rstd, dy)"""
    present = "RowConfig(1, 4096, 8, 3, 264)"
    _, (_, first, second), same = compiled(
        fake_gpu, "rmsnorm.configure_backward", body, f"{present}, RowConfig(1, 4096, 8, 3, 132)", columns=3968
    )
    assert first[3] == second[3] == 3 and same == 1
    _, (_, *_), same = compiled(fake_gpu, "rmsnorm.configure_backward", body, present, columns=3968)
    assert same == 2  # the present configuration has as many programs


def test_another_kernel_may_take_the_place_of_the_present_one(fake_gpu: Any) -> None:
    _, found, same = compiled(
        fake_gpu, "softmax.configure_forward", "softmax.forward(x)",
        "RowConfig(1, 4096, 16, 1, 264), RowConfig(1, 32768, 32, 3, 132)", columns=20000,
    )
    assert [each[3] for each in found] == [1, 1, 1] and same == 0
    assert not any(each[0] for each in found)


def test_a_candidate_may_spill_as_much_as_the_present_configuration(fake_gpu: Any) -> None:
    """Rows that are not aligned spill with any configuration."""
    body = """mean, rstd = torch.empty((2, 8192), dtype=torch.float32, device="cuda")
    layernorm.backward(x, weight, mean, rstd, dy)"""
    _, (present, other), _ = compiled(
        fake_gpu, "layernorm.configure_backward", body, "replace(trials.present(choice), programs=33)", columns=16383
    )
    assert not present[0] and not other[0] and other[1] > 0


BETWEEN = """
import sys
from dataclasses import replace
sys.path.insert(0, "tests/helpers")
import shapes_between
from xlafuse.compare.workers.pytorch.tuning import fake_call
from xlafuse.triton_side.calls.replay import launches_of
from xlafuse.triton_side.configs.tuned import TUNED, overridden
from xlafuse.triton_side.tuning import spaces, trials

def taken(call, choice):  # the configuration of the call itself, whose rows may be fewer than those of its class
    given = []
    def note(name, facts, _):
        if name == choice.name:
            given.append(facts)
    with overridden(note):
        launches_of(call, launch=False)
    (found,) = {{TUNED[choice.name](*facts.values()) for facts in given}}
    return found

def fields(config):
    return {{name: value for name, value in vars(config).items() if name != "programs"}}

found = []
with trials.fake_tensors():
    for case in shapes_between.cases():
        call = fake_call(case, "triton")
        for choice in trials.choices_in(call):
            space = spaces.candidates(choice)
            present = trials.present(choice)
            some = (present, *space[1:: len(space) // 5]) if {compiles} else ()
            problems = [trials.compile_with(call, choice, config).problem for config in some]
            same = fields(present) == fields(taken(call, choice))
            found.append([case.id, choice.name, len(space), same, problems])
print(json.dumps(found))
"""
KERNELS_BETWEEN = {
    "matmul.matmul_config": 4, "softmax.configure_forward": 1, "softmax.configure_backward": 1,
    "rmsnorm.configure_forward": 1, "rmsnorm.configure_backward": 1, "layernorm.configure_forward": 1,
    "layernorm.configure_backward": 1, "shared.attention_configs.forward_config": 1,
    "shared.attention_configs.dk_dv_config": 1, "shared.attention_configs.dq_config": 1,
    "decode_attention.decode_config": 2,
}


def test_sizes_between_those_of_a_table_have_spaces(fake_gpu: Any) -> None:
    """The search compares what such a call takes: rules see its rows, and the search the most rows of its class."""
    found = fake_gpu.answer(BETWEEN.format(compiles=False))
    assert Counter(name for _, name, *_ in found) == KERNELS_BETWEEN
    assert all(size >= 10 and same for _, _, size, same, _ in found)


@pytest.mark.full
def test_configurations_for_sizes_between_those_of_a_table_compile(fake_gpu: Any) -> None:
    for case, name, _, _, (present, *others) in fake_gpu.answer(BETWEEN.format(compiles=True)):
        assert not present, (case, name)
        assert not all(others) and not any("compile" in problem for problem in others), (case, name, others)


CHOOSES = """
from xlafuse.triton_side.configs.tuned import overridden
from xlafuse.triton_side.kernels import transformer_layer
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig
from xlafuse.triton_side.tuning import trials

with trials.fake_tensors():
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((8192, 768), (768, 3072)))
    found = [transformer_layer.fused_epilogue_wins(a, b)]
    with overridden(lambda *choice: MatmulConfig(64, 256, 64, 4, 4)):
        found.append(transformer_layer.fused_epilogue_wins(a, b))
print(json.dumps(found))
"""


def test_a_table_does_not_choose_between_a_kernel_and_cublas(fake_gpu: Any) -> None:
    """The search times Triton's launches only, so a configuration that calls cuBLAS instead would seem fast."""
    assert fake_gpu.answer(CHOOSES) == [True, True]
