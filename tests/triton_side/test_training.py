"""A training step in plain PyTorch: AdamW against torch.optim, and the step's graph under Dynamo."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from xlafuse.compare.numerics import input_arrays
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.blocks import lm_step
from xlafuse.triton_side.blocks.adamw import adamw
from xlafuse.triton_side.library import attention

STEP = BLOCKS["lm_step"]
CASE = next(case for case in STEP.cases("check") if case.dtype == "float32")
SETTINGS = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "decay": 0.1}


def drawn(case: Case) -> dict[str, torch.Tensor]:
    tensors = {t.name: (t, torch.from_numpy(input_arrays.draw(case, t, 0))) for t in STEP.inputs}
    return {name: x.to(getattr(torch, t.dtype_in(case))) for name, (t, x) in tensors.items()}


def test_adamw_equals_torch_optim() -> None:
    torch.manual_seed(0)
    param, mu, nu = torch.randn(100), torch.zeros(100), torch.zeros(100)
    theirs = param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1)
    for step in (1, 2, 3):
        theirs.grad = torch.randn(100)
        optimizer.step()
        param, mu, nu = adamw(param, theirs.grad, mu, nu, torch.tensor(step), **SETTINGS)
    torch.testing.assert_close(param, theirs.detach())
    torch.testing.assert_close(mu, optimizer.state[theirs]["exp_avg"])
    torch.testing.assert_close(nu, optimizer.state[theirs]["exp_avg_sq"])


# The implementation `inductor-remat` of lm_step has the same requirement.
TAKES_GRADIENTS = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12),
    reason="Dynamo of torch 2.11 refuses requires_grad_ in a compiled function",
)


# The implementation `inductor-sdpa` uses cuDNN's attention, which has no CPU path.
with_sdpa = partial(lm_step.apply, attend=attention.apply_flash)


@pytest.mark.parametrize(
    "function", [lm_step.apply, pytest.param(lm_step.apply_remat, marks=TAKES_GRADIENTS), with_sdpa],
    ids=["plain", "remat", "sdpa"],
)
def test_a_step_compiles_to_one_graph_with_the_same_results(function: Any) -> None:
    inputs, attributes = drawn(CASE), STEP.attributes_of(CASE)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(trace_autograd_ops=True):  # as compiler.compile sets it
        found, expected = compiled(inputs, **attributes), lm_step.apply(inputs, **attributes)
    assert len(graphs) == 1 and found.keys() == expected.keys() == {t.name for t in STEP.outputs}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_inputs_stay_unchanged() -> None:
    inputs = drawn(CASE)
    before = {name: x.clone() for name, x in inputs.items()}
    with torch.no_grad():
        lm_step.apply(inputs, **STEP.attributes_of(CASE))
    assert all(torch.equal(x, before[name]) and not x.requires_grad for name, x in inputs.items())
