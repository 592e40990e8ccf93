"""One training step of a small language model, in one program: loss, new parameters and new moments of AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label]);  every parameter by `adamw` with its gradient of the loss

The outputs of a step are new parameters, not gradients. So the block has only the direction fwd, and its function
differentiates inside. A wrong gradient may change a bfloat16 parameter by less than half a unit in its last place, but
the float32 moments show it. Nothing is updated in place, because a block writes none of its inputs.

Weights of layers are stacked, as jax.lax.scan takes them. Every sound implementation sums the loss and the gradient of
the table's rows in float32.
"""

from dataclasses import replace
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import cuda_graphs, triton
from ..implementation import Implementation
from ..tensor import Tensor
from . import adamw, attention, cross_entropy, decoder_block, embedding, rmsnorm, rope
from ._portable import at_least_float32, in_dtype_of

LAYER_PARAMETERS = tuple(
    replace(tensor, axes=("layers", *tensor.axes))
    for tensor in decoder_block.BLOCK.inputs if tensor.name not in ("x", "positions")
)
PARAMETERS = (
    Tensor("table", ("vocabulary", "width"), std=0.02), *LAYER_PARAMETERS,
    Tensor("final_norm", ("width",), mean=1.0, std=0.1), Tensor("w_head", ("vocabulary", "width"), fan_in="width"),
)


def loss_of(xp, inputs, **attributes):  # type: ignore[no-untyped-def]
    """Return the loss, which NumPy evaluates as well."""
    table, positions = inputs["table"], inputs["positions"]
    x = in_dtype_of(table, at_least_float32(xp, table)[inputs["tokens"]])
    for layer in range(len(inputs["w_qkv"])):
        weights = {t.name: inputs[t.name][layer] for t in LAYER_PARAMETERS}
        x = decoder_block.reference(xp, {"x": x, "positions": positions, **weights}, **attributes)["y"]
    h = rmsnorm.reference(xp, {"x": x, "weight": inputs["final_norm"]}, eps=attributes["eps"])["y"]
    logits = (h @ inputs["w_head"].T).reshape(-1, table.shape[0])
    classes = {"logits": logits, "labels": inputs["labels"].reshape(-1)}
    return cross_entropy.reference(xp, classes, smoothing=0.0, z_loss=0.0)["loss"]


def reference(xp, inputs, *, optimizer, **attributes):  # type: ignore[no-untyped-def]
    """Return the outputs of the step. xp is torch, whose autograd differentiates the loss."""
    parameters = {t.name: inputs[t.name].detach().requires_grad_() for t in PARAMETERS}
    loss = loss_of(xp, {**inputs, **parameters}, **attributes)
    gradients = xp.autograd.grad(loss, list(parameters.values()))
    results = {"loss": loss.detach()}
    for tensor, gradient in zip(PARAMETERS, gradients, strict=True):
        names = (tensor.name, f"mu_{tensor.name}", f"nu_{tensor.name}")
        param, mu, nu = (inputs[name] for name in names)
        new = adamw.updated(xp, param, gradient, mu, nu, inputs["step"], **optimizer)
        results |= {f"new_{name}": value for name, value in zip(names, new, strict=True)}
    return results


def draw_tokens(generator: Any, sizes: Sizes) -> Any:
    """Draw token ids with the frequencies of words in a text; see `embedding.draw_ids`."""
    count = sizes["batch"] * sizes["sequence"]
    ids = embedding.draw_ids(generator, {"rows": sizes["vocabulary"], "distinct": sizes["distinct"], "tokens": count})
    return ids.reshape(sizes["batch"], sizes["sequence"])


def step_flops(sizes: Sizes) -> float:
    """Count six FLOPs for each weight of a product and token: two forward, four backward.

    Attention has two products forward and five backward. Elementwise work, with AdamW's, is below 1% and left out.
    """
    head = 2 * sizes["batch"] * sizes["sequence"] * sizes["width"] * sizes["vocabulary"]
    products = sizes["layers"] * decoder_block.product_flops(sizes) + head
    return 3 * products + 3.5 * sizes["layers"] * attention.flops(sizes)


def sizes(
    layers: int, batch: int, sequence: int, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int,
    vocabulary: int, distinct: int, step: int,
) -> Sizes:
    layer = decoder_block.sizes(batch, sequence, width, heads, kv_heads, head_dim, hidden)
    return {**layer, "layers": layers, "vocabulary": vocabulary, "distinct": distinct, "step": step}


def cudnn_unsupported(case: Case) -> str | None:
    """Refuse odd sequences: the block differentiates inside, and jax 0.11.2 does so only for even ones with cuDNN."""
    if case.sizes["sequence"] % 2:
        return f"jax's cuDNN attention trains on even sequence lengths only, not {case.sizes['sequence']}"
    return attention.cudnn_unsupported(case)


IDS = ("batch", "sequence")
# Parameters and their moments, which an optimizer keeps at their addresses.
KEPT = tuple(f"{kept}{t.name}" for t in PARAMETERS for kept in ("", "mu_", "nu_"))
XLA, TORCH = "xlafuse.blocks.lm_step", "xlafuse.triton_side.blocks.lm_step"

BLOCK = Block(
    name="lm_step",
    summary="a training step of a small language model in one program: loss, gradients, AdamW",
    inputs=(
        Tensor("tokens", IDS, dtype="int32", draw=draw_tokens), Tensor("labels", IDS, dtype="int32", draw=draw_tokens),
        Tensor("positions", IDS, dtype="int32", draw=rope.draw_positions), adamw.STEP, *PARAMETERS,
        *(moment for t in PARAMETERS for moment in adamw.moments(f"_{t.name}", t.axes)),
    ),
    outputs=(
        Tensor("loss", (), dtype="float32"), *(Tensor(f"new_{t.name}", t.axes) for t in PARAMETERS),
        *(
            Tensor(f"new_{moment.name}", t.axes, dtype="float32")
            for t in PARAMETERS for moment in adamw.moments(f"_{t.name}", t.axes)
        ),
    ),
    reference=reference,
    attributes={"eps": 1e-5, "theta": 500000.0, "optimizer": adamw.ATTRIBUTES},
    parameters=("heads", "kv_heads"),
    directions=("fwd",),
    flops=step_flops,
    work="flops",
    sizes=sizes,
    shapes=(
        # Layers as wide as the smallest Llama's, and tokens for a few milliseconds.
        Shape(
            "2-layers", sizes(2, 4, 1024, 1024, 16, 4, 64, 2816, 16384, 2000, 1000), quick=True,
        ),
        Shape("8-layers", sizes(8, 4, 1024, 1024, 16, 4, 64, 2816, 16384, 2000, 1000)),
        # With 116 tokens the largest error does not depend on one of them, which would be luck.
        Shape("small", sizes(2, 2, 29, 37, 4, 2, 16, 67, 53, 30, 5), ("float32", "float16", "bfloat16"), edge=True),
        # Small enough for Triton's interpreter in a second dtype.
        Shape("tiny-token", sizes(1, 1, 1, 16, 2, 1, 16, 24, 19, 1, 5), ("float16",), edge=True),
    ),
    # No inductor-max, which would autotune some thirty products; no torch.optim.AdamW, for the reasons in `adamw`.
    implementations=(
        Implementation("xla", f"{XLA}:apply", "xla", "jax.jit of the whole step, layers unrolled"),
        Implementation(
            "xla-remat", f"{XLA}:apply_remat", "xla",
            "jax.jit, layers unrolled; jax.checkpoint keeps only their inputs",
        ),
        Implementation("xla-scan", f"{XLA}:apply_scan", "xla", "jax.jit, jax.lax.scan over the layers"),
        Implementation(
            "xla-scan-remat", f"{XLA}:apply_scan_remat", "xla",
            "jax.jit, jax.lax.scan over the layers; jax.checkpoint keeps only their inputs",
        ),
        Implementation(
            "xla-unfused", f"{XLA}:apply", "xla-unfused", "jax.jit with XLA's fusion passes off", unfused_of="xla"
        ),
        Implementation(
            "xla-cudnn", f"{XLA}:apply_cudnn", "xla",
            'layers unrolled, jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan", unsupported=cudnn_unsupported,
        ),
        Implementation(
            "eager", f"{TORCH}:apply", "eager", "PyTorch, one operation after the other", unfused_of="inductor"
        ),
        Implementation("inductor", f"{TORCH}:apply", "inductor", "torch.compile of the whole step as one graph"),
        Implementation(
            "inductor-remat", f"{TORCH}:apply_remat", "inductor",
            "one graph, layers under torch.utils.checkpoint, which keeps only their inputs",
            requires=("torch>=2.12",),  # Dynamo of 2.11 refuses requires_grad_ in the compiled function
        ),
        Implementation(
            "inductor-sdpa", "xlafuse.triton_side.library.lm_step:apply", "inductor",
            "one graph, its attention F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.cudnn_unsupported,
        ),
        triton("lm_step"),
        *cuda_graphs("lm_step", static=KEPT),
    ),
)
