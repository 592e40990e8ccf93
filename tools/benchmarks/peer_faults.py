"""Two probable faults of optional libraries, each as a minimal program on an NVIDIA GPU; see docs/opponents.md.

    python -m tools.benchmarks.peer_faults tokamax    the weight gradient of tokamax.ragged_dot against float32 products
    python -m tools.benchmarks.peer_faults quack      times of quack's layernorm_fwd beside PyTorch's, by columns
"""

from __future__ import annotations

import argparse
from functools import partial

from tabulate import tabulate


def tokamax_weight_gradient() -> str:
    """Return errors of the gradient of rhs [groups, k, n] in bfloat16, max|d - reference| / rms(reference), twice."""
    import jax
    import jax.numpy as jnp
    import tokamax

    @partial(jax.jit, static_argnames="implementation")
    def gradient(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, dy: jax.Array, implementation: str) -> jax.Array:
        product = partial(tokamax.ragged_dot, group_sizes=sizes, implementation=implementation)
        return jax.vjp(lambda rhs: product(lhs, rhs), rhs)[1](dy)[0]

    @jax.jit
    def reference(lhs: jax.Array, dy: jax.Array, in_group: jax.Array) -> jax.Array:
        a, b = (jnp.where(in_group[:, None], x, 0).astype(jnp.float32) for x in (lhs, dy))
        return jnp.matmul(a.T, b, precision="highest")

    rows = []
    for m, k, n, groups in ((1024, 512, 256, 4), (8192, 2048, 3584, 8), (32768, 2048, 1024, 64)):
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = (m, k), (groups, k, n), (m, n)
        lhs, rhs, dy = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=False))
        group_of_row = jnp.sort(jax.random.randint(keys[3], (m,), 0, groups))
        sizes = jnp.bincount(group_of_row, length=groups).astype(jnp.int32)
        for implementation in ("mosaic", "xla"):
            cells = []
            for _ in range(2):
                gradients, errors = gradient(lhs, rhs, sizes, dy, implementation), []
                for group in range(groups):
                    expected = reference(lhs, dy, group_of_row == group)
                    difference = jnp.abs(gradients[group] - expected).max()
                    errors.append(float(difference / jnp.sqrt(jnp.mean(expected**2))))
                wrong = sum(error > 0.1 for error in errors)
                cells.append(f"{max(errors):.3f}, {wrong} of {groups} groups above 0.1")
            rows.append([f"[{m}, {k}] x [{groups}, {k}, {n}]", implementation, *cells])
    header = ["lhs x rhs", "implementation", "error", "error, called again"]
    return tabulate(rows, header, "github") + f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}"


def quack_layernorm() -> str:
    """Return median times of a call in microseconds by triton.testing.do_bench; a call reads and writes 268 MB."""
    import torch
    import torch.nn.functional as functional
    from quack.rmsnorm import layernorm_fwd
    from triton.testing import do_bench

    rows = []
    for columns in (4096, 8192, 12288, 16384, 16640, 32768):
        x = torch.randn((1 << 26) // columns, columns, device="cuda", dtype=torch.bfloat16)
        weight, bias = torch.randn(2, columns, device="cuda")  # layernorm_fwd takes float32 only
        plain = partial(functional.layer_norm, x, (columns,), weight.bfloat16(), bias.bfloat16())
        quack = partial(layernorm_fwd, x, weight, bias, 1e-5)
        expected = functional.layer_norm(x[:64].double(), (columns,), weight.double(), bias.double())
        error = (quack()[:64].double() - expected).abs().max().item()
        times = [1e3 * do_bench(call, return_mode="median") for call in (quack, plain)]
        rows.append([columns, *times, error])
    table = tabulate(rows, ["columns", "quack, us", "F.layer_norm, us", "error of quack"], "github", floatfmt=".3g")
    return f"{table}\n{torch.cuda.get_device_name()}, torch {torch.__version__}"


PROGRAMS = {"tokamax": tokamax_weight_gradient, "quack": quack_layernorm}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.peer_faults", description=__doc__)
    parser.add_argument("library", choices=PROGRAMS)
    print(PROGRAMS[parser.parse_args().library]())
