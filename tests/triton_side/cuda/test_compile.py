"""Every CUDA C++ kernel compiles for an H200 without a GPU, loads 16 bytes at a time, and spills nothing."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from full_marks import first_of_each

from xlafuse.triton_side.calls import artifacts, cuda_program
from xlafuse.triton_side.cuda import (
    bias_gelu,
    dropout_residual_norm,
    gelu,
    layernorm,
    matmul,
    rmsnorm,
    softmax,
    vector_add,
)
from xlafuse.triton_side.cuda.common import launch, tensors

ARCH = "sm_90"
PROJECT = Path(__file__).parents[3]
ELEMENTWISE = [
    ("vector_add.cu", "vector_add"),
    ("gelu.cu", "gelu_forward"),
    ("gelu.cu", "gelu_backward"),
]
DTYPES = list(tensors.CPP_TYPES)
# Every dtype with 16-byte loads, and single elements of a 16-bit and a 32-bit dtype.
LOADS = first_of_each(
    [*((dtype, 16 // dtype.itemsize) for dtype in DTYPES), (torch.bfloat16, 1), (torch.float32, 1)],
    lambda load: load[1] > 1,
)


def compiled(source: str, expression: str, threads: int, *options: str) -> artifacts.Artifacts:
    return artifacts.of_cuda(cuda_program.compile_kernel(source, expression, ARCH, *options), threads)


def one_of_each(instances: list[Any]) -> list[Any]:
    """Return (expression, threads, lanes, ...) as parameters: `make test` compiles each kernel once, with vectors."""
    vectors_first = sorted(instances, key=lambda instance: instance[2] == 1)
    return first_of_each(vectors_first, lambda instance: instance[0].partition("<")[0])


def check_vectorised(code: artifacts.Artifacts, threads: int, lanes: int) -> None:
    assert code.resources.spill_bytes == 0
    assert code.resources.registers * threads <= 65536, "a block of this size could not be launched"
    assert ("LDG.E.128" in code.sass) == (lanes > 1)
    assert ("STG.E.128" in code.sass) == (lanes > 1)
    assert not re.search(r"\b(ATOM|ATOMG|RED)\b", code.sass)


@pytest.mark.parametrize(("dtype", "lanes"), LOADS)
@pytest.mark.parametrize(("source", "name"), ELEMENTWISE, ids=[name for _, name in ELEMENTWISE])
def test_elementwise_kernels(source: str, name: str, dtype: torch.dtype, lanes: int) -> None:
    vectors = launch.VECTORS if lanes > 1 else launch.SCALARS
    code = compiled(source, launch.expression(name, dtype, lanes, vectors, launch.THREADS), launch.THREADS)
    check_vectorised(code, launch.THREADS, lanes)
    assert f".target {ARCH}" in code.texts["ptx"]
    assert name in code.name and code.name in code.texts["ptx"]


@pytest.mark.parametrize(("dtype", "lanes"), LOADS)
@pytest.mark.parametrize(
    ("name", "rows"),
    [("bias_gelu_forward", bias_gelu.FORWARD_ROWS), ("bias_gelu_backward", bias_gelu.BACKWARD_ROWS)],
)
def test_bias_gelu_kernels(name: str, rows: int, dtype: torch.dtype, lanes: int) -> None:
    rows = rows if lanes > 1 else bias_gelu.SCALAR_ROWS
    code = compiled("bias_gelu.cu", launch.expression(name, dtype, lanes, rows, bias_gelu.THREADS), bias_gelu.THREADS)
    check_vectorised(code, bias_gelu.THREADS, lanes)
    assert code.resources.registers * bias_gelu.THREADS * bias_gelu.RESIDENT <= 65536, "fewer blocks are resident"
    assert code.resources.shared_bytes == 0
    matrices = 1 if name == "bias_gelu_forward" else 2
    assert len(re.findall(r"\bLDG\b", code.sass)) == matrices * rows + 1  # each element once, and the bias


def test_bias_gelu_sums() -> None:
    threads = bias_gelu.WARP * bias_gelu.SUM_WARPS
    expression = launch.expression("bias_gelu_sum_partials", torch.bfloat16, bias_gelu.SUM_WARPS)
    code = compiled("bias_gelu.cu", expression, threads)
    check_vectorised(code, threads, lanes=1)
    assert code.resources.shared_bytes == 4 * threads


def softmax_instances() -> list[tuple[str, int, int]]:
    """Return (expression, threads, lanes): every aligned plan in bf16, and the extremes of other dtypes."""
    instances = []
    for direction in ("forward", "backward"):
        for element, lanes, plans in (
            ("__nv_bfloat16", 8, softmax.VECTOR_PLANS),
            ("float", 4, softmax.VECTOR_PLANS[3::3]),
            ("__half", 8, softmax.VECTOR_PLANS[-1:]),
            ("__nv_bfloat16", 1, softmax.SCALAR_PLANS[2::3]),
        ):
            for p in plans:
                if p.cluster > 1:
                    name, last = f"softmax_{direction}_cluster", p.cluster
                else:
                    name, last = f"softmax_{direction}", p.rows
                threads = p.threads * p.rows
                instances.append((f"{name}<{element}, {lanes}, {p.vectors}, {p.threads}, {last}>", threads, lanes))
        for element, lanes in (("__nv_bfloat16", 8), ("__half", 8), ("float", 4), ("float", 1)):
            threads = softmax.STREAMING_THREADS
            instances.append((f"softmax_{direction}_streaming<{element}, {lanes}, {threads}>", threads, lanes))
    return instances


@pytest.mark.parametrize(("expression", "threads", "lanes"), one_of_each(softmax_instances()))
def test_softmax_kernels(expression: str, threads: int, lanes: int) -> None:
    check_vectorised(compiled("softmax.cu", expression, threads, "--ftz=true"), threads, lanes)


def test_softmax_reads_its_row_once() -> None:
    code = compiled("softmax.cu", "softmax_forward<__nv_bfloat16, 8, 4, 128, 1>", 128, "--ftz=true")
    assert code.sass.count("LDG.E.128") == 4
    assert code.sass.count("STG.E.128") == 4
    assert code.resources.shared_bytes == 4 * 8  # one (maximum, sum) per warp


def norm_instances(norm: str) -> list[tuple[str, int, int]]:
    """Return (expression, threads, lanes): the plans with most elements per thread, and the streaming kernels.

    norm: layernorm, or rmsnorm, which has its plans.
    """
    instances = []
    for element, lanes, plans in (
        ("__nv_bfloat16", 8, layernorm.VECTOR_PLANS[4::2]),
        ("__half", 8, layernorm.VECTOR_PLANS[-1:]),
        ("float", 4, layernorm.VECTOR_PLANS[-1:]),
        ("float", 1, layernorm.SCALAR_PLANS[-1:]),
    ):
        for direction in ("forward", "backward"):
            name = f"{norm}_{direction}"
            instances += [(f"{name}<{element}, {lanes}, {p.vectors}, {p.threads}>", p.threads, lanes) for p in plans]
    for element, lanes in (("__nv_bfloat16", 8), ("float", 1)):
        for name, threads in (
            (f"{norm}_forward_streaming", layernorm.STREAMING_THREADS),
            (f"{norm}_backward_streaming", layernorm.STREAMING_THREADS),
            (f"{norm}_partials", layernorm.PARTIALS_THREADS),
        ):
            instances.append((f"{name}<{element}, {lanes}, {threads}>", threads, lanes))
    instances.append((f"{norm}_sum_partials<__nv_bfloat16, {layernorm.SUM_WARPS}>", 32 * layernorm.SUM_WARPS, 1))
    return instances


@pytest.mark.parametrize(("expression", "threads", "lanes"), one_of_each(norm_instances("layernorm")))
def test_layernorm_kernels(expression: str, threads: int, lanes: int) -> None:
    check_vectorised(compiled("layernorm.cu", expression, threads), threads, lanes)


@pytest.mark.parametrize(("expression", "threads", "lanes"), one_of_each(norm_instances("rmsnorm")))
def test_rmsnorm_kernels(expression: str, threads: int, lanes: int) -> None:
    check_vectorised(compiled("rmsnorm.cu", expression, threads), threads, lanes)


def test_layernorm_reads_its_row_once() -> None:
    forward = compiled("layernorm.cu", "layernorm_forward<__nv_bfloat16, 8, 2, 512>", 512)
    assert forward.sass.count("LDG.E.128") == 2 * 3  # x, weight, bias
    assert forward.sass.count("STG.E.128") == 2
    assert forward.resources.shared_bytes == 2 * 16 * 4  # per warp a float for the mean and one for the variance


@pytest.mark.parametrize(("lanes", "longest"), [(8, 16384), (4, 8192), (1, 8192)])
def test_longest_layernorm_in_registers(lanes: int, longest: int) -> None:
    for columns in (1, 7, 1000, longest):
        chosen = layernorm.plan(columns, lanes)
        assert chosen is not None and chosen.columns(lanes) >= columns and chosen.resident(lanes) >= 1
    assert layernorm.plan(longest + 1, lanes) is None


def dropout_residual_norm_instances() -> list[tuple[str, int, int, int]]:
    """Return (expression, threads, lanes, blocks that must fit a multiprocessor) for plans with most elements."""
    instances = []
    for element, lanes, forward, backward in (
        ("__nv_bfloat16", 8, 3, 4), ("float", 4, 3, 4), ("float", 1, 1, 2), ("__half", 1, 1, 1),
    ):
        for p in dropout_residual_norm.FORWARD_PLANS[-forward:]:
            expression = f"dropout_residual_norm_forward<{element}, {lanes}, {p.elements // lanes}, {p.threads}>"
            instances.append((expression, p.threads, lanes, 1))
        for p in dropout_residual_norm.BACKWARD_PLANS[-backward:]:
            blocks = p.resident(lanes)
            name, last = ("backward", blocks) if p.cluster == 1 else ("backward_cluster", p.cluster)
            constants = f"{lanes}, {p.elements // lanes}, {p.threads}, {last}"
            instances.append((f"dropout_residual_norm_{name}<{element}, {constants}>", p.threads, lanes, blocks))
    threads = 32 * dropout_residual_norm.SUM_WARPS
    sums = f"dropout_residual_norm_sum_partials<__nv_bfloat16, {dropout_residual_norm.SUM_WARPS}>"
    return [*instances, (sums, threads, 1, 1)]


@pytest.mark.parametrize(("expression", "threads", "lanes", "blocks"), one_of_each(dropout_residual_norm_instances()))
def test_dropout_residual_norm_kernels(expression: str, threads: int, lanes: int, blocks: int) -> None:
    code = compiled("dropout_residual_norm.cu", expression, threads)
    check_vectorised(code, threads, lanes)
    assert code.resources.registers * threads * blocks <= 65536, "fewer blocks are resident"


def test_dropout_residual_norm_reads_its_row_once_and_draws_four_numbers_a_call() -> None:
    forward, backward = (dropout_residual_norm.plan(4096, plans) for plans in (
        dropout_residual_norm.FORWARD_PLANS, dropout_residual_norm.BACKWARD_PLANS,
    ))
    code = compiled(
        "dropout_residual_norm.cu", f"dropout_residual_norm_forward<__nv_bfloat16, 8, 2, {forward.threads}>",
        forward.threads,
    )
    assert code.sass.count("LDG.E.128") == 2 * 5  # x, residual, bias, weight, shift
    assert code.sass.count("STG.E.128") == 2 * 2
    assert code.resources.registers * forward.threads * 6 <= 65536
    calls, rotations = forward.elements // 4, len(re.findall(r"SHF\.L\.W", code.sass))
    assert 12 * calls <= rotations <= 13 * calls  # some rotations by whole bytes compile to byte permutations
    expression = f"dropout_residual_norm_backward<__nv_bfloat16, 8, 1, {backward.threads}, {backward.resident(8)}>"
    code = compiled("dropout_residual_norm.cu", expression, backward.threads)
    assert code.sass.count("LDG.E.128") == 3 + 2  # h, dy, dh, and the weight twice
    assert code.sass.count("STG.E.128") == 2 + 3 * 2  # dx, dresidual, three sums in fp32
    assert backward.threads * backward.resident(8) == 1024


@pytest.mark.parametrize("plans", [dropout_residual_norm.FORWARD_PLANS, dropout_residual_norm.BACKWARD_PLANS])
@pytest.mark.parametrize("columns", [1, 7, 256, 257, 4093, 4096, 8192, 8193, 16384])
def test_a_plan_of_dropout_residual_norm_holds_the_row(
    plans: tuple[dropout_residual_norm.Plan, ...], columns: int
) -> None:
    chosen = dropout_residual_norm.plan(columns, plans)
    assert chosen.columns >= columns and (chosen.columns < 2 * columns or chosen is plans[0])
    assert all(chosen.elements % lanes == 0 and chosen.resident(lanes) >= 1 for lanes in (1, 4, 8))


@pytest.mark.parametrize(
    ("dtype", "a_inner_first", "b_inner_first"),
    first_of_each(
        [
            (torch.bfloat16, True, True), (torch.float32, True, False), (torch.float16, False, True),
            *((torch.bfloat16, a, b) for a, b in ((True, False), (False, True), (False, False))),
        ],
        lambda matrices: matrices[0],
    ),
)
def test_matmul_fits_two_blocks_on_a_multiprocessor(
    dtype: torch.dtype, a_inner_first: bool, b_inner_first: bool
) -> None:
    expression = launch.expression("matmul", dtype, *matmul.constants(a_inner_first, b_inner_first))
    code = compiled("matmul.cu", expression, matmul.THREADS)
    assert code.resources.spill_bytes == 0
    assert 2 * code.resources.registers * matmul.THREADS <= 65536
    # Each term adds to 8 x 8 sums, from two 16-byte loads per operand out of shared memory.
    assert code.sass.count("FFMA") == matmul.DEPTH * 8 * 8
    assert code.sass.count("LDS.128") == matmul.DEPTH * 2 * 2
    assert not re.search(r"\b(ATOM|ATOMG|RED|HMMA|HGMMA)\b", code.sass)


def test_no_thread_block_clusters_before_hopper() -> None:
    kernel = cuda_program.compile_kernel("softmax.cu", "softmax_forward<float, 4, 4, 128, 1>", "sm_80", "--ftz=true")
    assert ".target sm_80" in kernel.ptx
    assert all(
        p is None or p.cluster == 1 for p in (softmax.plan(c, 8, clusters=False) for c in (1, 8192, 8200, 10**6))
    )


def test_rows_that_dropout_residual_norm_takes_before_hopper_and_since(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, capability, longest in (("sm_80", (8, 0), 8192), (ARCH, (9, 0), 16384)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert dropout_residual_norm.most_columns(torch.device("cuda")) == longest
        chosen = dropout_residual_norm.plan(8192, dropout_residual_norm.BACKWARD_PLANS)
        constants = f"8, {chosen.elements // 8}, {chosen.threads}, {chosen.resident(8)}"
        expression = f"dropout_residual_norm_backward<__nv_bfloat16, {constants}>"
        assert f".target {arch}" in cuda_program.compile_kernel("dropout_residual_norm.cu", expression, arch).ptx


@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize("columns", [1, 7, 256, 1000, 4096, 8192, 32003, 65536])
def test_plan_holds_the_row_and_no_smaller_one_does(columns: int, lanes: int) -> None:
    plans = softmax.VECTOR_PLANS if lanes > 1 else softmax.SCALAR_PLANS
    chosen = softmax.plan(columns, lanes, clusters=True)
    assert chosen is not None
    assert chosen.columns(lanes) >= columns
    assert all(p.columns(lanes) < columns for p in plans if p.columns(lanes) < chosen.columns(lanes))


@pytest.mark.parametrize(("lanes", "longest"), [(8, 131072), (4, 65536), (1, 65536)])
def test_longest_row_in_registers(lanes: int, longest: int) -> None:
    assert softmax.plan(longest, lanes, clusters=True) is not None
    assert softmax.plan(longest + 1, lanes, clusters=True) is None


def test_a_kernel_is_compiled_once() -> None:
    first = cuda_program.compile_kernel("gelu.cu", "gelu_forward<float, 4, 2, 256>", ARCH)
    assert cuda_program.compile_kernel("gelu.cu", "gelu_forward<float, 4, 2, 256>", ARCH) is first


def test_compile_error_shows_the_log() -> None:
    with pytest.raises(cuda_program.CompileError, match=r"(?s)gelu_sideways.*gelu\.cu.*sm_90.*error"):
        cuda_program.compile_kernel("gelu.cu", "gelu_sideways<float, 4, 2, 256>", ARCH)


def test_missing_headers_name_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_program, "_wheel_folders", lambda distribution: [tmp_path / distribution])
    monkeypatch.setattr(cuda_program.Path, "is_file", lambda self: False)
    with pytest.raises(cuda_program.CudaUnavailable, match=r"pip install 'nvidia-cuda-runtime==13\.\*'"):
        cuda_program.header_folder.__wrapped__()


@pytest.mark.parametrize(
    "operation",
    [
        gelu.gelu, softmax.softmax, lambda x: vector_add.vector_add(x, x), lambda x: bias_gelu.bias_gelu(x, x[0]),
        lambda x: layernorm.layernorm(x, x[0], x[0], 1e-5), lambda x: rmsnorm.rmsnorm(x, x[0], 1e-5),
        lambda x: matmul.matmul(x, x),
        lambda x: dropout_residual_norm.dropout_residual_norm(x, x[0], x, x[0], x[0], x[:, 0].int(), p=0.1, eps=1e-5),
    ],
)
def test_a_tensor_on_the_cpu_is_refused(operation: object) -> None:
    with pytest.raises(ValueError, match=r"must be on a CUDA device, got cpu; move it with \.to\('cuda'\)"):
        operation(torch.zeros(2, 3))  # type: ignore[operator]


def test_compiles_where_another_library_loaded_nvrtc_first() -> None:
    """If another library (jax's CUDA plugin does it) loads NVRTC first, NVRTC does not find its builtins by itself."""
    code = """
        import ctypes, importlib.util, pathlib
        nvidia = importlib.util.find_spec("nvidia")
        for root in nvidia.submodule_search_locations if nvidia else ():
            for path in pathlib.Path(root).glob("**/libnvrtc.so.*"):
                ctypes.CDLL(str(path))
        from xlafuse.triton_side.calls import cuda_program
        assert cuda_program.compile_kernel("vector_add.cu", "vector_add<float, 4, 2, 256>", "sm_90")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
