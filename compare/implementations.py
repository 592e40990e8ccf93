"""The rows that most blocks share, so that a block's spec names only what is its own."""

from __future__ import annotations

from collections.abc import Callable

from compare.spec import Case, Implementation


def compilers(block: str, train: bool = True) -> tuple[Implementation, ...]:
    """The plainly written block under each compiler, and eager; `train` where the block has gradients."""
    xla, torch = f"xlafuse.blocks.{block}:apply", f"triton_side.blocks.{block}:apply"
    remat = Implementation(
        "xla-remat", xla, "xla-remat", "jax.jit of jax.checkpoint: only products are saved for backward",
        directions=("train",),
    )
    return (
        Implementation("xla", xla, "xla", "jax.jit, XLA's default passes"),
        *([remat] if train else []),
        Implementation("xla-unfused", xla, "xla-unfused", "jax.jit with XLA's fusion passes off"),
        Implementation("eager", torch, "eager", "PyTorch, one operation after the other"),
        Implementation("inductor", torch, "inductor", "torch.compile, default mode"),
        Implementation("inductor-max", torch, "inductor-max", "torch.compile, max-autotune-no-cudagraphs", tunes=True),
    )


def library(
    block: str, summary: str, unsupported: Callable[[Case], str | None] = lambda case: None
) -> Implementation:
    """What a PyTorch user would call instead of writing the block out."""
    target = f"triton_side.library.{block}:apply"
    return Implementation("library", target, "eager", summary, unsupported=unsupported)


def triton(block: str) -> Implementation:
    return Implementation("triton", f"triton_side.kernels.{block}:apply", "triton", "hand-written Triton")


def cuda(block: str) -> Implementation:
    return Implementation("cuda", f"triton_side.cuda.{block}:apply", "cuda", "raw CUDA C++ through NVRTC")


def half_precision_only(what: str) -> Callable[[Case], str | None]:
    """For library kernels that exist in fp16 and bf16 alone."""

    def unsupported(case: Case) -> str | None:
        return f"{what} takes float16 and bfloat16, not {case.dtype}" if case.dtype == "float32" else None

    return unsupported
