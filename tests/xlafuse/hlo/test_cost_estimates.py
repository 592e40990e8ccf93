"""The times that XLA's cost models expect, read from a fusion's backend_config."""

from __future__ import annotations

import pytest

from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.render.text_view import remarks
from xlafuse.hlo import gpu_program
from xlafuse.hlo.cost_estimates import estimates_us

COSTS = (
    '"reification_cost":[{"compute_time_us":0.4,"end_to_end_cycles":14185.2,"exec_time_us":7.25,"name":""},'
    '{"exec_time_us":6.5,"name":"sol"},{"exec_time_us":"Infinity","name":"indexing-cost-model"}]'
)
MODULE = """HloModule m, is_scheduled=true

%f (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %n = f32[64]{0} negate(%p)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %k = f32[64]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"operation_queue_id":"0",COSTS}
}
"""


def test_models_have_their_names_and_numbers_that_are_not_finite_are_left_out() -> None:
    assert estimates_us("{" + COSTS + "}") == {"analytical": 7.25, "sol": 6.5}


@pytest.mark.parametrize("text", [
    "", "{}", '{"reification_cost":[]}', '{"reification_cost":[1,null,"x"]}', '{"reification_cost":[{"name":"sol"}]}',
    '{"reification_cost":[{"exec_time_us":"7","name":"sol"}]}', '{"reification_cost":[{]}',
    '{"reification_cost":[' * 50,
])
def test_other_texts_have_no_estimates(text: str) -> None:
    assert estimates_us(text) == {}


def test_a_kernel_says_what_xla_expects() -> None:
    (kernel,) = from_hlo(gpu_program.parse(MODULE.replace("COSTS", COSTS))).kernels or ()
    assert kernel.facts["xla_estimates_us"] == {"analytical": 7.25, "sol": 6.5}
    assert "7.25" in " ".join(remarks(kernel)) and "sol" in " ".join(remarks(kernel))
    (plain,) = from_hlo(gpu_program.parse(MODULE.replace(",COSTS", ""))).kernels or ()
    assert "xla_estimates_us" not in plain.facts
