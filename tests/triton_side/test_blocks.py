"""The plain blocks and the library implementations against formulas in float64, on a CPU."""

import importlib
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.traceback import preserve_node_meta

from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.blocks.threefry import uniforms
from xlafuse.triton_side.calls.stages import of_node
from xlafuse.triton_side.library import attention as library_attention
from xlafuse.triton_side.library import attention_bias as library_bias
from xlafuse.triton_side.library import attention_packed as library_packed
from xlafuse.triton_side.library import decode_attention as library_decode
from xlafuse.triton_side.library import decode_attention_paged as library_paged

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = {
    "vector_add": [(1,), (131,)],
    "gelu": [(1, 1), (7, 129)],
    "swiglu": [(1, 1), (7, 129)],
    "geglu": [(1, 1), (7, 129)],
    "bias_gelu": [(1, 1), (7, 129)],
    "softmax": [(1, 1), (7, 129)],
    "rmsnorm": [(1, 1), (7, 129)],
    "layernorm": [(1, 2), (7, 129)],
    "dropout_residual_norm": [(1, 3), (7, 129)],
    "matmul": [(1, 1, 1), (7, 33, 65)],  # m, k, n
    "linear": [(1, 3, 5), (7, 33, 65)],  # m, k, n
    "linear_residual": [(1, 3, 5), (7, 33, 65)],  # m, k, n
    "linear_gelu": [(1, 3, 5), (7, 33, 65)],  # m, k, n
    "swiglu_mlp": [(1, 3, 5), (7, 33, 65)],  # tokens, width, hidden
    "moe": [(1, 8, 16, 3), (7, 32, 40, 6)],  # tokens, width, hidden, experts; rows of 16 bytes for grouped_mm
    "rope": [(1, 1, 1, 1, 2), (2, 3, 1, 37, 24)],  # batch, heads, kv_heads, sequence, head_dim
    "attention": [(1, 1, 1, 1, 16), (1, 2, 1, 37, 24)],  # batch, heads, kv_heads, sequence, head_dim
    "attention_bias": [(1, 1, 1, 16), (2, 2, 37, 24)],  # batch, heads, sequence, head_dim
    "attention_packed": [(1, 1, 1, 1, 16), (5, 4, 2, 37, 24)],  # sequences, heads, kv_heads, tokens, head_dim
    "decode_attention": [(1, 1, 1, 1, 16), (3, 6, 2, 37, 24)],  # batch, heads, kv_heads, capacity, head_dim
    # batch, heads, kv_heads, page_size, pages_per_sequence, head_dim
    "decode_attention_paged": [(1, 1, 1, 1, 1, 16), (3, 6, 2, 5, 8, 24)],
    "gpt2_block": [(1, 1, 8, 2, 5), (2, 7, 24, 6, 33)],  # batch, sequence, width, head_dim, hidden
    # batch, sequence, width, head_dim, hidden
    "decoder_block": [(1, 1, 3, 2, 5), (2, 7, 24, 6, 33)],
    "embedding": [(1, 1, 1), (37, 65, 19)],  # rows, columns, tokens
    "cross_entropy": [(1, 1), (7, 129)],
    "linear_cross_entropy": [(1, 1, 1), (7, 33, 65)],  # tokens, width, classes
}
THETA = 10000.0
SMOOTHING, Z_LOSS = 0.1, 0.05
HEADS, KV_HEADS = 4, 2
ATTRIBUTES = {
    "rmsnorm": {"eps": EPS}, "layernorm": {"eps": EPS}, "swiglu_mlp": {"eps": EPS}, "rope": {"theta": THETA},
    "dropout_residual_norm": {"p": 0.25, "eps": EPS}, "attention_packed": {"longest": 0},
    "gpt2_block": {"heads": HEADS, "p": 0.25, "eps": EPS},
    "decoder_block": {"heads": HEADS, "kv_heads": KV_HEADS, "eps": EPS, "theta": THETA},
    "cross_entropy": {"smoothing": SMOOTHING, "z_loss": Z_LOSS},
    "linear_cross_entropy": {"smoothing": SMOOTHING, "z_loss": Z_LOSS}, "moe": {"top_k": 2},
}
FLOAT32 = {"loss", "balance_loss"}  # outputs that are float32 for every input dtype
ROUNDED = {"linear_cross_entropy"}  # blocks with such outputs that round intermediates to the input dtype
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


def make_inputs(block: str, shape: tuple[int, ...], dtype: torch.dtype) -> Arrays:
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale + mean).to(dtype).requires_grad_()

    if block == "vector_add":
        return {"x": normal(*shape), "y": normal(*shape)}
    if block in ("swiglu", "geglu"):
        return {"gate": normal(*shape), "up": normal(*shape)}
    if block == "rmsnorm":
        return {"x": normal(*shape), "weight": normal(shape[-1])}
    if block == "bias_gelu":
        return {"x": normal(*shape), "bias": normal(shape[-1])}
    if block == "dropout_residual_norm":
        vectors = {name: normal(shape[-1]) for name in ("bias", "weight", "shift")}
        seed = torch.tensor([-3, 5], dtype=torch.int32)
        return {"x": normal(*shape), "residual": normal(*shape), **vectors, "seed": seed}
    if block == "layernorm":
        return {"x": normal(*shape), "weight": normal(shape[-1]), "bias": normal(shape[-1])}
    if block == "attention":
        batch, heads, kv_heads, sequence, head_dim = shape
        return {
            name: normal(batch, heads if name == "q" else kv_heads, sequence, head_dim) for name in "qkv"
        }
    if block == "attention_bias":
        batch, heads, sequence, head_dim = shape
        return {
            **{name: normal(batch, heads, sequence, head_dim) for name in "qkv"},
            "bias": normal(heads, sequence, sequence),
        }
    if block == "attention_packed":
        sequences, heads, kv_heads, tokens, head_dim = shape
        return {
            **{name: normal(tokens, heads if name == "q" else kv_heads, head_dim) for name in "qkv"},
            "cu_seqlens": torch.linspace(0, 1, sequences + 1).square().mul(tokens).ceil().to(torch.int32),
        }
    if block == "matmul":
        m, k, n = shape
        return {"a": normal(m, k), "b": normal(k, n, scale=k**-0.5)}
    if block in ("linear", "linear_gelu", "linear_residual"):
        m, k, n = shape
        added = {"residual": normal(m, n)} if block == "linear_residual" else {"bias": normal(n)}
        return {"x": normal(m, k), "weight": normal(k, n, scale=k**-0.5), **added}
    if block == "rope":
        batch, heads, kv_heads, sequence, head_dim = shape
        # Small positions, because they multiply the error of an angle.
        positions = torch.randint(16, (batch, sequence), generator=generator, dtype=torch.int32)
        return {
            "q": normal(batch, heads, sequence, head_dim), "k": normal(batch, kv_heads, sequence, head_dim),
            "positions": positions,
        }
    if block == "decode_attention":
        batch, heads, kv_heads, capacity, head_dim = shape
        caches = {name: normal(batch, kv_heads, capacity, head_dim) for name in ("k_cache", "v_cache")}
        return {"q": normal(batch, heads, head_dim), **caches, "lengths": lengths(batch, capacity)}
    if block == "decode_attention_paged":
        batch, heads, kv_heads, page_size, each, head_dim = shape
        pages = {name: normal(batch * each, page_size, kv_heads, head_dim) for name in ("k_pages", "v_pages")}
        table = torch.randperm(batch * each, generator=generator).to(torch.int32).view(batch, each)
        return {
            "q": normal(batch, heads, head_dim), **pages, "page_table": table,
            "lengths": lengths(batch, each * page_size),
        }
    if block == "gpt2_block":
        batch, sequence, width, head_dim, hidden = shape
        matrices = {
            "w_qkv": (width, 3 * HEADS * head_dim), "w_o": (HEADS * head_dim, width), "w_up": (width, hidden),
            "w_down": (hidden, width),
        }
        halves = ("attention", "mlp")
        return {
            "x": normal(batch, sequence, width), "seed": torch.tensor([[-3, 5], [7, 11]], dtype=torch.int32),
            **{name: normal(*size, scale=size[0] ** -0.5) for name, size in matrices.items()},
            **{f"{half}_norm_weight": normal(width, scale=0.1, mean=1.0) for half in halves},
            **{f"{half}_norm_bias": normal(width, scale=0.1) for half in halves},
            "b_qkv": normal(3 * HEADS * head_dim), "b_o": normal(width), "b_up": normal(hidden),
            "b_down": normal(width),
        }
    if block == "decoder_block":
        batch, sequence, width, head_dim, hidden = shape
        columns = {"w_qkv": (HEADS + 2 * KV_HEADS) * head_dim, "w_o": width, "w_gate": hidden, "w_up": hidden}
        rows = {"w_o": HEADS * head_dim}
        return {
            "x": normal(batch, sequence, width), "attention_norm": normal(width, scale=0.1, mean=1.0),
            "mlp_norm": normal(width, scale=0.1, mean=1.0),
            "positions": torch.randint(3, (batch, sequence), generator=generator, dtype=torch.int32),
            "w_down": normal(hidden, width, scale=hidden**-0.5),
            **{n: normal(rows.get(n, width), c, scale=rows.get(n, width) ** -0.5) for n, c in columns.items()},
        }
    if block == "embedding":
        rows, columns, tokens = shape
        # Each id at most twice: on a CPU F.embedding sums gradients in the table's dtype.
        return {"table": normal(rows, columns), "ids": torch.arange(tokens, dtype=torch.int32) // 2 * 2}
    if block in ("cross_entropy", "linear_cross_entropy"):
        labels = torch.arange(shape[0], dtype=torch.int32)
        labels[1::3] = IGNORED
        if block == "cross_entropy":
            return {"logits": normal(*shape), "labels": labels}
        tokens, width, classes = shape
        return {"h": normal(tokens, width), "w": normal(classes, width, scale=width**-0.5), "labels": labels}
    if block == "moe":
        tokens, width, hidden, experts = shape
        x = normal(tokens, width).detach()
        # Logits differ by at least a half, or are equal.
        x[:, :experts] = torch.arange(experts) * (1 + torch.arange(tokens)[:, None]) % 7 / 8
        return {
            "x": x.requires_grad_(),
            "router": (4 * torch.eye(experts, width)).to(dtype).requires_grad_(),
            "w_gate": normal(experts, width, hidden, scale=width**-0.5),
            "w_up": normal(experts, width, hidden, scale=width**-0.5),
            "w_down": normal(experts, hidden, width, scale=hidden**-0.5),
        }
    if block == "swiglu_mlp":
        tokens, width, hidden = shape
        return {
            "x": normal(tokens, width),
            "norm_weight": normal(width),
            "gate_weight": normal(width, hidden, scale=width**-0.5),
            "up_weight": normal(width, hidden, scale=width**-0.5),
            "down_weight": normal(hidden, width, scale=hidden**-0.5),
        }
    return {"x": normal(*shape)}


def lengths(batch: int, capacity: int) -> Tensor:
    """Lengths: all keys, then fewer and fewer."""
    return torch.tensor([max(capacity // (i + 1), 1) for i in range(batch)], dtype=torch.int32)


def detached(inputs: Arrays) -> Arrays:
    return {name: tensor.detach() for name, tensor in inputs.items()}


def gelu_reference(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rmsnorm_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rope_reference(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rotation: pair i is a complex number, multiplied by exp(i angle)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def decoded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend for each sequence separately, to its own keys."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for i, length in enumerate(lengths.tolist()):
        keys, values = (x[i, :, :length].repeat_interleave(group, dim=0) for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,hkd->hk", q[i], keys) / math.sqrt(q.shape[-1]), -1)
        rows.append(torch.einsum("hk,hkd->hd", weights, values))
    return torch.stack(rows)


def reference(block: str, inputs: Arrays, causal: int = 1, window: int = 0) -> Arrays:
    """Return the block's formula on float64 tensors."""
    x = inputs.get("x")
    if block == "vector_add":
        return {"out": x + inputs["y"]}
    if block == "bias_gelu":
        return reference("gelu", {"x": x + inputs["bias"]})
    if block == "gelu":
        return {"y": gelu_reference(x)}
    if block == "swiglu":
        return {"y": inputs["gate"] / (1 + torch.exp(-inputs["gate"])) * inputs["up"]}
    if block == "geglu":
        return {"y": gelu_reference(inputs["gate"]) * inputs["up"]}
    if block == "matmul":
        return {"c": inputs["a"] @ inputs["b"]}
    if block == "linear":
        return {"y": x @ inputs["weight"] + inputs["bias"]}
    if block == "linear_residual":
        return {"y": inputs["residual"] + x @ inputs["weight"]}
    if block == "linear_gelu":
        return {"y": gelu_reference(x @ inputs["weight"] + inputs["bias"])}
    if block == "softmax":
        return {"y": torch.softmax(x, -1)}
    if block == "rmsnorm":
        return {"y": rmsnorm_reference(x, inputs["weight"])}
    if block == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        return {"y": rmsnorm_reference(centred, inputs["weight"]) + inputs["bias"]}
    if block == "swiglu_mlp":
        h = rmsnorm_reference(x, inputs["norm_weight"])
        gate = h @ inputs["gate_weight"]
        return {"y": x + (gate / (1 + torch.exp(-gate)) * (h @ inputs["up_weight"])) @ inputs["down_weight"]}
    if block == "moe":
        probabilities = torch.softmax(x @ inputs["router"].T, -1)
        experts = probabilities.shape[1]
        chosen = probabilities.detach().sort(descending=True, stable=True)[1][:, :2]
        weights = torch.zeros_like(probabilities).scatter(1, chosen, probabilities.gather(1, chosen))
        weights = weights / weights.sum(-1, keepdim=True)
        gate = torch.einsum("tw,ewh->eth", x, inputs["w_gate"])
        out = gate / (1 + torch.exp(-gate)) * torch.einsum("tw,ewh->eth", x, inputs["w_up"]) @ inputs["w_down"]
        fraction = chosen.flatten().bincount(minlength=experts) / chosen.numel()
        return {
            "y": torch.einsum("te,etw->tw", weights, out),
            "balance_loss": experts * (fraction * probabilities.mean(0)).sum(),
        }
    if block == "rope":
        return {f"{name}_out": rope_reference(inputs[name], inputs["positions"]) for name in "qk"}
    if block == "embedding":
        return {"y": inputs["table"][inputs["ids"].long()]}
    if block == "linear_cross_entropy":
        return reference("cross_entropy", {"logits": inputs["h"] @ inputs["w"].T, "labels": inputs["labels"]})
    if block == "cross_entropy":
        logits, labels = (inputs[name][inputs["labels"] != IGNORED] for name in ("logits", "labels"))
        entropy = torch.nn.functional.cross_entropy(logits, labels.long(), label_smoothing=SMOOTHING)
        return {"loss": entropy + Z_LOSS * logits.logsumexp(-1).square().mean()}
    if block == "dropout_residual_norm":
        kept = uniforms(*x.shape, inputs["seed"]) >= 65536 // 4
        h = inputs["residual"] + kept * (x + inputs["bias"]) / 0.75
        return {"y": torch.nn.functional.layer_norm(h, h.shape[-1:], inputs["weight"], inputs["shift"], EPS), "h": h}
    if block == "gpt2_block":
        norm = {"weight": inputs["attention_norm_weight"], "bias": inputs["attention_norm_bias"]}
        tokens = x.flatten(0, 1)
        qkv = reference("layernorm", {"x": tokens, **norm})["y"] @ inputs["w_qkv"] + inputs["b_qkv"]
        q, k, v = qkv.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = reference("attention", {"q": q, "k": k, "v": v})["out"].transpose(1, 2).reshape(len(tokens), -1)
        between = {"bias": inputs["b_o"], "weight": inputs["mlp_norm_weight"], "shift": inputs["mlp_norm_bias"]}
        out = {"x": attended @ inputs["w_o"], "residual": tokens, "seed": inputs["seed"][0], **between}
        out = reference("dropout_residual_norm", out)
        up = reference("linear_gelu", {"x": out["y"], "weight": inputs["w_up"], "bias": inputs["b_up"]})["y"]
        down = {"x": up @ inputs["w_down"], "bias": inputs["b_down"], "residual": out["h"], "seed": inputs["seed"][1]}
        last = reference("dropout_residual_norm", {**down, "weight": between["weight"], "shift": between["shift"]})
        return {"y": last["h"].view(x.shape)}
    if block == "decoder_block":
        h = rmsnorm_reference(x, inputs["attention_norm"])
        qkv = (h @ inputs["w_qkv"]).unflatten(-1, (HEADS + 2 * KV_HEADS, -1)).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = (rope_reference(each, inputs["positions"]) for each in (q, k))
        attended = reference("attention", {"q": q, "k": k, "v": v})["out"]
        mlp = {f"{name}_weight": inputs[f"w_{name}"] for name in ("gate", "up", "down")}
        x = x + attended.transpose(1, 2).flatten(2) @ inputs["w_o"]
        return reference("swiglu_mlp", {"x": x, "norm_weight": inputs["mlp_norm"], **mlp})
    if block == "attention_packed":
        parts = zip(*(inputs[name].split(inputs["cu_seqlens"].diff().tolist()) for name in "qkv"), strict=True)
        alone = [dict(zip("qkv", (x.transpose(0, 1)[None] for x in part), strict=True)) for part in parts]
        return {"out": torch.cat([reference("attention", one)["out"][0].transpose(0, 1) for one in alone])}
    if block == "decode_attention":
        return {"out": decoded(inputs["q"], inputs["k_cache"], inputs["v_cache"], inputs["lengths"])}
    if block == "decode_attention_paged":
        k, v = (inputs[name][inputs["page_table"].long()].flatten(1, 2) for name in ("k_pages", "v_pages"))
        return {"out": decoded(inputs["q"], k.transpose(1, 2), v.transpose(1, 2), inputs["lengths"])}
    q, *kv = (inputs[name] for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kv)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if block == "attention_bias":
        return {"out": torch.softmax(scores + inputs["bias"], -1) @ v}
    return {"out": torch.softmax(scores.where(seen(q.shape[-2], causal, window), -math.inf), -1) @ v}


def seen(sequence: int, causal: int, window: int) -> Tensor:
    distance = torch.arange(sequence)[:, None] - torch.arange(sequence)
    return (distance >= (0 if causal else -sequence)) & (distance < (window or sequence))


def assert_close(
    name: str, value: Tensor, expected: Tensor, dtype: torch.dtype, rounded: torch.dtype | None = None
) -> None:
    """rounded: the dtype that something was rounded to on the way, if that is not `dtype`."""
    assert value.dtype == dtype and value.shape == expected.shape, name
    # Where most values are zeros (an expert without tokens), the largest exceeds four times the rms.
    scale = max(expected.square().mean().sqrt().item(), expected.abs().max().item() / 4)
    # A gradient that cancels (softmax of one column) is the difference of terms of order one.
    scale = scale if scale > 1e-3 else 1.0
    error = (value.double() - expected).abs().max() / scale / torch.finfo(rounded or dtype).eps
    assert error <= TOLERANCE_IN_EPS, f"{name}: error {error:.1f} eps"


def check(
    block: str, apply: Callable[..., Arrays], inputs: Arrays, *, gradients: bool = True, **parameters: int
) -> None:
    """Check outputs, and gradients of all inputs for a random cotangent, against the reference."""
    floating = {name: tensor for name, tensor in inputs.items() if tensor.is_floating_point()}
    dtype = next(iter(floating.values())).dtype
    exact = inputs | {name: tensor.detach().double().requires_grad_() for name, tensor in floating.items()}
    expected = reference(block, exact, **parameters)
    outputs = apply(inputs, **ATTRIBUTES.get(block, {}), **parameters)
    assert outputs.keys() == expected.keys()
    dtypes = {name: torch.float32 if name in FLOAT32 else dtype for name in outputs}
    for name, value in outputs.items():
        assert_close(name, value, expected[name], dtypes[name], dtype if block in ROUNDED else None)
    if not gradients:
        return
    generator = torch.Generator().manual_seed(1)
    cotangents = {name: torch.randn(y.shape, generator=generator).to(dtypes[name]) for name, y in expected.items()}
    torch.autograd.backward([outputs[name] for name in cotangents], list(cotangents.values()))
    torch.autograd.backward([expected[name] for name in cotangents], [dy.double() for dy in cotangents.values()])
    for name, tensor in floating.items():
        assert_close(f"gradient of {name}", tensor.grad, exact[name].grad, dtype)


def module(package: str, block: str) -> Callable[..., Arrays]:
    return importlib.import_module(f"xlafuse.triton_side.{package}.{block}").apply


ALL_CASES = [(block, shape) for block, shapes in SHAPES.items() for shape in shapes]
WITHOUT_LIBRARY = (
    "attention", "attention_bias", "attention_packed", "decode_attention", "decode_attention_paged", "decoder_block",
    "dropout_residual_norm", "gpt2_block", "matmul", "rope",
)
LIBRARY_CASES = [(block, shape) for block, shape in ALL_CASES if block not in WITHOUT_LIBRARY]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "shape"), ALL_CASES)
def test_block(block: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(block, module("blocks", block), make_inputs(block, shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "shape"), LIBRARY_CASES)
def test_library(block: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(block, module("library", block), make_inputs(block, shape, dtype))


@pytest.mark.parametrize("package", ["blocks", "library"])
def test_matmul_fp8(package: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(rows, 32, generator=generator) * 8).to(torch.float8_e4m3fn) for rows in (7, 48))
    scales = {"a_scale": torch.tensor(0.37), "b_scale": torch.tensor(0.011)}
    c = module(package, "matmul_fp8")({"a": a, "b": b, **scales})["c"]
    exact = (a.double() @ b.double().T) * scales["a_scale"].double() * scales["b_scale"].double()
    assert_close("c", c, exact, torch.bfloat16)


def test_the_library_projects_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    block = "linear_cross_entropy"
    monkeypatch.setattr(importlib.import_module(f"xlafuse.triton_side.library.{block}"), "TOKENS", 3)
    check(block, module("library", block), make_inputs(block, SHAPES[block][1], torch.float32))


def test_gelu_is_the_tanh_approximation_not_erf() -> None:
    x = torch.linspace(-4, 4, 101)
    y = module("blocks", "gelu")({"x": x})["y"]
    assert (y - torch.nn.functional.gelu(x)).abs().max() > 1e-4


@pytest.mark.parametrize("block", ["rmsnorm", "layernorm", "swiglu_mlp"])
def test_eps_reaches_the_norm(block: str) -> None:
    """The values are so small that eps determines the result."""
    inputs = detached(make_inputs(block, SHAPES[block][1], torch.float32))
    inputs["x"] = inputs["x"] * 1e-3
    for package in ("blocks", "library"):
        (with_eps,) = module(package, block)(inputs, eps=EPS).values()
        exact = {name: tensor.double() for name, tensor in inputs.items()}
        assert_close("output", with_eps, *reference(block, exact).values(), torch.float32)


@pytest.mark.parametrize("block", SHAPES)
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
        check(block, compiled, make_inputs(block, SHAPES[block][1], torch.float32))
    assert stages["forward"] == STAGES[block]
    # A sum passes its gradient on unchanged. Softmax's maximum, positions and random bits get none.
    without = {"add", "max", "residual", "angles", "random", "attention_residual", "mlp_residual"}
    expected = {stage for stage in STAGES[block] if stage.split("/")[-1] not in without}
    assert stages.get("backward", set()) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES["attention"])
def test_flash_has_a_cpu_path(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for causal in (0, 1):
        check("attention", library_attention.apply_flash, make_inputs("attention", shape, dtype), causal=causal)


def test_cudnn_fails_where_it_cannot_run() -> None:
    with pytest.raises(RuntimeError, match="No viable backend"):
        library_attention.apply_cudnn(make_inputs("attention", (1, 2, 2, 37, 16), torch.bfloat16))


@pytest.mark.parametrize("apply", [library_attention.apply_flash, library_attention.apply_cudnn])
def test_sdpa_has_no_window(apply: Callable[..., Arrays]) -> None:
    with pytest.raises(ValueError, match="no window, got 3; use FlexAttention"):
        apply(make_inputs("attention", (1, 2, 2, 37, 16), torch.bfloat16), window=3)


@pytest.mark.parametrize(("causal", "window"), [(0, 0), (1, 1), (1, 5), (1, 40)])
def test_attention_masks_by_its_parameters(causal: int, window: int) -> None:
    inputs = make_inputs("attention", (1, 4, 2, 37, 16), torch.float32)
    check("attention", module("blocks", "attention"), inputs, causal=causal, window=window)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_forward_on_a_cpu() -> None:
    inputs = detached(make_inputs("attention", (1, 2, 1, 37, 16), torch.float32))
    for causal, window in ((0, 0), (1, 0), (1, 5)):
        check("attention", library_attention.apply_flex, inputs, gradients=False, causal=causal, window=window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_decodes_on_a_cpu(dtype: torch.dtype) -> None:
    for shape in SHAPES["decode_attention"]:
        inputs = detached(make_inputs("decode_attention", shape, dtype))
        attend = lambda given: {"out": library_decode.attend(*given.values())}  # noqa: E731
        check("decode_attention", attend, inputs, gradients=False)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_decodes_on_a_cpu() -> None:
    inputs = detached(make_inputs("decode_attention", (3, 6, 2, 300, 16), torch.float32))
    inputs["lengths"][1] = 0
    check("decode_attention", library_decode.apply_flex, inputs, gradients=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_of_pages_attends_by_its_mask() -> None:
    """Uncompiled, FlexAttention evaluates its formula; its CPU kernel supports no lists of pages."""
    inputs = detached(make_inputs("decode_attention_paged", (3, 6, 2, 5, 8, 16), torch.float32))
    inputs["lengths"][1] = 0
    with torch.compiler.set_stance("force_eager"):
        check("decode_attention_paged", library_paged.apply_flex, inputs, gradients=False)


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
    inputs = detached(make_inputs(block, SHAPES[block][1], torch.float32))
    inputs["lengths"][1] = 0
    out = module("blocks", block)(inputs)["out"]
    assert not out[1].any() and out[[0, 2]].all()
    if block == "decode_attention":
        assert not library_decode.attend(*inputs.values())[1].any()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_of_packed_sequences_on_a_cpu() -> None:
    inputs = detached(make_inputs("attention_packed", (5, 4, 2, 37, 16), torch.float32))
    check("attention_packed", library_packed.apply_flex, inputs, gradients=False)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
def test_flex_adds_a_bias_on_a_cpu() -> None:
    inputs = detached(make_inputs("attention_bias", (2, 2, 37, 16), torch.float32))
    check("attention_bias", library_bias.apply_flex, inputs, gradients=False)


def test_a_query_without_keys_gives_zeros_and_no_gradient() -> None:
    inputs = make_inputs("attention_bias", (2, 2, 37, 24), torch.float32)
    hidden = inputs["bias"].detach().clone()
    hidden[:, 5] = -math.inf
    inputs["bias"] = hidden.requires_grad_()
    out = module("blocks", "attention_bias")(inputs)["out"]
    out.square().sum().backward()
    assert not out[:, :, 5].any() and out[:, :, 6].all()
    assert not inputs["q"].grad[:, :, 5].any() and not inputs["bias"].grad[:, 5].any()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in inputs.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_only_minus_infinity_is_zeros_without_gradient(dtype: torch.dtype) -> None:
    x = make_inputs("softmax", (7, 129), dtype)["x"].detach()
    x[1] = x[2, :-1] = x[3, ::2] = -math.inf
    x[5, 3], x[6, 3] = math.inf, math.nan
    x.requires_grad_()
    y = module("blocks", "softmax")({"x": x}, masked=1)["y"]
    y[:5].backward(1e4 * torch.ones_like(y[:5]))
    assert not y[1].any() and not x.grad[1].any()
    seen = [0, 2, 3, 4]
    torch.testing.assert_close(y[seen], torch.softmax(x.double(), -1)[seen].to(dtype))
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
