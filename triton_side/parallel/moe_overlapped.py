"""A mixture of SwiGLU experts over ranks in Triton; exchanges with the peers overlap with products.

    y[t] = sum over t's choices j of w[t, j] (silu(x[t] w_gate[e]) * (x[t] w_up[e])) w_down[e]    e: the choice's expert

Tokens and experts are split over the ranks. `kernels/moe_routing.py` sorts a rank's choices by expert, so the rows for
one rank are consecutive slots, and so are the results that come back. Copy engines move both; no kernel sorts rows
again. A rank computes with the rows of one rank at a time:

    | kernels                                       | exchange that they hide                            |
    |-----------------------------------------------|----------------------------------------------------|
    | copy of x into the order of the slots         |                                                    |
    | gate, up, act of own rows                     | the experts' first slots, then rows of the peers   |
    | gate, up, act of each peer's rows             |                                                    |
    | down of the peers' rows, in CHUNKS of experts | results of the chunk before                        |
    | down of own rows                              | results of the last chunk                          |
    | weighted sum                                  |                                                    |

The peers get the weights of their rows with the results of the first chunk. Backward likewise: own dout hides dy; then
dout, dgate, dup and dx of each peer's rows; the gradients of the experts' matrices hide the return of dx and dw.
Formulas and dtypes are those of `kernels/moe.py`.

The host must know how many rows to move. It learns this once, in the forward pass, while the GPU computes with the own
rows. Arrays of these rows' results have room for all slots, because the product is launched before the host knows.
So no CUDA graph can repeat these calls; `moe_all_slots.py` has a program whose sizes do not depend on the routing.

Shapes: x, y [tokens, width] of a rank; router [experts of all ranks, width]; w_gate, w_up [experts, width, hidden],
w_down [experts, hidden, width] of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    GATE_UP,
    GATHER_DY,
    GATHER_X,
    launch_combine,
    launch_dx,
    product_config,
)
from xlafuse.triton_side.kernels.moe_routing import Route
from xlafuse.triton_side.kernels.shared.grouped_product import launch_gate_up, launch_grouped_product
from xlafuse.triton_side.kernels.shared.launch import check_tensors, with_unit_column_stride
from xlafuse.triton_side.parallel.collectives import sum_over_ranks
from xlafuse.triton_side.parallel.mlp_overlapped import send_to_all
from xlafuse.triton_side.parallel.moe_kernels import launch_activation_gradients, launch_block_gradients, launch_gather
from xlafuse.triton_side.parallel.peer_buffers import Exchange, Incoming, PeerBuffers, aligned, bytes_of, peer_buffers
from xlafuse.triton_side.parallel.ranks import Ranks

CHUNKS = 2  # of experts, whose results return separately


@dataclass(frozen=True)
class Plan:
    """The rows that a rank sends and gets, known to the host.

    own: the first slot of each expert of all ranks, among this rank's slots. A block is the rows of one rank, this
    one's and then each peer's. of_block: for each block the first row of each of this rank's experts, from 0.
    first_in_peer: the first slot, among a peer's, of its rows for this rank. chunks: bounds of the experts whose
    results return together. In GPU memory, whole: of_block; offsets: the same for each chunk, from 0; in_all: of_block
    with all blocks one after the other.
    """

    rank: int
    own: list[int]
    of_block: list[list[int]]
    first_in_peer: dict[int, int]
    chunks: list[tuple[int, int]]
    offsets: list[list[Tensor]]
    whole: list[Tensor]
    in_all: Tensor

    @property
    def experts(self) -> int:
        return len(self.of_block[0]) - 1

    def rows(self, block: int) -> int:
        return self.of_block[block][-1]

    def bounds(self, block: int) -> slice:
        """Return where a block lies among all rows."""
        first = sum(self.rows(before) for before in range(block))
        return slice(first, first + self.rows(block))

    def slots(self, owner: int, low: int = 0, high: int | None = None) -> slice:
        """Return this rank's slots that go to a rank's experts low to high, of all by default."""
        first = owner * self.experts
        return slice(self.own[first + low], self.own[first + (self.experts if high is None else high)])


def make_plan(buffers: PeerBuffers, first_slots: Sequence[Sequence[int]], experts: int) -> Plan:
    """Return the plan from the first slots of all experts, this rank's and then each peer's."""
    rank, own = buffers.ranks.rank, list(first_slots[0])
    mine = [first[rank * experts : (rank + 1) * experts + 1] for first in first_slots]
    of_block = [[slot - slots[0] for slot in slots] for slots in mine]
    step = -(-experts // CHUNKS)
    chunks = [(low, min(low + step, experts)) for low in range(0, experts, step)]
    values: list[int] = []
    begin = 0
    for rows in of_block:
        values += [begin + row for row in rows]
        begin += rows[-1]
    for rows in of_block:
        values += rows
        for low, high in chunks:
            values += [row - rows[low] for row in rows[low : high + 1]]
    # The host has waited for the GPU since it last wrote here, so the copy of that time is over.
    (on_host,) = buffers.on_host("plan", 1, len(values))
    on_host.numpy()[:] = values
    flat = on_host.to(buffers.device, non_blocking=True, copy=True)
    lengths = [experts + 1] * len(first_slots)
    for _ in first_slots:
        lengths += [experts + 1, *(high - low + 1 for low, high in chunks)]
    parts = list(flat.split(lengths))
    blocks = len(first_slots)
    rest = [parts[n : n + 1 + len(chunks)] for n in range(blocks, len(parts), 1 + len(chunks))]
    return Plan(
        rank, own, of_block, dict(zip(buffers.peers, (slots[0] for slots in mine[1:]), strict=True)), chunks,
        [each[1:] for each in rest], [each[0] for each in rest],
        flat[: blocks * (experts + 1)].view(blocks, experts + 1),
    )


def grouped(
    a: Tensor, b: Tensor, offsets: Tensor, out: Tensor | None = None, second: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return a @ b (+ a2 @ b2) by expert; nothing is launched for no rows."""
    slots = len(a)
    if not slots:
        return a.new_empty(0, b.shape[2]) if out is None else out
    config = product_config(b, a, *(second or ()), slots=slots, pairs=1 if second is None else 2)
    return launch_grouped_product(a, None, b, offsets, slots, config, second, out)


def gate_up(
    rows: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, save: bool, estimate: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return act, gate and up of the rows that belong to an expert. estimate: the number of these rows."""
    if not len(rows):
        none = rows.new_empty(0, w_gate.shape[2])
        return none, none if save else None, none if save else None
    config = product_config(w_gate, w_up, rows, slots=estimate, accumulators=2)
    with computing(*GATE_UP):
        return launch_gate_up(rows, None, w_gate, w_up, offsets, config, save)


def sort_rows(exchange: Exchange, buffers: PeerBuffers, x: Tensor, rows: Tensor) -> Tensor:
    """Return x in the order of the slots, where the exchange can send it from."""
    shape = len(rows), x.shape[1]
    out = x.new_empty(shape) if buffers.put else exchange.offer(0, shape, x.dtype)
    launch_gather(x, rows, out)
    return out


@dataclass(frozen=True)
class Saved:
    """Tensors for the backward pass besides the inputs, x of all rows, and the route's.

    gates, ups: by block, as in `Plan`. slots [tokens, top_k]: the route's, in int64. weights: of this rank's slots, and
    of each peer's rows.
    """

    gates: list[Tensor]
    ups: list[Tensor]
    slots: Tensor
    weights: list[Tensor]


def _forward(
    buffers: PeerBuffers, x: Tensor, router: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, top_k: int,
    save: bool,
) -> tuple[Tensor, Route, Plan, Tensor | None, Saved | None]:
    """Return y, route and plan and, with `save`, x of all rows, and what else the backward pass needs."""
    experts, width, rank = len(w_gate), x.shape[1], buffers.ranks.rank
    blocks = 1 + len(buffers.peers)
    route, _ = moe_routing.route_tokens(x, router, top_k, save)
    slots_exchange, exchange = buffers.exchange("dispatch"), buffers.exchange("dispatch")
    with computing(GATHER_X):
        in_slots = sort_rows(exchange, buffers, x, route.rows)
    exchange.complete()
    first_slots = buffers.on_host("first slots", blocks, len(route.offsets))
    first_slots[0].copy_(route.offsets, non_blocking=True)
    send_to_all(slots_exchange, route.offsets[None], [row[None] for row in first_slots[1:]])
    own_first_slots = route.offsets[rank * experts : (rank + 1) * experts + 1]
    act, gate, up = gate_up(in_slots, w_gate, w_up, own_first_slots, save, -(-len(in_slots) // blocks))
    slots_exchange.start()
    slots_exchange.wait_on_host()
    plan = make_plan(buffers, [first.tolist() for first in first_slots], experts)
    own = plan.slots(rank)
    computed = [(act[own], None if gate is None else gate[own], None if up is None else up[own])]
    all_x = buffers.allocate((sum(plan.rows(block) for block in range(blocks)), width), x.dtype) if save else None

    _exchange_rows(exchange, plan, in_slots, all_x)
    slots, weights = weights_by_slot(route) if save else (None, None)
    if all_x is not None:
        all_x[plan.bounds(0)].copy_(in_slots[own])
    for block, peer in enumerate(buffers.peers, 1):
        (rows,) = exchange.receive(peer)
        computed.append(gate_up(rows, w_gate, w_up, plan.whole[block], save, len(rows)))

    out = torch.empty_like(in_slots)
    acts = [act for act, _, _ in computed]
    results = [_send_results(buffers, plan, chunk, acts, w_down, out, weights) for chunk in range(len(plan.chunks))]
    with computing(*DOWN):
        grouped(acts[0], w_down, plan.whole[0], out[own])
    for exchange in results:
        for peer in buffers.peers:
            exchange.receive(peer)
    y = launch_combine(out, route)
    if weights is None or slots is None:
        return y, route, plan, None, None
    gates, ups = [gate for _, gate, _ in computed if gate is not None], [up for _, _, up in computed if up is not None]
    of_peers = [results[0].received[peer][1] for peer in buffers.peers]
    return y, route, plan, all_x, Saved(gates, ups, slots, [weights, *of_peers])


def _send_results(
    buffers: PeerBuffers, plan: Plan, chunk: int, acts: Sequence[Tensor], w_down: Tensor, out: Tensor,
    weights: Tensor | None,
) -> Exchange:
    """Start to return the results of the peers' rows by a chunk of experts, and with the first one to send the weights.

    out: the peers' results for this rank's slots. weights: of this rank's slots.
    """
    low, high = plan.chunks[chunk]
    exchange, incoming = buffers.exchange("combine"), {}
    for block, peer in enumerate(buffers.peers, 1):
        act = acts[block][plan.of_block[block][low] : plan.of_block[block][high]]
        outbox = exchange.outbox(peer, (len(act), out.shape[1]), out.dtype)
        with computing(*DOWN):
            grouped(act, w_down[low:high], plan.offsets[block][chunk], outbox)
        into = out[plan.slots(peer, low, high)]
        incoming[peer] = [Incoming(tuple(into.shape), out.dtype, None, into)]
        if weights is not None and chunk == 0:
            exchange.send(peer, weights[plan.slots(peer)])
            of_peer = weights.new_empty(plan.rows(block))
            incoming[peer].append(Incoming(tuple(of_peer.shape), torch.float32, None, of_peer))
    exchange.expect(incoming).start()
    return exchange


def weights_by_slot(route: Route) -> tuple[Tensor, Tensor]:
    """Return the slots of the choices in int64, and the weight of the choice in each slot."""
    slots = route.slots.long()
    weights = torch.empty_like(route.weights.flatten())
    weights[slots.flatten()] = route.weights.flatten()
    return slots, weights


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, top_k: int,
        buffers: PeerBuffers,
    ) -> Tensor:
        y, route, plan, all_x, saved = _forward(buffers, x, router, w_gate, w_up, w_down, top_k, save=True)
        assert saved is not None
        of_route = (route.chosen, route.weights, route.slots, route.rows, route.offsets, route.logits)
        ctx.save_for_backward(
            x, router, w_gate, w_up, w_down, all_x, *of_route, saved.slots, *saved.gates, *saved.ups, *saved.weights
        )
        ctx.plan, ctx.buffers = plan, buffers
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, router, w_gate, w_up, w_down, all_x, *rest = ctx.saved_tensors
        plan: Plan = ctx.plan
        buffers: PeerBuffers = ctx.buffers
        width, hidden, own, blocks = x.shape[1], w_gate.shape[2], plan.slots(plan.rank), len(plan.of_block)
        route, slots = Route(*rest[:6]), rest[6]
        gates, ups, weights = (rest[7 + n * blocks : 7 + (n + 1) * blocks] for n in range(3))

        exchange = buffers.exchange("combine")
        with computing(GATHER_DY):
            in_slots = sort_rows(exchange, buffers, with_unit_column_stride(dy), route.rows)
        exchange.complete()

        def dout_of(rows: Tensor, block: int) -> Tensor:
            with computing(*DOUT):
                return grouped(rows, w_down.mT, plan.whole[block])

        own_dy = in_slots[own]
        own_dout = dout_of(own_dy, 0)
        all_dy = buffers.allocate(all_x.shape, all_x.dtype)
        _exchange_rows(exchange, plan, in_slots, all_dy)
        all_dy[plan.bounds(0)].copy_(own_dy)
        dgate, dup, weighted_act = (x.new_empty(len(all_x), hidden) for _ in range(3))

        def of_activations(block: int, dout: Tensor, weight: Tensor, dweights: Tensor) -> None:
            at = plan.bounds(block)
            launch_activation_gradients(
                dout, gates[block], ups[block], weight, dgate[at], dup[at], weighted_act[at], dweights
            )

        def dx_of_block(block: int, out: Tensor) -> None:
            at = plan.bounds(block)
            with computing(*DX_OF_EXPERTS):
                grouped(dgate[at], w_gate.mT, plan.whole[block], out, second=(dup[at], w_up.mT))

        dx, dweights = x.new_empty(len(route.rows), width), torch.empty_like(weights[0])
        results = buffers.exchange("dispatch")
        incoming = {}
        for block, peer in enumerate(buffers.peers, 1):
            (peer_dy,) = exchange.receive(peer)
            to_peer = results.outbox(peer, (len(peer_dy), width), x.dtype)
            of_activations(
                block, dout_of(peer_dy, block), weights[block],
                results.outbox(peer, (len(peer_dy),), torch.float32),
            )
            dx_of_block(block, to_peer)
            theirs = plan.slots(peer)
            incoming[peer] = [
                Incoming(tuple(dx[theirs].shape), x.dtype, None, dx[theirs]),
                Incoming(tuple(dweights[theirs].shape), torch.float32, None, dweights[theirs]),
            ]
        results.expect(incoming).start()
        of_activations(0, own_dout, weights[0][own], dweights[own])
        with computing(*DDOWN):
            dw_down, _ = launch_block_gradients(weighted_act, all_dy, plan.in_all)
        with computing(*DGATE_UP):
            dw_gate, dw_up = launch_block_gradients(all_x, dgate, plan.in_all, dup)
        dx_of_block(0, dx[own])
        for peer in buffers.peers:
            results.receive(peer)
        dlogits = moe_routing.launch_dlogits(route, dweights[slots], dweights.new_zeros(()))
        drouter = moe_routing.launch_drouter(x, dlogits)
        with stage("router"):
            drouter = sum_over_ranks(drouter, buffers.ranks)
        return launch_dx(dx, dlogits, router, route), drouter, dw_gate, dw_up, dw_down, None, None


def _exchange_rows(exchange: Exchange, plan: Plan, in_slots: Tensor, into: Tensor | None) -> None:
    """Start to move rows in the order of the slots to their experts. into: all rows, if the peers' shall lie there."""
    width, incoming = in_slots.shape[1], {}
    for block, peer in enumerate(exchange.buffers.peers, 1):
        at = plan.first_in_peer[peer] * width * in_slots.element_size()
        place = None if into is None else into[plan.bounds(block)]
        incoming[peer] = [Incoming((plan.rows(block), width), in_slots.dtype, at, place)]
        if exchange.buffers.put:
            exchange.send(peer, in_slots[plan.slots(peer)])
    exchange.expect(incoming).start()


def checked(
    inputs: Mapping[str, Tensor], top_k: int, ranks: Ranks, put: bool, overlap: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], PeerBuffers]:
    """Return x, router and the experts' matrices in the layouts that the kernels take, and memory for the exchanges.

    Raises:
        ValueError: the shapes do not fit each other, or there are fewer experts than top_k.
    """
    x, router, w_gate, w_up, w_down = (inputs[name] for name in ("x", "router", "w_gate", "w_up", "w_down"))
    check_tensors(x=x, router=router, w_gate=w_gate, w_up=w_up, w_down=w_down)
    (tokens, width), experts, hidden = x.shape, len(w_gate), w_gate.shape[-1]
    up, down = [experts, width, hidden], [experts, hidden, width]
    expected = {"router": [experts * ranks.count, width], "w_gate": up, "w_up": up, "w_down": down}
    got = {name: list(inputs[name].shape) for name in expected}
    if got != expected:
        raise ValueError(
            f"the whole router and this rank's weights must fit x {list(x.shape)}: expected {expected}, got {got}"
        )
    if not 1 <= top_k <= len(router):
        raise ValueError(f"top_k must be 1 to {len(router)}, the number of experts, got {top_k}")
    x = with_unit_column_stride(x)
    if w_gate.stride() != w_up.stride():
        w_gate, w_up = w_gate.contiguous(), w_up.contiguous()
    slots = tokens * top_k
    # The slots of a region hold all rows, and their float32 weights behind them.
    size = aligned(bytes_of((slots, width), x.dtype)) + aligned(bytes_of((slots,), torch.float32))
    size = max(size, bytes_of((len(router) + 1,), torch.int32))
    return (x, router, w_gate, w_up, w_down), peer_buffers("moe", size, ranks, x.device, put, overlap)


def moe(inputs: Mapping[str, Tensor], top_k: int, ranks: Ranks, *, put: bool, overlap: bool = True) -> Tensor:
    """Return y of this rank's tokens, differentiable once.

    Every rank calls this at the same point with as many tokens: the places in their memory follow from the number.
    put: ranks write into their peers' memory instead of reading it. overlap: exchanges run at the same
    time as kernels.
    """
    tensors, buffers = checked(inputs, top_k, ranks, put, overlap)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _MoE.apply(*tensors, top_k, buffers)
    return _forward(buffers, *tensors, top_k, save=False)[0]
