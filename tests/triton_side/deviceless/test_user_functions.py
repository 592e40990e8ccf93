"""Users' calls, compiled for an absent GPU in a process that pretends to have it."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from full_marks import first_of_each

from xlafuse.triton_side.inductor import dump

pytest.importorskip("torch")

PROLOGUE = """
import os
import torch.nn.functional as F
from xlafuse.triton_side.deviceless import user_functions
factory = user_functions.TensorFactory()
def tensor(*shape, stride=None, dtype="bfloat16", **more):
    stride = stride or torch.empty(shape, device="meta").stride()
    return factory.tensor(user_functions.TensorSpec(shape, tuple(stride), dtype, **more))
def compiled(function, *args, train=False, **kwargs):
    return user_functions.compile_call(function, args, kwargs, factory, train=train)[0]
"""


@pytest.fixture
def run(fake_gpu: Any) -> Callable[[str], Any]:
    """Run a program and return the JSON that it prints."""

    def answer(program: str) -> Any:
        try:
            return fake_gpu.answer(PROLOGUE + textwrap.dedent(program))
        except RuntimeError as problem:
            if "Unsupported" in str(problem):
                pytest.skip(str(problem).strip().splitlines()[-1])
            raise

    return answer


def test_after_a_graph_break_the_rest_is_compiled_both_ways(run):
    found = run("""
        def function(x, weight, *, scale):
            hidden = torch.relu(x @ weight) * scale
            torch._dynamo.graph_break()
            return torch.softmax(hidden, -1)
        captured = compiled(function, tensor(64, 128), tensor(128, 256), scale=3.0, train=True)
        print(json.dumps([[graph.part for graph in captured.graphs], len(captured.breaks)]))
    """)
    assert found == [["forward", "forward", "backward", "backward"], 1]


def test_requires_grad_selects_the_gradients(run):
    found = run("""
        def gemms(*args):
            captured = compiled(lambda x, weight: (x @ weight).relu(), *args, train=True)
            return sum(kernel.kind == "gemm" for kernel in captured.kernels if kernel.part == "backward")
        weight = tensor(128, 256, requires_grad=True, is_parameter=True)
        print(json.dumps([gemms(tensor(64, 128), weight), gemms(tensor(64, 128), tensor(128, 256))]))
    """)
    assert found == [1, 2]


def test_the_attention_kernel_supports_the_call(run):
    found = run("""
        def attention(q, k, v, mask=None):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        def plain(q, k, v, mask):
            return torch.softmax(q @ k.transpose(-1, -2) / 8 + mask, -1) @ v
        def names(*args):
            return [kernel.name.split(".")[-2] for kernel in compiled(*args).kernels if kernel.kind == "attention"]
        q, mask, w = tensor(2, 4, 64, 64), tensor(2, 1, 64, 64), tensor(2, 4, 64, 64, dtype="float32")
        cases = [(attention, q, q, q), (attention, q, q, q, mask), (attention, w, w, w), (plain, q, q, q, mask)]
        print(json.dumps([names(*call) for call in cases]))
    """)
    flash, efficient = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
    assert found == [[flash], [efficient], [efficient], [efficient]]


def test_units_share_storage_numbers_also_with_fake_results(run):
    found = run("""
        def function(x, weight):
            hidden, twice = x @ weight, x * 2
            torch._dynamo.graph_break()
            return torch.softmax(hidden, -1) + twice
        both = [compiled(function, tensor(64, 64), tensor(64, 64), train=train) for train in (False, True)]
        graphs = [captured.program().graphs for captured in both]
        print(json.dumps([[[dict(each.storages), each.inputs, each.outputs] for each in some] for some in graphs]))
    """)
    for first, second, *backward in found:
        results = {first[0][name] for name in first[2][:2]}
        assert {second[0][name] for name in second[1][:2]} == results and len(results) == 2
        assert all(holds == {} for holds, _, _ in backward)


def test_operations_of_another_kernel_are_not_counted_twice(run):
    found = run("""
        softmax = compiled(lambda x: torch.softmax(x.float(), -1).bfloat16(), tensor(1, 1 << 20))
        (graph,) = softmax.program().graphs
        print(json.dumps([[list(call.kernel.ops), [s.op for s in call.sources], call.flops] for call in graph.calls]))
    """)
    (first, _, elements), *finishing, (last, _, _) = found
    assert {"aten.amax", "aten.sub", "aten.exp", "aten.sum"} <= set(first)
    # One kernel finishes the sums with torch 2.13, two with 2.11, which reads x once more before the last.
    sums = [flops for _, sources, flops in finishing if sources == ["aten.amax", "aten.sum"]]
    assert sums and all(elements > flops > 0 for flops in sums)
    assert [op for op in last if op.startswith("aten.")] == ["aten.sub", "aten.exp", "aten.div"]


COUNTED = """
import tempfile
from pathlib import Path
from xlafuse.triton_side.inductor import dump
def counted(program):
    def side(buffers):
        return {b.name: b.bytes for b in buffers}
    (graph,) = program.graphs
    assert not graph.unparsed, graph.unparsed
    return [[c.kernel.name, c.kernel.kind, side(c.kernel.inputs), side(c.kernel.outputs)] for c in graph.calls]
def both(function, *args, **settings):
    captured, _ = user_functions.compile_call(function, args, {}, factory, train=False, settings=settings)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "output_code.py"
        code.write_text(captured.graphs[0].code)
        return counted(captured.program()), counted(dump.read(code)), [k.ops for k in captured.kernels]
"""


def test_foreach_operations_in_one_kernel_and_in_several(run):
    """Inductor limits the arguments of a kernel, so two operations on many arrays become several kernels."""
    (one, read, ops), (live, dumped, _) = run(COUNTED + """
def two(arrays, others):
    torch._foreach_mul_(arrays, 0.9)
    torch._foreach_add_(arrays, others)
def arrays(n):
    return [tensor(8 + i, dtype="float32") for i in range(n)]
several = both(two, arrays(5), arrays(5), combo_kernel_max_num_args="12")
print(json.dumps([both(two, arrays(3), arrays(3)), several]))
""")
    ((_, kind, reads, writes),) = one
    assert one == read and kind == "elementwise"
    assert sorted(reads.values()) == [32, 32, 36, 36, 40, 40] and sorted(writes.values()) == [32, 36, 40]
    assert ops[0][:2] == ["aten._foreach_mul", "aten._foreach_add"]
    assert len(live) > 1 and live == dumped
    sizes = [4 * (8 + index) for index in range(5)]
    assert sorted(size for _, _, reads, _ in live for size in reads.values()) == sorted(2 * sizes)
    assert sorted(size for _, _, _, writes in live for size in writes.values()) == sizes


def test_an_optimizer_makes_its_state_in_the_call(run):
    """AdamW reads a parameter, its gradient and two moments, and writes all but the gradient."""
    total = run("""
class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(tensor(64, 64, dtype="float32"))
        self.optimizer = torch.optim.AdamW(self.parameters(), capturable=True)
    def forward(self, gradient):
        self.weight.grad = gradient
        self.optimizer.step()
kernels = [
    call.kernel for graph in compiled(Step(), tensor(64, 64, dtype="float32")).program().graphs for call in graph.calls
]
print(json.dumps([
    sum(b.bytes for kernel in kernels for b in side(kernel) if b.bytes > 64)
    for side in (lambda kernel: kernel.inputs, lambda kernel: kernel.outputs)
]))
""")
    assert total == [4 * 64 * 64 * 4, 3 * 64 * 64 * 4]


def test_an_update_in_place_touches_its_part_alone(run):
    """The cache has 1000 rows of 64; the column that is written and the intermediates are no whole arrays."""
    row, column, adamw = run(COUNTED + """
def row(cache, new, position):
    cache.index_copy_(0, position, new)
    return cache.sum()
def column(cache, new):
    cache[:, 5] = new
    return cache.sum(0)
def step(p, g, m):
    m.mul_(0.9).add_(g)
    p.sub_(m * m)
    p.add_(m.sqrt())
cache, position = tensor(1000, 64, dtype="float32"), tensor(1, dtype="int64")
print(json.dumps([
    both(row, cache, tensor(1, 64, dtype="float32"), position),
    both(column, cache, tensor(1000, dtype="float32")),
    both(step, *(tensor(64, 64, dtype="float32") for _ in range(3))),
]))
""")
    for live, dumped, _ in (row, column, adamw):
        assert live == dumped
    update, read = row[0][:2]
    assert sorted(update[2].values()) == [8, 256] and list(update[3].values()) == [256]
    assert max(read[2].values()) == 256000
    assert list(column[0][0][2].values()) == [4000] and list(column[0][0][3].values()) == [4000]
    assert list(column[0][1][2].values()) == [256000]
    ((_, _, reads, writes),) = adamw[0]
    assert len(reads) == 3 and len(writes) == 2


def test_a_scatter_that_pytorch_runs_is_a_kernel(run):
    found = run(COUNTED + """
def add(x, index, values):
    return x.scatter_add(0, index, values)
def put(x, index, values):
    return x.index_put((index,), values, accumulate=True)
x, index = tensor(1000, dtype="int64"), tensor(10, dtype="int64")
print(json.dumps([both(add, x, index, index), both(put, x, index, index)]))
""")
    for live, dumped, ops in found:
        # The code's comment gives the copy before the operation its name.
        assert [each[2:] for each in live] == [each[2:] for each in dumped] and live[1] == dumped[1]
        (_, kind, reads, writes), operation = live[1], ops[1]
        assert kind == "scatter" and operation[0] in ("aten.scatter_add", "aten.index_put")
        assert set(reads.values()) == {80} and list(writes.values()) == [80]


def test_bytes_of_results_and_operands_of_more_than_a_billion_elements(run):
    found = run("""
        q = tensor(1, 64, 131072, 128)
        attention = compiled(F.scaled_dot_product_attention, q, q, q, train=True).kernels
        product = compiled(torch.bmm, tensor(1, 40000, 8), tensor(1, 8, 40000)).kernels
        print(json.dumps([[b.bytes for b in (*k.inputs, *k.outputs)] for k in (*attention, *product)]))
    """)
    whole = 2 * 64 * 131072 * 128
    assert found[0][:2] == [whole, whole]
    assert found[1][:3] == [whole, whole, whole] and found[1][-3:] == [whole, whole, whole]
    assert found[-1] == [2 * 8 * 40000, 2 * 8 * 40000, 2 * 40000**2]


OWN_KERNEL = '''
import torch, triton, triton.language as tl

@triton.jit
def scale(x, y, total, unused, rows, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < rows
    value = tl.load(x + places, inside)
    tl.store(y + places, value * 2, inside)
    tl.store(total + places, tl.load(total + places, inside) + value, inside)

def function(x, total):
    y, unused = torch.empty_like(x), torch.empty_like(x)
    scale[(triton.cdiv(x.numel(), 1024),)](x, y, total, unused, x.numel(), BLOCK=1024)
    return y + 1
'''


@pytest.fixture(scope="module")
def own_kernel(fake_gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """The folder of a compiled function with a Triton kernel of its own, and what that kernel reads and writes."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_kernel.py").write_text(OWN_KERNEL)
    found = fake_gpu.answer(PROLOGUE + textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        import own_kernel
        captured = compiled(own_kernel.function, tensor(4096), tensor(4096))
        captured.write({str(folder / "dump")!r})
        (own,) = [kernel for kernel in captured.kernels if kernel.kind == "custom"]
        memory = captured.program().graphs[0].memory
        assert all(each.bytes == memory[each.name].bytes for each in (*own.inputs, *own.outputs))
        sides = {{"reads": own.inputs, "writes": own.outputs}}
        print(json.dumps({{side: [each.name for each in buffers] for side, buffers in sides.items()}}))
    """))
    return folder, found


def test_a_users_triton_kernel_reads_what_it_loads_and_writes_what_it_stores(own_kernel):
    folder, found = own_kernel
    assert found == {"reads": ["arg0_1", "arg1_1"], "writes": ["buf0", "arg1_1"]}
    (graph,) = dump.read(folder / "dump").graphs
    own = graph.calls[0].kernel
    assert [each.name for each in own.inputs] == found["reads"] and graph.unparsed == ()
    assert [each.name for each in own.outputs] == found["writes"]


def test_a_dump_without_ttir_says_that_a_users_kernels_effects_are_unknown(own_kernel):
    (graph,) = dump.read(own_kernel[0] / "dump/forward/output_code.py").graphs
    own = graph.calls[0].kernel
    assert [each.name for each in own.inputs] == ["arg0_1", "arg1_1"]  # nothing has written the others yet
    assert [each.name for each in own.outputs] == ["arg0_1", "buf0", "arg1_1", "buf1"]
    assert graph.unparsed == ("scale_0: without its TTIR, each array counts as read and written",)


def test_a_product_that_inductor_splits_along_k_is_two_kernels(fake_gpu, tmp_path):
    found = fake_gpu.answer(f"""
import unittest.mock
from xlafuse.triton_side.inductor import _private
def split(choices):
    return [choice for choice in choices if "decompose_k" in choice.name][:1] or choices[:1]
specs = {{"a": ((32, 65536), "bfloat16"), "b": ((65536, 64), "bfloat16")}}
with unittest.mock.patch.object(_private, "_first_template", split):
    captured = deviceless.compile_inductor(
        lambda inputs: {{"y": inputs["a"] @ inputs["b"]}}, specs, {{}}, train=False, max_autotune=True
    )
captured.write({str(tmp_path)!r})
(graph,) = captured.program().graphs
def names(buffers):
    return [each.name for each in buffers]
calls = [(call.kernel, call.flops) for call in graph.calls]
print(json.dumps([[own.kind, names(own.inputs), names(own.outputs), flops] for own, flops in calls]))
""")
    (kind, reads, (partial,), flops), (_, summed, result, additions) = found
    assert (kind, reads, flops) == ("gemm", ["arg0_1", "arg1_1"], 2 * 32 * 64 * 65536)
    assert (summed, result) == ([partial], ["buf0"]) and additions < flops / 1000
    (graph,) = dump.read(tmp_path).graphs
    assert [call.kernel.kind for call in graph.calls][0] == "gemm" and graph.unparsed == ()
    assert [[each.name for each in call.kernel.inputs] for call in graph.calls] == [reads, summed]
    parts = graph.memory[partial].shape[0]
    assert graph.memory[partial].shape == (parts, 32, 64) and parts > 1


@pytest.mark.parametrize("train", first_of_each([True, False]))
def test_calls_of_several_settings_stay_compiled_together(train: bool) -> None:
    import torch
    from torch._dynamo.utils import counters

    from xlafuse.triton_side.deviceless import user_functions

    def function(x):
        return torch.sin(x).sum(-1) * 2

    class OnTheCpu:
        mode = None

    x = torch.randn(8, 16)
    made = [
        user_functions.compile_call(
            function, (x,), {}, OnTheCpu(), train=train, settings=settings, keep_compiled=True,  # type: ignore[arg-type]
        )
        for settings in ({}, {"cpp.simdlen": "0"})
    ]
    assert ["at::vec::" in captured.graphs[0].code for captured, _ in made] == [True, False]
    compiles = counters["stats"]["unique_graphs"]
    expected = torch.cos(x.detach()) * 2 if train else torch.sin(x).sum(-1) * 2
    for _, again in made * 2:
        results = again()
        assert torch.allclose(results[0] if train else results, expected, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == compiles and x.grad is None
