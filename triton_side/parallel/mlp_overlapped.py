"""A SwiGLU MLP over ranks in Triton; exchanges with the peers overlap with products.

    y = sum over ranks of (silu(x w_gate) * (x w_up)) w_down    x: the tokens of all ranks

x and y are split by tokens, the weights by hidden size. A rank computes with the tokens of one rank at a time, its own
and each peer's, in the order in which rows arrive and results are needed:

    | kernels                                     | exchange that they hide      |
    |---------------------------------------------|------------------------------|
    | own gate                                    | x of the peers               |
    | gate, up, act, down of each peer's tokens   |                              |
    | own up, own act                             | the results of these tokens  |
    | own down, which adds the received results   |                              |

Backward likewise: own dact hides dy; then dact, dgate, dup and dx of each peer's tokens; the weights' gradients hide
these dx; own dx last. A sum of received results and an own product is made in float32 in the product's epilogue.

Shapes: x, y [tokens, width] of a rank; w_gate, w_up [width, hidden], w_down [hidden, width] with a rank's share of
hidden. dtypes: bfloat16, float16, float32, one for all. Products accumulate in float32. With gradients, the forward
pass saves x of all ranks, gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import Computed, computing, forward, gradient
from xlafuse.triton_side.kernels.matmul import choose_config, launch_matmul, matmul_config
from xlafuse.triton_side.kernels.shared import gated_unit
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, check_tensors, launch_elementwise
from xlafuse.triton_side.kernels.swiglu import swiglu_forward_kernel
from xlafuse.triton_side.kernels.swiglu_mlp import (
    ACT,
    DACT,
    DDOWN_WEIGHT,
    DGATE_WEIGHT,
    DH_OF_GATE,
    DH_OF_UP,
    DUP_WEIGHT,
    GATE,
    UP,
    activation_gradients_kernel,
)
from xlafuse.triton_side.parallel.peer_buffers import Exchange, Incoming, PeerBuffers, bytes_of, peer_buffers
from xlafuse.triton_side.parallel.ranks import Ranks

DOWN, SUM, SUM_OF_DX = (forward("dot", "down"),), forward("add", "scatter"), gradient("add", "gather")


def product(
    a: Tensor, b: Tensor, operations: tuple[Computed, ...], residual: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    with computing(*operations):
        return launch_matmul(a, b, choose_config(matmul_config, a, b), residual, out=out)


def activated(gate: Tensor, up: Tensor) -> Tensor:
    with computing(*ACT, y_ptr="act"):
        return gated_unit.forward(swiglu_forward_kernel, gate, up)


def send_to_all(exchange: Exchange, rows: Tensor, into: Sequence[Tensor | None]) -> Exchange:
    """Return the exchange, to be started, of these rows for as many of each peer, into[n] those of the n-th peer."""
    buffers = exchange.buffers
    if buffers.put:
        for peer in buffers.peers:
            exchange.send(peer, rows)
    else:
        exchange.offer(0, rows.shape, rows.dtype).copy_(rows)
    return exchange.expect({
        peer: [Incoming(tuple(rows.shape), rows.dtype, 0, memory)]
        for peer, memory in zip(buffers.peers, into, strict=True)
    })


def received_sum(exchange: Exchange, peers: Sequence[int]) -> Tensor | None:
    """Return the sum of what the peers sent, None without peers."""
    parts = [exchange.receive(peer)[0] for peer in peers]
    if len(parts) < 2:
        return parts[0] if parts else None
    total = parts[0].float()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)


def start_results(buffers: PeerBuffers, exchange: Exchange, like: Tensor) -> None:
    exchange.expect({peer: [Incoming(tuple(like.shape), like.dtype)] for peer in buffers.peers}).start()


def _forward(
    buffers: PeerBuffers, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return y and, with `save`, x, gate and up of all ranks [ranks, tokens, ...], own tokens first."""
    ranks, (tokens, width), hidden = 1 + len(buffers.peers), x.shape, w_gate.shape[1]
    all_x = x.new_empty(ranks, tokens, width) if save else None
    all_gate = x.new_empty(ranks if save else 1, tokens, hidden)
    all_up = torch.empty_like(all_gate)
    exchange = send_to_all(buffers.exchange("gather"), x, [None] * (ranks - 1) if all_x is None else list(all_x[1:]))
    own_gate = product(x, w_gate, GATE, out=all_gate[0])
    exchange.start()  # after the launch, because it takes the host longer
    results = buffers.exchange("scatter") if ranks > 1 else None
    for n, peer in enumerate(buffers.peers, 1):
        (peer_x,) = exchange.receive(peer)
        gate = product(peer_x, w_gate, GATE, out=all_gate[n] if save else None)
        up = product(peer_x, w_up, UP, out=all_up[n] if save else None)
        assert results is not None
        product(activated(gate, up), w_down, DOWN, out=results.outbox(peer, x.shape, x.dtype))
    if results is not None:
        start_results(buffers, results, x)
    if all_x is not None:
        all_x[0].copy_(x)
    act = activated(own_gate, product(x, w_up, UP, out=all_up[0]))
    y = product(act, w_down, (*DOWN, SUM), None if results is None else received_sum(results, buffers.peers))
    return (y, all_x, all_gate, all_up) if save else (y, None, None, None)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, buffers: PeerBuffers
    ) -> Tensor:
        y, all_x, gate, up = _forward(buffers, x, w_gate, w_up, w_down, save=True)
        ctx.save_for_backward(w_gate, w_up, w_down, all_x, gate, up)
        ctx.buffers = buffers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w_gate, w_up, w_down, all_x, gate, up = ctx.saved_tensors
        buffers: PeerBuffers = ctx.buffers
        dy = dy.contiguous()
        all_dy, dgate, dup, act = torch.empty_like(all_x), *(torch.empty_like(gate) for _ in range(3))

        def activation_gradients(n: int, dact: Tensor) -> None:
            launch_elementwise(
                activation_gradients_kernel, FlatConfig(block=2048, num_warps=8),
                dact, gate[n], up[n], dgate[n], dup[n], act[n],
            )

        exchange = send_to_all(buffers.exchange("scatter"), dy, list(all_dy[1:]))
        own_dact = product(dy, w_down.T, DACT)
        exchange.start()
        results = buffers.exchange("gather") if buffers.peers else None
        for n, peer in enumerate(buffers.peers, 1):
            (peer_dy,) = exchange.receive(peer)
            activation_gradients(n, product(peer_dy, w_down.T, DACT))
            assert results is not None
            of_gate = product(dgate[n], w_gate.T, DH_OF_GATE)
            product(dup[n], w_up.T, DH_OF_UP, of_gate, results.outbox(peer, dy.shape, dy.dtype))
        if results is not None:
            start_results(buffers, results, dy)
        activation_gradients(0, own_dact)
        all_dy[0].copy_(dy)
        rows = all_x.flatten(0, 1).T
        dw_down = product(act.flatten(0, 1).T, all_dy.flatten(0, 1), DDOWN_WEIGHT)
        dw_gate = product(rows, dgate.flatten(0, 1), DGATE_WEIGHT)
        dw_up = product(rows, dup.flatten(0, 1), DUP_WEIGHT)
        others = None if results is None else received_sum(results, buffers.peers)
        dx = product(dgate[0], w_gate.T, (*DH_OF_GATE, SUM_OF_DX), others)
        return product(dup[0], w_up.T, DH_OF_UP, dx), dw_gate, dw_up, dw_down, None


def mlp(inputs: Mapping[str, Tensor], ranks: Ranks, *, put: bool, overlap: bool = True) -> Tensor:
    """Return this rank's rows of the result, differentiable once; every rank calls this at the same point.

    put: ranks write into their peers' memory instead of reading it. overlap: exchanges run at the same
    time as kernels.
    """
    x, w_gate, w_up, w_down = (inputs[name] for name in ("x", "w_gate", "w_up", "w_down"))
    check_tensors(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    (_, width), hidden = x.shape, w_gate.shape[-1]
    expected = {"w_gate": [width, hidden], "w_up": [width, hidden], "w_down": [hidden, width]}
    got = {name: list(inputs[name].shape) for name in expected}
    if got != expected:
        raise ValueError(f"a rank's weights must fit x {list(x.shape)}: expected {expected}, got {got}")
    x = x.contiguous()
    buffers = peer_buffers("mlp", bytes_of(x.shape, x.dtype), ranks, x.device, put, overlap)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs.values()):
        return _Mlp.apply(x, w_gate, w_up, w_down, buffers)
    return _forward(buffers, x, w_gate, w_up, w_down, save=False)[0]
