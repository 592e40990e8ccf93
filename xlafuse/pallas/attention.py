"""Attention as a Pallas kernel on Mosaic GPU: out = softmax(masked(q k^T / sqrt(head_dim))) v.

"FlashAttention-3" (Shah et al., arXiv 2407.08608) describes the division of work. A program for Hopper owns a tile of
queries of one head:

- One warpgroup copies tiles of k and v by TMA into rings in shared memory.
- Two or three warpgroups own 64 rows of queries each. Such a consumer starts the product of the next tile's scores and
  the product of this tile's weights with v together. The tensor cores work while it computes its softmax.
- Weights stay in registers, as the left operand of their product with v.

Tiles of keys are visited from the latest to the first. A row's own key is then in its first tile, so its maximum is
finite from the start, and only the first tile needs a mask. Causal programs leave out the tiles that no query sees.

Programs start in an order that keeps k and v in L2: a few heads together, and in these the tiles with most keys first.

Heads of q share heads of k and v in groups (arXiv 2305.13245). Rows beyond the sequence are zeros in shared memory, and
are not stored.

Shapes: q, out [batch, heads, sequence, head_dim]; k, v [batch, kv_heads, sequence, head_dim]; logsumexp2 [batch, heads,
rows of whole tiles], float32, base 2. head_dim: 64, 128. sequence: a multiple of 8, the rows of a piece of memory.
dtypes: bfloat16, float16. Scores, softmax and sums are float32; weights are rounded to the inputs' dtype. The forward
pass saves q, k, v, out and logsumexp2.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.attention_backward import launch_backward
from xlafuse.pallas.attention_parts import (
    CONFIGS,
    FORWARD,
    L2_BYTES,
    LOG2_E,
    OWN_ROWS,
    Config,
    of_case,
    place_of_program,
    visible_pairs,
)
from xlafuse.pallas.mosaic import PROGRAM, WARPGROUP, check_dtypes, kernel, store, tiles_in_shared_memory

REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a thread that computes and of one that copies, by consumers


def per_row(x, like):
    """Return a number for each row as a matrix."""
    return lax.broadcast_in_dim(x, like.shape, (0,))


def row_max(x):
    """Return the maximum of each row. Halving the columns makes chains of dependent instructions short."""
    while x.shape[1] > 16:
        half = x.shape[1] // 2
        x = jnp.maximum(x[:, :half], x[:, half:])
    return x.max(axis=1)


def partial_sums(x):
    """Return eight sums for each row, which one thread can add without the others of its row."""
    while x.shape[1] > 8:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x


@kernel
def attention_forward_kernel(
    q, k, v, out, logsumexp2=None, *, q_tiles, k_ring, v_ring, row_values, q_loaded, k_loaded, v_loaded, k_read, v_read,
    together, causal, config,
):
    """Compute out and, where it is wanted, logsumexp2 for a tile of 64 queries a consumer.

    q_tiles, k_ring, v_ring, row_values: shared memory. *_loaded, *_read: barriers, one for each place of a ring.
    """
    heads, sequence, head_dim = q.shape[1:]
    rows, keys = config.consumers * OWN_ROWS, config.keys
    warpgroup = lax.axis_index(WARPGROUP)
    row_tiles = pl.cdiv(sequence, rows)
    head, order = place_of_program(lax.axis_index(PROGRAM), q.shape[0] * heads, row_tiles, together)
    batch, head = lax.div(head, heads), lax.rem(head, heads)
    first_row = (row_tiles - 1 - order) * rows  # the last rows see most keys
    tiles = pl.cdiv(sequence, keys)  # of keys
    if causal:
        tiles = jnp.minimum(pl.cdiv(first_row + rows, keys), tiles)

    def place(ring, step):
        return lax.rem(step, ring.shape[0])

    @pl.when(warpgroup == config.consumers)
    def copy_keys_and_values():
        plgpu.set_max_registers(REGISTERS[config.consumers][1], action="decrease")
        kv_head = lax.div(head, heads // k.shape[1])

        @pl.loop(0, tiles)
        def copy_tile(step):
            source = batch, kv_head, pl.ds((tiles - 1 - step) * keys, keys)
            for array, ring, loaded, read in ((k, k_ring, k_loaded, k_read), (v, v_ring, v_loaded, v_read)):
                at = place(ring, step)
                pl.when(step >= ring.shape[0])(lambda read=read, at=at: plgpu.barrier_wait(read.at[at]))
                plgpu.copy_gmem_to_smem(array.at[source], ring.at[at], loaded.at[at])

        for ring, read in ((k_ring, k_read), (v_ring, v_read)):

            @pl.loop(jnp.maximum(tiles - ring.shape[0], 0), tiles)
            def wait_for_consumers(step, ring=ring, read=read):
                plgpu.barrier_wait(read.at[place(ring, step)])

    @pl.when(warpgroup < config.consumers)
    def compute():
        plgpu.set_max_registers(REGISTERS[config.consumers][0], action="increase")
        own_row = first_row + warpgroup * OWN_ROWS
        own_rows = batch, head, pl.ds(own_row, OWN_ROWS)
        q_tile = q_tiles.at[warpgroup]
        plgpu.copy_gmem_to_smem(q.at[own_rows], q_tile, q_loaded.at[warpgroup])
        scale = LOG2_E / math.sqrt(head_dim)

        def start_scores(scores, step):
            """Start the product of the queries with the keys of a step, which are loaded."""
            plgpu.wgmma(scores, q_tile, k_ring.at[place(k_ring, step)].transpose((1, 0)))

        def masked(scores):
            """Return the first scores with -inf for invisible keys."""
            key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            if causal:
                row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
                visible = key - row <= own_row - first_key
            else:
                visible = key < sequence - first_key
            return jnp.where(visible, scores, -jnp.inf)

        # The latest tiles that no query of this consumer sees.
        first = tiles - jnp.minimum(pl.cdiv(own_row + OWN_ROWS, keys), tiles) if causal and keys % rows else 0
        first_key = (tiles - 1 - first) * keys

        @pl.loop(0, first)
        def leave_out(step):
            plgpu.barrier_wait(k_loaded.at[place(k_ring, step)])
            plgpu.barrier_arrive(k_read.at[place(k_ring, step)])
            plgpu.barrier_wait(v_loaded.at[place(v_ring, step)])
            plgpu.barrier_arrive(v_read.at[place(v_ring, step)])

        plgpu.barrier_wait(q_loaded.at[warpgroup])
        plgpu.barrier_wait(k_loaded.at[place(k_ring, first)])

        def first_scores(scores):
            start_scores(scores, first)
            return scores[...]

        scores = pl.run_scoped(first_scores, plgpu.ACC((OWN_ROWS, keys), jnp.float32))
        plgpu.barrier_arrive(k_read.at[place(k_ring, first)])
        if causal or sequence % keys:
            scores = masked(scores)
        highest = row_max(scores) * scale
        weights = jnp.exp2(scores * scale - per_row(highest, scores))
        sums = partial_sums(weights)
        pl.when(first + 1 < tiles)(lambda: plgpu.barrier_wait(k_loaded.at[place(k_ring, first + 1)]))

        def add_tile(output, step, carry):
            """Add a step's weights times v to the output, and compute the weights of the next step meanwhile."""
            sums, highest, weights = carry

            def products(scores):
                start_scores(scores, step + 1)
                plgpu.barrier_wait(v_loaded.at[place(v_ring, step)])
                plgpu.wgmma(output, weights, v_ring.at[place(v_ring, step)])
                return plgpu.wgmma_accumulator_load(scores, wait_n=1)

            scores = pl.run_scoped(products, plgpu.ACC((OWN_ROWS, keys), jnp.float32))
            plgpu.barrier_arrive(k_read.at[place(k_ring, step + 1)])
            next_highest = jnp.maximum(highest, row_max(scores) * scale)
            factor = jnp.exp2(highest - next_highest)
            weights = jnp.exp2(scores * scale - per_row(next_highest, scores))
            sums = sums * per_row(factor, sums) + partial_sums(weights)
            weights = weights.astype(q.dtype)
            # The keys of the step after the next. ptxas moves no wait for a product across this one.
            pl.when(step + 2 < tiles)(lambda: plgpu.barrier_wait(k_loaded.at[place(k_ring, step + 2)]))
            output[...] = output[...] * per_row(factor, output)
            plgpu.barrier_arrive(v_read.at[place(v_ring, step)])
            return sums, next_highest, weights

        def all_tiles(output):
            carry = sums, highest, weights.astype(q.dtype)
            carry = lax.fori_loop(first, tiles - 1, lambda step, carry: add_tile(output, step, carry), carry)
            last = place(v_ring, tiles - 1)
            plgpu.barrier_wait(v_loaded.at[last])
            plgpu.wgmma(output, carry[2], v_ring.at[last])
            return output[...], *carry[:2]

        output, sums, highest = pl.run_scoped(all_tiles, plgpu.ACC((OWN_ROWS, head_dim), jnp.float32))
        plgpu.barrier_arrive(v_read.at[place(v_ring, tiles - 1)])

        total = sums.sum(axis=1)
        q_tile[...] = (output * per_row(1 / total, output)).astype(q.dtype)
        if logsumexp2 is not None:
            row_values[warpgroup] = highest + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_tile, out.at[own_rows])
        if logsumexp2 is not None:
            store(row_values.at[warpgroup], logsumexp2, own_rows)
        plgpu.wait_smem_to_gmem(0)


def check_inputs(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Raise ValueError or TypeError unless q, k and v fit, of sizes that the kernels take."""
    check_dtypes(q, k, v)
    batch, heads, sequence, head_dim = q.shape
    if k.shape != v.shape or k.shape != (batch, k.shape[1], sequence, head_dim) or heads % k.shape[1]:
        raise ValueError(
            "q [batch, heads, sequence, head_dim] and k, v [batch, kv_heads, sequence, head_dim] must fit, with "
            f"heads a multiple of kv_heads; got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if head_dim not in CONFIGS or sequence % 8:
        raise ValueError(
            f"head_dim must be one of {list(CONFIGS)} and sequence a multiple of 8, got {head_dim} and {sequence}: "
            "pad the arrays with zeros"
        )


def launch_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, config: Config | None = None, *,
    with_logsumexp2: bool = False,
) -> tuple[jax.Array, ...]:
    """Return (out,), or (out, logsumexp2)."""
    batch, heads, sequence, head_dim = q.shape
    config = config or CONFIGS[head_dim]
    rows = config.consumers * OWN_ROWS
    whole_rows = pl.cdiv(sequence, rows) * rows
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    moved = (2 * q.size + k.size + v.size) * q.dtype.itemsize
    if with_logsumexp2:
        # Whole tiles of rows (`mosaic.store`).
        results.append(jax.ShapeDtypeStruct((batch, heads, whole_rows), jnp.float32))
        moved += 4 * batch * heads * whole_rows
    pairs = visible_pairs(q, causal)
    kv_bytes = (k.size + v.size) * k.dtype.itemsize // (batch * k.shape[1])  # of a head
    return attention_forward_kernel(
        q, k, v, results=tuple(results), programs=batch * heads * pl.cdiv(sequence, rows),
        warpgroups=config.consumers + 1,
        scratch={
            "q_tiles": tiles_in_shared_memory((config.consumers, OWN_ROWS, head_dim), q.dtype),
            "k_ring": tiles_in_shared_memory((config.k_steps, config.keys, head_dim), q.dtype),
            "v_ring": tiles_in_shared_memory((config.v_steps, config.keys, head_dim), q.dtype),
            "row_values": plgpu.SMEM((config.consumers, OWN_ROWS), jnp.float32) if with_logsumexp2 else None,
            "q_loaded": plgpu.Barrier(num_barriers=config.consumers),
            "k_loaded": plgpu.Barrier(num_barriers=config.k_steps),
            "v_loaded": plgpu.Barrier(num_barriers=config.v_steps),
            "k_read": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.k_steps),
            "v_read": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.v_steps),
        },
        computes=of_case(FORWARD, causal),
        cost=pl.CostEstimate(flops=4 * pairs * head_dim, bytes_accessed=moved, transcendentals=pairs),
        together=max(1, L2_BYTES // kv_bytes) * (heads // k.shape[1]), causal=causal, config=config,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def attention(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = True, config: Config | None = None) -> jax.Array:
    """Return out of q's shape and dtype. config: how programs divide their work; None chooses by head_dim.

    Raises TypeError for other dtypes than bfloat16 and float16, and ValueError for other sizes than the header's.
    """
    check_inputs(q, k, v)
    return launch_forward(q, k, v, causal, config)[0]


def attention_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool, config: Config | None
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    check_inputs(q, k, v)
    out, logsumexp2 = launch_forward(q, k, v, causal, config, with_logsumexp2=True)
    return out, (q, k, v, out, logsumexp2)


def attention_backward(
    causal: bool, config: Config | None, saved: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, logsumexp2 = saved
    return launch_backward(q, k, v, out, logsumexp2, dout, causal, config)


attention.defvjp(attention_forward, attention_backward)


def apply(inputs: dict[str, jax.Array], causal: int = 1, window: int = 0) -> dict[str, jax.Array]:
    """Run the block `attention`: q [batch, heads, sequence, head_dim], k, v [batch, kv_heads, ...] -> out."""
    if window:
        raise ValueError(f"the kernels have no window, got {window}")
    return {"out": attention(inputs["q"], inputs["k"], inputs["v"], bool(causal))}
