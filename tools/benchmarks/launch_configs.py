"""Time hand-written kernels under other launch configurations than their own, to tune them.

    python tools/benchmarks/launch_configs.py KERNEL [KERNEL ...] [--top N]

It needs an NVIDIA GPU. Candidates compile in parallel processes, each of which launches its candidate once. Then
triton.testing.do_bench (CUDA events, L2 flushed) times each alone, which is good for ranking. Use `xlafuse run` for
times in reports. A candidate that does not compile or launch is counted but not shown. `*` marks the configuration that
the kernel chooses, `peer` the call of PyTorch that computes the same. "of a copy": the time of a copy that moves as
many bytes, over the kernel's.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton_side.kernels import (
    cross_entropy,
    dropout_residual_norm,
    embedding,
    layernorm,
    linear_cross_entropy,
    matmul,
    matmul_fp8,
    moe,
    moe_routing,
    rope,
    softmax,
)
from triton_side.kernels.embedding import EmbeddingConfig
from triton_side.kernels.matmul import pointer_config
from triton_side.kernels.rope import RopeConfig
from triton_side.kernels.shared import grouped_gradient, grouped_product
from triton_side.kernels.shared.launch import FlatConfig, RowConfig, multiprocessors, next_power_of_2
from triton_side.kernels.shared.matmul_tiles import MatmulConfig


@dataclass(frozen=True)
class Kernel:
    """A kernel to tune.

    prepare: makes the inputs on the GPU. call: launches the kernel with inputs and a configuration.
    work: (amount, unit) of a call. chosen: returns the kernel's own configuration. peer: computes the same in PyTorch.
    """

    prepare: Callable[[], Any]
    call: Callable[[Any, Any], Any]
    candidates: tuple[Any, ...]
    work: tuple[float, str]
    chosen: Callable[[Any], Any]
    peer: Callable[[Any], Any] | None = None


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rope_of(
    batch: int, heads: int, kv_heads: int, sequence: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Kernel:
    def inputs() -> tuple[torch.Tensor, ...]:
        positions = torch.arange(sequence, device="cuda", dtype=torch.int32).expand(batch, -1).contiguous()
        q, k = (normal(batch, number, sequence, head_dim, dtype=dtype) for number in (heads, kv_heads))
        return q, k, positions

    return Kernel(
        inputs, lambda given, config: rope.launch_rope(given[0], given[1], given[2], 500000.0, config=config),
        tuple(rope_candidates(next_power_of_2(head_dim // 2), heads + kv_heads)),
        (2.0 * dtype.itemsize * batch * (heads + kv_heads) * sequence * head_dim, "B"),
        lambda given: rope.configure(
            batch * sequence, heads, kv_heads, head_dim, dtype.itemsize, multiprocessors(given[0].device)
        ),
    )


def rope_candidates(pairs: int, heads: int) -> Iterable[RopeConfig]:
    """Yield configurations with 8 to 32 pairs per thread, and angles that at most two threads compute."""
    for rows, heads_at_once, splits, warps in itertools.product((4, 8, 16, 32, 64), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        threads = warps * 32
        if threads // 2 <= rows * pairs // 8 <= 2 * threads and 8 <= rows * heads_at_once * pairs // threads <= 32:
            if splits * heads_at_once <= heads:
                yield RopeConfig(rows=rows, heads=heads_at_once, splits=splits, num_warps=warps)


def row_candidates(resident: bool) -> tuple[RowConfig, ...]:
    """Return configurations for 8192 rows of 4096 columns on an H200's 132 multiprocessors.

    A thread has 4 to 32 elements. All programs are resident and may prefetch; without `resident`, there are also
    configurations with one tile per program.
    """
    found = []
    for block_rows, warps in itertools.product((1, 2, 4), (4, 8, 16, 32)):
        if 4 <= block_rows * 128 // warps <= 32:
            if not resident:
                found.append(RowConfig(block_rows, 4096, warps, 1, 8192 // block_rows))
            for stages, programs in itertools.product((1, 2, 3), (132, 264, 396, 528)):
                if programs * warps <= 132 * 64:
                    found.append(RowConfig(block_rows, 4096, warps, stages, programs))
    return tuple(found)


def rows_of(
    launch: Callable[..., Any], configure: Callable[..., RowConfig], matrices: int, resident: bool = False
) -> Kernel:
    """Return a kernel on matrices of 8192 rows and 4096 columns in bfloat16, of which it reads or writes `matrices`."""
    return Kernel(
        lambda: (
            *(normal(8192, 4096) for _ in range(2)), *(normal(4096) for _ in range(3)),
            *torch.ones(2, 8192, device="cuda"), torch.tensor((7, -9), dtype=torch.int32, device="cuda"),
        ),
        launch, row_candidates(resident), (2.0 * matrices * 8192 * 4096, "B"),
        lambda given: configure(8192, 4096, 2, multiprocessors(given[0].device)),
    )


def looped_candidates() -> Iterable[RowConfig]:
    """Yield configurations that loop over a row in blocks, with up to 64 warps on each of 132 multiprocessors."""
    for columns, warps, stages, resident in itertools.product(
        (4096, 8192, 16384), (8, 16, 32), (1, 2), (1, 2, 3, 4)
    ):
        if warps * resident <= 64 and 8 <= columns // (32 * warps) <= 32:
            yield RowConfig(1, columns, warps, stages, 132 * resident)


def held_candidates(columns: int) -> Iterable[RowConfig]:
    """Yield configurations that hold a row of up to 32,768 columns in registers, one a multiprocessor."""
    if columns <= 32768:
        for warps, stages in itertools.product((16, 32), (1, 2, 3)):
            yield RowConfig(1, next_power_of_2(columns), warps, stages, 132)


def softmax_of(rows: int, columns: int) -> Kernel:
    return Kernel(
        lambda: normal(rows, columns), softmax.forward, (*looped_candidates(), *held_candidates(columns)),
        (4.0 * rows * columns, "B"),
        lambda x: softmax.configure_forward(rows, columns, 2, multiprocessors(x.device)),
    )


def normalised_gradients(given: tuple[torch.Tensor, ...], config: RowConfig) -> Any:
    x, weight, mean, rstd, dy = given
    return layernorm.backward(x, weight, mean, rstd, dy, config)


def layernorm_backward_of(rows: int, columns: int) -> Kernel:
    return Kernel(
        lambda: (normal(rows, columns), normal(columns), *torch.ones(2, rows, device="cuda"), normal(rows, columns)),
        normalised_gradients,
        tuple(
            RowConfig(1, block, warps, stages, programs)
            for block, programs in ((next_power_of_2(columns), 132), (next_power_of_2(columns) // 2, 66))
            for warps, stages in itertools.product((8, 16, 32), (1, 2, 3)) if block <= 1024 * warps
        ),
        (6.0 * rows * columns, "B"),
        lambda given: layernorm.configure_backward(rows, columns, 2, multiprocessors(given[0].device)),
    )


def softmax_backward_of(rows: int, columns: int) -> Kernel:
    return Kernel(
        lambda: (normal(rows, columns).softmax(1), normal(rows, columns)),
        lambda given, config: softmax.backward(given[0], given[1], config),
        tuple(looped_candidates()), (6.0 * rows * columns, "B"),
        lambda given: softmax.configure_backward(rows, columns, 2, multiprocessors(given[0].device)),
    )


def embedding_of(columns: int) -> Kernel:
    """Return the gradient of 8192 ids that follow Zipf's law, as in the block."""
    def inputs() -> tuple[torch.Tensor, ...]:
        ids = torch.multinomial(1 / torch.arange(1.0, 3001.0), 8192, replacement=True)
        return torch.randperm(128256)[ids].to("cuda", torch.int32), normal(8192, columns)

    return Kernel(
        inputs, lambda given, config: embedding.backward(given[0], given[1], 128256, config),
        tuple(
            EmbeddingConfig(tokens, width, width // 256, rows)
            for tokens, width, rows in itertools.product((8, 16, 32), (1024, 2048), (16, 32, 64))
        ),
        (2.0 * columns * (128256 + 8192), "B"), lambda given: embedding.configure_backward(columns, 2),
    )


def normalised(given: tuple[torch.Tensor, ...], config: RowConfig) -> Any:
    x, _, _, weight, shift, *_ = given
    return layernorm.forward(x, weight, shift, 1e-5, save=False, config=config)


def dropped(given: tuple[torch.Tensor, ...], config: RowConfig) -> Any:
    x, residual, bias, weight, shift, _, _, seed = given
    return dropout_residual_norm.forward(
        x, bias, residual, weight, shift, seed, 0.1, 1e-5, save_statistics=False, config=config
    )


def dropped_gradients(given: tuple[torch.Tensor, ...], config: RowConfig) -> Any:
    h, dy, _, weight, _, mean, rstd, seed = given
    return dropout_residual_norm.backward(h, weight, seed, mean, rstd, dy, h, 0.1, config)


def logits(tokens: int, classes: int) -> tuple[torch.Tensor, ...]:
    statistics = torch.ones(2, tokens, device="cuda")
    return normal(tokens, classes), torch.randint(classes, (tokens,), device="cuda"), *statistics


def cross_entropy_of(tokens: int, classes: int) -> Kernel:
    return Kernel(
        lambda: logits(tokens, classes),
        lambda given, config: cross_entropy.forward(given[0], given[1], 0.1, 1e-4, save=False, config=config),
        FLAT, (2.0 * tokens * classes, "B"),
        lambda given: cross_entropy.configure_forward(tokens, 2, multiprocessors(given[0].device)),
    )


def logits_gradient(given: tuple[torch.Tensor, ...], config: FlatConfig) -> torch.Tensor:
    x, labels, maximum, log_sum = given
    saved = cross_entropy.SavedStatistics(maximum, log_sum, labels[0])
    return cross_entropy.backward(x, labels, saved, maximum[0], 0.1, 1e-4, config)


def product(m: int, k: int, n: int, candidates: Iterable[MatmulConfig]) -> Kernel:
    return Kernel(
        lambda: (normal(m, k), normal(k, n)),
        lambda operands, config: matmul.launch_matmul(operands[0], operands[1], config),
        tuple(candidates), (2.0 * m * k * n, "FLOP"),
        lambda operands: matmul.choose_config(matmul.matmul_config, *operands),
        lambda operands: torch.mm(*operands),
    )


def few_rows(element_bytes: int = 2) -> tuple[MatmulConfig, ...]:
    """Return tiles of 16 rows whose steps are 128 to 512 bytes deep and prefetch at most 220 kB."""
    return tuple(
        pointer_config(16, n, k // element_bytes, 4, s)
        for n in (32, 64, 128) for k in (128, 256, 512) for s in (3, 5, 8) if s * (n + 16) * k <= 220_000
    )


def fp8_product(m: int, k: int, n: int, candidates: Iterable[MatmulConfig]) -> Kernel:
    def operands() -> tuple[torch.Tensor, ...]:
        a, b = (normal(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        return a, b.T, torch.ones((), device="cuda"), torch.ones((), device="cuda")

    def peer(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        a, b, a_scale, b_scale = given
        return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=False)

    def call(given: tuple[torch.Tensor, ...], config: MatmulConfig) -> torch.Tensor:
        a, b, a_scale, b_scale = given
        return matmul_fp8.launch_fp8(a, b, a_scale, b_scale, config)

    return Kernel(
        operands, call, tuple(candidates),
        (2.0 * m * k * n, "FLOP"), lambda given: matmul.choose_config(matmul_fp8.fp8_config, *given[:2]), peer,
    )


TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 4096, 2048, 3584, 8, 2  # of moe's quick case


def slots_inputs(products: int) -> tuple[torch.Tensor, ...]:
    """Return x, a random route's rows and offsets, and moe's other gradient operands, ordered by expert."""
    x, router = normal(TOKENS, WIDTH), normal(EXPERTS, WIDTH)
    found, _ = moe_routing.route_tokens(x, router, TOP_K, save=False)
    return x, found.rows, found.offsets, *(normal(TOKENS * TOP_K, HIDDEN) for _ in range(products))


@dataclass(frozen=True)
class Gathering:
    """A configuration of moe's gradients. copies: x's rows are first copied in the order of the experts."""

    tiles: MatmulConfig
    copies: bool


def weights_gradients(given: tuple[torch.Tensor, ...], config: Gathering) -> Any:
    """Compute dw_gate and dw_up from x and two operands, or dw_down from one operand and x in place of dy."""
    x, numbers, offsets, *others = given
    rows: torch.Tensor | None = numbers
    if config.copies:
        x, rows = embedding.forward(x, numbers), None
    if len(others) == 1:
        return grouped_gradient.launch_group_gradients(others[0], x, rows, offsets, config.tiles, a_gathered=False)
    b, b2 = others
    return grouped_gradient.launch_group_gradients(x, b, rows, offsets, config.tiles, a_gathered=True, b2=b2)


def moe_gradients(products: int, candidates: Iterable[Gathering]) -> Kernel:
    def chosen(given: tuple[torch.Tensor, ...]) -> Gathering:
        copied, left = moe.copy_in_slot_order(given[0], given[1], name="x")
        return Gathering(moe.gradient_config(copied, given[3], accumulators=products), left is None)

    work = 2.0 * TOKENS * TOP_K * WIDTH * HIDDEN * products
    return Kernel(
        lambda: slots_inputs(products), weights_gradients, tuple(candidates), (work, "FLOP"), chosen
    )


def gathering(*configs: MatmulConfig) -> Iterable[Gathering]:
    return (Gathering(config, copies=False) for config in configs)


def copying(*configs: MatmulConfig) -> Iterable[Gathering]:
    return (Gathering(config, copies=True) for config in configs)


def experts_inputs() -> tuple[torch.Tensor, ...]:
    """Return rows of two widths in the order of the experts, the offsets, and the experts' matrices."""
    x, rows, offsets, act = slots_inputs(1)
    up, down = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return x[rows.long()], act, offsets, normal(*up), normal(*up), normal(*down)


def grouped_down(given: tuple[torch.Tensor, ...], config: MatmulConfig) -> torch.Tensor:
    _, act, offsets, _, _, w_down = given
    return grouped_product.launch_grouped_product(act, None, w_down, offsets, len(act), config)


def grouped_gate_up(given: tuple[torch.Tensor, ...], config: MatmulConfig) -> Any:
    x, _, offsets, w_gate, w_up, _ = given
    return grouped_product.launch_gate_up(x, None, w_gate, w_up, offsets, config, save=False)


def head_inputs() -> tuple[torch.Tensor, ...]:
    """Return h, w and labels of a chunk of linear_cross_entropy, its logits, and dw."""
    h, w = normal(1024, 4096), normal(128256, 4096) / 64
    labels = torch.randint(128256, (1024,), device="cuda", dtype=torch.int32)
    return h, w, labels, normal(1024, 128256), torch.zeros_like(w)


def head_statistics(given: tuple[torch.Tensor, ...], config: MatmulConfig) -> None:
    h, w, labels, logits, _ = given
    losses, maximum, log_sum = torch.empty((3, len(h)), device="cuda")
    linear_cross_entropy.launch_statistics(
        h, w, labels, losses, 0.1, 1e-4, lambda *about: config, (logits, maximum, log_sum)
    )


def head_gradient(given: tuple[torch.Tensor, ...], config: MatmulConfig) -> torch.Tensor:
    h, _, _, logits, dw = given
    return matmul.launch_matmul(logits.T, h, config, residual=dw, out=dw)


FLAT = tuple(FlatConfig(32 * warps * each, warps) for warps in (1, 2, 4, 8, 16) for each in (8, 16, 32, 64))
WIDE = MatmulConfig(128, 256, 64, 8, 3)
ONE_ACCUMULATOR = (
    *(MatmulConfig(128, 256, 64, 8, s, g) for s in (3, 4) for g in (8, 16)), MatmulConfig(256, 128, 64, 8, 4, 16),
    *(MatmulConfig(128, 128, 64, 4, 3, g, programs=2) for g in (8, 16)),
)
FP8 = (
    *(MatmulConfig(128, 256, 128, 8, s, g) for s in (3, 4) for g in (8, 16)), MatmulConfig(256, 128, 128, 8, 4, 16),
    MatmulConfig(128, 128, 128, 8, 4, 16), MatmulConfig(128, 128, 128, 4, 3, 16, programs=2),
)
TWO_ACCUMULATORS = (
    *(MatmulConfig(128, 128, 64, 8, s, g) for s in (3, 4) for g in (8, 16)),
    MatmulConfig(128, 64, 64, 4, 3, 16, programs=2),
)
KERNELS = {
    "rope": rope_of(2, 32, 8, 4096, 128),
    "rope-phi": rope_of(2, 32, 32, 4096, 96),
    "rope-qwen": rope_of(8, 14, 2, 1024, 64, torch.float16),
    "softmax-vocabulary": softmax_of(4096, 50257),
    "softmax-32768": softmax_of(8192, 32768),
    "softmax-65536": softmax_of(4096, 65536),
    "softmax-vocabulary-backward": softmax_backward_of(4096, 50257),
    "softmax-32768-backward": softmax_backward_of(8192, 32768),
    "embedding-backward": embedding_of(2048),
    "embedding-4096-backward": embedding_of(4096),
    "layernorm-16k-backward": layernorm_backward_of(4096, 16384),
    "layernorm": rows_of(normalised, layernorm.configure_forward, 2),
    "dropout_residual_norm": rows_of(dropped, dropout_residual_norm.configure_forward, 4),
    "dropout_residual_norm-backward": rows_of(
        dropped_gradients, dropout_residual_norm.configure_backward, 5, resident=True
    ),
    "cross_entropy": cross_entropy_of(2048, 128256),
    "cross_entropy-32k": cross_entropy_of(8192, 32000),
    "cross_entropy-backward": Kernel(
        lambda: logits(2048, 128256), logits_gradient, FLAT, (4.0 * 2048 * 128256, "B"),
        lambda given: cross_entropy.configure_backward(2),
    ),
    "matmul-llama-8b": product(8192, 4096, 4096, (replace(WIDE, group_m=g) for g in (2, 4, 8, 16, 32))),
    "skinny-matmul": product(16, 4096, 14336, few_rows()),
    "skinny-linear": product(16, 4096, 4096, few_rows()),
    "skinny-linear_gelu": product(16, 4096, 16384, few_rows()),
    "skinny-linear_residual": product(16, 14336, 4096, few_rows()),
    "skinny-matmul_fp8": fp8_product(16, 4096, 14336, few_rows(1)),
    "moe-down": Kernel(
        experts_inputs, grouped_down, ONE_ACCUMULATOR, (2.0 * TOKENS * TOP_K * WIDTH * HIDDEN, "FLOP"),
        lambda given: moe.product_config(given[5], given[1], slots=TOKENS * TOP_K),
        lambda given: torch._grouped_mm(given[1], given[5], offs=given[2][1:]),
    ),
    "moe-gate-up": Kernel(
        experts_inputs, grouped_gate_up, TWO_ACCUMULATORS, (4.0 * TOKENS * TOP_K * WIDTH * HIDDEN, "FLOP"),
        lambda given: moe.product_config(given[3], given[0], slots=TOKENS * TOP_K, accumulators=2),
    ),
    "linear_cross_entropy-statistics": Kernel(
        head_inputs, head_statistics, ONE_ACCUMULATOR, (2.0 * 1024 * 4096 * 128256, "FLOP"),
        lambda given: matmul.choose_config(matmul.matmul_config, given[0], given[1].T),
        lambda given: torch.mm(given[0], given[1].T, out=given[3]),
    ),
    "linear_cross_entropy-dw": Kernel(
        head_inputs, head_gradient, ONE_ACCUMULATOR, (2.0 * 1024 * 4096 * 128256, "FLOP"),
        lambda given: matmul.choose_config(matmul.matmul_config, given[3].T, given[0]),
        lambda given: given[4].addmm_(given[3].T, given[0]),
    ),
    # With s stages, gathered rows have (s + 1) // 2 buffers, because their load waits for the load of their indices.
    "moe_gradients_gate_up": moe_gradients(2, (
        *copying(*(MatmulConfig(128, 128, 64, 8, s, g) for s in (3, 4) for g in (4, 8, 16))),
        *copying(MatmulConfig(256, 64, 64, 8, 4), MatmulConfig(128, 128, 32, 8, 6)),
        *copying(MatmulConfig(128, 64, 64, 4, 3), MatmulConfig(128, 64, 64, 4, 3, programs=2)),
        *gathering(*(MatmulConfig(128, 128, 64, 8, s, g) for s in (3, 5, 7) for g in (8, 16))),
        *gathering(MatmulConfig(256, 64, 64, 8, 5), MatmulConfig(128, 64, 64, 4, 5, programs=2)),
        *gathering(pointer_config(128, 128, 64, 8, 3), pointer_config(128, 128, 64, 8, 5)),
    )),
    "moe_gradients_down": moe_gradients(1, (
        *copying(*(MatmulConfig(128, 256, 64, 8, s, g) for s in (3, 4) for g in (4, 8, 16))),
        *copying(MatmulConfig(256, 128, 64, 8, 4), MatmulConfig(128, 256, 32, 8, 6)),
        *copying(MatmulConfig(128, 128, 64, 4, 3), MatmulConfig(128, 128, 64, 4, 3, programs=2)),
        *gathering(*(MatmulConfig(128, 256, 64, 8, s, g) for s in (3, 5, 7) for g in (8, 16))),
        *gathering(MatmulConfig(256, 128, 64, 8, 5), MatmulConfig(128, 128, 64, 4, 5, programs=2)),
        *gathering(pointer_config(128, 256, 64, 8, 3), pointer_config(128, 256, 64, 8, 5)),
    )),
    "matmul_fp8": fp8_product(8192, 8192, 8192, FP8),
    "matmul_fp8-llama-8b-up": fp8_product(8192, 4096, 14336, FP8),
}


def launch_once(name: str, index: int) -> bool:
    """Compile and launch a candidate, which fills Triton's cache. Return whether that worked."""
    kernel = KERNELS[name]
    try:
        kernel.call(kernel.prepare(), kernel.candidates[index])
        torch.cuda.synchronize()
    except Exception as problem:  # too many registers, too much shared memory, or a compiler error
        print(f"{kernel.candidates[index]}: {type(problem).__name__}: {str(problem)[:100]}", file=sys.stderr)
        return False
    return True


def copy_seconds(moved: float) -> float:
    """Return the time in which PyTorch copies half as many bytes, so that it reads and writes `moved`."""
    source = torch.empty(int(moved) // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return float(do_bench(lambda: target.copy_(source), return_mode="median")) * 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+", choices=sorted(KERNELS), metavar="KERNEL")
    parser.add_argument("--top", type=int, default=8, help="lines a kernel (default 8)")
    arguments = parser.parse_args()
    work = [(name, index) for name in arguments.kernels for index in range(len(KERNELS[name].candidates))]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        usable = dict(zip(work, pool.map(launch_once, *zip(*work, strict=True)), strict=True))
    for name in arguments.kernels:
        kernel = KERNELS[name]
        given = kernel.prepare()
        chosen = kernel.chosen(given)
        configs = {c for i, c in enumerate(kernel.candidates) if usable[name, i]} | {chosen}
        times = {c: do_bench(lambda c=c: kernel.call(given, c), return_mode="median") * 1e-3 for c in configs}  # noqa: B023
        amount, unit = kernel.work
        ranked = sorted(times, key=times.__getitem__)
        copy = copy_seconds(amount) if unit == "B" else None
        rows = [
            (
                "*" if config == chosen else "", times[config] * 1e6, amount / times[config] / 1e12,
                copy and copy / times[config], config,
            )
            for place, config in enumerate(ranked) if place < arguments.top or config == chosen
        ]
        if kernel.peer is not None:
            peer = do_bench(lambda: kernel.peer(given), return_mode="median") * 1e-3  # noqa: B023
            rows.append(("peer", peer * 1e6, amount / peer / 1e12, copy and copy / peer, ""))
        print(f"\n{name}: {len(configs)} of {len(kernel.candidates)} candidates ran")
        headers = ("", "us", f"T{unit}/s", "of a copy", "configuration")
        print(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".0%", "")))


if __name__ == "__main__":
    main()
