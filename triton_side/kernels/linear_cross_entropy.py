"""The last projection and its loss without the logits in memory, forward and backward.

    x = h w^T    loss = cross_entropy(x, labels), as `cross_entropy.py` defines it
    dh = dx w    dw = dx^T h

Wijmans et al., "Cut your losses in large-vocabulary language models", arXiv:2411.09009.

Forward: the product's epilogue reduces each tile of logits to each token's maximum, sum of exponentials and share of
the mean, and keeps the label's logit. A second kernel combines the tiles, and a third takes the mean over tokens. The
statistics are 12 bytes a token for every tile, 49 MB for 8192 tokens and 128,256 classes. Programs could instead keep
them in registers, each for its own tokens along all classes. They would then read all of h for every tile of classes:
with a width of 4096 that is 67 MB, more than L2 holds.

Backward loops over chunks of classes. The product runs again, with dx in the inputs' dtype as its epilogue, in a
workspace of WORKSPACE bytes. One product then gives the final dw of these classes. Another gives their share of dh,
which accumulates in float32. The workspace and this sum take 0.4 GB for the sizes above; chunks of tokens would need dw
in float32, 2.1 GB.

The forward and the backward pass together take four products, where logits in memory take three. Liger
(arXiv:2410.10989) takes three: its forward pass computes the gradients of chunks of tokens. It accumulates dw over the
chunks, either in w's dtype or in those 2.1 GB.

Shapes: h, dh [tokens, width]; w, dw [classes, width]; labels [tokens] in int32 or int64; loss [] in fp32. dtypes of h
and w: bfloat16, float16, float32, one for both. Logits are float32 and never rounded. dx is rounded to the inputs'
dtype: float16 loses gradients under 6e-8, so scale the loss. Products of float32 inputs read w across its rows, at a
third of the rate (`matmul.py`), because a transposed copy would take as much memory as w.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from triton_side.blocks.cross_entropy import IGNORED
from triton_side.calls.declare import Shapes, again, computing, declare, forward, gradient
from triton_side.kernels.cross_entropy import SavedStatistics, check_labels, launch_mean, loss_slope, token_loss
from triton_side.kernels.matmul import Choose, choose_config, launch_matmul, matmul_config
from triton_side.kernels.shared.launch import cdiv, check_matrix, check_tensors, device_of
from triton_side.kernels.shared.matmul_tiles import (
    MatmulConfig,
    open_operand,
    programs_for_output,
    store_tile,
    stored_transposed,
    tile_at,
    tile_product,
)
from triton_side.kernels.shared.tiles import DESCRIPTOR_ALIGNMENT, product_precision, provide_descriptor_memory

WORKSPACE = 256 << 20  # bytes of dx in one chunk
MIN_CLASSES = 256  # of a chunk, whatever its bytes: the width of a tile
TILES_PER_STEP = 64  # combined in one step

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
    again("dot", "product"), again("sub", "logsumexp"), again("exp", "logsumexp"), again("add", "logsumexp"),
    gradient("div", "mean"), gradient("select", "mean"), gradient("mul", "z_loss"), gradient("mul", "logsumexp"),
    gradient("sub", "smoothing"), gradient("sub", "target"),
)
DW = (gradient("dot", "product", "dw"),)
DH = (gradient("dot", "product", "dh"),)
DH_ADDED = (*DH, gradient("add", "product", "dh"))


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
    h_ptr, w_ptr, labels_ptr, maximum_ptr, exponentials_ptr, mean_ptr, chosen_ptr, tokens, classes, width,
    stride_ht, stride_hk, stride_wk, stride_wc,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    H_TRANSPOSED: tl.constexpr, W_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute statistics of each token's logits in each tile of classes, and the label's logit.

    The statistics [tiles, tokens] are the maximum, the sum of exp(x - maximum) and the sum of x / classes. The label's
    logit [tokens] is stored only if the label is a class. w is [width, classes].
    """
    h = open_operand(h_ptr, tokens, width, stride_ht, stride_hk, BLOCK_M, BLOCK_K, DESCRIPTORS, H_TRANSPOSED)
    w = open_operand(w_ptr, width, classes, stride_wk, stride_wc, BLOCK_K, BLOCK_N, DESCRIPTORS, W_TRANSPOSED)
    tiles = tl.cdiv(tokens, BLOCK_M) * tl.cdiv(classes, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        row, column = tile_at(tile, tokens, classes, BLOCK_M, BLOCK_N, GROUP_M)
        x = tile_product(
            h, w, row, column, tokens, classes, width, stride_ht, stride_hk, stride_wk, stride_wc,
            BLOCK_M, BLOCK_N, BLOCK_K, H_TRANSPOSED, W_TRANSPOSED, DESCRIPTORS, PRECISION,
        )
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


@declare(*DLOGITS, flops=projection_flops)
@triton.jit
def dlogits_kernel(
    h_ptr, w_ptr, labels_ptr, maximum_ptr, log_sum_ptr, dloss_ptr, count_ptr, dlogits_ptr, tokens, chunk, width,
    stride_dt, stride_ht, stride_hk, stride_wk, stride_wc, first, classes, smoothing, z_loss, IGNORED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    H_TRANSPOSED: tl.constexpr, W_TRANSPOSED: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
):
    """Compute dx [tokens, chunk] of the classes from `first` on, whose projection is w [width, chunk].

    Rows of dx are stride_dt apart; the gaps between them are written too.
    """
    h = open_operand(h_ptr, tokens, width, stride_ht, stride_hk, BLOCK_M, BLOCK_K, DESCRIPTORS, H_TRANSPOSED)
    w = open_operand(w_ptr, width, chunk, stride_wk, stride_wc, BLOCK_K, BLOCK_N, DESCRIPTORS, W_TRANSPOSED)
    tiles = tl.cdiv(tokens, BLOCK_M) * tl.cdiv(chunk, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=DESCRIPTORS):
        row, column = tile_at(tile, tokens, chunk, BLOCK_M, BLOCK_N, GROUP_M)
        x = tile_product(
            h, w, row, column, tokens, chunk, width, stride_ht, stride_hk, stride_wk, stride_wc,
            BLOCK_M, BLOCK_N, BLOCK_K, H_TRANSPOSED, W_TRANSPOSED, DESCRIPTORS, PRECISION,
        )
        token = row + tl.arange(0, BLOCK_M)
        exists = token < tokens
        class_ = first + column + tl.arange(0, BLOCK_N)[None, :]
        label = tl.load(labels_ptr + token, mask=exists, other=IGNORED)
        maximum = tl.load(maximum_ptr + token, mask=exists, other=0.0)[:, None]
        log_sum = tl.load(log_sum_ptr + token, mask=exists, other=0.0)[:, None]
        is_class = (label >= 0) & (label < classes)
        dloss = tl.where(is_class, tl.load(dloss_ptr) / tl.load(count_ptr), float("nan"))
        dx = loss_slope(x, class_ == label[:, None], maximum, log_sum, classes, smoothing, z_loss)
        dx = tl.where((label != IGNORED)[:, None], dx * dloss[:, None], 0.0)
        store_tile(dlogits_ptr, dx, row, column, tokens, stride_dt, BLOCK_M, BLOCK_N)


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


def forward_pass(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float, *, save: bool,
    choose: Choose = matmul_config,
) -> tuple[torch.Tensor, SavedStatistics | None]:
    """Launch the forward kernels on contiguous labels; return the loss, [] in fp32."""
    tokens, classes = h.shape[0], w.shape[0]
    config = choose_config(choose, h, w.T)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=h.device)

    losses, chosen = empty(tokens), empty(tokens)
    row_maximum, log_sum = (empty(tokens), empty(tokens)) if save else (None, None)
    tiles = cdiv(classes, config.block_n)
    maximum, exponentials, mean = (empty(tiles, tokens) for _ in range(3))
    if tokens:
        grid, strides, tiling = _operands(h, w.T, config)
        with device_of(h), computing(chosen_ptr="chosen", maximum_ptr="tile_maximum", mean_ptr="tile_mean"):
            if config.descriptors:
                provide_descriptor_memory(h.device)
            projected_statistics_kernel[(grid,)](
                h, w.T, labels, maximum, exponentials, mean, chosen, tokens, classes, h.shape[1], *strides, **tiling
            )
        # 32 tokens in fp32 are the 128 bytes of a cache line.
        with device_of(h), computing(row_maximum_ptr="maximum"):
            combine_tiles_kernel[(cdiv(tokens, 32),)](
                maximum, exponentials, mean, chosen, labels, losses, row_maximum, log_sum, tiles, tokens, classes,
                smoothing, z_loss, IGNORED=IGNORED, TILES=TILES_PER_STEP, TOKENS=32, num_warps=8,
            )
    loss, count = launch_mean(losses, labels)
    if row_maximum is None or log_sum is None:
        return loss, None
    return loss, SavedStatistics(row_maximum, log_sum, count)


def classes_per_chunk(tokens: int, classes: int, element_bytes: int, workspace: int = WORKSPACE) -> int:
    """Return the size of equal chunks, a multiple of a tile's width, whose dx fits the workspace."""
    most = max(MIN_CLASSES, workspace // (element_bytes * tokens) // MIN_CLASSES * MIN_CLASSES)
    return MIN_CLASSES * cdiv(cdiv(classes, cdiv(classes, most)), MIN_CLASSES)


def backward_pass(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, saved: SavedStatistics, dloss: torch.Tensor,
    smoothing: float, z_loss: float, wanted: tuple[bool, bool] = (True, True), choose: Choose = matmul_config,
    workspace: int = WORKSPACE,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward kernels; return dh and dw, contiguous, in h's dtype; None for one that is not `wanted`."""
    (tokens, width), classes = h.shape, w.shape[0]
    dh = torch.empty((tokens, width), dtype=h.dtype, device=h.device) if wanted[0] else None
    dw = torch.empty((classes, width), dtype=h.dtype, device=h.device) if wanted[1] else None
    if tokens == 0:
        return dh, None if dw is None else dw.zero_()
    chunk = classes_per_chunk(tokens, classes, h.element_size(), workspace)
    # Rows begin at multiples of 16 bytes, so TMA can read them.
    grain = DESCRIPTOR_ALIGNMENT // h.element_size()
    memory = torch.empty((tokens, grain * cdiv(min(chunk, classes), grain)), dtype=h.dtype, device=h.device)
    total = None
    if dh is not None and chunk < classes:
        total = torch.empty((tokens, width), dtype=torch.float32, device=h.device)
    for first in range(0, classes, chunk):
        rows = w[first : first + chunk]
        dlogits = memory[:, : len(rows)]
        config = choose_config(choose, h, rows.T)
        grid, strides, tiling = _operands(h, rows.T, config)
        with device_of(h):
            if config.descriptors:
                provide_descriptor_memory(h.device)
            dlogits_kernel[(grid,)](
                h, rows.T, labels, saved.maximum, saved.log_sum, dloss, saved.count, dlogits, tokens, len(rows), width,
                dlogits.stride(0), *strides, first, classes, smoothing, z_loss, IGNORED=IGNORED, **tiling,
            )
        if dw is not None:
            with computing(*DW, c_ptr="dw"):
                launch_matmul(dlogits.T, h, choose_config(choose, dlogits.T, h), out=dw[first : first + chunk])
        if dh is not None:
            before = total if first else None
            out = dh if first + chunk >= classes else total
            with computing(*(DH_ADDED if first else DH), c_ptr="dh" if out is dh else "dh_total"):
                launch_matmul(dlogits, rows, choose_config(choose, dlogits, rows), before, out=out)
    return dh, dw


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float
    ) -> torch.Tensor:
        loss, saved = forward_pass(h, w, labels, smoothing, z_loss, save=True)
        assert saved is not None
        ctx.save_for_backward(h, w, labels, saved.maximum, saved.log_sum, saved.count)
        ctx.attributes = smoothing, z_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h, w, labels, *saved = ctx.saved_tensors
        smoothing, z_loss = ctx.attributes
        wanted = ctx.needs_input_grad[:2]
        dh, dw = backward_pass(h, w, labels, SavedStatistics(*saved), dloss, smoothing, z_loss, wanted)
        return dh, dw, None, None, None


def linear_cross_entropy(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, z_loss: float = 0.0
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

    Returns:
        A float32 tensor of shape []; 0 where every label is IGNORED, with gradients of 0.

    Raises:
        ValueError: shapes do not fit, there is no class, devices differ or are not a GPU (outside the interpreter), or
            float32 products are set to "medium".
        TypeError: a dtype is not supported, or those of h and w differ.
    """
    check_tensors(h=h, w=w)
    check_matrix("h", h)
    check_matrix("w", w)
    if h.shape[1] != w.shape[1] or w.shape[0] == 0:
        raise ValueError(
            f"h [tokens, width] and w [classes, width] must fit, with at least one class, got {list(h.shape)} and "
            f"{list(w.shape)}; w has the layout of a torch.nn.Linear's weight"
        )
    check_labels(h, labels)
    labels = labels.contiguous()
    if torch.is_grad_enabled() and (h.requires_grad or w.requires_grad):
        return _LinearCrossEntropy.apply(h, w, labels, smoothing, z_loss)
    loss, _ = forward_pass(h, w, labels, smoothing, z_loss, save=False)
    return loss


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `linear_cross_entropy`: h [tokens, width], w [classes, width], labels [tokens] -> loss []."""
    return {"loss": linear_cross_entropy(inputs["h"], inputs["w"], inputs["labels"], **attributes)}
