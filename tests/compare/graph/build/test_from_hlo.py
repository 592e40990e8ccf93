"""Graphs of modules from an H200, and unparsed lines; test_hlo_golden.py has many more modules."""

import time
from pathlib import Path

import pytest

from xlafuse.compare.graph import store
from xlafuse.compare.graph.analyse.totals import totals
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.findings.collect import findings
from xlafuse.compare.graph.model import FusionGraph, SourceOp
from xlafuse.compare.graph.render import text_view
from xlafuse.hlo import file_reader, gpu_program

DATA = Path(__file__).parents[3] / "data" / "xla"
HLO = DATA.with_name("hlo")


def _graph(name: str) -> FusionGraph:
    module = gpu_program.parse((DATA / name).read_text())
    graph = from_hlo(module, target="h200", versions={"jax": "0.11.2"})
    assert graph.kernels is not None and not graph.unparsed
    assert [k.name for k in graph.kernels] == [k.name for k in gpu_program.kernels(module)]
    for kernel, summary in zip(graph.kernels, gpu_program.kernels(module), strict=True):
        assert (kernel.bytes_read, kernel.bytes_written) == (summary.bytes_read, summary.bytes_written)
        assert (kernel.stages, tuple(op.op for op in kernel.source_ops)) == (summary.stages, summary.ops)
    returned = sum(b.bytes for b in graph.buffers if b.role == "output")
    root = module.computations[module.entry].root
    assert root is not None and returned == root.bytes
    assert store.from_json(store.to_json(graph)) == graph
    return graph


def test_mlp_on_an_h200() -> None:
    graph = _graph("mlp_fwd.hlo.txt")
    assert (graph.name, graph.compiler, graph.target, graph.versions) == ("jit_mlp", "xla", "h200", {"jax": "0.11.2"})
    assert {b.name: b.role for b in graph.buffers if b.role != "intermediate"} == {
        "x.1": "input", "w.1": "input", "wg.1": "input", "wu.1": "input", "wd.1": "input",
        "gemm_fusion_dot_general.5": "output",
    }
    tokens, width, hidden = 4096, 2048, 5632
    gate, up = (kernel for kernel in graph.kernels or () if kernel.facts.get("custom_call_target"))
    assert gate.flops == up.flops == 2 * tokens * width * hidden
    assert gate.workspace_bytes == 33_554_432 and gate.runtime_name is None
    down = (graph.kernels or ())[-1]
    assert down.flops == 2 * tokens * width * hidden + tokens * width
    assert [op.op for op in down.source_ops] == ["dot_general", "add"]
    assert {op.line for op in down.source_ops} == {"blocks.py:11"}
    # The normalised input is computed by two kernels, one for each product: nothing else is done twice.
    sites = [op.site for kernel in graph.kernels or () for op in kernel.source_ops if op.site]
    assert {site.split("@")[0] for site in sites if sites.count(site) > 1} == {"jit(mlp)/mul"}
    largest = graph.materialized[:3]
    assert {buffer.bytes for buffer in largest} == {tokens * hidden * 2}


@pytest.mark.parametrize("name", ["softmax.hlo.txt", "block_fwd.hlo.txt"])
def test_others_of_an_h200(name: str) -> None:
    graph = _graph(name)
    written = {access.buffer for kernel in graph.kernels or () for access in kernel.outputs or ()}
    for buffer in graph.buffers:
        assert (buffer.name in written) is (buffer.role in ("intermediate", "output"))


TEXT = """HloModule m, is_scheduled=true
ENTRY %main () -> f32[] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} sine(%x), metadata={op_name="jit(f)/transpose(jvp(act))/cos" source_file="f.py" source_line=3}
  what is this
  ROOT %z = f32[8]{0} add(%y, %gone)
}"""


def test_phase_provenance_and_unparsed_lines() -> None:
    graph = from_hlo(gpu_program.parse(TEXT), phase="backward", provenance={"y": "replayed"})
    first, second = graph.kernels or ()
    assert (first.phase, first.provenance, second.provenance) == ("backward", "replayed", "")
    assert first.source_ops == (SourceOp("cos", "act", "f.py:3", "jit(f)/transpose(jvp(act))/cos@f.py:3#", True),)
    assert second.source_ops == (SourceOp("add"),) and second.facts == {"opcode": "add"}
    assert graph.unparsed == ("line 5:   what is this", "z: operand gone is not there")


def _entry(count: int) -> str:
    """Return a module with this many kernels in one computation."""
    lines = [f"  %v{i} = f32[64]{{0}} multiply(%v{i - 1}, %v{i // 2}), metadata={{op_name=\"jit(f)/l{i % 9}/mul\"}}"
             for i in range(1, count)]
    return "\n".join(["HloModule m", "ENTRY %main () -> f32[] {", "  %v0 = f32[64]{0} parameter(0)", *lines, "}"])


def _fusions(count: int) -> str:
    """Return a module with this many instructions in computations of ten."""
    lines = ["HloModule m"]
    for i in range(count // 10):
        lines += [f"%c{i} (p: f32[64]) -> f32[64] {{", "  %p = f32[64]{0} parameter(0)"]
        lines += [f"  %n{j} = f32[64]{{0}} multiply(%{f'n{j - 1}' if j else 'p'}, %p)" for j in range(7)]
        lines += ["  ROOT %r = f32[64]{0} negate(%n6)", "}"]
    lines += ["ENTRY %main () -> f32[] {", "  %v0 = f32[64]{0} parameter(0)"]
    lines += [f"  %v{i + 1} = f32[64]{{0}} fusion(%v{i}), kind=kLoop, calls=%c{i}" for i in range(count // 10)]
    return "\n".join([*lines, "}"])


def _state(count: int) -> str:
    """Return a module with a loop that carries this many arrays in tuples."""
    shape = f"({', '.join(['f32[64]{0}'] * count)})"
    text = ["HloModule m", f"%body (s: {shape}) -> {shape} {{", f"  %s = {shape} parameter(0)"]
    text += [f"  %n{i} = f32[64]{{0}} sine(%s#{i})" for i in range(count)]
    text += [f"  ROOT %t = {shape} tuple({', '.join(f'%n{i}' for i in range(count))})", "}"]
    text += ["ENTRY %main () -> f32[] {", f"  %x = {shape} parameter(0)"]
    return "\n".join([*text, f"  ROOT %w = {shape} while(%x), condition=%none, body=%body", "}"])


@pytest.mark.full
@pytest.mark.parametrize("make", [_entry, _fusions, _state])
def test_cost_grows_linearly(make: object) -> None:
    assert callable(make)

    def cost(count: int) -> float:
        text = make(count)
        started = time.process_time()
        graph = from_hlo(gpu_program.parse(text))
        assert graph.kernels and len(graph.kernels) >= count // 10 - 1
        return time.process_time() - started

    cost(1000)
    small, large = min(cost(2000) for _ in range(3)), cost(20_000)
    assert large < 30 * small


BRANCHES = """HloModule m, is_scheduled=true
%cheap (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}
%dear (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %a = f32[8]{0} sine(%q)
  ROOT %b = f32[8]{0} cosine(%a)
}
%ends (c: f32[8]) -> pred[] {
  %c = f32[8]{0} parameter(0)
  ROOT %t = pred[] custom-call(%c), custom_call_target="f"
}
ENTRY %main (x: f32[8], i: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %i = s32[] parameter(1)
  WORK
}
"""


_CONDITIONAL = "f32[8]{0} conditional(%i, %x, %x), branch_computations={%dear, %cheap}"
_LOOP = "ROOT %y = f32[8]{0} while(%x), condition=%ends, body=%dear"


def _branched(work: str) -> FusionGraph:
    return from_hlo(gpu_program.parse(BRANCHES.replace("WORK", work)))


@pytest.mark.parametrize(
    ("work", "least"), [(f"ROOT %y = {_CONDITIONAL}", 2 * 32), (_LOOP, 32 + 1)],
    ids=["the cheapest branch", "no trip of a loop and one look at its condition"],
)
def test_work_that_depends_on_data_declares_its_least_bytes(work: str, least: int) -> None:
    declared = totals(_branched(work)).declared
    assert declared.exact is None and declared.value == least


def test_kernels_of_a_branch_may_not_run_and_totals_are_bounds() -> None:
    graph = _branched(f"ROOT %y = {_CONDITIONAL}")
    assert [(kernel.launches, kernel.least_launches) for kernel in graph.kernels or ()] == [(None, 0)] * 3
    shown = text_view.text(graph)
    assert "compulsory bytes: at least 64 B" in " ".join(shown.replace("│", "").split())
    assert shown.count("0 or more launches, in branch") == 3


def test_a_branch_in_a_branch_counts_its_cheapest_way() -> None:
    inner = BRANCHES.replace("ENTRY", "%inner (p.1: f32[8]) -> f32[8] {\n  %p.1 = f32[8]{0} parameter(0)\n  "
                             "%k = s32[] constant(1)\n  ROOT %c.1 = f32[8]{0} conditional(%k, %p.1, %p.1), "
                             "branch_computations={%dear, %cheap}\n}\nENTRY")
    text = inner.replace("WORK", "ROOT %y = f32[8]{0} conditional(%i, %x, %x), branch_computations={%inner, %dear}")
    found = totals(from_hlo(gpu_program.parse(text)))
    assert found.declared.value == 2 * 32 and found.compulsory == {"forward": 2 * 32} and found.open_ended


def test_what_the_branches_have_in_common_must_move() -> None:
    halves = BRANCHES.replace("sine(%q)", "sine(%z)").replace("%q = f32[8]{0} parameter(0)", (
        "%q = (f32[8]{0}, f32[8]{0}) parameter(0)\n  %z = f32[8]{0} get-tuple-element(%q), index=1"
    )).replace("(q: f32[8])", "(q: (f32[8], f32[8]))").replace("i: s32[]", "i: s32[], w: f32[8]")
    text = halves.replace("WORK", "%w = f32[8]{0} parameter(2)\n  %t = (f32[8]{0}, f32[8]{0}) tuple(%x, %w)\n  ROOT "
                          "%y = f32[8]{0} conditional(%i, %t, %x), branch_computations={%dear, %cheap}")
    found = totals(from_hlo(gpu_program.parse(text)))
    assert found.compulsory == {"forward": 32}  # the result; each branch reads another input
    assert found.declared.value == 2 * 32


def test_conditionals_and_loops_read_what_decides_them() -> None:
    decided = "%j = s32[] negate(%i)\n  ROOT %y = " + _CONDITIONAL.replace("%i", "%j")
    for work, name in ((decided, "j"), (_LOOP, "t")):
        graph = _branched(work)
        opcode = "conditional" if name == "j" else "while"
        assert graph.buffer[name].decides == f"{opcode} y" and not graph.consumers.get(name)
        titles = {title: [each.name for each in buffers] for title, buffers in text_view.buffer_lists(graph)}
        assert name in titles["read to choose a branch or to end a loop"]
        assert "written and never read" not in titles
        assert store.from_json(store.to_json(graph)) == graph


def test_a_loop_of_unknown_length_bounds_the_compulsory_bytes() -> None:
    assert totals(_branched(_LOOP)).open_ended
    assert not totals(_branched(f'{_LOOP}, backend_config={{"known_trip_count":{{"n":"3"}}}}')).open_ended


@pytest.mark.parametrize("config", ['{"known_trip_count":{"n":"3"}}', '"{\\"known_trip_count\\":{\\"n\\":\\"3\\"}}"'])
def test_known_trips_count(config: str) -> None:
    assert totals(_branched(f"{_LOOP}, backend_config={config}")).declared.exact == 3 * 4 * 32


OFFLOADED = """HloModule offloaded, is_scheduled=true

ENTRY %main (x: f32[1024], w: f32[100,100]) -> f32[1024] {
  %x = f32[1024]{0:S(5)} parameter(0)
  %w = f32[100,100]{1,0:T(8,128)} parameter(1)
  %start = (f32[1024]{0:S(1)}, f32[1024]{0:S(5)}, u32[]) copy-start(%x)
  %near = f32[1024]{0:S(1)} copy-done(%start)
  %call = f32[1024]{0} custom-call(%near, %w), custom_call_target="tpu_custom_call"
  ROOT %back = f32[1024]{0:S(5)} copy(%call)
}
"""


def test_other_memories_are_named_and_count_no_device_bytes() -> None:
    graph = from_hlo(gpu_program.parse(OFFLOADED))
    assert {buffer.name: buffer.space for buffer in graph.buffers} == {
        "x": "host", "w": "", "start": "VMEM", "call": "", "back": "host",
    }
    near, call, back = graph.kernels or ()
    assert [(k.bytes_read, k.bytes_written) for k in (near, call, back)] == [(0, 0), (104 * 128 * 4, 4096), (4096, 0)]
    assert [kernel.facts["other_memory"] for kernel in (near, call, back)] == [
        {"host": 4096, "VMEM": 4096}, {"VMEM": 4096}, {"host": 4096},
    ]
    assert [buffer.name for buffer in graph.materialized] == ["call"]
    assert totals(graph).compulsory == {"forward": 100 * 100 * 4}  # without the padding that the kernel reads
    assert "moves 4.10 kB of host memory" in text_view.facts(near)
    assert "other_memory" not in text_view.render(text_view.kernel(graph, 0))  # `facts` shows it in words
    assert store.from_json(store.to_json(graph)) == graph


def _of_tpu(name: str) -> FusionGraph:
    return from_hlo(file_reader.read(HLO / "jax-0.11.2" / f"tpu-{name}.hlo.txt.gz"), target="tpu-v5e")


def test_padding_is_declared_but_not_compulsory() -> None:
    """bf16[300,1000] fills 304 x 1024 elements of a TPU's tiles; it is prefetched, read again, and written."""
    graph, padded, plain = _of_tpu("padded"), 304 * 1024 * 2, 300 * 1000 * 2
    assert {b.name: b.padding for b in graph.buffers if b.role == "input"} == {"x.1": padded - plain, "weight.1": 48}
    found = totals(graph)
    assert found.declared.exact == 3 * padded + 1024 * 2
    assert found.compulsory == {"forward": 2 * plain + 1000 * 2}


def test_slices_of_a_prefetch_are_read_as_one_array() -> None:
    """ConcatBitcast names four slices in VMEM as one array. It is no kernel, and the product reads each slice."""
    graph = _of_tpu("prefetched")
    kernels = graph.kernels or ()
    slices = [index for index, kernel in enumerate(kernels) if kernel.facts["opcode"] == "slice-start"]
    (down,) = [index for index, kernel in enumerate(kernels) if kernel.stages == ("down",)]
    assert len(slices) == 4
    for index in slices:
        (written,) = kernels[index].outputs or ()
        assert graph.buffer[written.buffer].space == "VMEM"
        assert graph.consumers[written.buffer] == (down,)
    assert sum(kernels[index].bytes_read or 0 for index in slices) == 2816 * 1024 * 2
    assert not [kernel for kernel in kernels if kernel.kind == "custom"]
    assert kernels[down].bytes_read == 0 and kernels[down].facts["other_memory"]["VMEM"] > 2816 * 1024 * 2


def test_the_compilers_estimate_is_marked_as_one() -> None:
    graph = _of_tpu("prefetched")
    estimates = [kernel.facts.get("estimated_cycles") for kernel in graph.kernels or ()]
    assert [cycles for cycles in estimates if cycles] == [102689, 98939, 97158]  # of the three products
    product = next(kernel for kernel in graph.kernels or () if kernel.kind == "gemm")
    assert "102,689 cycles, as the compiler estimates" in text_view.facts(product)
    assert any("estimated" in note for note in graph.notes)


def test_a_prefetch_is_no_needless_copy() -> None:
    assert [each for each in findings({"xla": _of_tpu("prefetched")}) if each.kind == "copy"] == []
