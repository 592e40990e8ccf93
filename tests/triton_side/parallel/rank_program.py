"""One of the ranks that `test_parallel.py` starts: rank_program.py RANK COUNT FOLDER.

It writes files of JSON, by case and program:

- errors-RANK: the largest error of each output and gradient, over the root mean square of the float64 reference.
- replays-RANK: the largest error of each call, where exchanges are repeated as in a CUDA graph.
- late-RANK: what the other rank sent in such calls, of which one rank copies late.
- exchanges-RANK: the exchanges of a recorded training step: phase, stage and bytes.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from xlafuse.compare.spec.blocks import mlp_parallel as mlp_spec
from xlafuse.compare.spec.blocks import moe as moe_spec
from xlafuse.triton_side.calls import dispatch
from xlafuse.triton_side.parallel import mlp_parallel, moe_parallel
from xlafuse.triton_side.parallel.peer_buffers import (
    REGIONS,
    Incoming,
    PeerBuffers,
    RepeatedExchanges,
    peer_buffers,
)
from xlafuse.triton_side.parallel.ranks import Ranks

SPLIT = {"moe": {"w_gate": 0, "w_up": 0, "w_down": 0}, "mlp": {"w_gate": 1, "w_up": 1, "w_down": 0}}
# Sizes, dtype, whether there are gradients, and programs. float16 stands for 16-bit types, because Triton's interpreter
# multiplies bfloat16 wrongly. The sizes of "tiles" are multiples of 16 bytes, as TMA and grouped_mm need.
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, bool, tuple[str, ...]]] = {
    "mlp odd": ((10, 21, 26), torch.float32, True, ("eager", "inductor", "inductor_async", "triton_in_order")),
    "mlp tiles": ((40, 64, 96), torch.float16, True, ("eager", "triton", "triton_put")),
    "moe odd": ((10, 21, 13, 6, 2, 4), torch.float32, True, ("eager", "inductor", "triton_put")),
    "moe tiles": ((24, 32, 48, 8, 2, 8), torch.float16, True, ("eager", "triton", "triton_all_slots")),
    "moe all-on-one": (
        (12, 16, 24, 4, 1, 1), torch.float32, False, ("eager", "triton_in_order", "triton_put", "triton_all_slots")
    ),
    "moe one-token": ((2, 16, 24, 4, 2, 3), torch.float32, True, ("eager", "triton", "triton_all_slots")),
}
# Their exchanges are repeated, as a CUDA graph repeats them.
REPEATED = {"mlp odd": ("triton", "triton_put"), "moe one-token": ("triton_all_slots",)}
REPLAYS = 4
RECORDED = {"mlp tiles": ("triton", "triton_put"), "moe tiles": ("triton",), "moe odd": ("triton_put",)}
WITHOUT_EXCHANGES = {"mlp odd": ("eager", "triton"), "moe one-token": ("eager", "triton_put", "triton_all_slots")}


def draw(sizes: Mapping[str, int], block: str, dtype: torch.dtype, seed: int = 3) -> dict[str, torch.Tensor]:
    """Return the arrays of all ranks, rounded to the dtype; y is the cotangent."""
    generator = np.random.default_rng(seed)
    width, hidden, tokens = sizes["width"], sizes["hidden"], sizes["tokens"]
    shapes: dict[str, tuple[int, ...]] = {"w_gate": (width, hidden), "w_up": (width, hidden), "w_down": (hidden, width)}
    arrays = {"x": generator.standard_normal((tokens, width))}
    if block == "moe":
        shapes = {name: (sizes["experts"], *shape) for name, shape in shapes.items()}
        arrays = {"x": moe_spec.draw_x(generator, sizes), "router": moe_spec.router_weight(sizes)}
    for name, shape in shapes.items():
        arrays[name] = generator.standard_normal(shape) / shape[-2] ** 0.5
    arrays["y"] = generator.standard_normal((tokens, width))
    return {name: torch.tensor(array).to(dtype) for name, array in arrays.items()}


def reference(arrays: Mapping[str, torch.Tensor], block: str, **parameters: int) -> dict[str, torch.Tensor]:
    """Return y and the gradients of all ranks in float64."""
    inputs = {name: array.double().requires_grad_() for name, array in arrays.items() if name != "y"}
    x = inputs["x"]
    if block == "mlp":
        y = (torch.nn.functional.silu(x @ inputs["w_gate"]) * (x @ inputs["w_up"])) @ inputs["w_down"]
    else:
        chosen, weights = moe_parallel.route(x.float(), inputs["router"].float(), parameters["top_k"])
        weights = torch.softmax((x @ inputs["router"].T).gather(1, chosen), dim=-1)
        gate, up = (torch.einsum("tw,ewh->teh", x, inputs[name]) for name in ("w_gate", "w_up"))
        out = torch.einsum("teh,ehw->tew", torch.nn.functional.silu(gate) * up, inputs["w_down"])
        y = (weights[:, :, None] * out.gather(1, chosen[:, :, None].expand(-1, -1, x.shape[1]))).sum(dim=1)
    gradients = torch.autograd.grad(y, list(inputs.values()), arrays["y"].double())
    return {"y": y.detach(), **dict(zip(inputs, gradients, strict=True))}


def mine(name: str, array: torch.Tensor, block: str, ranks: Ranks) -> torch.Tensor:
    axis = 0 if name in ("x", "y") else SPLIT[block].get(name)
    return array if axis is None else array.chunk(ranks.count, dim=axis)[ranks.rank].contiguous()


def errors(
    program: Callable[..., Any], arrays: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor],
    block: str, ranks: Ranks, gradients: bool, inference: bool = True, **parameters: int,
) -> dict[str, float]:
    """Return the errors of this rank's output without and with gradients, and of its gradients."""
    local = {name: mine(name, array, block, ranks) for name, array in arrays.items()}
    dy = local.pop("y")
    got = {"inference": program(local, ranks=ranks, **parameters)["y"]} if inference else {}
    if gradients:
        inputs = {name: tensor.clone().requires_grad_() for name, tensor in local.items()}
        got["y"] = program(inputs, ranks=ranks, **parameters)["y"]
        got |= zip(inputs, torch.autograd.grad(got["y"], list(inputs.values()), dy), strict=True)
    found = {}
    for name, value in got.items():
        whole = expected["y" if name == "inference" else name]
        want = mine("y" if name == "inference" else name, whole, block, ranks)
        assert value.dtype == dy.dtype and value.shape == want.shape, (name, value.dtype, value.shape, want.shape)
        found[name] = float((value.detach().double() - want).abs().max() / whole.square().mean().sqrt())
    return found


def replays(
    program: Callable[..., Any], sizes: Mapping[str, int], block: str, dtype: torch.dtype, ranks: Ranks,
    **parameters: int,
) -> list[float]:
    """Return the largest error of each call, on other arrays each time."""
    repeated, found = RepeatedExchanges(), []
    for seed in range(REPLAYS + 1):
        arrays = draw(sizes, block, dtype, seed)
        expected = reference(arrays, block, **parameters)
        with (repeated.captured if seed else repeated.first)():
            each = errors(program, arrays, expected, block, ranks, gradients=True, inference=False, **parameters)
        found.append(max(each.values()))
    return found


def late_readings(put: bool, ranks: Ranks) -> list[int]:
    """Return what the other rank sent, in calls of more exchanges than there are regions. One rank copies late.

    The n-th exchange of call c from rank r sends 100 r + 10 c + n.
    """
    repeated, found = RepeatedExchanges(), []
    peer, move = 1 - ranks.rank, PeerBuffers.move

    def late(*args: Any, **named: Any) -> None:
        time.sleep(0.03 * (call % 2 == ranks.rank))
        move(*args, **named)

    for call in range(1 + REPLAYS):
        with (repeated.captured if call else repeated.first)(), patch.object(PeerBuffers, "move", late):
            buffers = peer_buffers("test", 64, ranks, torch.device("cpu"), put, overlap=True)
            for n in range(REGIONS + 1):
                exchange = buffers.exchange("test")
                exchange.outbox(peer, (1,), torch.int64).fill_(100 * ranks.rank + 10 * call + n)
                exchange.expect({peer: [Incoming((1,), torch.int64, None, torch.empty(1, dtype=torch.int64))]}).start()
                found.append(int(exchange.receive(peer)[0]))
    return found


def exchanges(
    program: Callable[..., Any], arrays: Mapping[str, torch.Tensor], block: str, ranks: Ranks, **parameters: int
) -> list[tuple[str, str, int]]:
    local = {name: mine(name, array, block, ranks) for name, array in arrays.items()}
    dy = local.pop("y")
    inputs = {name: tensor.clone().requires_grad_() for name, tensor in local.items()}
    call = functools.partial(program, ranks=ranks, **parameters)
    recorded = dispatch.record_call(call, inputs, train=True, cotangents={"y": dy})
    return [
        (phase, event.stage, sum(tensor.bytes for tensor in event.writes))
        for phase, events in recorded.parts.items() for event in events
        if isinstance(event, dispatch.Operation) and event.kind == "collective"
    ]


def add_cpu_kernels() -> None:
    """Give the two operations of `inductor_async` kernels for CPUs, which PyTorch has not."""

    @torch.library.impl("symm_mem::fused_all_gather_matmul", "CPU")
    def gather(a, products, gather_dim, group, *, return_A=True):  # type: ignore[no-untyped-def]  # noqa: N803
        rows = a.new_empty(2 * len(a), a.shape[1])
        dist.all_gather_into_tensor(rows, a.contiguous())
        return rows, [rows @ b for b in products]

    @torch.library.impl("symm_mem::fused_matmul_reduce_scatter", "CPU")
    def scatter(a, b, reduce_op, scatter_dim, group):  # type: ignore[no-untyped-def]
        sums = a.new_empty(len(a) // 2, b.shape[1])
        dist.reduce_scatter_tensor(sums, a @ b)
        return sums


def main(rank: int, count: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    add_cpu_kernels()
    # Traced by torch.compile, and then run without Inductor's C++ compiler, which takes too long for a test.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    found: dict[str, dict[str, float]] = {}
    moved: dict[str, list[tuple[str, str, int]]] = {}
    replayed: dict[str, list[float]] = {}
    for case, (shape, dtype, gradients, programs) in CASES.items():
        block = case.partition(" ")[0]
        spec, module = (mlp_spec, mlp_parallel) if block == "mlp" else (moe_spec, moe_parallel)
        sizes = spec.sizes(*shape)
        parameters = {"top_k": sizes["top_k"]} if block == "moe" else {}
        arrays = draw(sizes, block, dtype)
        expected = reference(arrays, block, **parameters)
        for communicate, names in ((True, programs), (False, WITHOUT_EXCHANGES.get(case, ()))):
            ranks = Ranks(rank, count, dist.group.WORLD, communicate)
            for name in names:
                found[f"{case} {name}{'' if communicate else ' alone'}"] = errors(
                    getattr(module, name), arrays, expected, block, ranks, gradients, **parameters
                )
        for name in REPEATED.get(case, ()):
            ranks = Ranks(rank, count, dist.group.WORLD)
            replayed[f"{case} {name}"] = replays(getattr(module, name), sizes, block, dtype, ranks, **parameters)
        for name in RECORDED.get(case, ()):
            ranks = Ranks(rank, count, dist.group.WORLD)
            moved[f"{case} {name}"] = exchanges(getattr(module, name), arrays, block, ranks, **parameters)
    (folder / f"errors-{rank}.json").write_text(json.dumps(found))
    (folder / f"exchanges-{rank}.json").write_text(json.dumps(moved))
    (folder / f"replays-{rank}.json").write_text(json.dumps(replayed))
    late = {put: late_readings(put, Ranks(rank, count, dist.group.WORLD)) for put in (False, True)}
    (folder / f"late-{rank}.json").write_text(json.dumps([late[False], late[True]]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
