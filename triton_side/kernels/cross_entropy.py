"""Mean cross-entropy of logits with label smoothing, ignored labels and z-loss, forward and backward.

    m = max(x)    lse = m + log(sum(exp(x - m)))    count = number of tokens whose label is not ignored

    loss = sum over these of ((1 - s) (lse - x[label]) + s (lse - mean(x)) + z lse^2) / count, 0 if there are none

    dx = (p (1 + 2 z lse) - (1 - s) [column = label] - s / classes) dloss / count,  p = exp(x - m - log(sum))

Label smoothing: Szegedy et al., arXiv:1512.00567; z-loss: Chowdhery et al., "PaLM", arXiv:2204.02311; maximum and sum
in one reading: Milakov and Gimelshein, arXiv:1805.02867. Shapes: x = logits, dx [tokens, classes] in bfloat16, float16
or float32; labels [tokens] in int32 or int64; loss [] in fp32. fp32 inside; the sum over tokens is fp64.

The forward kernel reads the logits of counted tokens once, and no others. A second kernel, of one program, adds the
tokens' losses in a fixed order, without atomics. The backward kernel reads the same logits and writes dx. The forward
pass saves m and log(sum) separately. At logits of 1e4 their sum, lse, is rounded by 5e-4, and p would have that
relative error.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.calls import declare
from xlafuse.triton_side.configs.tuned import tuned
from xlafuse.triton_side.kernels.shared.constants import LOG2_E, LOWEST
from xlafuse.triton_side.kernels.shared.launch import (
    FlatConfig,
    check_matrix,
    check_tensors,
    device_of,
    multiprocessors,
    with_unit_column_stride,
)
from xlafuse.triton_side.kernels.shared.row_reduction import add_to_softmax

# Operations in the block's stages: for each token, for all tokens, and for the gradient.
TOKENS = (
    declare.forward("reduce_max", "logsumexp"), declare.forward("sub", "logsumexp"),
    declare.forward("exp", "logsumexp"), declare.forward("reduce_sum", "logsumexp"),
    declare.forward("log", "logsumexp"), declare.forward("add", "logsumexp"), declare.forward("gather", "target"),
    declare.forward("sub", "target"), declare.forward("reduce_sum", "smoothing"), declare.forward("add", "smoothing"),
    declare.forward("mul", "z_loss"), declare.forward("add", "z_loss"), declare.forward("select", "mean"),
)
MEAN = (declare.forward("reduce_sum", "mean"), declare.forward("div", "mean"))
BACKWARD = (
    declare.again("sub", "logsumexp"), declare.again("exp", "logsumexp"), declare.again("add", "logsumexp"),
    declare.gradient("div", "mean"), declare.gradient("select", "mean"), declare.gradient("mul", "z_loss"),
    declare.gradient("mul", "logsumexp"), declare.gradient("sub", "smoothing"), declare.gradient("sub", "target"),
)


@triton.jit
def add_logits(maximum, exponentials, mean, x, inside, classes):
    """Return the results of `add_to_softmax` and each lane's share of the mean, [lanes, 1], with the logits x added.

    x is [lanes, VECTOR], and -inf if not `inside`; None means that all are inside.
    """
    maximum, exponentials = add_to_softmax(maximum, exponentials, x, False)
    # Division precedes the sum, so logits near the largest number do not overflow.
    x = x if inside is None else tl.where(inside, x, 0.0)
    mean += tl.sum(x * (1.0 / classes), axis=1, keep_dims=True)
    return maximum, exponentials, mean


@triton.jit
def token_loss(maximum, log_sum, mean, chosen, smoothing, z_loss):
    """Return the loss of tokens with these statistics of their logits; `chosen` is the label's logit."""
    loss = (1.0 - smoothing) * (maximum - chosen + log_sum) + smoothing * (maximum - mean + log_sum)
    lse = maximum + log_sum
    loss += (z_loss * lse) * lse
    return loss


@triton.jit
def loss_slope(x, is_label, maximum, log_sum, classes, smoothing, z_loss):
    """Return the derivative of `token_loss` in the logits x; `is_label` marks the label's logit."""
    slope = 1.0 + 2.0 * z_loss * (maximum + log_sum)
    p = tl.exp2((x - maximum - log_sum) * LOG2_E)
    return p * slope - smoothing / classes - tl.where(is_label, 1.0 - smoothing, 0.0)


@declare.declare(*TOKENS, flops=lambda shapes: 5 * math.prod(shapes["logits_ptr"]))
@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr, labels_ptr, losses_ptr, maximum_ptr, log_sum_ptr, row_stride, classes, smoothing, z_loss,
    IGNORED: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr,
):
    """One program computes one token."""
    lanes: tl.constexpr = COLUMNS // VECTOR
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    counted = label != IGNORED
    row_ptr = logits_ptr + token * row_stride
    lane = tl.arange(0, lanes)[:, None]
    element = tl.arange(0, VECTOR)[None, :]
    # An aligned lane reads the 16 bytes of one access. Otherwise a lane's elements are `lanes` apart, so neighbouring
    # lanes read neighbouring elements.
    if ALIGNED:
        offset = lane * VECTOR + element
    else:
        offset = element * lanes + lane

    maximum = tl.full([lanes, 1], LOWEST, tl.float32)
    exponentials = tl.zeros([lanes, 1], tl.float32)
    mean = tl.zeros([lanes, 1], tl.float32)
    end = tl.where(counted, classes, 0)
    whole = end // COLUMNS * COLUMNS  # no column before it needs a mask
    # A label that is no class makes the loss NaN. Its logit is loaded early, as is each step's next tile.
    is_class = (label >= 0) & (label < classes)
    chosen = tl.load(row_ptr + label, mask=counted & is_class, other=float("nan")).to(tl.float32)
    following = tl.load(row_ptr + offset, mask=COLUMNS <= whole, other=0.0)
    for start in tl.range(0, whole, COLUMNS):
        x = following.to(tl.float32)
        following = tl.load(row_ptr + start + COLUMNS + offset, mask=start + COLUMNS < whole, other=0.0)
        maximum, exponentials, mean = add_logits(maximum, exponentials, mean, x, None, classes)
    if whole < end:
        inside = whole + offset < end
        rest = tl.load(row_ptr + whole + offset, mask=inside, other=-float("inf")).to(tl.float32)
        maximum, exponentials, mean = add_logits(maximum, exponentials, mean, rest, inside, classes)

    row_maximum = tl.max(maximum)
    log_sum = tl.log(tl.sum(exponentials * tl.exp(maximum - row_maximum)))
    row_mean = tl.sum(mean)
    loss = token_loss(row_maximum, log_sum, row_mean, chosen, smoothing, z_loss)
    tl.store(losses_ptr + token, tl.where(counted, loss, 0.0))
    if maximum_ptr is not None:
        tl.store(maximum_ptr + token, tl.where(counted, row_maximum, 0.0))
        tl.store(log_sum_ptr + token, tl.where(counted, log_sum, 0.0))


@declare.declare(*MEAN, flops=lambda shapes: 2 * math.prod(shapes["losses_ptr"]))
@triton.jit
def cross_entropy_mean_kernel(
    losses_ptr, labels_ptr, loss_ptr, count_ptr, tokens,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):
    """One program sums in fp64, because the sum of losses may overflow fp32 although their mean does not."""
    total = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        total += tl.load(losses_ptr + token, mask=token < tokens, other=0.0).to(tl.float64)
        label = tl.load(labels_ptr + token, mask=token < tokens, other=IGNORED)
        counts += (label != IGNORED).to(tl.int32)
    count = tl.maximum(tl.sum(counts), 1)
    tl.store(loss_ptr, (tl.sum(total) / count).to(tl.float32))
    tl.store(count_ptr, count)


@declare.declare(*BACKWARD, flops=lambda shapes: 5 * math.prod(shapes["logits_ptr"]))
@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr, labels_ptr, maximum_ptr, log_sum_ptr, dloss_ptr, count_ptr, dlogits_ptr, row_stride, classes,
    smoothing, z_loss, IGNORED: tl.constexpr, COLUMNS: tl.constexpr,
):
    """One program computes one token."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    counted = label != IGNORED
    maximum = tl.load(maximum_ptr + token)
    log_sum = tl.load(log_sum_ptr + token)
    is_class = (label >= 0) & (label < classes)
    # 0 for a token that does not count. It multiplies finite numbers: the token's logits are not read but taken as 0.
    dloss = tl.where(counted, tl.where(is_class, tl.load(dloss_ptr) / tl.load(count_ptr), float("nan")), 0.0)
    for start in tl.range(0, classes, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < classes
        x = tl.load(logits_ptr + token * row_stride + column, mask=inside & counted, other=0.0).to(tl.float32)
        dx = loss_slope(x, column == label, maximum, log_sum, classes, smoothing, z_loss) * dloss
        tl.store(dlogits_ptr + token * classes + column, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)


@tuned
def configure_forward(tokens: int, element_bytes: int, multiprocessors: int) -> FlatConfig:
    """4 KB of a row at a time for 4 warps, two 16-byte loads a thread; 2 KB if there are few tokens.

    16 programs with 2 KB are resident on a multiprocessor of an H200, and 10 with 4 KB in bfloat16. So 4 KB pays only
    if programs follow each other. By do_bench, without the mean and with log2(e) multiplied first, in bfloat16:

        8192 tokens of 32,000 classes     130.0 us with 4 KB, 134.3 with 2 KB
        2048 tokens of 128,256 classes    131.5 us with 2 KB, more than 132.2 with 4 KB
    """
    several = tokens > 2 * 16 * multiprocessors
    return FlatConfig(block=(4096 if several else 2048) // element_bytes, num_warps=4)


@tuned
def configure_backward(element_bytes: int) -> FlatConfig:
    """32 KB of a row at a time for 16 warps: four 16-byte loads in flight a thread.

    bfloat16 on an H200, 2048 tokens of 128,256 classes, by do_bench: 269.3 us. 4 KB for 8 warps take 277.1, 8 KB for 4
    warps 317.2.
    """
    return FlatConfig(block=32768 // element_bytes, num_warps=16)


@dataclass(frozen=True)
class SavedStatistics:
    """Statistics that the forward pass saves for the backward pass.

    maximum, log_sum: [tokens] in fp32, each token's largest logit and log(sum of exp(x - maximum)). count: int32 of
    shape [], the number of tokens that count, at least 1.
    """

    maximum: torch.Tensor
    log_sum: torch.Tensor
    count: torch.Tensor


def forward(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float, *, save: bool,
    config: FlatConfig | None = None,
) -> tuple[torch.Tensor, SavedStatistics | None]:
    """Launch the forward kernels on logits [tokens, classes] and contiguous labels; return the loss, [] in fp32."""
    tokens, classes = logits.shape
    logits = with_unit_column_stride(logits)
    config = config or configure_forward(tokens, logits.element_size(), multiprocessors(logits.device))
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    maximum = log_sum = None
    if save:
        maximum, log_sum = torch.empty_like(losses), torch.empty_like(losses)
    with device_of(logits):
        if tokens:
            cross_entropy_forward_kernel[(tokens,)](
                logits, labels, losses, maximum, log_sum, logits.stride(0), classes, smoothing, z_loss,
                IGNORED=IGNORED, COLUMNS=config.block, VECTOR=16 // logits.element_size(),
                ALIGNED=classes % 16 == 0 and logits.stride(0) % 16 == 0, num_warps=config.num_warps,
            )
    loss, count = launch_mean(losses, labels)
    if maximum is None or log_sum is None:
        return loss, None
    return loss, SavedStatistics(maximum, log_sum, count)


def launch_mean(losses: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss from the tokens' losses [tokens], and the number of tokens that count, at least 1."""
    loss = torch.empty((), dtype=torch.float32, device=losses.device)
    count = torch.empty((), dtype=torch.int32, device=losses.device)
    with device_of(losses):
        # Eight losses a thread; a loop of small loads would wait for L2 each time.
        cross_entropy_mean_kernel[(1,)](
            losses, labels, loss, count, len(losses), IGNORED=IGNORED, BLOCK=4096, num_warps=16
        )
    return loss, count


def backward(
    logits: torch.Tensor, labels: torch.Tensor, saved: SavedStatistics, dloss: torch.Tensor, smoothing: float,
    z_loss: float, config: FlatConfig | None = None,
) -> torch.Tensor:
    """Launch the backward kernel; return dlogits [tokens, classes], contiguous, in the logits' dtype."""
    tokens, classes = logits.shape
    dlogits = torch.empty((tokens, classes), dtype=logits.dtype, device=logits.device)
    if tokens == 0:
        return dlogits
    logits = with_unit_column_stride(logits)
    config = config or configure_backward(logits.element_size())
    with device_of(logits):
        cross_entropy_backward_kernel[(tokens,)](
            logits, labels, saved.maximum, saved.log_sum, dloss, saved.count, dlogits, logits.stride(0), classes,
            smoothing, z_loss, IGNORED=IGNORED, COLUMNS=config.block, num_warps=config.num_warps,
        )
    return dlogits


class CrossEntropyFunction(torch.autograd.Function):
    """Save logits, labels and SavedStatistics. The backward pass reads the logits once and writes their gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, smoothing: float, z_loss: float
    ) -> torch.Tensor:
        loss, saved = forward(logits, labels, smoothing, z_loss, save=True)
        assert saved is not None
        ctx.save_for_backward(logits, labels, saved.maximum, saved.log_sum, saved.count)
        ctx.attributes = smoothing, z_loss
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, *saved = ctx.saved_tensors
        return backward(logits, labels, SavedStatistics(*saved), dloss, *ctx.attributes), None, None, None


def check_labels(logits: torch.Tensor, labels: torch.Tensor, name: str = "logits") -> None:
    """Raise unless there is one integer label for each row of the logits, or of what `name` is, on its device.

    Raises:
        ValueError: another shape or device.
        TypeError: the dtype is not int32 or int64.
    """
    if labels.shape != logits.shape[:1]:
        raise ValueError(
            f"labels must be [tokens] = [{logits.shape[0]}] for {name} of shape {tuple(logits.shape)}, got "
            f"{tuple(labels.shape)}; pass one label for each token"
        )
    if labels.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"labels must be int32 or int64, got {labels.dtype}; cast them with .to(torch.int32)")
    if labels.device != logits.device:
        raise ValueError(
            f"all tensors must be on one device, got {name} on {logits.device} and labels on {labels.device}; "
            f"move labels with .to({name}.device)"
        )


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, z_loss: float = 0.0
) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens whose label is not IGNORED, differentiable once in the logits.

    Args:
        logits: [tokens, classes], bfloat16, float16 or float32, on a GPU. Rows may be any distance apart; a matrix
            whose last stride is not 1 is copied.
        labels: [tokens], int32 or int64, on that GPU: classes, or IGNORED. A label that is neither makes the loss NaN,
            and its token's gradient.
        smoothing: share of the target spread equally over all classes.
        z_loss: factor of the squared logarithm of the sum of exp(logits).

    Returns:
        A float32 tensor of shape []; 0 where every label is IGNORED, with gradients of 0.

    Raises:
        ValueError: logits are not [tokens, classes] of at least one class, or not on a GPU; labels do not fit.
        TypeError: a dtype is not supported.
    """
    check_tensors(logits=logits)
    check_matrix("logits", logits)
    if logits.shape[1] == 0:
        raise ValueError(f"logits must have at least one class, got shape {tuple(logits.shape)}")
    check_labels(logits, labels)
    labels = labels.contiguous()
    if torch.is_grad_enabled() and logits.requires_grad:
        return CrossEntropyFunction.apply(logits, labels, smoothing, z_loss)
    loss, _ = forward(logits, labels, smoothing, z_loss, save=False)
    return loss


def apply(inputs: dict[str, torch.Tensor], **attributes: Any) -> dict[str, torch.Tensor]:
    """Run the block `cross_entropy`: logits[tokens, classes], labels[tokens] -> loss[]."""
    return {"loss": cross_entropy(inputs["logits"], inputs["labels"], **attributes)}
