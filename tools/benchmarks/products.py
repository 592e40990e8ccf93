"""Time float32 products on this GPU by each algorithm: `python tools/benchmarks/products.py`.

Rows: cuBLAS and our kernels in IEEE, three TF32 products ("tf32x3") and one ("tf32"), with copied operands and through
pointers. Times are medians of do_bench in us; errors are the largest difference from float64 over the rms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from xlafuse.triton_side.kernels import matmul
from xlafuse.triton_side.kernels.shared.tiles import ieee_products

SHAPES = ((8192, 768, 2048), (8192, 2048, 768), (4096, 4096, 4096), (512, 4096, 4096))  # m, k, n
SETTINGS = {"highest": "tf32x3", "high": "tf32"}
POINTER_TILES = ((64, 64, 32, 4, 3), (128, 128, 32, 8, 3))


def algorithms(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield each algorithm with the setting under which the caller calls it in force."""
    for setting, precision in SETTINGS.items():
        torch.set_float32_matmul_precision(setting)
        yield f"cuBLAS, {'IEEE' if setting == 'highest' else precision}", lambda: a @ b
        copies = matmul.choose_config(matmul.matmul_config, a, b)
        yield f"{precision}, copied operands", partial(matmul.launch_matmul, a, b, copies)
        for tiles in POINTER_TILES:
            through_pointers = partial(matmul.launch_matmul, a, b, matmul.pointer_config(*tiles))
            yield f"{precision}, {tiles[0]} x {tiles[1]}", through_pointers
    torch.set_float32_matmul_precision("highest")
    with ieee_products():
        yield "IEEE", lambda: matmul.launch_matmul(a, b, matmul.choose_config(matmul.matmul_config, a, b))


def main() -> None:
    for m, k, n in SHAPES:
        for layout in ("NN", "NT", "TN"):
            a = torch.randn(k, m, device="cuda").T if layout[0] == "T" else torch.randn(m, k, device="cuda")
            b = torch.randn(n, k, device="cuda").T if layout[1] == "T" else torch.randn(k, n, device="cuda")
            exact = a.double() @ b.double()
            for name, call in algorithms(a, b):
                error = float((call() - exact).abs().max() / exact.pow(2).mean().sqrt())
                time_us = do_bench(call, warmup=5, rep=30, return_mode="median") * 1e3
                print(f"{m} x {k} x {n} {layout}  {name:24} {time_us:8.0f} us  {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
