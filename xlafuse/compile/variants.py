"""Named ways to compile the same function: XLA as it comes, and XLA with its fusion passes off."""

from collections.abc import Iterable
from typing import Any, Literal

from xlafuse.hlo.gpu_program import Kernel

Variant = Literal["default", "unfused"]
CommandBuffers = Literal["default", "all", "none"]

# The fewest launches in a row that XLA records into one command buffer (a CUDA graph), as XLA's option of that name.
# Its own default is 5 (jax 0.10.2 and 0.11.2).
_LEAST_IN_A_BUFFER = {"all": 1, "none": 2**31 - 1}

# What puts several instructions into one kernel on a GPU. XLA accepts a misspelt or renamed pass without a
# word: check_unfused.
FUSION_PASSES = (
    "priority-fusion", "multi_output_fusion", "triton-softmax-rewriter", "dot-merger", "copy_fusion",
    "sort-iota-fusion",  # of an argsort (jax 0.10.2)
    "dynamic-slice-fusion-rewriter-v2",  # of a layer's weights into the product that takes them (jax 0.11.2)
)


class FusionNotDisabled(RuntimeError):
    """A compile that should have been without fusion fused."""


def compiler_options(variant: Variant, command_buffers: CommandBuffers = "default") -> dict[str, Any]:
    """XLA's options for a variant, all of them accepted per compile.

    command_buffers: which launches are replayed from CUDA graphs: as XLA decides, all that XLA can record, or none.

    "unfused" also keeps GEMMs out of Triton, whose GEMM fusions absorb their neighbours. cuBLAS keeps what
    its own call does: a residual added to a product becomes that call's beta.
    """
    options: dict[str, Any] = {}
    if command_buffers != "default":
        options["xla_gpu_graph_min_graph_size"] = _LEAST_IN_A_BUFFER[command_buffers]
    match variant:
        case "default":
            return options
        case "unfused":
            unfused = {"xla_disable_hlo_passes": ",".join(FUSION_PASSES), "xla_gpu_enable_triton_gemm": False}
            return options | unfused
        case _:
            raise ValueError(f"variant must be 'default' or 'unfused', got {variant!r}")


def check_unfused(kernels: Iterable[Kernel]) -> None:
    """Raise FusionNotDisabled unless every kernel holds exactly one computing instruction.

    With all of them off, that held for each block, forward and both training halves, on jax 0.10.2 and, but for
    matmul and linear_gelu, which were not tried there, on 0.11.2 (for an H200). With one of the first three left
    on, some kernel of softmax, SwiGLU or attention held 2 to 15; with copy_fusion on, softmax's training forward
    over one column merged the copy of an output that leaves twice; with sort-iota-fusion on, an argsort held the
    numbers that it orders (0.10.2); with dynamic-slice-fusion-rewriter-v2 on, products of lm_step held the slice of
    their operand (0.11.2). Leaving dot-merger on is not seen: it makes one product of two, and no kernel of
    several instructions.
    """
    fused = [kernel for kernel in kernels if len(kernel.opcodes) > 1]
    if fused:
        examples = "; ".join(f"{kernel.name} holds {', '.join(kernel.opcodes)}" for kernel in fused[:3])
        raise FusionNotDisabled(
            f"an unfused compile must give every instruction its own kernel, but {len(fused)} hold several: "
            f"{examples}. This XLA fuses in a pass other than {', '.join(FUSION_PASSES)}: find it with "
            "--xla_dump_hlo_pass_re=.* and add it to FUSION_PASSES (XLA for CPUs always fuses; "
            "the variant is for GPUs)"
        )
