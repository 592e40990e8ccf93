"""Implementations that most blocks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .case import CONTIGUOUS, Case
from .dtype import DTYPES
from .implementation import Implementation


def compilers(block: str, train: bool = True, rounded_sums: tuple[str, ...] = ()) -> tuple[Implementation, ...]:
    """Return the plainly written block under each compiler, and eager.

    train: the block has a train direction. rounded_sums: of the JAX program (see Implementation).
    """
    xla, torch = f"xlafuse.blocks.{block}:apply", f"xlafuse.triton_side.blocks.{block}:apply"
    remat = Implementation(
        "xla-remat", xla, "xla-remat", "jax.jit of jax.checkpoint: only products are saved for backward",
        directions=("train",), rounded_sums=rounded_sums,
    )
    return (
        Implementation("xla", xla, "xla", "jax.jit, XLA's default passes", rounded_sums=rounded_sums),
        *([remat] if train else []),
        Implementation(
            "xla-unfused", xla, "xla-unfused", "jax.jit with XLA's fusion passes off", unfused_of="xla",
            rounded_sums=rounded_sums,
        ),
        Implementation("eager", torch, "eager", "PyTorch, one operation after the other", unfused_of="inductor"),
        Implementation("inductor", torch, "inductor", "torch.compile, default mode"),
        Implementation("inductor-max", torch, "inductor-max", "torch.compile, max-autotune-no-cudagraphs"),
    )


def xla_tf32x3(block: str, rounded_sums: tuple[str, ...] = ()) -> Implementation:
    """Return the JAX program with three TF32 products for each product of float32 arrays (`rounded_sums`: of `xla`)."""

    def unsupported(case: Case) -> str | None:
        if case.dtype != "float32":
            return f"only float32 arrays have products of three TF32 products, not {case.dtype}"
        return "TF32 products of row xla take a third of its products" if case.precision == "tf32" else None

    return Implementation(
        "xla-tf32x3", f"xlafuse.blocks.{block}:apply", "xla-tf32x3",
        "jax.jit, jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3: three TF32 products for each float32 product",
        unsupported=unsupported, rounded_sums=rounded_sums,
    )


def library(
    block: str, summary: str, unsupported: Callable[[Case], str | None] = lambda case: None
) -> Implementation:
    """Return the PyTorch library call that computes the block."""
    target = f"xlafuse.triton_side.library.{block}:apply"
    return Implementation("library", target, "eager", summary, unsupported=unsupported)


def triton(block: str) -> Implementation:
    return Implementation("triton", f"xlafuse.triton_side.kernels.{block}:apply", "triton", "hand-written Triton")


def cuda_graphs(block: str, static: tuple[str, ...] = ()) -> tuple[Implementation, ...]:
    """Return `triton` and `inductor` replayed from CUDA graphs, for a block whose launches cost time.

    A block has these rows where launches cost `triton` or `inductor` 5% or more in a realistic case on an H200; a table
    in docs/cuda-graphs.md shows them. static: its weights and caches, which a user's module keeps at one address.
    """
    why = "a CUDA graph is captured on a GPU only, and its kernels are those of"
    return (
        Implementation(
            "triton-cudagraphs", f"xlafuse.triton_side.kernels.{block}:apply", "triton-cudagraphs",
            "hand-written Triton, captured once as a CUDA graph and replayed", needs_gpu=f"{why} triton",
        ),
        Implementation(
            "inductor-cudagraphs", f"xlafuse.triton_side.blocks.{block}:apply", "inductor-cudagraphs",
            "torch.compile, reduce-overhead: replayed from CUDA graphs", needs_gpu=f"{why} inductor",
            static_inputs=static,
        ),
    )


def xla_triton(block: str) -> Implementation:
    return Implementation(
        "xla+triton", f"xlafuse.triton_side.kernels.{block}:apply", "xla-triton",
        "the launches of the hand-written Triton in a jax.jit, compiled by XLA's own Triton",
    )


def cuda(block: str) -> Implementation:
    return Implementation("cuda", f"xlafuse.triton_side.cuda.{block}:apply", "cuda", "raw CUDA C++ through NVRTC")


def pallas(block: str, unsupported: Callable[[Case], str | None]) -> Implementation:
    """Return the hand-written Pallas kernels of a block. unsupported: sizes that they do not take."""
    half_precision = half_precision_only("hand-written Pallas")
    return Implementation(
        "pallas", f"xlafuse.pallas.{block}:apply", "pallas", "hand-written Pallas (Mosaic GPU)",
        unsupported=lambda case: half_precision(case) or unsupported(case), requires=JAX_11,
    )


def xla_pallas(
    block: str, operation: str, unsupported: Callable[[Case], str | None], rounded_sums: tuple[str, ...] = ()
) -> Implementation:
    """Return the JAX block with one operation written in Pallas. unsupported: its sizes."""
    return replace(
        pallas(block, unsupported), name="xla+pallas", backend_name="xla-pallas", rounded_sums=rounded_sums,
        summary=f"the same layer with {operation} in Pallas",
    )


def pallas_product(block: str) -> Implementation:
    """Return a product of m, k and n in Pallas. Its tiles in shared memory consist of pieces of 8 x 64 elements."""

    def unsupported(case: Case) -> str | None:
        m, k, n = (case.sizes[axis] for axis in "mkn")
        if (m <= 8 or m % 8 == 0) and all(size % (64 if size > 64 else 8) == 0 for size in (k, n)):
            return None
        return f"hand-written Pallas copies tiles of whole 8 x 64 pieces, which m {m}, k {k}, n {n} do not divide into"

    return pallas(block, unsupported)


def pallas_rows(block: str, longest: int | None = 4096) -> Implementation:
    """Return a kernel over rows in Pallas. Each thread of a row's warpgroup has equal pieces of it.

    longest: columns of a row that is summed in one warpgroup; None for an elementwise kernel.
    """

    def unsupported(case: Case) -> str | None:
        columns = case.sizes["columns"]
        if columns % 128 == 0 and (longest is None or columns <= longest):
            return None
        bound = "" if longest is None else f", up to {longest}"
        return f"hand-written Pallas takes rows of multiples of 128 columns{bound}, not {columns}"

    return pallas(block, unsupported)


JAX_11 = ("python>=3.12", "jax>=0.11")  # Python 3.11 has jax 0.10 at most
LIGER = "liger-kernel==0.8.5"
TOKAMAX = "tokamax==0.0.17"
CUTE = ("quack-kernels==0.6.5", "nvidia-cutlass-dsl[cu13]==4.8.1")
FLASH_ATTENTION_4 = ("flash-attn-4==4.0.0b36", *CUTE)


def inference_only(what: str) -> Callable[[Case], str | None]:
    """Refuse cases with gradients, for library kernels whose backward writes over the inputs."""

    def unsupported(case: Case) -> str | None:
        return f"{what} writes its gradients over its inputs" if case.differentiates else None

    return unsupported


def contiguous_rows_only(what: str) -> Callable[[Case], str | None]:
    """Refuse transposed inputs, for library kernels whose caller would copy them."""

    def unsupported(case: Case) -> str | None:
        if case.layout == CONTIGUOUS:
            return None
        return f"{what} takes inputs whose last axis is contiguous, not {case.layout} ones"

    return unsupported


def whole_vectors(what: str, size: int) -> Callable[[Case], str | None]:
    """Refuse rows that are no multiple of `size` bytes, for library kernels that copy whole pieces."""

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
    """Return Liger's kernels as an implementation.

    They compile like our own Triton kernels and are not checked on the CPU: Triton's interpreter lacks the libdevice
    functions that most of them call, and `.to` of a scalar argument.
    """
    return Implementation(
        "liger", f"xlafuse.triton_side.library.liger:{block}", "triton-library", "Liger's Triton kernels",
        needs_gpu=needs_gpu, unsupported=unsupported, requires=(LIGER,),
    )


def quack(block: str, piece: int, unsupported: Callable[[Case], str | None] = lambda case: None) -> Implementation:
    """Return quack's kernels as an implementation. piece: the bytes of a row that they copy at a time."""
    whole = whole_vectors(f"quack's {block}", piece)
    return Implementation(
        "quack", f"xlafuse.triton_side.library.quack:{block}", "eager", "quack's CuTe kernels",
        needs_gpu="quack's CuTe kernels are compiled only for the GPU of the machine",
        unsupported=lambda case: unsupported(case) or whole(case), requires=CUTE,
    )


def tokamax(
    block: str, what: str, unsupported: Callable[[Case], str | None] = lambda case: None
) -> Implementation:
    """Return tokamax's kernels as an implementation. what: its function. unsupported: sizes without such a kernel.

    In float32 tokamax has none that multiplies in full precision or in TF32, and calls XLA.
    """
    half_precision = half_precision_only(f"tokamax's {what}")
    return Implementation(
        "tokamax", f"xlafuse.library.tokamax:{block}", "xla-library", f"tokamax.{what}, by the kernels that it chooses",
        unsupported=lambda case: half_precision(case) or unsupported(case), requires=(*JAX_11, TOKAMAX),
    )


def pallas_examples(block: str, what: str, unsupported: Callable[[Case], str | None]) -> Implementation:
    """Return a block with products by the example kernels that jax ships. what: the module. unsupported: its sizes."""
    half_precision = half_precision_only("jax's Pallas example")
    return Implementation(
        "pallas-examples", f"xlafuse.library.pallas_examples:{block}", "xla-library", f"jax's example {what} (Pallas)",
        unsupported=lambda case: half_precision(case) or unsupported(case), directions=("fwd",),
        requires=JAX_11,
    )


def flash_attention_4(function: str = "apply") -> Implementation:
    return Implementation(
        "fa4", f"xlafuse.triton_side.library.flash_attention_4:{function}", "eager", "FlashAttention-4's CuTe kernels",
        needs_gpu="FlashAttention-4's CuTe kernels are compiled only for the GPU of the machine",
        unsupported=lambda case: (
            half_precision_only("FlashAttention-4")(case) or contiguous_rows_only("FlashAttention-4")(case)
        ),
        requires=FLASH_ATTENTION_4,
    )


def flex_in_tf32(case: Case) -> str | None:
    """Refuse TF32: FlexAttention's tensor cores drop the low bits of operands instead of rounding them.

    In attention/gpt2-fp32 its output and gradients erred by 1.3 to 2.7 times the tolerance; cuBLAS and kernels that
    round err by half of it (H200, torch 2.11.0). See triton_side/kernels/shared/tiles.py.
    """
    if case.precision == "tf32":
        return "FlexAttention truncates to TF32 instead of rounding, and errs by up to 2.7 times the tolerance of TF32"
    return None


def half_precision_only(what: str) -> Callable[[Case], str | None]:
    """Refuse float32, for library kernels that exist in fp16 and bf16 only."""

    def unsupported(case: Case) -> str | None:
        return f"{what} takes float16 and bfloat16, not {case.dtype}" if case.dtype == "float32" else None

    return unsupported


def xla_ranks(block: str, partitioned: bool = True) -> tuple[Implementation, ...]:
    """Return the JAX programs of a block that spans several GPUs. partitioned: XLA's partitioner can split it."""
    target = f"xlafuse.blocks.{block}:apply"
    whole = f"xlafuse.blocks.{block}:apply_whole"
    sharded = (
        Implementation("xla-sharded", whole, "xla-ranks-sharded", "jax.jit with shardings: XLA adds the exchanges"),
        Implementation(
            "xla-windowed", whole, "xla-ranks-windowed", "the same, with products split to overlap with exchanges",
        ),
    )
    return (
        Implementation("xla", target, "xla-ranks", "jax.shard_map with explicit exchanges, XLA's default passes"),
        Implementation(
            "xla-in-order", target, "xla-ranks-in-order", "the same, without XLA's latency-hiding scheduler",
        ),
        *(sharded if partitioned else ()),
    )


def xla_ragged(block: str) -> Implementation:
    return Implementation(
        "xla-ragged", f"xlafuse.blocks.{block}:apply_ragged", "xla-ranks-ragged",
        "jax.shard_map with ragged exchanges of no more than the routed rows",
    )


def torch_ranks(block: str, async_tensor_parallel: bool = True, routed: bool = False) -> tuple[Implementation, ...]:
    """Return the PyTorch and Triton programs of a block that spans several GPUs.

    routed: they read on the host how many rows to exchange. So no CUDA graph can repeat `triton`, and no compile
    without a GPU knows the sizes in `inductor`.
    """
    module = f"xlafuse.triton_side.parallel.{block}"
    asynchronous = Implementation(
        "inductor-async", f"{module}:inductor_async", "inductor-ranks-async",
        "torch.compile with products fused with exchanges through symmetric memory",
    )
    triton = Implementation(
        "triton", f"{module}:triton", "triton-ranks", "hand-written Triton beside copies from other GPUs' memory"
    )
    return (
        Implementation("eager", f"{module}:eager", "eager-ranks", "PyTorch and NCCL, one operation after the other"),
        Implementation(
            "inductor", f"{module}:inductor", "inductor-ranks-routed" if routed else "inductor-ranks",
            "torch.compile, default mode, and NCCL",
        ),
        *([asynchronous] if async_tensor_parallel else []),
        triton,
        Implementation(
            "triton-put", f"{module}:triton_put", "triton-ranks",
            "hand-written Triton beside copies into the other GPUs' memory",
        ),
        Implementation(
            "triton-in-order", f"{module}:triton_in_order", "triton-ranks",
            "the kernels and copies of triton, one after the other",
        ),
        *([] if routed else [replayed_ranks(triton)]),
    )


def triton_ranks_all_slots(block: str) -> Implementation:
    """Return the Triton program of a mixture of experts whose copies do not depend on the routing."""
    return Implementation(
        "triton-all-slots", f"xlafuse.triton_side.parallel.{block}:triton_all_slots", "triton-ranks",
        "the kernels of triton beside copies of all slots, of one size for every routing",
    )


def replayed_ranks(plain: Implementation) -> Implementation:
    """Return a Triton program over several GPUs, replayed from one CUDA graph with its copies."""
    return replace(
        plain, name=f"{plain.name}-cudagraphs", backend_name="triton-ranks-cudagraphs",
        summary=f"the kernels and copies of {plain.name}, captured once as a CUDA graph and replayed",
        needs_gpu=f"a CUDA graph is captured on a GPU only, and its kernels are those of {plain.name}",
    )
