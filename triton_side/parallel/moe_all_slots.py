"""The mixture of experts of `moe_overlapped.py` with exchanges of one size, whatever the routing is.

A CUDA graph repeats copies of the same bytes, and the host cannot read the numbers of rows while it captures. So each
rank reads all slots of each peer, and computes with those of its own experts. The peer's first slots, which arrive in
GPU memory, tell the kernels which these are. Results come back in the same way, for all slots. The other rows hold any
bits, and no result depends on them.

    | kernels                               | exchange that they hide               |
    |---------------------------------------|---------------------------------------|
    | copy of x into the order of the slots |                                       |
    | gate, up, act of own rows             | the experts' first slots, then x      |
    | gate, up, act, down of a peer's rows  |                                       |
    | down of own rows                      | results and, with `save`, weights      |
    | weighted sum                          |                                       |

With R ranks and even routing, this sends R times as many bytes as the rows take. Backward likewise.

A block is the slots of one rank, this one's and then each peer's. Row s of a block belongs to slot s of its rank.
Shapes and dtypes are those of `moe_overlapped.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xlafuse.triton_side.calls.declare import computing
from xlafuse.triton_side.calls.stages import stage
from xlafuse.triton_side.kernels import moe_routing
from xlafuse.triton_side.kernels.moe import (
    DDOWN,
    DGATE_UP,
    DOUT,
    DOWN,
    DX_OF_EXPERTS,
    GATHER_DY,
    GATHER_X,
    launch_combine,
    launch_dx,
)
from xlafuse.triton_side.kernels.moe_routing import Route
from xlafuse.triton_side.kernels.shared.launch import with_unit_column_stride
from xlafuse.triton_side.parallel.collectives import sum_over_ranks
from xlafuse.triton_side.parallel.mlp_overlapped import send_to_all
from xlafuse.triton_side.parallel.moe_kernels import launch_activation_gradients, launch_block_gradients
from xlafuse.triton_side.parallel.moe_overlapped import checked, gate_up, grouped, sort_rows, weights_by_slot
from xlafuse.triton_side.parallel.peer_buffers import Exchange, Incoming, PeerBuffers
from xlafuse.triton_side.parallel.ranks import Ranks


def _expect_slots(exchange: Exchange, like: Tensor, into: Tensor | None) -> None:
    """Declare that all slots of each peer arrive, in `into` [blocks, slots, width] or in new memory."""
    exchange.expect({
        peer: [Incoming(tuple(like.shape), like.dtype, 0, None if into is None else into[block])]
        for block, peer in enumerate(exchange.buffers.peers, 1)
    })


def _return(exchange: Exchange, *arrays: Tensor) -> None:
    """Start to read what each peer computed for this rank's slots into arrays [blocks, slots, ...]."""
    exchange.expect({
        peer: [Incoming(tuple(array[block].shape), array.dtype, None, array[block]) for array in arrays]
        for block, peer in enumerate(exchange.buffers.peers, 1)
    }).start()


def _rows_of_choices(route: Route, experts: int, buffers: PeerBuffers) -> Tensor:
    """Return the row of each choice in arrays [blocks x slots, ...]; experts: those of a rank. int32."""
    block = (route.chosen // experts - buffers.ranks.rank) % buffers.ranks.count
    return route.slots + block * len(route.rows)


def _forward(
    buffers: PeerBuffers, x: Tensor, router: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, top_k: int,
    save: bool,
) -> tuple[Tensor, Route, tuple[Tensor, ...]]:
    """Return y, the route with the rows of the choices as its slots, and with `save` what backward needs.

    Backward needs x [blocks, slots, width], each block's first slots of this rank's experts [blocks, experts + 1], the
    weights [blocks, slots], and gate and then up of each block [slots, hidden].
    """
    rank, experts, blocks = buffers.ranks.rank, len(w_gate), 1 + len(buffers.peers)
    route, _ = moe_routing.route_tokens(x, router, top_k, save)
    slots, width = len(route.rows), x.shape[1]
    offsets_exchange, exchange = buffers.exchange("dispatch"), buffers.exchange("dispatch")
    with computing(GATHER_X):
        in_slots = sort_rows(exchange, buffers, x, route.rows)
    exchange.complete()
    offsets = route.offsets.new_empty(blocks, len(route.offsets))
    offsets[0].copy_(route.offsets)
    send_to_all(offsets_exchange, route.offsets[None], [row[None] for row in offsets[1:]])
    mine, share = offsets[:, rank * experts : (rank + 1) * experts + 1], -(-slots // blocks)
    computed = [gate_up(in_slots, w_gate, w_up, mine[0], save, share)]
    all_x = buffers.allocate((blocks, slots, width), x.dtype) if save else None
    _expect_slots(exchange, in_slots, all_x)
    offsets_exchange.start()
    exchange.start()
    if all_x is not None:
        all_x[0].copy_(in_slots)
    rows = _rows_of_choices(route, experts, buffers)
    all_weights = route.weights.new_empty(blocks, slots)
    if save:
        all_weights[0].copy_(weights_by_slot(route)[1])
    out = x.new_empty(blocks, slots, width)
    results = buffers.exchange("combine")
    for block, peer in enumerate(buffers.peers, 1):
        offsets_exchange.receive(peer)
        (peer_rows,) = exchange.receive(peer)
        computed.append(gate_up(peer_rows, w_gate, w_up, mine[block], save, share))
        with computing(*DOWN):
            grouped(computed[block][0], w_down, mine[block], results.outbox(peer, (slots, width), x.dtype))
        if save:
            results.send(peer, all_weights[0])
    _return(results, *((out, all_weights) if save else (out,)))
    with computing(*DOWN):
        grouped(computed[0][0], w_down, mine[0], out[0])
    for peer in buffers.peers:
        results.receive(peer)
    route = replace(route, slots=rows)
    y = launch_combine(out.flatten(0, 1), route)
    if all_x is None:
        return y, route, ()
    gates, ups = [gate for _, gate, _ in computed if gate is not None], [up for _, _, up in computed if up is not None]
    return y, route, (all_x, mine, all_weights, *gates, *ups)


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, top_k: int,
        buffers: PeerBuffers,
    ) -> Tensor:
        y, route, saved = _forward(buffers, x, router, w_gate, w_up, w_down, top_k, save=True)
        of_route = (route.chosen, route.weights, route.slots, route.rows, route.offsets, route.logits)
        ctx.save_for_backward(x, router, w_gate, w_up, w_down, *of_route, *saved)
        ctx.buffers = buffers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, router, w_gate, w_up, w_down, *rest = ctx.saved_tensors
        buffers: PeerBuffers = ctx.buffers
        route, (all_x, mine, all_weights, *of_blocks) = Route(*rest[:6]), rest[6:]
        blocks, slots, width = all_x.shape
        gates, ups, hidden = of_blocks[:blocks], of_blocks[blocks:], w_gate.shape[2]

        exchange = buffers.exchange("combine")
        with computing(GATHER_DY):
            in_slots = sort_rows(exchange, buffers, with_unit_column_stride(dy), route.rows)
        exchange.complete()

        def dout_of(rows: Tensor, block: int) -> Tensor:
            with computing(*DOUT):
                return grouped(rows, w_down.mT, mine[block])

        own_dout = dout_of(in_slots, 0)
        all_dy = buffers.allocate(all_x.shape, all_x.dtype)
        _expect_slots(exchange, in_slots, all_dy)
        exchange.start()
        all_dy[0].copy_(in_slots)
        dgate, dup, weighted_act = (x.new_empty(blocks, slots, hidden) for _ in range(3))

        def of_activations(block: int, dout: Tensor, dweights: Tensor) -> None:
            launch_activation_gradients(
                dout, gates[block], ups[block], all_weights[block], dgate[block], dup[block], weighted_act[block],
                dweights,
            )

        def dx_of_block(block: int, out: Tensor) -> None:
            with computing(*DX_OF_EXPERTS):
                grouped(dgate[block], w_gate.mT, mine[block], out, second=(dup[block], w_up.mT))

        dx, dweights = torch.empty_like(all_x), torch.empty_like(all_weights)
        results = buffers.exchange("dispatch")
        for block, peer in enumerate(buffers.peers, 1):
            (peer_dy,) = exchange.receive(peer)
            to_peer = results.outbox(peer, (slots, width), x.dtype)
            of_activations(block, dout_of(peer_dy, block), results.outbox(peer, (slots,), torch.float32))
            dx_of_block(block, to_peer)
        _return(results, dx, dweights)
        of_activations(0, own_dout, dweights[0])
        begins = slots * torch.arange(blocks, dtype=mine.dtype, device=mine.device)[:, None]
        in_all = mine + begins
        with computing(*DDOWN):
            dw_down, _ = launch_block_gradients(weighted_act.flatten(0, 1), all_dy.flatten(0, 1), in_all)
        with computing(*DGATE_UP):
            dw_gate, dw_up = launch_block_gradients(
                all_x.flatten(0, 1), dgate.flatten(0, 1), in_all, dup.flatten(0, 1)
            )
        dx_of_block(0, dx[0])
        for peer in buffers.peers:
            results.receive(peer)
        dlogits = moe_routing.launch_dlogits(route, dweights.flatten()[route.slots], dweights.new_zeros(()))
        drouter = moe_routing.launch_drouter(x, dlogits)
        with stage("router"):
            drouter = sum_over_ranks(drouter, buffers.ranks)
        dx = launch_dx(dx.flatten(0, 1), dlogits, router, route)
        return dx, drouter, dw_gate, dw_up, dw_down, None, None


def moe(inputs: Mapping[str, Tensor], top_k: int, ranks: Ranks) -> Tensor:
    """Return y of this rank's tokens, differentiable once; see `moe_overlapped.moe`. Ranks read their peers' memory."""
    tensors, buffers = checked(inputs, top_k, ranks, put=False, overlap=True)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _MoE.apply(*tensors, top_k, buffers)
    return _forward(buffers, *tensors, top_k, save=False)[0]
