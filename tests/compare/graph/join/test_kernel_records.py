"""Records of a GPU joined with a graph's kernels: named kernels, library calls and loops."""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recording import record

from xlafuse.compare.graph import store
from xlafuse.compare.graph.build.from_hlo import from_hlo
from xlafuse.compare.graph.join.kernel_records import join
from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Launch
from xlafuse.compare.measure.clock import DeviceRecord
from xlafuse.compare.record.record import Record
from xlafuse.compare.record.run_files import recorded_file
from xlafuse.compare.record.run_folder import read_records
from xlafuse.hlo import gpu_program

RUNS = Path(__file__).parents[4] / "reports"
SMALL = Path(__file__).parents[3] / "data" / "runs" / "h200-small"
NVJET = "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT"


def kernel(name: str, kind: str = "elementwise", size: int | None = 8, **more: Any) -> Kernel:
    accesses = None if size is None else (Access("b", size),)
    runtime = more.pop("runtime_name", name)
    return Kernel(name, kind, runtime_name=runtime, inputs=accesses, outputs=accesses, **more)  # type: ignore[arg-type]


def library(name: str = "mm", kind: str = "gemm", **more: Any) -> Kernel:
    return kernel(name, kind, runtime_name=None, **more)


def graph(*kernels: Kernel, compiler: str = "inductor") -> FusionGraph:
    return FusionGraph("g", compiler, kernels, (Buffer("b", (), "u8", 8, "intermediate"),))


def times(joined: FusionGraph) -> list[float | None]:
    return [k.device_time_us and round(k.device_time_us, 3) for k in joined.kernels or ()]


def test_by_name_and_library_calls_with_their_helpers() -> None:
    joined, left = join(
        graph(kernel("a"), library(), library(), kernel("c"), library("addmm")),
        {"forward": [
            record("a", 1), record("[memset]", 0.5), record(NVJET, 2), record("[memset]", 0.5), record("cutlass_x", 3),
            record("_ZN8cublasLt19splitKreduce_kernel", 1), record("c", 4), record("[memcpy]", 1), record(NVJET, 5),
        ]},
    )
    assert left == ()
    assert times(joined) == [1, 2.5, 4.5, 4, 6]
    assert joined.kernels is not None
    assert [k.runtime_name for k in joined.kernels] == ["a", NVJET, "cutlass_x", "c", NVJET]
    assert joined.kernels[2].facts["with"] == {"[memset]": 1, "_ZN8cublasLt19splitKreduce_kernel": 1}


def test_the_seed_of_dropout_is_a_helper_of_attention() -> None:
    unpack = "at::cuda::philox::unpack_cudnn(at::PhiloxCudaState, long*, long*)"
    sdpa = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
    ran = [record(NVJET, 2), record(unpack, 0.5), record("[memset]", 0.5), record(sdpa, 3), record(NVJET, 5)]
    joined, left = join(graph(library(), library("sdpa", "attention"), library("addmm")), {"forward": ran})
    assert left == () and times(joined) == [2, 4, 5]


@pytest.mark.parametrize("at", range(4))
def test_a_planted_kernel_is_left_over_wherever_it_runs(at: int) -> None:
    ran = [record("a"), record(NVJET), record("c")]
    for name in ("planted", "_Z7plantedPf"):
        ran.insert(at, record(name))
        _, left = join(graph(kernel("a"), library(), kernel("c")), {"forward": ran})
        assert [r.name for r in left] == [name]
        del ran[at]


def test_exchanges_are_joined_beside_the_kernels_that_they_run_with() -> None:
    """Copies are known by their bytes; those of 4 are signals. NCCL's kernel starts after a later kernel."""

    def copy(size: int, start: float) -> DeviceRecord:
        return DeviceRecord("[memcpy peer]", start, start + size * 1e-6, bytes=size)

    def ran(name: str, start: float) -> DeviceRecord:
        return DeviceRecord(name, start, start + 5e-6)

    g = graph(
        library("gather", "collective", size=64), kernel("gate"), library("scatter", "collective", size=32),
        kernel("down"), compiler="triton",
    )
    joined, left = join(g, {"forward": [
        ran("gate", 0), copy(4, 1e-6), copy(64, 2e-6), ran("down", 3e-6), copy(4, 4e-6), copy(32, 5e-6)
    ]})
    assert times(joined) == [64, 5, 32, 5] and [record.bytes for record in left] == [4, 4]  # type: ignore[attr-defined]
    of_nccl, left = join(
        graph(kernel("a"), library("all_gather", "collective"), kernel("b"), compiler="xla"),
        {"forward": [ran("a", 0), ran("b", 1e-6), ran("_Z31ncclDevKernel_AllGather_RING_LL", 2e-6)]},
    )
    assert times(of_nccl) == [5, 5, 5] and left == ()


def test_a_memset_without_a_library_call_is_left_over() -> None:
    _, left = join(graph(kernel("a"), kernel("c")), {"forward": [record("a"), record("[memset]"), record("c")]})
    assert [r.name for r in left] == ["[memset]"]


def test_an_extra_or_missing_kernel_is_reported() -> None:
    g = graph(kernel("a"), kernel("a"), kernel("b"))
    joined, left = join(g, {"forward": [record("a"), record("a"), record("a"), record("b")]})
    assert len(left) == 1
    joined, left = join(g, {"forward": [record("a"), record("b")]})
    assert left == () and sum(k.device_time_us is None for k in joined.kernels or ()) == 1


def test_adjacent_library_calls_are_not_guessed() -> None:
    g = graph(kernel("a"), library(), library(), kernel("c"))
    for products in (1, 3):
        ran = [record("a"), *[record(NVJET)] * products, record("c")]
        joined, left = join(g, {"forward": ran})
        assert len(left) == products
        assert times(joined) == [1, None, None, 1]


def test_loops_repeat_their_kernels_in_order() -> None:
    g = graph(kernel("before"), kernel("x", launches=2), kernel("y", launches=6), library(launches=6), kernel("after"))
    trip = [record("x"), *[record("y"), record("[memset]"), record(NVJET)] * 3]
    joined, left = join(g, {"forward": [record("before"), *trip, *trip, record("after")]})
    assert left == () and times(joined) == [1, 2, 6, 12, 1]
    _, left = join(g, {"forward": [record("before"), *trip, *trip, *trip[:1], record("after")]})
    assert [r.name for r in left] == ["x"]
    branch = graph(kernel("x", launches=None), kernel("y"))
    for runs in (0, 1, 3):
        joined, left = join(branch, {"forward": [*[record("x")] * runs, record("y")]})
        assert left == () and times(joined) == [runs or None, 1]


def test_xla_runs_one_kernel_for_equal_fusions() -> None:
    kernels = (kernel("fusion_1"), kernel("fusion_2"), kernel("fusion_3", size=16))
    joined, left = join(graph(*kernels, compiler="xla"), {"forward": [record("fusion_1"), record("fusion_1"),
                                                                      record("fusion_3")]})
    assert left == () and joined.kernels is not None
    assert joined.kernels[1].facts["ran_as"] == ["fusion_1"]
    assert joined.kernels[0].facts == {}
    # Not one that moves other bytes, and not another compiler's.
    for compiler, ran in (("xla", ["fusion_1", "fusion_2", "fusion_1"]), ("inductor", ["fusion_1"] * 3)):
        _, left = join(graph(*kernels, compiler=compiler), {"forward": [record(name) for name in ran]})
        assert left


def test_a_sort_in_a_library_runs_as_many_kernels_as_it_needs() -> None:
    sort, pass_ = "torch.ops.aten.sort.stable", "_ZN14at_cuda_detail3cub10radix_sort29DeviceRadixSortOnesweepKernel"
    ran = ["[memcpy]", "_ZN2at6native46fill_reverse_indices_kernel", *("[memset]", pass_) * 8]
    g = graph(kernel("a"), library(sort, "library"), kernel("b"))
    joined, left = join(g, {"forward": [record("a"), *map(record, ran), record("b")]})
    assert left == () and times(joined) == [1, len(ran), 1]


def test_xla_sorts_a_copy_in_stages_under_the_name_of_the_sort() -> None:
    facts = {"opcode": "fusion", "opcodes": ["iota", "sort"]}
    g = graph(kernel("a"), kernel("fusion.1", runtime_name="sort_0_1", facts=facts), kernel("b"), compiler="xla")
    ran = ["a", "[memcpy]", "sort_0_1", "sort_0_1__1", "sort_0_1__2", "b"]
    joined, left = join(g, {"forward": list(map(record, ran))})
    assert left == () and times(joined) == [1, 4, 1] and joined.kernels is not None
    assert joined.kernels[1].facts == {**facts, "with": {"[memcpy]": 1, "sort_0_1__1": 1, "sort_0_1__2": 1}}
    _, left = join(g, {"forward": list(map(record, [*ran, "sort_0_1__more", "sort_0_2"]))})
    assert [r.name for r in left] == ["sort_0_1__more", "sort_0_2"]


def test_an_asynchronous_slice_of_xla_runs_as_a_copy() -> None:
    facts = {"opcode": "fusion-start", "opcodes": ["subtract", "dynamic-slice"]}
    g = graph(kernel("fusion-start", runtime_name="fusion_start", facts=facts), kernel("a"), compiler="xla")
    joined, left = join(g, {"forward": [record("[memcpy]"), record("a")]})
    assert left == () and times(joined) == [1, 1]


_COPIED = """HloModule m, is_scheduled=true

%fused (p: f32[3,4], i: s32[]) -> f32[1,4] {
  %p = f32[3,4]{1,0} parameter(0)
  %last = s32[] constant(2)
  %i = s32[] parameter(1)
  %back = s32[] subtract(%last, %i)
  %zero = s32[] constant(0)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%p, %back, %zero), dynamic_slice_sizes={1,4}, backend_config={KNOWN}
}

%asynchronous (p: f32[3,4], i: s32[]) -> f32[1,4] {
  %p = f32[3,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %taken = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%fused
}

%step (state: (s32[], f32[3,4], f32[1,4])) -> (s32[], f32[3,4], f32[1,4]) {
  %state = (s32[], f32[3,4]{1,0}, f32[1,4]{1,0}) parameter(0)
  %start = ((f32[3,4]{1,0}, s32[]), f32[1,4]{1,0}, u32[]) async-start(%state#1, %state#0), calls=%asynchronous
  %done = f32[1,4]{1,0} async-done(%start)
  %sum = f32[1,4]{1,0} add(%state#2, %done)
  %one = s32[] constant(1)
  %next = s32[] add(%state#0, %one)
  ROOT %result = (s32[], f32[3,4]{1,0}, f32[1,4]{1,0}) tuple(%next, %state#1, %sum)
}

%more (state: (s32[], f32[3,4], f32[1,4])) -> pred[] {
  %state = (s32[], f32[3,4]{1,0}, f32[1,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (state: (s32[], f32[3,4], f32[1,4])) -> (s32[], f32[3,4], f32[1,4]) {
  %state = (s32[], f32[3,4]{1,0}, f32[1,4]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[3,4]{1,0}, f32[1,4]{1,0}) while(%state), condition=%more, body=%step, TRIPS
}
"""


def test_a_loops_slices_from_the_last_one_on_run_as_copies() -> None:
    known = '{"dynamic_slice_config":{"byte_offset":"32","byte_stride":"-16","loop_index":"0"}}'
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    ran = {"forward": [record(name) for name in ("[memcpy]", "sum", "next") * 3]}
    joined, left = join(from_hlo(gpu_program.parse(_COPIED.replace("{KNOWN}", known).replace("TRIPS", trips))), ran)
    assert left == () and times(joined) == [3, 3, 3]
    unknown, left = join(from_hlo(gpu_program.parse(_COPIED.replace("{KNOWN}", "{}").replace("TRIPS", trips))), ran)
    assert len(left) == 3 and times(unknown) == [None, 3, 3]


def test_a_compiled_copy_may_run_as_a_memcpy_and_an_empty_one_not_at_all() -> None:
    g = graph(kernel("copy_1", "copy"), kernel("a"), kernel("copy_2", "copy", size=0), compiler="xla")
    joined, left = join(g, {"forward": [record("[memcpy]"), record("a")]})
    assert left == () and times(joined) == [1, 1, None]


def test_phases_are_joined_separately() -> None:
    g = graph(kernel("a"), kernel("a", phase="backward"))
    joined, left = join(g, {"forward": [record("a", 1)], "backward": [record("a", 2)]})
    assert left == () and times(joined) == [1, 2]
    _, left = join(g, {"forward": [record("a"), record("a")], "backward": []})
    assert len(left) == 1
    # One part after the other, where both call a library that takes the same kernel.
    g = graph(library(), library(phase="backward"))
    forward, left = join(g, {"forward": [record("[memset]"), record(NVJET, 1)]})
    assert left == ()
    joined, left = join(forward, {"backward": [record("[memset]", 0.5), record(NVJET, 2)]})
    assert left == () and times(joined) == [2, 2.5]


def test_flat_records_with_grids_are_not_joined_across_shapes() -> None:
    g = graph(
        *(kernel("add", launch=Launch((x, 1, 1)), facts={"language": "triton"}) for x in (4, 8)), compiler="triton"
    )
    right = [record("add", grid=(4, 1, 1)), record("add", grid=(8, 1, 1))]
    assert join(g, {"forward": right})[1] == ()
    assert join(g, {"forward": right[::-1]})[1]


def eager(name: str, *beside: str, **more: Any) -> Kernel:
    return kernel(name, facts={"with": dict(Counter(beside))} if beside else {}, **more)


def test_an_eager_operation_takes_all_its_launches() -> None:
    """Operations with helpers before or after, with another operation's kernel, and with a kernel launched twice."""
    products = [eager("gemm", "[memset]", "reduce"), eager("gemm", "[memset]", "reduce")]
    graph_ = graph(eager("norm", "moments"), *products, eager("reduce"), eager("big", launches=2), compiler="eager")
    names = ["moments", "norm", "[memset]", "gemm", "reduce", "[memset]", "gemm", "reduce", "reduce", "big", "big"]
    joined, left = join(graph_, {"forward": [record(name, 2**i) for i, name in enumerate(names)]})
    assert left == () and times(joined) == [3, 28, 224, 256, 1536]
    assert all("ran_as" not in k.facts for k in joined.kernels or ())


@pytest.mark.parametrize("planted", ["planted", "gemm", "[memset]"])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 6])
def test_a_kernel_planted_among_eager_operations_is_left_over(planted: str, at: int) -> None:
    graph_ = graph(eager("a"), eager("gemm", "[memset]"), eager("c"), eager("gemm", "[memset]"), compiler="eager")
    names = ["a", "[memset]", "gemm", "c", "[memset]", "gemm"]
    names.insert(at, planted)
    joined, left = join(graph_, {"forward": list(map(record, names))})
    assert [each.name for each in left] == [planted]
    assert None not in times(joined)


def test_an_eager_operation_with_other_kernels_takes_nothing() -> None:
    graph_ = graph(eager("a"), eager("gemm", "[memset]"), eager("c"), compiler="eager")
    joined, left = join(graph_, {"forward": list(map(record, ["a", "gemm", "c"]))})
    assert [each.name for each in left] == ["gemm"] and times(joined) == [1, None, 1]


def test_a_graph_without_kernels_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="from_eager"):
        join(FusionGraph("eager", "eager", None), {})


def test_all_records_of_a_run_on_an_h200_are_joined() -> None:
    """The graphs before a join, and CUPTI's records of one call of each."""
    joined_records: Counter[str] = Counter()
    for run in read_records(SMALL)[0]:
        joined, left = join(_before_a_join(_graph(SMALL, run)), _ran(run))
        idle = [k for k in joined.kernels or () if k.device_time_us is None]
        assert all(k.kind == "copy" and k.bytes_written == 0 for k in idle), (run.id, [k.name for k in idle])
        assert left == (), (run.id, [r.name for r in left])
        joined_records[run.implementation] += sum(map(len, _ran(run).values()))
    assert set(joined_records) >= {
        "xla", "xla-unfused", "xla-remat", "xla-cudnn", "inductor", "inductor-max", "triton", "cuda", "eager",
        "library", "sdpa-flash", "sdpa-cudnn",
    }
    assert joined_records.total() > 800


def test_records_of_every_block_are_joined() -> None:
    """A third of the run's records are joined.

    Eager PyTorch is left out, because its scatters launch other kernels while they are recorded. Replays of CUDA graphs
    are, too: they copy inputs into the graph's memory, which no kernel of the compile does. In Liger's loss, adjacent
    products run more kernels than calls, and none is placed by a guess.
    """
    total = 0
    for run in read_records(RUNS / "h200")[0][::3]:
        if run.status != "ok" or run.compiler in ("eager", "flex") or run.compiler.endswith("cudagraphs"):
            continue
        if run.implementation == "liger" and run.case.block == "linear_cross_entropy":
            continue
        joined, left = join(_before_a_join(_graph(RUNS / "h200", run)), _ran(run))
        idle = [k.name for k in joined.kernels or () if k.device_time_us is None and k.bytes_written != 0]
        assert left == () and not idle, (run.id, idle, [r.name for r in left])
        total += sum(map(len, _ran(run).values()))
    assert total > 1500


def _graph(folder: Path, run: Record) -> FusionGraph:
    assert run.graph
    return store.load(recorded_file(folder, run, run.graph))


def _ran(run: Record) -> dict[str, list[DeviceRecord]]:
    """Return what CUPTI recorded of one call, by phase."""
    return {phase: [record(ran.name) for ran in times.records or ()] for phase, times in run.times.items()}


def _before_a_join(g: FusionGraph) -> FusionGraph:
    def unnamed(k: Kernel) -> Kernel:
        if g.compiler == "eager":  # a device told what its operations launch
            return replace(k, device_time_us=None)
        sorts = "cub_sort" in k.facts.get("custom_call_target", "")
        called = sorts or k.kind in ("gemm", "attention", "library") and "fusion" not in k.name
        library = called if g.compiler == "xla" else k.facts.get("extern") or k.name.startswith("aten.")
        facts = {name: value for name, value in k.facts.items() if name not in ("with", "ran_as")}
        name = None if library else k.runtime_name
        return replace(k, device_time_us=None, runtime_name=name, facts=facts)

    return replace(g, kernels=tuple(map(unnamed, g.kernels or ())))


@pytest.mark.slow
def test_all_records_are_joined_with_graphs_of_their_hlo() -> None:
    total = 0
    for run in read_records(RUNS / "h200")[0]:
        if not run.compiler.startswith("xla") or run.dumps is None:
            continue
        packed = recorded_file(RUNS / "h200", run, run.dumps)
        if not packed.exists():
            continue  # the run keeps the artifacts of some main cases
        with zipfile.ZipFile(io.BytesIO(packed.read_bytes())) as dumps:
            for part, ran in _ran(run).items():
                module = gpu_program.parse(dumps.read(f"{part}/optimized.hlo.txt").decode())
                joined, left = join(from_hlo(module, phase=part), {part: ran})
                assert left == () and None not in times(joined), (run.id, part)
                total += len(ran)
    assert total > 500


MLP = {"x": (256, 512), "norm_weight": (512,), "gate_weight": (512, 1024), "up_weight": (512, 1024),
       "down_weight": (1024, 512)}


class _Device:
    """The kernels that each event of a recorded call ran on a real GPU, with their grids."""

    def __init__(self) -> None:
        import torch

        from xlafuse.compare.measure.clock import CuptiClock

        device = self

        class Clock(CuptiClock):
            def _completed(self, activities: list[Any]) -> None:
                for activity in activities:
                    name = self._labels.get(int(activity.kind))
                    grid = None if name else (activity.grid_x, activity.grid_y, activity.grid_z)
                    times = {"start": activity.start * 1e-9, "end": activity.end * 1e-9}
                    device._ran.append(SimpleNamespace(name=name or activity.name, grid=grid, **times))

        self._ran: list[Any] = []
        self._torch, self._clock = torch, Clock()

    def drain(self) -> list[Any]:
        self._torch.cuda.synchronize()
        self._clock._cupti.activity_flush_all(1)
        ran, self._ran[:] = sorted(self._ran, key=lambda r: r.start), []
        return ran

    def record(self, call: Any, inputs: dict[str, Any], train: bool) -> tuple[Any, dict[str, list[list[Any]]]]:
        """Record a call by operation, after a first call that compiles, and return its records."""
        from xlafuse.triton_side.calls.dispatch import record_call

        found: dict[str, list[list[Any]]] = {"forward": [], "backward": []}
        cotangents = {name: self._torch.ones_like(y) for name, y in call(inputs).items()} if train else None
        record_call(call, inputs, train=train)
        self._clock.start()
        self.drain()

        def after_each(part: str, index: int) -> None:
            assert index == len(found[part])
            found[part].append(self.drain())

        recorded = record_call(call, inputs, train=train, cotangents=cotangents, after_each=after_each)
        found["after"] = [self.drain()]
        self._clock.collect()
        assert found.pop("after") == [[]]
        return recorded, found


    def plain(self, call: Any, inputs: dict[str, Any]) -> list[list[str]]:
        """Return the names of the kernels of an unrecorded call, forward and backward."""
        torch = self._torch
        self._clock.start()
        self.drain()
        outputs = call(inputs)
        forward = self.drain()
        dy = [torch.ones_like(y) for y in outputs.values()]
        self.drain()
        torch.autograd.grad(list(outputs.values()), list(inputs.values()), dy)
        backward = self.drain()
        self._clock.collect()
        return [[r.name for r in forward], [r.name for r in backward]]


@pytest.fixture(scope="module")
def device() -> _Device:
    return _Device()


@pytest.mark.gpu
@pytest.mark.parametrize("folder", ["blocks", "library"])
@pytest.mark.parametrize("block", ["rmsnorm", "layernorm", "gelu", "bias_gelu", "softmax", "swiglu_mlp"])
def test_every_kernel_of_eager_code_belongs_to_an_operation(block: str, folder: str, device: _Device) -> None:
    import importlib

    import torch

    from xlafuse.compare.graph.build.from_eager import from_eager

    apply = importlib.import_module(f"xlafuse.triton_side.{folder}.{block}").apply
    attributes = {"eps": 1e-6} if block in ("rmsnorm", "layernorm", "swiglu_mlp") else {}
    vectors = {"rmsnorm": ("weight",), "layernorm": ("weight", "bias"), "bias_gelu": ("bias",)}.get(block, ())
    shapes = MLP if block == "swiglu_mlp" else {"x": (256, 512)} | dict.fromkeys(vectors, (512,))
    inputs = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, shape in shapes.items()
    }

    def call(given: dict[str, Any]) -> dict[str, Any]:
        return apply(given, **attributes)

    recorded, ran = device.record(call, inputs, train=True)
    # Recording changes nothing of what runs.
    assert [[r.name for r in sum(found, [])] for found in ran.values()] == device.plain(call, inputs)
    joined = from_eager(recorded, name=block, kernels=ran)
    assert joined.kernels is not None and all(kernels for part in ran.values() for kernels in part)
    assert {op for k in joined.kernels for op in k.source_ops} == set(joined.operations)


@pytest.mark.gpu
def test_every_kernel_of_a_hand_written_mlp_is_joined(device: _Device) -> None:
    import torch

    from xlafuse.compare.graph.build.from_launches import from_launches
    from xlafuse.triton_side.kernels import swiglu_mlp

    inputs = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name, shape in MLP.items()
    }
    recorded, ran = device.record(lambda given: swiglu_mlp.apply(given, eps=1e-6), inputs, train=True)
    g = from_launches(recorded, name="swiglu_mlp", compiler="triton")
    joined, left = join(g, {part: sum(found, []) for part, found in ran.items()})
    assert left == () and None not in times(joined)
    ran["backward"][2].append(ran["backward"][0][0])
    assert join(g, {part: sum(found, []) for part, found in ran.items()})[1]


@pytest.mark.gpu
def test_planted_kernels_of_one_name_and_two_shapes(device: _Device) -> None:
    import torch

    from xlafuse.compare.graph.build.from_launches import from_launches
    from xlafuse.triton_side.kernels.vector_add import vector_add

    inputs = {"x": torch.randn(1 << 16, device="cuda"), "y": torch.randn(1 << 20, device="cuda")}
    recorded, ran = device.record(
        lambda given: {name: vector_add(x, x) for name, x in given.items()}, inputs, train=False
    )
    g = from_launches(recorded, name="adds", compiler="triton")
    one, two = ran["forward"]
    assert one[0].name == two[0].name and one[0].grid != two[0].grid
    assert join(g, {"forward": [*one, *two]})[1] == ()
    assert join(g, {"forward": [*two, *one]})[1]
    assert join(g, {"forward": [*one, *two, *one]})[1]
