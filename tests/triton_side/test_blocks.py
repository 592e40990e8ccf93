"""The plain blocks and the library implementations against the float64 references, on a CPU."""

import contextlib
import importlib
import math
import shutil
from collections.abc import Callable

import float64_reference
import pytest
import torch
from float64_reference import ONE_GPU, attributes_of, case_of, cotangents_of, inputs_of
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.traceback import preserve_node_meta
from torch.utils.flop_counter import FlopCounterMode

from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.compare.spec.case import Case
from xlafuse.triton_side.calls.stages import of_node
from xlafuse.triton_side.library import attention as library_attention
from xlafuse.triton_side.library import attention_bias as library_bias
from xlafuse.triton_side.library import attention_packed as library_packed
from xlafuse.triton_side.library import decode_attention as library_decode
from xlafuse.triton_side.library import decode_attention_paged as library_paged

DTYPES = ["float32", "float16", "bfloat16"]
SUM = ("bias", "random", "dropout", "residual")
NORM = ("mean_square", "normalize", "weight")
STAGES = {
    "vector_add": {"add"},
    "gelu": {"gelu"},
    "swiglu": {"silu", "multiply"},
    "geglu": {"gelu", "multiply"},
    "bias_gelu": {"bias", "gelu"},
    "softmax": {"max", "exp", "sum", "divide"},
    "rmsnorm": {"mean_square", "normalize", "weight"},
    "layernorm": {"mean", "variance", "normalize", "weight", "bias"},
    "dropout_residual_norm": {"bias", "random", "dropout", "residual", "mean", "variance", "normalize", "affine"},
    "matmul": {"product"},
    "linear": {"product", "bias"},
    "linear_residual": {"product", "residual"},
    "linear_gelu": {"product", "bias", "gelu"},
    "swiglu_mlp": {"norm", "gate", "up", "act", "down", "residual"},
    "moe": {"router", "topk", "balance", "dispatch", "gate", "up", "act", "down", "combine"},
    "rope": {"angles", "rotate_q", "rotate_k"},
    "attention": {"scores", "mask", "softmax", "values"},
    "attention_bias": {"scores", "bias", "softmax", "values"},
    "attention_packed": {"scores", "mask", "softmax", "values"},
    "decode_attention": {"scores", "mask", "softmax", "values"},
    "decode_attention_paged": {"gather", "scores", "mask", "softmax", "values"},
    "gpt2_block": {
        *(f"attention_norm/{stage}" for stage in ("mean", "variance", "normalize", "weight", "bias")), "qkv",
        "attention/scores", "attention/mask", "attention/softmax", "attention/values", "out",
        *(f"attention_residual/{stage}" for stage in (*SUM, "mean", "variance", "normalize", "affine")),
        "up/product", "up/bias", "up/gelu", "down", *(f"mlp_residual/{stage}" for stage in SUM),
    },
    "decoder_block": {
        *(f"{norm}/{stage}" for norm in ("attention_norm", "mlp_norm") for stage in NORM), "qkv",
        "rope/angles", "rope/rotate_q", "rope/rotate_k",
        "attention/scores", "attention/mask", "attention/softmax", "attention/values",
        "out", "attention_residual", "gate", "up", "act", "down", "mlp_residual",
    },
    "embedding": {"gather"},
    "cross_entropy": {"logsumexp", "target", "smoothing", "z_loss", "mean"},
    "linear_cross_entropy": {"product", "logsumexp", "target", "smoothing", "z_loss", "mean"},
}
# Error allowed, in units of the dtype's eps at the tensor's rms. The largest of a thousand normal values is
# four times their rms, so storing it alone costs two; chained roundings take the rest (largest seen: 23).
TOLERANCE_IN_EPS = 32

Arrays = dict[str, Tensor]


def assert_close(name: str, value: Tensor, expected: Tensor, eps: float) -> None:
    assert value.shape == expected.shape, name
    # Where most values are zeros (an expert without tokens), the largest exceeds four times the rms.
    scale = max(expected.square().mean().sqrt().item(), expected.abs().max().item() / 4)
    # A gradient that cancels (softmax of one column) is the difference of terms of order one.
    scale = scale if scale > 1e-3 else 1.0
    error = (value.double() - expected).abs().max() / scale / eps
    assert error <= TOLERANCE_IN_EPS, f"{name}: error {error:.1f} eps"


def check(case: Case, apply: Callable[..., Arrays], inputs: Arrays | None = None, *, gradients: bool = True) -> None:
    """Check outputs, and gradients of all inputs for a random cotangent, against the reference."""
    inputs = inputs or inputs_of(case)
    cotangents = cotangents_of(case) if gradients else {}
    attributes = attributes_of(case)
    found = float64_reference.evaluated(lambda inputs: apply(inputs, **attributes), inputs, cotangents)
    expected = float64_reference.exact(case, inputs, cotangents)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        dtype = BLOCKS[case.block].tensor(name.removeprefix("d_")).dtype_in(case)
        assert value.dtype == getattr(torch, dtype), name
        # A float32 loss of rounded logits has their error.
        rounded = case.dtype if case.block == "linear_cross_entropy" else dtype
        assert_close(name, value, expected[name], torch.finfo(getattr(torch, rounded)).eps)


def module(package: str, block: str) -> Callable[..., Arrays]:
    return importlib.import_module(f"xlafuse.triton_side.{package}.{block}").apply


def library_cases() -> list[Case]:
    libraries = {block.name: row for block in ONE_GPU for row in block.implementations if row.name == "library"}
    found = [case_of(block, dtype) for block in libraries for dtype in DTYPES]
    grouped = case_of("moe", "bfloat16", "one-expert")  # rows of 16 bytes for grouped_mm
    return [case for case in (*found, grouped) if not libraries[case.block].unsupported(case)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [block.name for block in ONE_GPU if block.name != "lm_step"])
def test_block(block: str, dtype: str) -> None:
    check(case_of(block, dtype), module("blocks", block))


@pytest.mark.parametrize("case", library_cases(), ids=lambda case: case.id)
def test_library(case: Case) -> None:
    check(case, module("library", case.block))


def test_the_library_projects_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    block = "linear_cross_entropy"
    monkeypatch.setattr(importlib.import_module(f"xlafuse.triton_side.library.{block}"), "TOKENS", 3)
    check(case_of(block, "float32"), module("library", block))


def test_gelu_is_the_tanh_approximation_not_erf() -> None:
    x = torch.linspace(-4, 4, 101)
    y = module("blocks", "gelu")({"x": x})["y"]
    assert (y - torch.nn.functional.gelu(x)).abs().max() > 1e-4


@pytest.mark.parametrize("block", STAGES)
def test_block_is_one_graph_and_its_stages_reach_both_directions(block: str) -> None:
    stages: dict[str, set[str]] = {}

    def recorder(direction: str) -> Callable[..., Callable[..., object]]:
        def compile_graph(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
            operations = (node for node in graph.graph.nodes if node.op == "call_function")
            stages[direction] = {name for node in operations if (name := of_node(node.meta))}
            return make_boxed_func(graph)

        return compile_graph

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"))
    compiled = torch.compile(module("blocks", block), backend=backend, fullgraph=True, dynamic=False)
    with preserve_node_meta():
        check(case_of(block, "float32"), compiled)
    assert stages["forward"] == STAGES[block]
    # A sum passes its gradient on unchanged. Softmax's maximum, positions and random bits get none.
    without = {"add", "max", "residual", "angles", "random", "attention_residual", "mlp_residual"}
    expected = {stage for stage in STAGES[block] if stage.split("/")[-1] not in without}
    assert stages.get("backward", set()) == (expected if {"train", "joint"} & {*BLOCKS[block].directions} else set())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["odd", "odd-full", "tiny-token"])
def test_flash_has_a_cpu_path(shape: str, dtype: str) -> None:
    check(case_of("attention", dtype, shape), library_attention.apply_flash)


def test_cudnn_fails_where_it_cannot_run() -> None:
    with pytest.raises(RuntimeError, match="No viable backend"):
        library_attention.apply_cudnn(inputs_of(case_of("attention", "bfloat16")))


@pytest.mark.parametrize("apply", [library_attention.apply_flash, library_attention.apply_cudnn])
def test_sdpa_has_no_window(apply: Callable[..., Arrays]) -> None:
    with pytest.raises(ValueError, match="no window, got 3; use FlexAttention"):
        apply(inputs_of(case_of("attention", "bfloat16")), window=3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.full
@pytest.mark.parametrize("shape", ["odd-window", "odd", "odd-full"])
def test_flex_forward_on_a_cpu(shape: str) -> None:
    check(case_of("attention", "float32", shape), library_attention.apply_flex, gradients=False)


QUERIES = ["odd-5-queries", "fewer-keys-than-queries"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", QUERIES)
@pytest.mark.parametrize("block", ["decode_attention", "decode_attention_paged"])
def test_several_queries_of_a_sequence(block: str, shape: str, dtype: str) -> None:
    check(case_of(block, dtype, shape), module("blocks", block))


def test_sdpa_aligns_its_causal_mask_to_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no FlashAttention-2 of PyTorch's CUDA library; its own kernels take the same mask."""
    monkeypatch.setattr(library_decode, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    for queries in ({}, {"queries": 5}):
        case = case_of("decode_attention", "float32", shortest=67, **queries)
        check(case, library_decode.apply_flash)


def test_sdpas_causal_mask_can_be_made_while_a_call_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_decode, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    q, k, v = (torch.randn(1, 2, rows, 16) for rows in (3, 8, 8))
    inputs = {"q": q, "k_cache": k, "v_cache": v, "lengths": torch.tensor([8])}
    expected = library_decode.apply_flash(inputs)["out"]
    with FlopCounterMode(display=False):
        assert torch.equal(library_decode.apply_flash(inputs)["out"], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["odd", "tiny-one-key", *QUERIES])
def test_sdpa_decodes_on_a_cpu(shape: str, dtype: str) -> None:
    case = case_of("decode_attention", dtype, shape)
    check(case, lambda inputs: {"out": library_decode.attend(*inputs.values())})


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("queries", [{}, {"queries": 5}])
def test_flex_decodes_on_a_cpu(queries: dict[str, int]) -> None:
    check(case_of("decode_attention", "float32", capacity=300, **queries), library_decode.apply_flex)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", ["odd", *QUERIES])
def test_flex_of_pages_attends_by_its_mask(shape: str) -> None:
    """Uncompiled, FlexAttention evaluates its formula; its CPU kernel supports no lists of pages."""
    with torch.compiler.set_stance("force_eager"):
        check(case_of("decode_attention_paged", "float32", shape), library_paged.apply_flex)


def test_flex_of_pages_reads_only_a_sequences_own_keys() -> None:
    table, lengths = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32), torch.tensor([9, 4])
    mask = library_paged.block_mask(table, lengths, pages=7, page_size=4)
    keys = torch.arange(7 * 4)
    none = torch.tensor(0)
    for sequence, listed, seen in ((0, [5, 0, 3], [20, 21, 22, 23, 0, 1, 2, 3, 12]), (1, [1], [4, 5, 6, 7])):
        count = mask.kv_num_blocks[sequence, 0, 0]
        assert mask.kv_indices[sequence, 0, 0, :count].tolist() == listed
        visible = mask.mask_mod(torch.tensor(sequence), none, none, keys)
        assert set(keys[visible].tolist()) == set(seen)


@pytest.mark.parametrize("block", ["decode_attention", "decode_attention_paged"])
def test_a_sequence_without_keys_gives_zeros(block: str) -> None:
    inputs = inputs_of(case_of(block, "float32"))
    inputs["lengths"] = torch.tensor([5, 0, 37], dtype=torch.int32)
    out = module("blocks", block)(inputs)["out"]
    assert not out[1].any() and out[[0, 2]].all()
    if block == "decode_attention":
        assert not library_decode.attend(*inputs.values())[1].any()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_of_packed_sequences_on_a_cpu() -> None:
    check(case_of("attention_packed", "float32"), library_packed.apply_flex, gradients=False)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_adds_a_bias_on_a_cpu() -> None:
    check(case_of("attention_bias", "float32"), library_bias.apply_flex, gradients=False)


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    inputs = inputs_of(case_of("attention_bias", "float32"))
    inputs["bias"][:, 5] = -math.inf
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    out = module("blocks", "attention_bias")(inputs)["out"]
    out.square().sum().backward()
    assert not out[:, :, 5].any() and out[:, :, 6].all()
    assert not inputs["q"].grad[:, :, 5].any() and not inputs["bias"].grad[:, 5].any()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in inputs.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_only_minus_infinity_is_zeros_without_gradient(dtype: str) -> None:
    x = inputs_of(case_of("softmax", dtype))["x"]
    x[1] = x[2, :-1] = x[3, ::2] = -math.inf
    x[5, 3], x[6, 3] = math.inf, math.nan
    x.requires_grad_()
    y = module("blocks", "softmax")({"x": x}, masked=1)["y"]
    y[:5].backward(1e4 * torch.ones_like(y[:5]))
    assert not y[1].any() and not x.grad[1].any()
    seen = [0, 2, 3, 4]
    torch.testing.assert_close(y[seen], torch.softmax(x.double(), -1)[seen].to(x.dtype))
    assert x.grad[:5].isfinite().all()
    assert y[5:].isnan().all()


def test_flex_caches_a_mask_while_its_boundaries_exist() -> None:
    cu_seqlens = torch.tensor([0, 5, 300], dtype=torch.int32)
    mask = library_packed._mask_of(cu_seqlens, 300)
    assert library_packed._mask_of(cu_seqlens, 300) is mask
    cu_seqlens.copy_(torch.tensor([0, 200, 300]))
    assert library_packed._mask_of(cu_seqlens, 300) is not mask
    assert library_packed._mask_of(cu_seqlens.clone(), 300) is not mask
    held = len(library_packed._masks)
    del cu_seqlens
    assert len(library_packed._masks) == held - 1


def test_flex_caches_one_mask_per_sequence_window_and_device() -> None:
    cpu = torch.device("cpu")
    mask = library_attention._block_mask(300, 0, cpu)
    assert library_attention._block_mask(300, 0, torch.device("cpu")) is mask
    assert library_attention._block_mask(301, 0, cpu) is not mask
    windowed = library_attention._block_mask(600, 128, cpu)
    assert windowed.sparsity() > library_attention._block_mask(600, 0, cpu).sparsity()
