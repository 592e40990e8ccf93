"""Time attention, forward and backward, by our kernels and cuDNN in turns on an NVIDIA GPU.

    python tools/benchmarks/attention.py [SHAPE ...] [--rounds N] [--splits]

Each round times every kernel once with triton.testing.do_bench (CUDA events, cold L2, median). The GPU's power limit
moves all times by 5 to 10%, so only times of one round are comparable. The table shows TFLOP/s of each round, by the
FLOPs of visible pairs, with 2.5 times as many for backward. For decode-N, with N query tokens a sequence, it shows TB/s
by the bytes of q, out, keys and values. Use `xlafuse run` for times in reports. The portable kernels' gradients
repeat bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from xlafuse.triton_side.kernels import attention
from xlafuse.triton_side.kernels.attention_packed import attention_packed
from xlafuse.triton_side.kernels.decode_attention import decode_attention
from xlafuse.triton_side.kernels.decode_attention_paged import decode_attention_paged
from xlafuse.triton_side.kernels.hopper import attention_backward as hopper_backward
from xlafuse.triton_side.kernels.shared.attention_tiles import visible_pairs

# batch, heads, kv_heads, sequence, head_dim, causal, window
SHAPES = {
    "llama-8b": (2, 32, 32, 4096, 128, True, 0), "llama-3-8b-8k": (1, 32, 8, 8192, 128, True, 0),
    "16k": (1, 32, 32, 16384, 128, True, 0), "window-16k": (1, 16, 8, 16384, 128, True, 4096),
    "gqa-window": (1, 32, 8, 4096, 128, True, 1024), "gemma-2-9b": (1, 16, 8, 2048, 256, True, 0),
    "full": (4, 16, 16, 2048, 64, False, 0), "gpt2": (8, 12, 12, 1024, 64, True, 0),
    "full-128": (2, 32, 32, 4096, 128, False, 0), "d64": (2, 32, 32, 4096, 64, True, 0),
    "public-llama-3.1-2k": (2, 64, 8, 2048, 128, True, 0), "public-llama-3.1-8k": (2, 64, 8, 8192, 128, True, 0),
    "public-llama-3.1-8k-full": (2, 64, 8, 8192, 128, False, 0),
    "public-qwen-3.5-2k": (1, 32, 2, 2048, 256, True, 0), "public-qwen-3.5-8k": (1, 32, 2, 8192, 256, True, 0),
    "public-qwen-3.5-16k": (1, 32, 2, 16384, 256, True, 0),
    "public-gpt-oss-8k": (2, 64, 8, 8192, 64, True, 128), "public-tutorial-4k": (4, 32, 32, 4096, 64, True, 0),
}
# tokens, heads, kv_heads, head_dim, sequences
PACKED = {"packed": (4096, 32, 8, 128, 8), "packed-16k": (16384, 32, 8, 128, 8)}
# batch, heads, kv_heads, keys of a sequence, head_dim, queries; pages have 16 keys
CACHED = {f"decode-{queries}": (32, 32, 8, 8192, 128, queries) for queries in (1, 2, 4, 8, 16)}
PAGE = 16


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def calls(name: str, every_split: bool) -> tuple[float, dict[str, Callable[[], Any]]]:
    """Return the FLOPs of forward, and the calls by name.

    every_split: backward also in other numbers of splits of heads that share k and v than the kernel's own choice.
    """
    batch, heads, kv_heads, sequence, head_dim, causal, window = SHAPES[name]
    q, k, v = (normal(batch, n, sequence, head_dim) for n in (heads, kv_heads, kv_heads))
    flops = 4 * batch * heads * head_dim * visible_pairs(sequence, causal, window)
    found: dict[str, Callable[[], Any]] = {}
    for kernels in ("hopper", "portable"):
        hopper = kernels == "hopper"
        if hopper and attention.hopper_problem(q, k, v, None):
            continue
        mask: dict[str, Any] = {"hopper": hopper, "causal": causal, "window": window}
        out, logsumexp2 = attention.forward(q, k, v, True, **mask)
        assert logsumexp2 is not None
        found[f"{kernels} fwd"] = partial(attention.forward, q, k, v, True, **mask)
        found[f"{kernels} bwd"] = partial(attention.backward, q, k, v, out, out, logsumexp2, **mask)
        if hopper and every_split:
            own = hopper_backward.choose_splits(q, k, hopper_backward.KEYS[head_dim], causal, window, None)
            for splits in (n for n in (1, 2, 4, 8, 16) if n != own and heads // kv_heads % n == 0):
                found[f"hopper bwd, {splits} splits, not {own}"] = partial(
                    hopper_backward.launch_backward, q, k, v, out, out, logsumexp2, causal, window, None, None, splits
                )
    if not window:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)

        found["cudnn fwd"] = partial(cudnn, q, k, v)
        found["cudnn bwd"] = partial(torch.autograd.grad, cudnn(*leaves), leaves, q, retain_graph=True)
    return flops, found


def packed_calls(name: str) -> tuple[float, dict[str, Callable[[], Any]]]:
    """As `calls`, for sequences of random lengths, packed one after the other."""
    tokens, heads, kv_heads, head_dim, sequences = PACKED[name]
    inner = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(0))[: sequences - 1].sort().values + 1
    offsets = [0, *inner.tolist(), tokens]
    lengths = [b - a for a, b in zip(offsets, offsets[1:], strict=False)]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    q, k, v = (normal(tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    flops = sum(4 * heads * head_dim * visible_pairs(length, True, 0) for length in lengths)
    found: dict[str, Callable[[], Any]] = {}
    for kernels in ("hopper", "portable"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        function = partial(attention_packed, cu_seqlens=cu_seqlens, kernels=kernels)
        found[f"{kernels} fwd"] = partial(function, q, k, v)
        found[f"{kernels} bwd"] = partial(torch.autograd.grad, function(*leaves), leaves, q, retain_graph=True)
    return flops, found


def cached_calls(name: str) -> tuple[float, dict[str, Callable[[], Any]]]:
    """Return the bytes of a call, and the calls by name. Raises AssertionError where two of them differ."""
    batch, heads, kv_heads, keys, head_dim, queries = CACHED[name]
    q, (k, v) = normal(batch, heads, queries, head_dim), normal(2, batch, kv_heads, keys, head_dim)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    table = torch.randperm(batch * keys // PAGE, device="cuda").view(batch, -1)

    def in_pages(cache: torch.Tensor) -> torch.Tensor:
        pages = torch.empty(batch * keys // PAGE, PAGE, kv_heads, head_dim, device="cuda", dtype=cache.dtype)
        pages[table] = cache.transpose(1, 2).unflatten(1, (-1, PAGE))
        return pages

    tokens_first = q.transpose(1, 2).contiguous()

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, causal_lower_right(queries, keys), enable_gqa=True)

    found: dict[str, Callable[[], Any]] = {
        "cache fwd": partial(decode_attention, q, k, v, lengths),
        "pages fwd": partial(decode_attention_paged, tokens_first, in_pages(k), in_pages(v), table.int(), lengths),
        "sdpa-flash fwd": flash,
    }
    expected = found["sdpa-flash fwd"]()
    torch.testing.assert_close(found["cache fwd"](), expected, atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(found["pages fwd"]().transpose(1, 2), expected, atol=2e-3, rtol=2e-2)
    return 2.0 * (2 * q.numel() + k.numel() + v.numel()), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*SHAPES, *PACKED, *CACHED]
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(known)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="how often each kernel is timed")
    parser.add_argument("--splits", action="store_true", help="time backward in every number of splits of shared heads")
    options = parser.parse_args()
    if unknown := [name for name in options.shapes if name not in known]:
        parser.error(f"no shape {unknown[0]!r}: choose from {', '.join(known)}")
    for name in options.shapes or known:
        if name in CACHED:
            work, found = cached_calls(name)
        else:
            work, found = calls(name, options.splits) if name in SHAPES else packed_calls(name)
        times: dict[str, list[float]] = {call: [] for call in found}
        for _ in range(options.rounds):
            for call, function in found.items():
                times[call].append(do_bench(function, 5, 30, return_mode="median"))
        rows = [
            [name, call, *(f"{ms * 1e3:.0f}" for ms in each),
             *(f"{work * (2.5 if ' bwd' in call else 1) / ms / 1e9:.4g}" for ms in each)]
            for call, each in times.items()
        ]
        rounds, rate = range(options.rounds), "TB/s" if name in CACHED else "TFLOP/s"
        headers = ["shape", "call", *(f"us {i}" for i in rounds), *(f"{rate} {i}" for i in rounds)]
        print(tabulate(rows, headers=headers), flush=True)


if __name__ == "__main__":
    main()
