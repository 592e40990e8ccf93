"""The variants of a compile: XLA's defaults, and XLA without its fusion passes."""

from collections.abc import Iterable
from typing import Any, Literal

from xlafuse.hlo.gpu_program import Kernel

Variant = Literal["default", "unfused"]
CommandBuffers = Literal["default", "all", "none"]

# Values of xla_gpu_graph_min_graph_size, the fewest consecutive launches that XLA records into one command buffer (a
# CUDA graph). The default is 5 (jax 0.10.2 and 0.11.2).
_MIN_GRAPH_SIZE = {"all": 1, "none": 2**31 - 1}

# The passes that put several instructions into one GPU kernel. XLA ignores names of passes that it does not know, so
# check_unfused checks the compiled kernels.
FUSION_PASSES = (
    "priority-fusion", "multi_output_fusion", "triton-softmax-rewriter", "dot-merger", "copy_fusion",
    "sort-iota-fusion",  # fuses an argsort with its indices (jax 0.10.2)
    "dynamic-slice-fusion-rewriter-v2",  # fuses the slice of a layer's weights into its product (jax 0.11.2)
)


class FusionNotDisabled(RuntimeError):
    """A kernel of an unfused compile holds several instructions."""


def compiler_options(variant: Variant, command_buffers: CommandBuffers = "default") -> dict[str, Any]:
    """Return XLA's options for a variant. Each of them can be set for a single compile.

    command_buffers: the launches that run from CUDA graphs: XLA's choice, all that XLA can record, or none.

    "unfused" also turns off Triton GEMMs, because they absorb neighbouring operations. cuBLAS calls keep their
    epilogues: adding a residual to a product stays inside the call (its beta).
    """
    options: dict[str, Any] = {}
    if command_buffers != "default":
        options["xla_gpu_graph_min_graph_size"] = _MIN_GRAPH_SIZE[command_buffers]
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

    With all FUSION_PASSES off, every block passed this check for an H200, in inference and in both training phases, on
    jax 0.10.2 and 0.11.2. Only matmul and linear_gelu are untested on 0.11.2. With one pass left on:

    | pass left on | kernels of several instructions |
    |---|---|
    | one of the first three | kernels of 2 to 15 instructions in softmax, SwiGLU or attention |
    | copy_fusion | softmax over one column, in training forward, with the copy of an output that is returned twice |
    | sort-iota-fusion | an argsort with the indices that it orders (jax 0.10.2) |
    | dynamic-slice-fusion-rewriter-v2 | products of lm_step with the slice of their operand (jax 0.11.2) |
    | dot-merger | none: it merges two products into one, which this check cannot see |
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
