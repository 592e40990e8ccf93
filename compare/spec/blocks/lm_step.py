"""One training step of a small language model, in one program: loss, new parameters and new moments of AdamW.

    x = table[tokens];  x = decoder_block(x) for each layer;  logits = rmsnorm(x) w_head^T
    loss = mean(logsumexp(logits) - logit[label]);  every parameter by `adamw` with its gradient of the loss

A step's outputs are not gradients but what they make of the parameters, so the block has the direction fwd alone, and
its function differentiates inside. What a wrong gradient does to a bfloat16 parameter may be less than half a unit in
its last place; the new moments are float32 and show it. Nothing is updated in place: a block writes none of its inputs.

Weights of layers are stacked, as jax.lax.scan takes them. The loss is added up in float32 by every sound
implementation, and so is the gradient of the table's rows.
"""

from dataclasses import replace
from typing import Any

from ..block import Block
from ..case import Case, Shape, Sizes
from ..common_rows import triton
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
    """The loss alone, which NumPy evaluates as well."""
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
    """xp is torch, whose autograd differentiates the loss."""
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
    """As often as words of a text are; see `embedding.draw_ids`."""
    count = sizes["batch"] * sizes["sequence"]
    ids = embedding.draw_ids(generator, {"rows": sizes["vocabulary"], "distinct": sizes["distinct"], "tokens": count})
    return ids.reshape(sizes["batch"], sizes["sequence"])


def step_flops(sizes: Sizes) -> float:
    """Six a weight of a product and token: two forward, four backward. Five products of attention's backward pass
    against two; the elementwise work, AdamW's too, is below 1% and left out."""
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
    """jax 0.11.2 differentiates cuDNN's attention of even sequences only, and this block differentiates inside."""
    if case.sizes["sequence"] % 2:
        return f"jax's cuDNN attention trains on even sequence lengths only, not {case.sizes['sequence']}"
    return attention.cudnn_unsupported(case)


IDS = ("batch", "sequence")
XLA, TORCH = "xlafuse.blocks.lm_step", "triton_side.blocks.lm_step"

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
    shapes=(
        # Layers as wide as those of the smallest Llamas, tokens of a few milliseconds.
        Shape(
            "2-layers", sizes(2, 4, 1024, 1024, 16, 4, 64, 2816, 16384, 2000, 1000), quick=True,
        ),
        Shape("8-layers", sizes(8, 4, 1024, 1024, 16, 4, 64, 2816, 16384, 2000, 1000)),
        # So many tokens that the largest error is not that of one of them, which is luck.
        Shape("small", sizes(2, 2, 29, 37, 4, 2, 16, 67, 53, 30, 5), ("float32", "float16", "bfloat16"), edge=True),
        # Small enough for Triton's interpreter in a second type.
        Shape("tiny-token", sizes(1, 1, 1, 16, 2, 1, 16, 24, 19, 1, 5), ("float16",), edge=True),
    ),
    # Not inductor-max, which would tune some thirty products; why not torch.optim.AdamW, `adamw` says.
    implementations=(
        Implementation("xla", f"{XLA}:apply", "xla", "jax.jit of the whole step, layers unrolled"),
        Implementation(
            "xla-remat", f"{XLA}:apply_remat", "xla",
            "jax.jit, layers unrolled of which jax.checkpoint keeps the input alone",
        ),
        Implementation("xla-scan", f"{XLA}:apply_scan", "xla", "jax.jit, jax.lax.scan over the layers"),
        Implementation(
            "xla-scan-remat", f"{XLA}:apply_scan_remat", "xla",
            "jax.jit, jax.lax.scan over layers of which jax.checkpoint keeps the input alone",
        ),
        Implementation(
            "xla-unfused", f"{XLA}:apply", "xla-unfused", "jax.jit with XLA's fusion passes off", baseline=True
        ),
        Implementation(
            "xla-cudnn", f"{XLA}:apply_cudnn", "xla",
            'layers unrolled, jax.nn.dot_product_attention(implementation="cudnn")',
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan", unsupported=cudnn_unsupported,
        ),
        Implementation("eager", f"{TORCH}:apply", "eager", "PyTorch, one operation after the other", baseline=True),
        Implementation("inductor", f"{TORCH}:apply", "inductor", "torch.compile of the whole step as one graph"),
        Implementation(
            "inductor-remat", f"{TORCH}:apply_remat", "inductor",
            "one graph, layers under torch.utils.checkpoint, which keeps their inputs alone",
            requires=("torch>=2.12",),  # Dynamo of 2.11 refuses requires_grad_ in the compiled function
        ),
        Implementation(
            "inductor-sdpa", "triton_side.library.lm_step:apply", "inductor",
            "one graph, its attention F.scaled_dot_product_attention, cuDNN",
            needs_gpu="cuDNN's attention needs a GPU with cuDNN to build its plan",
            unsupported=attention.cudnn_unsupported,
        ),
        triton("lm_step"),
    ),
)
