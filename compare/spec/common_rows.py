"""The rows that most blocks share, so that a block's spec names only what is its own."""

from __future__ import annotations

from collections.abc import Callable

from .case import CONTIGUOUS, Case
from .dtype import DTYPES
from .implementation import Implementation


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
        Implementation("xla-unfused", xla, "xla-unfused", "jax.jit with XLA's fusion passes off", baseline=True),
        Implementation("eager", torch, "eager", "PyTorch, one operation after the other", baseline=True),
        Implementation("inductor", torch, "inductor", "torch.compile, default mode"),
        Implementation("inductor-max", torch, "inductor-max", "torch.compile, max-autotune-no-cudagraphs"),
    )


def library(
    block: str, summary: str, unsupported: Callable[[Case], str | None] = lambda case: None
) -> Implementation:
    """What a PyTorch user would call instead of writing the block out."""
    target = f"triton_side.library.{block}:apply"
    return Implementation("library", target, "eager", summary, unsupported=unsupported)


def triton(block: str) -> Implementation:
    return Implementation("triton", f"triton_side.kernels.{block}:apply", "triton", "hand-written Triton")


def xla_triton(block: str) -> Implementation:
    return Implementation(
        "xla+triton", f"triton_side.kernels.{block}:apply", "xla-triton",
        "the hand-written Triton's launches in a jax.jit, compiled by XLA's own Triton",
    )


def cuda(block: str) -> Implementation:
    return Implementation("cuda", f"triton_side.cuda.{block}:apply", "cuda", "raw CUDA C++ through NVRTC")


LIGER = "liger-kernel==0.8.5"
CUTE = ("quack-kernels==0.6.5", "nvidia-cutlass-dsl[cu13]==4.8.1")
FLASH_ATTENTION_4 = ("flash-attn-4==4.0.0b36", *CUTE)


def inference_only(what: str) -> Callable[[Case], str | None]:
    """For library kernels whose backward writes over the inputs."""

    def unsupported(case: Case) -> str | None:
        return f"{what} writes its gradients over its inputs" if case.differentiates else None

    return unsupported


def contiguous_rows_only(what: str) -> Callable[[Case], str | None]:
    """For library kernels whose caller copies what has strides along its last axis."""

    def unsupported(case: Case) -> str | None:
        if case.layout == CONTIGUOUS:
            return None
        return f"{what} takes inputs whose last axis is contiguous, not {case.layout} ones"

    return unsupported


def whole_vectors(what: str, size: int) -> Callable[[Case], str | None]:
    """For library kernels that copy rows in pieces of at least `size` bytes."""

    def unsupported(case: Case) -> str | None:
        if problem := contiguous_rows_only(what)(case):
            return problem
        if case.sizes["columns"] * DTYPES[case.dtype].itemsize % size == 0:
            return None
        return f"{what} takes rows of whole {size}-byte pieces, not {case.sizes['columns']} columns of {case.dtype}"

    return unsupported


def liger(
    block: str, unsupported: Callable[[Case], str | None] = lambda case: None, needs_gpu: str | None = None
) -> Implementation:
    """Compiled like our own Triton kernels, but not checked on the CPU: Triton's interpreter has neither the libdevice
    functions that most of them call nor `.to` of a scalar argument."""
    return Implementation(
        "liger", f"triton_side.library.liger:{block}", "triton-library", "Liger's Triton kernels",
        needs_gpu=needs_gpu, unsupported=unsupported, requires=(LIGER,),
    )


def quack(block: str, piece: int, unsupported: Callable[[Case], str | None] = lambda case: None) -> Implementation:
    """`piece`: the fewest bytes of a row that the kernels copy at a time, so rows must be whole ones."""
    whole = whole_vectors(f"quack's {block}", piece)
    return Implementation(
        "quack", f"triton_side.library.quack:{block}", "eager", "quack's CuTe kernels",
        needs_gpu="quack's CuTe kernels are compiled for the GPU at hand",
        unsupported=lambda case: unsupported(case) or whole(case), requires=CUTE,
    )


def flash_attention_4(function: str = "apply") -> Implementation:
    return Implementation(
        "fa4", f"triton_side.library.flash_attention_4:{function}", "eager", "FlashAttention-4's CuTe kernels",
        needs_gpu="FlashAttention-4's CuTe kernels are compiled for the GPU at hand",
        unsupported=lambda case: (
            half_precision_only("FlashAttention-4")(case) or contiguous_rows_only("FlashAttention-4")(case)
        ),
        requires=FLASH_ATTENTION_4,
    )


def flex_in_tf32(case: Case) -> str | None:
    """Its Triton kernels leave operands to tensor cores that drop their low bits (see triton_side/kernels/_tiles.py):
    of attention/gpt2-fp32, output and gradients erred 1.3 to 2.7 times the tolerance, where cuBLAS and kernels that
    round are at half of it (H200, torch 2.11.0)."""
    if case.precision == "tf32":
        return "FlexAttention cuts off to TF32 instead of rounding, and errs by up to 2.7 times what plain TF32 may"
    return None


def half_precision_only(what: str) -> Callable[[Case], str | None]:
    """For library kernels that exist in fp16 and bf16 alone."""

    def unsupported(case: Case) -> str | None:
        return f"{what} takes float16 and bfloat16, not {case.dtype}" if case.dtype == "float32" else None

    return unsupported
