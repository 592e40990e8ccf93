"""Blocks in layers of public libraries, in captures of whole training steps, and in functions that only look alike.

data/make_layers.py and data/make_torch_layers.py compiled the layers; no library of theirs is needed here.
"""

import gzip
import re
import tarfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from xlafuse.compare.model.recognise.block import RecognisedBlock
from xlafuse.compare.model.recognise.from_hlo import from_hlo
from xlafuse.compare.model.recognise.from_inductor import from_inductor
from xlafuse.compare.model.recognise.operation_graph import OperationGraph
from xlafuse.compare.model.recognise.recognise import recognise
from xlafuse.compare.spec.blocks import BLOCKS
from xlafuse.hlo.text_reader import parse
from xlafuse.triton_side.inductor import dump
from xlafuse.triton_side.inductor.graph import CompiledGraph, Program
from xlafuse.triton_side.inductor.ir_text import read_fx

DATA = Path(__file__).parent / "data"
CAPTURES = Path(__file__).parents[2] / "data" / "profiles"


def texts(archive: str) -> dict[str, str]:
    with tarfile.open(DATA / archive) as packed:
        return {member.name.removesuffix(".txt"): packed.extractfile(member).read().decode() for member in packed}


def fx_graph(text: str) -> OperationGraph:
    graph = CompiledGraph("forward", 0, (), {}, (), (), traced=read_fx(text))
    return from_inductor(Program((graph,)))


LAYERS, TORCH_LAYERS, LOOK_ALIKES = map(texts, ("layers.tar.xz", "torch_layers.tar.xz", "look_alikes.tar.xz"))


def attention(head_dim=64, kv_heads=8, causal=1, window=0, batch=4, sequence=512):
    sizes = {"batch": batch, "heads": 8, "kv_heads": kv_heads, "sequence": sequence, "head_dim": head_dim}
    known = {"causal": causal, "window": window}
    return "attention", sizes | {name: value for name, value in known.items() if value is not None}


def biased(attention):
    return "attention_bias", {axis: attention[1][axis] for axis in ("batch", "heads", "sequence", "head_dim")}


def norm(block="rmsnorm", rows=2048):
    return block, {"rows": rows, "columns": 256}


def rope(kv_heads, head_dim=64, batch=4, sequence=512):
    sizes = {"batch": batch, "heads": 8, "kv_heads": kv_heads, "sequence": sequence, "head_dim": head_dim}
    return "rope", sizes


EMBEDDING = ("embedding", {"rows": 4096, "columns": 256, "tokens": 2048})
MLP = ("linear_gelu", {"m": 2048, "k": 256, "n": 1024})
SWIGLU = ("swiglu_mlp", {"tokens": 2048, "width": 256, "hidden": 1024})
MOE = ("moe", {"tokens": 2048, "width": 256, "hidden": 512, "experts": 8, "top_k": 2})
LOSS = ("linear_cross_entropy", {"tokens": 2048, "width": 256, "classes": 4096})

# Layer -> its forward block, the dtype, and its attributes.
EXPECTED = {
    "nnx_attention": (attention(32, causal=0), "bf16", {}),
    "linen_attention_causal": (attention(32), "bf16", {}),
    "equinox_attention_causal": (attention(32), "f32", {}),
    "haiku_attention_causal": (attention(32), "f32", {}),
    # XLA folds a part of the window into an array, which its text leaves out. So the window is not known.
    "jax_nn_grouped_window": (attention(kv_heads=2, window=None), "bf16", {"mask": "data"}),
    "jax_nn_bias": (biased(attention()), "bf16", {}),
    "jax_nn_cudnn": (attention(), "bf16", {"library": True}),
    "gemma_capped_grouped": (attention(kv_heads=2), "bf16", {"capped": True}),
    "einsum_attention": (attention(), "bf16", {}),
    "einsum_attention_window": (attention(window=100), "bf16", {}),
    "einsum_attention_train": (attention(), "bf16", {}),
    "einsum_attention_gradient": (attention(), "bf16", {"without_last_product": True}),
    "matmul_attention_divided_last": (attention(), "bf16", {}),
    "maxtext_rope": (("rope", {"batch": 4, "heads": 8, "sequence": 512, "head_dim": 64}), "bf16", {}),
    "nnx_rmsnorm": (norm(), "bf16", {}),
    "nnx_layernorm": (norm("layernorm"), "bf16", {}),
    "linen_rmsnorm": (norm(), "bf16", {}),
    "linen_layernorm": (norm("layernorm"), "bf16", {}),
    "haiku_rmsnorm": (norm(), "f32", {}),
    "haiku_layernorm": (norm("layernorm"), "f32", {}),
    "equinox_rmsnorm": (norm(), "f32", {}),
    "equinox_layernorm": (norm("layernorm"), "f32", {}),
    "gemma_rmsnorm": (norm(), "bf16", {}),
    "linen_dropout_norm": (norm("dropout_residual_norm"), "bf16", {}),
    "linen_mlp": (MLP, "bf16", {"down": 256}),
    "haiku_mlp": (MLP, "f32", {"down": 256}),
    "equinox_mlp": (MLP, "f32", {"down": 256}),
    "nnx_swiglu": (SWIGLU, "bf16", {}),
    "swiglu_train": (SWIGLU, "bf16", {}),
    "gemma_geglu": (("geglu", {"rows": 2048, "columns": 1024}), "bf16", {"width": 256, "down": 256}),
    "moe_dense": (MOE, "bf16", {"form": "dense"}),
    "moe_dispatch": (MOE, "bf16", {"form": "dispatched"}),
    "moe_ragged": (MOE, "bf16", {"form": "ragged"}),
    "nnx_embed": (EMBEDDING, "bf16", {}),
    "linen_embed": (EMBEDDING, "bf16", {}),
    "haiku_embed": (EMBEDDING, "f32", {}),
    "equinox_embedding": (EMBEDDING, "f32", {}),
    "optax_cross_entropy_train": (LOSS, "bf16", {}),
    "optax_one_hot_cross_entropy": (("cross_entropy", {"tokens": 2048, "classes": 4096}), "f32", {}),
    "plain_cross_entropy": (("cross_entropy", {"tokens": 2048, "classes": 4096}), "bf16", {}),
    "optax_adamw": (("adamw", {"elements": 263_168}), "f32", {"tensors": 2}),
    "plain_adam": (("adamw", {"elements": 262_144}), "f32", {"tensors": 1}),
}


def described(block: RecognisedBlock):
    assert block.sizes.keys() <= BLOCKS[block.block].shapes[0].sizes.keys()
    return (block.block, dict(block.sizes)), block.dtype, dict(block.attributes)


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_of_jax(name: str) -> None:
    found = recognise(from_hlo(parse(LAYERS[name])))
    assert [described(block) for block in found if block.phase in ("forward", "update")] == [EXPECTED[name]]
    assert all(block.kernels for block in found)
    has_gradient = name.endswith(("_train", "_gradient"))
    gradients = [described(block) for block in found if block.phase == "backward"]
    assert gradients == ([EXPECTED[name]] if has_gradient else [])


def test_rope_has_the_sizes_of_its_attention() -> None:
    found = recognise(from_hlo(parse(LAYERS["rotate_half_attention"])))
    assert [(block.block, block.sizes) for block in found] == [rope(2), attention(kv_heads=2)]


DECODER_BLOCKS = {"rmsnorm": 2, "attention": 1, "swiglu_mlp": 1}


@pytest.mark.parametrize("name", ["scanned_decoder_train", "scanned_checkpointed_decoder_train"])
def test_the_layers_of_a_scan_are_blocks_once(name: str) -> None:
    """Backward's loop takes what forward's loop has saved from arrays of all iterations."""
    phases = ["forward", "backward"] + (["recompute"] if "checkpointed" in name else [])
    expected = {(block, phase): number for block, number in DECODER_BLOCKS.items() for phase in phases}
    assert counted(recognise(from_hlo(parse(LAYERS[name])))) == expected


ONE_LAYER = {"rmsnorm": 2, "rope": 1, "attention": 1, "swiglu_mlp": 1}
SUITE = {
    "suite_attention_bias": {("attention_bias", "forward"): 1},
    "suite_decoder_block": {(block, "forward"): number for block, number in ONE_LAYER.items()},
    "suite_gpt2_block": {
        (block, "forward"): 1 for block in ("layernorm", "attention", "dropout_residual_norm", "linear_gelu")
    },
    "suite_lm_step": {
        (block, phase): number
        for phase in ("forward", "backward")
        for block, number in (
            ("embedding", 1), ("rmsnorm", 5), ("rope", 2), ("attention", 2), ("swiglu_mlp", 2),
            ("linear_cross_entropy", 1),
        )
    } | {("adamw", "update"): 1},
}


PRODUCTS = {"geglu": 0, "rope": 0, "rmsnorm": 0, "layernorm": 0, "cross_entropy": 0, "linear_gelu": 1}


@pytest.mark.parametrize("name", [*LAYERS, *TORCH_LAYERS])
def test_a_block_has_the_products_that_the_suites_block_has(name: str) -> None:
    """The measured rows of a block without products say nothing of a product beside it, nor of its gradient."""
    graph = from_hlo(parse(LAYERS[name])) if name in LAYERS else fx_graph(TORCH_LAYERS[name])
    for block in recognise(graph):
        products = [o for o in block.operations if o.op in ("product", "ragged-product", "attention")]
        if PRODUCTS.get(block.block) == 0 or (block.block in PRODUCTS and block.phase == "forward"):
            assert len(products) == PRODUCTS[block.block], block


@pytest.mark.parametrize("name", SUITE)
def test_blocks_of_the_suite(name: str) -> None:
    found = recognise(from_hlo(parse(LAYERS[name])))
    assert counted(found) == SUITE[name]
    spec = BLOCKS[name.removeprefix("suite_")]
    for block in found:
        own = {axis: size for axis, size in spec.shapes[0].sizes.items() if axis in block.sizes}
        assert block.block not in ("attention", "attention_bias") or own.items() <= block.sizes.items()


def test_every_layer_is_expected() -> None:
    assert LAYERS.keys() == EXPECTED.keys() | SUITE.keys() | {
        "rotate_half_attention", "scanned_decoder_train", "scanned_checkpointed_decoder_train",
    }
    assert TORCH_LAYERS.keys() == TORCH_EXPECTED.keys()
    assert len(LAYERS) + len(TORCH_LAYERS) > 20 and len(LOOK_ALIKES) >= 20


def torch_attention(kv_heads=8, causal=1, window=0):
    return attention(32, kv_heads, causal, window, batch=2, sequence=128)


def lookup(rows, columns, tokens):
    return "embedding", {"rows": rows, "columns": columns, "tokens": tokens}


WORDS, LAYERNORM, RMSNORM = lookup(4096, 256, 256), norm("layernorm", 256), norm("rmsnorm", 256)
ROTATED = rope(2, 32, batch=2, sequence=128)
TORCH_MLP = ("linear_gelu", {"m": 256, "k": 256, "n": 1024})
TORCH_LOSS = ("linear_cross_entropy", {"tokens": 256, "width": 256, "classes": 4096})
# The mask of transformers also hides other sequences that are packed into one; it is computed from position ids.
LLAMA_ATTENTION, DROPOUT_NORM = torch_attention(2, window=None), norm("dropout_residual_norm", 256)


def gemma2(window):
    geglu = ("geglu", {"rows": 256, "columns": 1024})
    return [RMSNORM, ROTATED, torch_attention(2, window=window), RMSNORM, RMSNORM, geglu, RMSNORM]


TORCH_EXPECTED = {
    "layernorm": [LAYERNORM],
    "rmsnorm": [RMSNORM],
    "embedding_train": [WORDS],
    "mlp_train": [TORCH_MLP],
    "encoder_layer_train": [torch_attention(causal=0), TORCH_MLP, DROPOUT_NORM, DROPOUT_NORM],
    "multihead_attention": [torch_attention(causal=0)],
    "sdpa_causal": [torch_attention()],
    "plain_attention_train": [torch_attention()],
    "window_capped_grouped": [torch_attention(2, window=16)],
    "einsum_bias": [biased(torch_attention())],
    "linear_cross_entropy_train": [TORCH_LOSS],
    "cross_entropy": [("cross_entropy", {"tokens": 256, "classes": 4096})],
    "plain_adamw": [("adamw", {"elements": 262_144})],
    "moe_dense": [("moe", {"tokens": 256, "width": 256, "hidden": 64, "experts": 8, "top_k": 2})],
    "transformers_llama_train": [
        WORDS, RMSNORM, ROTATED, LLAMA_ATTENTION, RMSNORM,
        ("swiglu_mlp", {"tokens": 256, "width": 256, "hidden": 1024}), RMSNORM, TORCH_LOSS,
    ],
    "transformers_gemma2": [WORDS, *gemma2(32), *gemma2(None), RMSNORM],
    "transformers_gpt2": [
        WORDS, lookup(128, 256, 128), LAYERNORM, torch_attention(window=None), LAYERNORM, TORCH_MLP, LAYERNORM,
    ],
    # Its feed-forward layer has a ReLU, which no block of the suite has; its relative positions are a bias.
    "transformers_t5": [WORDS, RMSNORM, lookup(32, 8, 128 * 128), torch_attention(8, None, None), RMSNORM, RMSNORM],
    "transformers_bert": [
        WORDS, lookup(512, 256, 128), LAYERNORM, torch_attention(causal=0), LAYERNORM, TORCH_MLP, LAYERNORM,
    ],
}


@pytest.mark.parametrize("name", TORCH_EXPECTED)
def test_layers_of_torch(name: str) -> None:
    found = recognise(fx_graph(TORCH_LAYERS[name]))
    expected = [(block, dict(sizes)) for block, sizes in TORCH_EXPECTED[name]]
    assert [(b.block, dict(b.sizes)) for b in found if b.phase in ("forward", "update")] == expected
    if name.endswith("_train") and name != "embedding_train":  # PyTorch has one operation for an embedding's gradient
        assert Counter(b.block for b in found if b.phase == "backward") == Counter(
            block for block, _ in expected if block != "embedding"
        )


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes(name: str) -> None:
    assert recognise(from_hlo(parse(LOOK_ALIKES[name]))) == []


def counted(found: list[RecognisedBlock]) -> Counter[tuple[str, str]]:
    assert all(block.block in BLOCKS for block in found)
    return Counter((block.block, block.phase) for block in found)


LAYERS_OF_STEP = {
    ("rmsnorm", "forward"): 17, ("rmsnorm", "backward"): 17, ("attention", "forward"): 8, ("attention", "backward"): 8,
    ("linear_gelu", "forward"): 8, ("linear_gelu", "backward"): 8, ("embedding", "forward"): 1,
    ("embedding", "backward"): 1, ("linear_cross_entropy", "forward"): 1, ("linear_cross_entropy", "backward"): 1,
}


def test_a_training_step_of_jax() -> None:
    (path,) = (CAPTURES / "jax" / "xla").glob("*after_optimizations.txt.gz")
    found = recognise(from_hlo(parse(gzip.decompress(path.read_bytes()).decode())))
    assert counted(found) == LAYERS_OF_STEP | {("adamw", "update"): 1}
    products = [block.kernels for block in found if (block.block, block.phase) == ("attention", "backward")]
    assert len({kernel for kernels in products for kernel in kernels}) >= 8 * 4  # each layer has its own


def test_a_training_step_of_torch() -> None:
    found = recognise(from_inductor(dump.read(CAPTURES / "torch" / "torch_trace")))
    assert counted(found) == LAYERS_OF_STEP
    (loss,) = (block for block in found if (block.block, block.phase) == ("linear_cross_entropy", "forward"))
    assert loss.sizes == {"tokens": 4096, "width": 1024, "classes": 32_000}


def test_kernels_of_a_dump_have_the_names_of_the_fusion_graph() -> None:
    from xlafuse.compare.graph.build.from_inductor import from_inductor as fusion_graph

    program = dump.read(CAPTURES / "torch" / "torch_trace")
    named = fusion_graph(program).named
    for block in recognise(from_inductor(program)):
        assert set(block.kernels) <= named.keys()


def test_what_checkpointing_computes_again_is_a_block_of_its_own() -> None:
    path = CAPTURES.parent / "hlo" / "jax-0.11.2" / "h200-scan_remat.hlo.txt.gz"
    found = recognise(from_hlo(parse(gzip.decompress(path.read_bytes()).decode())))
    assert counted(found) == {("linear_gelu", phase): 1 for phase in ("forward", "recompute", "backward")}


@pytest.mark.parametrize("name", ["h200-attention-fwd", "h200-swiglu_mlp-fwd", "h200-scan_remat", "h200-indexing"])
def test_text_and_proto_have_the_same_blocks(name: str) -> None:
    pytest.importorskip("google.protobuf")
    pytest.importorskip("jaxlib")
    from xlafuse.hlo.proto_reader import parse_proto

    path = CAPTURES.parent / "hlo" / "jax-0.10.2" / f"{name}.hlo.pb.gz"
    text = gzip.decompress(path.with_name(path.name.replace(".pb", ".txt")).read_bytes()).decode()
    both = [recognise(from_hlo(module)) for module in (parse(text), parse_proto(gzip.decompress(path.read_bytes())))]
    assert both[0] and list(map(described, both[0])) == list(map(described, both[1]))


@pytest.mark.parametrize("seed", range(60))
def test_damaged_text_is_read_without_an_error(seed: int) -> None:
    random = Random(seed)
    lines = random.choice(sorted(LAYERS.values() if seed % 2 else TORCH_LAYERS.values())).splitlines()
    for _ in range(5):
        index = random.randrange(1, len(lines))
        damages = (
            lambda line: "", lambda line: re.sub(r"%?[\w.]+, (?=%?\w)", "", line, count=1),
            lambda line: re.sub(r"\d+", lambda number: random.choice(["0", "1", "7", number[0]]), line),
            lambda line: re.sub(r"\[[\d,]*\]", "[]", line, count=1),
        )
        lines[index] = random.choice(damages)(lines[index])
    text = "\n".join(lines)
    try:
        graph = from_hlo(parse(text)) if seed % 2 else fx_graph(text)
    except ValueError as problem:
        assert "calls itself" in str(problem)
    else:
        recognise(graph)
