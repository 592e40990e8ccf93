"""A layer of GPT-2 (Radford et al., 2019): attention and a GELU MLP, each after a LayerNorm and before dropout.

    x1 = x + dropout(attention(LN(x) Wqkv + bqkv) Wo + bo)
    y = x1 + dropout(gelu(LN(x1) Wup + bup) Wdown + bdown)

dropout draws its masks as in dropout_residual_norm, at (token, column), with the keys seed[0] and seed[1].
"""

from ..block import Block
from ..case import Shape, Sizes
from ..common_rows import compilers, cuda_graphs, triton
from ..implementation import Implementation
from ..tensor import Tensor
from . import attention, dropout_residual_norm, layernorm, linear_gelu


def reference(xp, inputs, *, heads, p, eps):  # type: ignore[no-untyped-def]
    batch, sequence, width = inputs["x"].shape
    x, seed = inputs["x"].reshape(-1, width), inputs["seed"]
    norm = {"x": x, "weight": inputs["attention_norm_weight"], "bias": inputs["attention_norm_bias"]}
    qkv = layernorm.reference(xp, norm, eps=eps)["y"] @ inputs["w_qkv"] + inputs["b_qkv"]
    by_head = xp.swapaxes(qkv.reshape(batch, sequence, 3 * heads, -1), 1, 2)
    q, k, v = (by_head[:, part * heads : (part + 1) * heads] for part in range(3))
    attended = attention.reference(xp, {"q": q, "k": k, "v": v}, causal=1, window=0)["out"]
    between = {
        "x": xp.swapaxes(attended, 1, 2).reshape(batch * sequence, -1) @ inputs["w_o"], "bias": inputs["b_o"],
        "residual": x, "weight": inputs["mlp_norm_weight"], "shift": inputs["mlp_norm_bias"], "seed": seed[0],
    }
    normed = dropout_residual_norm.reference(xp, between, p=p, eps=eps)
    up = linear_gelu.reference(xp, {"x": normed["y"], "weight": inputs["w_up"], "bias": inputs["b_up"]})["y"]
    down = up @ inputs["w_down"]
    y = dropout_residual_norm.dropped_sum(xp, down, inputs["b_down"], normed["h"], seed[1], p)
    return {"y": y.reshape(batch, sequence, width)}


def draw_seed(generator, sizes):  # type: ignore[no-untyped-def]
    return generator.integers(-(2**31), 2**31, (sizes["dropouts"], sizes["words"]))


def product_flops(sizes: Sizes) -> float:
    """Count the products with weights; the elementwise work is below 1% of them and left out."""
    width = sizes["width"] * (sizes["qkv"] + sizes["attended"] + 2 * sizes["hidden"])
    return 2 * sizes["batch"] * sizes["sequence"] * width


def sizes(batch: int, sequence: int, width: int, heads: int, head_dim: int, hidden: int) -> Sizes:
    return {
        **attention.sizes(batch, heads, sequence, head_dim), "width": width, "hidden": hidden,
        "qkv": 3 * heads * head_dim, "attended": heads * head_dim, "dropouts": 2, "words": 2,
    }


TOKENS, WIDTH = ("batch", "sequence", "width"), ("width",)

INPUTS = (
    Tensor("x", TOKENS),
    Tensor("attention_norm_weight", WIDTH, mean=1.0, std=0.1),
    Tensor("attention_norm_bias", WIDTH, std=0.1),
    Tensor("w_qkv", ("width", "qkv"), fan_in="width"),
    Tensor("b_qkv", ("qkv",), std=0.1),
    Tensor("w_o", ("attended", "width"), fan_in="attended"),
    Tensor("b_o", WIDTH, std=0.1),
    Tensor("mlp_norm_weight", WIDTH, mean=1.0, std=0.1),
    Tensor("mlp_norm_bias", WIDTH, std=0.1),
    Tensor("w_up", ("width", "hidden"), fan_in="width"),
    Tensor("b_up", ("hidden",), std=0.1),
    Tensor("w_down", ("hidden", "width"), fan_in="hidden"),
    Tensor("b_down", WIDTH, std=0.1),
    Tensor("seed", ("dropouts", "words"), dtype="int32", draw=draw_seed),
)

ROUNDED_SUMS = ("b_qkv", "b_o", "b_up", "b_down")

BLOCK = Block(
    name="gpt2_block",
    summary="a whole layer of GPT-2, with biases and dropout",
    inputs=INPUTS,
    outputs=(Tensor("y", TOKENS),),
    reference=reference,
    attributes={"p": 0.1, "eps": 1e-5},
    parameters=("heads",),
    backward_needs=tuple(t.name for t in INPUTS if t.name != "b_down"),
    flops=lambda s: product_flops(s) + attention.flops(s),
    backward_flops=lambda s: 2 * product_flops(s) + 2.5 * attention.flops(s),
    work="flops",
    working_bytes=attention.working_bytes,
    sizes=sizes,
    shapes=(
        Shape("gpt2-small", sizes(8, 1024, 768, 12, 64, 3072), quick=True),
        Shape("prime", sizes(1, 251, 509, 3, 64, 1021), ("float32",), edge=True),
        Shape("gpt2-xl", sizes(8, 1024, 1600, 25, 64, 6400), ("float16",)),
        Shape("small", sizes(2, 5, 37, 2, 16, 67), ("float32", "float16", "bfloat16"), edge=True),
        Shape("tiny-token", sizes(1, 1, 16, 1, 16, 24), ("float32", "bfloat16"), directions=("train",), edge=True),
    ),
    implementations=(
        *compilers("gpt2_block", rounded_sums=ROUNDED_SUMS),
        Implementation(
            "xla-cudnn", "xlafuse.blocks.gpt2_block:apply_cudnn", "xla",
            'the same layer with jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.jax_cudnn_unsupported,
            rounded_sums=ROUNDED_SUMS,
        ),
        Implementation(
            "inductor-sdpa", "xlafuse.triton_side.library.gpt2_block:apply", "inductor",
            "the same layer with F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.cudnn_unsupported,
        ),
        triton("gpt2_block"),
        *cuda_graphs(
            "gpt2_block",
            static=(
                "attention_norm_weight", "attention_norm_bias", "w_qkv", "b_qkv", "w_o", "b_o",
                "mlp_norm_weight", "mlp_norm_bias", "w_up", "b_up", "w_down", "b_down",
            ),
        ),
    ),
)
