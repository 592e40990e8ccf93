"""Resources of decoding with one and with several queries, compiled for an H200 without one."""

import pytest

pytest.importorskip("torch")

RECORD = """
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.triton_side.kernels import {block}
block = BLOCKS["{block}"]
case = next(case for case in block.cases("full") if case.name == "{name}")
specs = {{t.name: (t.shape(case.sizes), t.dtype_in(case)) for t in block.inputs}}
recorded = deviceless.record_call({block}.apply, specs, {{}}, train=False)
print(json.dumps([(launch.resources.registers, launch.resources.spill_bytes, launch.resources.shared_bytes,
                   launch.resources.num_warps, "wgmma" in launch.artifacts.texts["ptx"])
                  for launch in recorded.parts["forward"]]))
"""


@pytest.mark.parametrize("queries", [2, 8, 16])
@pytest.mark.parametrize("block", ["decode_attention", "decode_attention_paged"])
def test_two_programs_of_several_queries_share_a_multiprocessor_without_spills(
    fake_gpu, block: str, queries: int
) -> None:
    """A multiprocessor has 65,536 registers and 228 KiB; one program waits for memory while the other computes."""
    attend, combine = fake_gpu.answer(RECORD.format(block=block, name=f"llama-8b-8k-{queries}-queries"))
    assert attend[1] == combine[1] == 0
    registers, _, shared, warps, wgmma = attend
    assert 2 * 32 * warps * registers <= 65536 and 2 * (shared + 1024) <= 228 * 1024
    assert wgmma == (4 * queries == 64)
