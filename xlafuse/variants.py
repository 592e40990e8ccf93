"""Named ways to compile the same function: XLA as it comes, and XLA with its fusion passes off."""

from collections.abc import Iterable
from typing import Any, Literal

from xlafuse.hlo import Kernel

Variant = Literal["default", "unfused"]

# What puts several instructions into one kernel on a GPU. XLA accepts a misspelt or renamed pass without a
# word: check_unfused.
FUSION_PASSES = ("priority-fusion", "multi_output_fusion", "triton-softmax-rewriter", "dot-merger", "copy_fusion")


class FusionNotOff(RuntimeError):
    """A compile that should have been without fusion fused."""


def compiler_options(variant: Variant) -> dict[str, Any]:
    """XLA's options for a variant, all of them accepted per compile.

    "unfused" also keeps GEMMs out of Triton, whose GEMM fusions absorb their neighbours. cuBLAS keeps what
    its own call does: a residual added to a product becomes that call's beta.
    """
    match variant:
        case "default":
            return {}
        case "unfused":
            return {"xla_disable_hlo_passes": ",".join(FUSION_PASSES), "xla_gpu_enable_triton_gemm": False}
        case _:
            raise ValueError(f"variant must be 'default' or 'unfused', got {variant!r}")


def check_unfused(kernels: Iterable[Kernel]) -> None:
    """Raise FusionNotOff unless every kernel holds exactly one computing instruction.

    With all of them off, that held for each of the six blocks, forward and both training halves, on jax
    0.10.2 and 0.11.2 (for an H200). With one of the first three left on, some kernel of softmax, SwiGLU or
    attention held 2 to 15; with copy_fusion on, softmax's training forward over one column merged the copy of
    an output that leaves twice. Leaving dot-merger on is not seen: it makes one product of two, and no kernel
    of several instructions.
    """
    fused = [kernel for kernel in kernels if len(kernel.opcodes) > 1]
    if fused:
        examples = "; ".join(f"{kernel.name} holds {', '.join(kernel.opcodes)}" for kernel in fused[:3])
        raise FusionNotOff(
            f"an unfused compile must give every instruction its own kernel, but {len(fused)} hold several: "
            f"{examples}. This XLA fuses in a pass other than {', '.join(FUSION_PASSES)}: find it with "
            "--xla_dump_hlo_pass_re=.* and add it to FUSION_PASSES (XLA for CPUs always fuses; "
            "the variant is for GPUs)"
        )
