"""Remedies against findings, by kind. A kind without one is no problem."""

from __future__ import annotations

from .finding import FindingKind

_ONE_KERNEL = (
    "use a library call that fuses these steps, or write them as one kernel (Triton, Pallas); the reasons for missed "
    "fusions say what stopped the compiler"
)
REMEDIES: dict[FindingKind, str] = {
    "above roofline": "try other tile sizes and numbers of warps (autotuning), or another kernel for this step",
    "copy": "give the array its layout and dtype where it is made, so that no kernel has to convert it",
    "duplicate": "compute the value once and pass it on",
    "recomputed": "compute the value once and keep it, if reading it costs less than the repeated reads",
    "kept on chip": _ONE_KERNEL,
    "largest": _ONE_KERNEL,
    "intermediates": _ONE_KERNEL,
    "missed": "see the compiler's reason under missed fusions; rewriting the producer or the consumer may remove it",
    "saved": "recompute it in backward (jax.checkpoint, torch.utils.checkpoint), or use a call that saves less",
    "dense ragged product": "use a grouped product (Pallas's megablox, a kernel in Triton), which skips other groups",
    "launch gaps": "replay the launches as a CUDA graph (torch.compile's mode reduce-overhead, torch.cuda.graph)",
    "more FLOPs": "use an implementation that skips the masked or unused part of the product",
}
