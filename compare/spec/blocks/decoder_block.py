"""A decoder layer of Llama (arXiv 2302.13971) with grouped queries (arXiv 2305.13245).

    x1 = x + attention(rope(attention_norm(x) Wqkv)) Wo       y = x1 + (silu(h Wg) * (h Wu)) Wd,  h = mlp_norm(x1)

Wqkv is one matrix with the columns of all query heads, then the key heads, then the value heads. So one product reads
the norm's result once, and its gradient is one product, too. Compilers need not find this fusion.
"""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, triton, xla_pallas
from ..implementation import Implementation
from ..tensor import Tensor
from . import attention, rmsnorm, rope, swiglu_mlp


def reference(xp, inputs, *, heads, kv_heads, eps, theta):  # type: ignore[no-untyped-def]
    x = inputs["x"]
    batch, sequence, _ = x.shape
    h = rmsnorm.reference(xp, {"x": x, "weight": inputs["attention_norm"]}, eps=eps)["y"]
    by_head = xp.swapaxes((h @ inputs["w_qkv"]).reshape(batch, sequence, heads + 2 * kv_heads, -1), 1, 2)
    q, k, v = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
    turned = rope.reference(xp, {"q": q, "k": k, "positions": inputs["positions"]}, theta=theta)
    heads_apart = {"q": turned["q_out"], "k": turned["k_out"], "v": v}
    attended = attention.reference(xp, heads_apart, causal=1, window=0)["out"]
    joined = xp.swapaxes(attended, 1, 2).reshape(batch, sequence, -1)
    mlp = {
        "x": x + joined @ inputs["w_o"], "norm_weight": inputs["mlp_norm"], "gate_weight": inputs["w_gate"],
        "up_weight": inputs["w_up"], "down_weight": inputs["w_down"],
    }
    return swiglu_mlp.reference(xp, mlp, eps=eps)


def product_flops(sizes: Sizes) -> float:
    """Count the products with weights; the elementwise work is below 1% of them and left out."""
    width = sizes["width"] * (sizes["qkv"] + sizes["attended"] + 3 * sizes["hidden"])
    return 2 * sizes["batch"] * sizes["sequence"] * width


def sizes(batch: int, sequence: int, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> Sizes:
    return {
        **attention.sizes(batch, heads, sequence, head_dim, kv_heads), "width": width, "hidden": hidden,
        "qkv": (heads + 2 * kv_heads) * head_dim, "attended": heads * head_dim,
    }


TOKENS = ("batch", "sequence", "width")

ROUNDED_SUMS = ("attention_norm", "mlp_norm")

BLOCK = Block(
    name="decoder_block",
    summary="a whole decoder layer of Llama: attention with grouped queries, then the gated MLP",
    inputs=(
        Tensor("x", TOKENS),
        Tensor("positions", ("batch", "sequence"), dtype="int32", draw=rope.draw_positions),
        Tensor("attention_norm", ("width",), mean=1.0, std=0.1),
        Tensor("w_qkv", ("width", "qkv"), fan_in="width"),
        Tensor("w_o", ("attended", "width"), fan_in="attended"),
        Tensor("mlp_norm", ("width",), mean=1.0, std=0.1),
        Tensor("w_gate", ("width", "hidden"), fan_in="width"),
        Tensor("w_up", ("width", "hidden"), fan_in="width"),
        Tensor("w_down", ("hidden", "width"), fan_in="hidden"),
    ),
    outputs=(Tensor("y", TOKENS),),
    reference=reference,
    attributes={"eps": 1e-5, "theta": 500000.0},
    parameters=("heads", "kv_heads"),
    backward_needs=("x", "positions", "attention_norm", "w_qkv", "w_o", "mlp_norm", "w_gate", "w_up", "w_down"),
    flops=lambda s: product_flops(s) + attention.flops(s),
    backward_flops=lambda s: 2 * product_flops(s) + 2.5 * attention.flops(s),
    work="flops",
    # The float64 scores of one sequence of 4096 take 4 GiB, and gradients keep several copies.
    slices=("batch",),
    working_bytes=attention.working_bytes,
    sizes=sizes,
    shapes=(
        Shape("llama-8b", sizes(2, 4096, 4096, 32, 8, 128, 14336), quick=True),
        Shape("prime", sizes(1, 251, 509, 6, 2, 64, 1021), ("float32",), edge=True),
        Shape("llama-1b", sizes(8, 1024, 2048, 32, 8, 64, 8192), ("float16",)),
        # With 58 tokens the largest error does not depend on one of them, which would be luck.
        Shape("small", sizes(2, 29, 37, 4, 2, 16, 67), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(1, 1, 16, 2, 1, 16, 24), ("float32", "bfloat16"), directions=("train",), edge=True),
    ),
    implementations=(
        *compilers("decoder_block", rounded_sums=ROUNDED_SUMS),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.decoder_block:apply_cudnn", "xla",
            'the same layer with jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.jax_cudnn_unsupported,
            rounded_sums=ROUNDED_SUMS,
        ),
        Implementation(
            "inductor-sdpa", "xlafuse.triton_side.library.decoder_block:apply", "inductor",
            "the same layer with F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.cudnn_unsupported,
        ),
        triton("decoder_block"), xla_pallas("decoder_block", "attention", attention.pallas_unsupported, ROUNDED_SUMS),
        *cuda_graphs(
            "decoder_block",
            static=(
                "attention_norm", "w_qkv", "w_o", "mlp_norm", "w_gate", "w_up", "w_down",
            ),
        ),
    ),
)
