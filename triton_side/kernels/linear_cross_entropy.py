"""The last projection and its loss without the logits in memory, forward and backward.

    x = h w^T    loss = cross_entropy(x, labels), as `cross_entropy.py` defines it
    dh = dx w    dw = dx^T h

Wijmans et al., "Cut your losses in large-vocabulary language models", arXiv:2411.09009.

Statistics: the product's epilogue reduces each tile of logits to each token's maximum, sum of exponentials and share of
the mean, and keeps the label's logit. A second kernel combines the tiles, and a third takes the mean over tokens.
Without gradients, that is all, and logits are not stored. The statistics are 12 bytes a token for every tile, 49 MB for
8192 tokens and 128,256 classes. Programs could instead keep them in registers, each for its own tokens along all
classes. They would then read all of h for every tile of classes: 67 MB with a width of 4096, more than L2 holds.

With gradients, the logits of a chunk of tokens are in memory, in a workspace of WORKSPACE bytes:

1. The product also stores the chunk's logits.
2. A pass over the workspace replaces them by dx.
3. One product gives the chunk's dh, another adds the chunk's share to dw. They have nothing to fuse with, so they are
   cuBLAS's, 1 to 15% faster than ours (`docs/kernels/products.md`).

So there are three products in all, as many as with all logits in memory. If one chunk holds all tokens, the forward
pass ends with step 1, and step 2 multiplies by dloss. With several chunks the forward pass takes all steps for a dloss
of 1, as Liger does (Hsu et al., arXiv:2410.10989), and the backward pass multiplies dh and dw by dloss, unless it is 1.
The scaling takes 0.55 ms for a dw of 1 GB.

With several chunks, gradients computed in the backward pass would take a fourth product, which recomputes the logits.
With chunks of classes the sum over chunks is dh, which is small, and can stay in float32. Here it is dw, which is
large, and is rounded to w's dtype after each chunk.

Shapes: h, dh [tokens, width]; w, dw [classes, width]; labels [tokens] in int32 or int64; loss [] in fp32. dtypes of h
and w: bfloat16, float16, float32, one for both. Without gradients the loss is computed from float32 logits; with them,
loss and gradients from logits in the inputs' dtype, in which dx is stored too. dx is divided by the count of tokens.
Small numbers vanish in float16, so the division of its dh and dw follows at the end of the backward pass. The product
of float32 inputs reads w itself, because the copies of `matmul.py` would take as much memory as w. IEEE products
read it across its rows, at a third of the rate.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.calls.declare import Shapes, computing, declare, forward, gradient
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels.cross_entropy import check_labels, launch_mean, loss_slope, token_loss
from xlafuse.triton_side.kernels.matmul import Choose, choose_config, matmul_config
from xlafuse.triton_side.kernels.shared.launch import (
    FlatConfig,
    cdiv,
    check_matrix,
    check_tensors,
    device_of,
    multiprocessors,
)
from xlafuse.triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    open_operand,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
    tile_product,
)
from xlafuse.triton_side.kernels.shared.tiles import DESCRIPTOR_ALIGNMENT, product_precision, provide_descriptor_memory

WORKSPACE = 512 << 20  # bytes of the logits of one chunk
MIN_TOKENS = 128  # of a chunk, whatever its bytes: the height of a tile
MOST_IN_AXIS = 65_535  # of a grid's second and third axis, by CUDA's limit
TILES_PER_STEP = 64  # combined in one step
DLOGITS_CONFIG = FlatConfig(block=8192, num_warps=8)

TILES = (
    forward("dot", "product"), forward("reduce_max", "logsumexp", "tile"), forward("sub", "logsumexp", "tile"),
    forward("exp", "logsumexp", "tile"), forward("reduce_sum", "logsumexp", "tile"),
    forward("reduce_sum", "smoothing", "tile"), forward("gather", "target"),
)
TOKENS = (
    forward("reduce_max", "logsumexp"), forward("sub", "logsumexp"), forward("exp", "logsumexp"),
    forward("reduce_sum", "logsumexp"), forward("log", "logsumexp"), forward("add", "logsumexp"),
    forward("sub", "target"), forward("reduce_sum", "smoothing"), forward("add", "smoothing"),
    forward("mul", "z_loss"), forward("add", "z_loss"), forward("select", "mean"),
)
DLOGITS = (
    gradient("div", "mean"), gradient("select", "mean"), gradient("mul", "z_loss"), gradient("mul", "logsumexp"),
    gradient("exp", "logsumexp"), gradient("sub", "smoothing"), gradient("sub", "target"),
)


@triton.jit
def finite_reference(maximum):
    """Return the number to subtract from logits before exp: their maximum, or 0 while all are -inf.

    Any finite number then keeps the sum at zero; -inf - -inf would be NaN.
    """
    return tl.where(maximum == -float("inf"), 0.0, maximum)


def projection_flops(shapes: Shapes) -> float:
    (tokens, width), classes = shapes["h_ptr"], shapes["w_ptr"][1]
    return 2 * tokens * width * classes + 5 * tokens * classes


@declare(*TILES, flops=projection_flops)
@triton.jit
def projected_statistics_kernel(
    h_ptr, w_ptr, labels_ptr, logits_ptr, maximum_ptr, exponentials_ptr, mean_ptr, chosen_ptr, tokens, classes, width,
    stride_ht, stride_hk, stride_wk, stride_wc, stride_lt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    H_TRANSPOSED: tl.constexpr, W_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute statistics of each token's logits in each tile of classes, and the label's logit.

    The statistics [tiles, tokens] are the maximum, the sum of exp(x - maximum) and the sum of x / classes. The label's
    logit [tokens] is stored only if the label is a class. The logits are stored unless their pointer is None, with rows
    stride_lt apart; the gaps between rows are written too. w is [width, classes].
    """
    h = open_operand(h_ptr, tokens, width, stride_ht, stride_hk, BLOCK_M, BLOCK_K, DESCRIPTORS, H_TRANSPOSED)
    w = open_operand(w_ptr, width, classes, stride_wk, stride_wc, BLOCK_K, BLOCK_N, DESCRIPTORS, W_TRANSPOSED)
    tiles = tl.cdiv(tokens, BLOCK_M) * tl.cdiv(classes, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        row, column = tile_at(tile, tokens, classes, BLOCK_M, BLOCK_N, GROUP_M)
        x = tile_product(
            h, w, row, column, tokens, classes, width, stride_ht, stride_hk, stride_wk, stride_wc,
            0, tl.cdiv(width, BLOCK_K),
            BLOCK_M, BLOCK_N, BLOCK_K, H_TRANSPOSED, W_TRANSPOSED, DESCRIPTORS, PRECISION, 0,
        )
        if logits_ptr is not None:
            store_tile(logits_ptr, x, row, column, tokens, stride_lt, BLOCK_M, BLOCK_N)
            # The gradients are a softmax of the stored logits, whose sum must be theirs.
            x = x.to(logits_ptr.dtype.element_ty).to(tl.float32)
        token = row + tl.arange(0, BLOCK_M)
        exists = token < tokens
        class_ = column + tl.arange(0, BLOCK_N)[None, :]
        label = tl.load(labels_ptr + token, mask=exists, other=-1)
        chosen = tl.sum(tl.where(class_ == label[:, None], x, 0.0), axis=1)
        is_here = (label >= column) & (label < tl.minimum(column + BLOCK_N, classes))
        tl.store(chosen_ptr + token, chosen, mask=exists & is_here)

        at = tl.cast(column // BLOCK_N, tl.int64) * tokens + token
        # Division precedes the sum, so logits near the largest number do not overflow.
        mean = tl.sum(tl.where(class_ < classes, x, 0.0) * (1.0 / classes), axis=1)
        tl.store(mean_ptr + at, mean, mask=exists)
        x = tl.where(class_ < classes, x, -float("inf"))
        maximum = tl.max(x, axis=1)
        tl.store(maximum_ptr + at, maximum, mask=exists)
        exponentials = tl.sum(tl.exp(x - finite_reference(maximum)[:, None]), axis=1)
        tl.store(exponentials_ptr + at, exponentials, mask=exists)


def combining_flops(shapes: Shapes) -> float:
    tiles, tokens = shapes["maximum_ptr"]
    return 6 * tiles * tokens


@declare(*TOKENS, flops=combining_flops)
@triton.jit
def combine_tiles_kernel(
    maximum_ptr, exponentials_ptr, mean_ptr, chosen_ptr, labels_ptr, losses_ptr, row_maximum_ptr, log_sum_ptr,
    tiles, tokens, classes, smoothing, z_loss,
    IGNORED: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
):
    """Compute loss, maximum and log(sum of exp(x - maximum)) of TOKENS tokens; 0 for tokens that do not count."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    # Each lane keeps its own maximum and sum, as in cross_entropy.
    maximum = tl.full([TILES, TOKENS], -float("inf"), tl.float32)
    exponentials = tl.zeros([TILES, TOKENS], tl.float32)
    mean = tl.zeros([TILES, TOKENS], tl.float32)
    for start in tl.range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)[:, None]
        at = tile.to(tl.int64) * tokens + token[None, :]
        inside = (tile < tiles) & exists[None, :]
        tile_maximum = tl.load(maximum_ptr + at, mask=inside, other=-float("inf"))
        new_maximum = tl.maximum(maximum, tile_maximum)
        reference = finite_reference(new_maximum)
        exponentials *= tl.exp(maximum - reference)
        added = tl.load(exponentials_ptr + at, mask=inside, other=0.0)
        exponentials += added * tl.exp(tile_maximum - reference)
        mean += tl.load(mean_ptr + at, mask=inside, other=0.0)
        maximum = new_maximum
    row_maximum = tl.max(maximum, axis=0)
    rescaled = exponentials * tl.exp(maximum - finite_reference(row_maximum)[None, :])
    log_sum = tl.log(tl.sum(rescaled, axis=0))

    label = tl.load(labels_ptr + token, mask=exists, other=IGNORED)
    counted = label != IGNORED
    # A label that is no class makes the loss NaN.
    is_class = (label >= 0) & (label < classes)
    chosen = tl.load(chosen_ptr + token, mask=exists & is_class, other=float("nan"))
    loss = token_loss(row_maximum, log_sum, tl.sum(mean, axis=0), chosen, smoothing, z_loss)
    tl.store(losses_ptr + token, tl.where(counted, loss, 0.0), mask=exists)
    if row_maximum_ptr is not None:
        tl.store(row_maximum_ptr + token, tl.where(counted, row_maximum, 0.0), mask=exists)
        tl.store(log_sum_ptr + token, tl.where(counted, log_sum, 0.0), mask=exists)


@declare(*DLOGITS, flops=lambda shapes: 5 * math.prod(shapes["logits_ptr"]))
@triton.jit
def dlogits_kernel(
    logits_ptr, labels_ptr, maximum_ptr, log_sum_ptr, count_ptr, dloss_ptr, dlogits_ptr, stride_lt, classes, smoothing,
    z_loss, IGNORED: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Compute the gradients of COLUMNS logits of a token, divided by the count of tokens and times dloss where given.

    They may replace the logits. Rows of both are stride_lt apart.
    """
    token = tl.program_id(1).to(tl.int64)
    class_ = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    label = tl.load(labels_ptr + token)
    at = token * stride_lt + class_
    x = tl.load(logits_ptr + at, mask=class_ < classes, other=0.0).to(tl.float32)
    maximum, log_sum = tl.load(maximum_ptr + token), tl.load(log_sum_ptr + token)
    dx = loss_slope(x, class_ == label, maximum, log_sum, classes, smoothing, z_loss)
    dx = tl.where((label >= 0) & (label < classes), dx, float("nan"))
    dx = tl.where(label != IGNORED, dx, 0.0)
    if count_ptr is not None:
        dx *= 1.0 / tl.load(count_ptr).to(tl.float32)
    if dloss_ptr is not None:
        dx *= tl.load(dloss_ptr)
    tl.store(dlogits_ptr + at, dx.to(dlogits_ptr.dtype.element_ty), mask=class_ < classes)


@declare(gradient("reduce_sum", "mean"), flops=lambda shapes: shapes["labels_ptr"][0])
@triton.jit
def count_kernel(labels_ptr, count_ptr, tokens, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """Count the tokens with a label, at least 1, in one program."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        label = tl.load(labels_ptr + token, mask=token < tokens, other=IGNORED)
        counts += (label != IGNORED).to(tl.int32)
    tl.store(count_ptr, tl.maximum(tl.sum(counts), 1))


def unscaled(shapes: Shapes) -> int:
    """Return the elements that `scale_gradient_kernel` moves where dloss is 1: all of float16, which has a count."""
    return math.prod(shapes["gradient_ptr"]) if "count_ptr" in shapes else 0


@declare(
    gradient("mul", "mean"), flops=lambda shapes: math.prod(shapes["gradient_ptr"]),
    reads={"gradient_ptr": unscaled, "scaled_ptr": unscaled},
)
@triton.jit
def scale_gradient_kernel(gradient_ptr, dloss_ptr, count_ptr, scaled_ptr, elements, BLOCK: tl.constexpr):
    """Multiply a gradient by dloss (and by 1 / count) in place, unless the factor is 1."""
    factor = tl.load(dloss_ptr)
    if count_ptr is not None:
        factor *= 1.0 / tl.load(count_ptr).to(tl.float32)
    if factor != 1.0:
        for tile in tl.range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
            at = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(gradient_ptr + at, mask=at < elements, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + at, (value * factor).to(scaled_ptr.dtype.element_ty), mask=at < elements)


def _operands(h: torch.Tensor, w: torch.Tensor, config: MatmulConfig) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """Return the programs, strides and tiling arguments of h [tokens, width] @ w [width, classes].

    Compiled for an H200, bfloat16 takes 170 registers and 148 kB of shared memory forward, 255 and 180 kB backward, and
    spills nothing.
    """
    return programs_for_output(h.shape[0], w.shape[1], config, h.device), (*h.stride(), *w.stride()), {
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "H_TRANSPOSED": stored_transposed(h), "W_TRANSPOSED": stored_transposed(w),
        "DESCRIPTORS": config.descriptors, "PRECISION": product_precision(h.dtype),
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }


class Chunk(NamedTuple):
    """The logits of a chunk of tokens, whose rows begin at multiples of 16 bytes, and each token's statistics.

    logits: [tokens, classes] in the inputs' dtype. maximum, log_sum: [tokens] in fp32.
    """

    logits: torch.Tensor
    maximum: torch.Tensor
    log_sum: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, w: torch.Tensor) -> "Chunk":
        classes, grain = len(w), DESCRIPTOR_ALIGNMENT // w.element_size()  # TMA can read such rows
        memory = torch.empty((tokens, grain * cdiv(classes, grain)), dtype=w.dtype, device=w.device)
        return cls(memory[:, :classes], *torch.empty((2, tokens), dtype=torch.float32, device=w.device))


def launch_statistics(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, smoothing: float, z_loss: float,
    choose: Choose, saved: Chunk | None,
) -> None:
    """Compute each token's loss; `saved` is memory for what the gradients need."""
    (tokens, width), classes = h.shape, w.shape[0]
    config = choose_config(choose, h, w.T)
    logits, row_maximum, log_sum = saved or (None, None, None)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=h.device)

    tiles, chosen = cdiv(classes, config.block_n), empty(tokens)
    maximum, exponentials, mean = (empty(tiles, tokens) for _ in range(3))
    grid, strides, tiling = _operands(h, w.T, config)
    names = {"logits_ptr": "logits", "chosen_ptr": "chosen", "maximum_ptr": "tile_maximum", "mean_ptr": "tile_mean"}
    with device_of(h), computing(**names):
        if config.descriptors:
            provide_descriptor_memory(h.device)
        projected_statistics_kernel[(grid,)](
            h, w.T, labels, logits, maximum, exponentials, mean, chosen, tokens, classes, width, *strides,
            0 if logits is None else logits.stride(0), **tiling,
        )
    # 32 tokens in fp32 are the 128 bytes of a cache line.
    with device_of(h), computing(row_maximum_ptr="maximum"):
        combine_tiles_kernel[(cdiv(tokens, 32),)](
            maximum, exponentials, mean, chosen, labels, losses, row_maximum, log_sum, tiles, tokens, classes,
            smoothing, z_loss, IGNORED=IGNORED, TILES=TILES_PER_STEP, TOKENS=32, num_warps=8,
        )


def forward_pass(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float,
    choose: Choose = matmul_config,
) -> torch.Tensor:
    """Return the loss, [] in fp32, of contiguous labels."""
    losses = torch.empty(len(h), dtype=torch.float32, device=h.device)
    if len(h):
        launch_statistics(h, w, labels, losses, smoothing, z_loss, choose, None)
    return launch_mean(losses, labels)[0]


def tokens_per_chunk(tokens: int, classes: int, element_bytes: int, workspace: int = WORKSPACE) -> int:
    """Return the size of equal chunks, a multiple of MIN_TOKENS, whose logits fit the workspace.

    A chunk's tokens are the second axis of a grid, which CUDA ends at MOST_IN_AXIS.
    """
    fitting = min(workspace // (element_bytes * classes), MOST_IN_AXIS) // MIN_TOKENS * MIN_TOKENS
    most = max(MIN_TOKENS, fitting)
    return MIN_TOKENS * cdiv(cdiv(tokens, cdiv(tokens, most)), MIN_TOKENS)


def launch_gradients(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, chunk: Chunk, count: torch.Tensor | None,
    dloss: torch.Tensor | None, smoothing: float, z_loss: float, dh: torch.Tensor | None, dw: torch.Tensor | None,
    adds: bool = False,
) -> None:
    """Replace a chunk's logits by dx, and write the chunk's dh and dw, or add to dw; None for a gradient not wanted."""
    logits, maximum, log_sum = chunk
    classes = len(w)
    with device_of(h):
        dlogits_kernel[(cdiv(classes, DLOGITS_CONFIG.block), len(h))](
            logits, labels, maximum, log_sum, count, dloss, logits, logits.stride(0), classes, smoothing, z_loss,
            IGNORED=IGNORED, COLUMNS=DLOGITS_CONFIG.block, num_warps=DLOGITS_CONFIG.num_warps,
        )
    with stage("product"):
        if dh is not None:
            torch.mm(logits, w, out=dh)
        if dw is not None and adds:
            torch.addmm(dw, logits.T, h, out=dw)
        elif dw is not None:
            torch.mm(logits.T, h, out=dw)


def empty_gradients(
    h: torch.Tensor, w: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return memory for dh and dw, contiguous; None for a gradient not wanted."""
    dh, dw = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if is_wanted else None
        for x, is_wanted in zip((h, w), wanted, strict=True)
    )
    return dh, dw


def training_pass(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float,
    wanted: tuple[bool, bool] = (True, True), choose: Choose = matmul_config, workspace: int = WORKSPACE,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Return the loss, dh and dw for dloss = 1, and the count of tokens, [] in int32; None for a gradient not `wanted`.

    float16 gradients are not divided by the count.
    """
    tokens = len(h)
    losses = torch.empty(tokens, dtype=torch.float32, device=h.device)
    count = torch.empty((), dtype=torch.int32, device=h.device)
    dh, dw = empty_gradients(h, w, wanted)
    size = min(tokens, tokens_per_chunk(max(tokens, 1), len(w), h.element_size(), workspace))
    memory = Chunk.empty(size, w)
    if not tokens:
        count.fill_(1)
        if dw is not None:
            dw.zero_()
    for first in range(0, tokens, size or 1):
        part = slice(first, first + size)
        rows, own = h[part], labels[part]
        chunk = Chunk(*(x[: len(rows)] for x in memory))
        launch_statistics(rows, w, own, losses[part], smoothing, z_loss, choose, chunk)
        if not first:  # after the first product, so that the GPU is busy while the host prepares the next launches
            with device_of(h):
                count_kernel[(1,)](labels, count, tokens, IGNORED=IGNORED, BLOCK=4096, num_warps=16)
        launch_gradients(
            rows, w, own, chunk, None if h.dtype == torch.float16 else count, None, smoothing, z_loss,
            None if dh is None else dh[part], dw, adds=first > 0,
        )
    return launch_mean(losses, labels)[0], dh, dw, count


def launch_scaling(gradient: torch.Tensor, dloss: torch.Tensor, count: torch.Tensor) -> None:
    """Multiply a contiguous gradient of `training_pass` by dloss, and by 1 / count if it is float16."""
    with device_of(gradient):
        scale_gradient_kernel[(8 * multiprocessors(gradient.device),)](
            gradient, dloss, count if gradient.dtype == torch.float16 else None, gradient, gradient.numel(), BLOCK=8192,
            num_warps=8,
        )


def _take(ctx: Any) -> tuple[torch.Tensor, ...]:
    """Return the saved tensors, which one backward pass overwrites. Raises RuntimeError in a second one."""
    if ctx.taken:
        raise RuntimeError(
            "linear_cross_entropy keeps its gradients for one backward pass only; call it again for another"
        )
    ctx.taken = True
    saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    return saved


class _InOneChunk(torch.autograd.Function):
    """Save the logits of all tokens; the backward pass computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float
    ) -> torch.Tensor:
        losses, chunk = torch.empty(len(h), dtype=torch.float32, device=h.device), Chunk.empty(len(h), w)
        launch_statistics(h, w, labels, losses, smoothing, z_loss, matmul_config, chunk)
        loss, count = launch_mean(losses, labels)
        ctx.save_for_backward(h, w, labels, count, *chunk)
        ctx.attributes, ctx.taken = (smoothing, z_loss), False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, w, labels, count, *chunk = _take(ctx)
        dh, dw = empty_gradients(h, w, ctx.needs_input_grad[:2])
        smoothing, z_loss = ctx.attributes
        scaled = h.dtype != torch.float16
        launch_gradients(
            h, w, labels, Chunk(*chunk), count if scaled else None, dloss if scaled else None, smoothing, z_loss, dh, dw
        )
        for gradient_ in (dh, dw):
            if gradient_ is not None and not scaled:
                launch_scaling(gradient_, dloss, count)
        return dh, dw, None, None, None


class _InChunks(torch.autograd.Function):
    """Compute the gradients in the forward pass; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float,
        workspace: int,
    ) -> torch.Tensor:
        loss, *gradients = training_pass(
            h, w, labels, smoothing, z_loss, ctx.needs_input_grad[:2], workspace=workspace
        )
        ctx.save_for_backward(*gradients)
        ctx.taken = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dw, count = _take(ctx)
        for gradient_ in (dh, dw):
            if gradient_ is not None:
                launch_scaling(gradient_, dloss, count)
        return dh, dw, None, None, None, None


def linear_cross_entropy(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, z_loss: float = 0.0,
    workspace: int = WORKSPACE,
) -> torch.Tensor:
    """Return the mean cross-entropy of the logits h w^T over the tokens whose label is not IGNORED.

    Differentiable once in h and w.

    Args:
        h: [tokens, width], any strides.
        w: [classes, width], any strides.
        labels: [tokens], int32 or int64: classes, or IGNORED. A label that is neither makes the loss NaN, and
            every gradient that its token contributes to. Rows of h whose label is IGNORED must be finite: the gradient
            of w multiplies them by 0.
        smoothing: share of the target spread equally over all classes.
        z_loss: factor of the squared logarithm of the sum of exp(logits).
        workspace: bytes of logits to keep in memory for gradients, at least those of MIN_TOKENS tokens.

    Returns:
        A float32 tensor of shape []; 0 where every label is IGNORED, with gradients of 0.

    Raises:
        ValueError: shapes do not fit, there is no class, devices differ or are not a GPU (outside the interpreter), or
            float32 products are set to "medium".
        TypeError: a dtype is not supported, or those of h and w differ.
        RuntimeError: in a second backward pass of one call.
    """
    check_tensors(h=h, w=w)
    check_matrix("h", h)
    check_matrix("w", w)
    if h.shape[1] != w.shape[1] or w.shape[0] == 0:
        raise ValueError(
            f"h [tokens, width] and w [classes, width] must fit, with at least one class, got {list(h.shape)} and "
            f"{list(w.shape)}; w has the layout of a torch.nn.Linear's weight"
        )
    check_labels(h, labels, name="h")
    labels = labels.contiguous()
    if torch.is_grad_enabled() and (h.requires_grad or w.requires_grad):
        loss: torch.Tensor
        if 0 < len(h) <= tokens_per_chunk(max(len(h), 1), len(w), h.element_size(), workspace):
            loss = _InOneChunk.apply(h, w, labels, smoothing, z_loss)
        else:
            loss = _InChunks.apply(h, w, labels, smoothing, z_loss, workspace)
        return loss
    return forward_pass(h, w, labels, smoothing, z_loss)


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `linear_cross_entropy`: h [tokens, width], w [classes, width], labels [tokens] -> loss []."""
    return {"loss": linear_cross_entropy(inputs["h"], inputs["w"], inputs["labels"], **attributes)}
