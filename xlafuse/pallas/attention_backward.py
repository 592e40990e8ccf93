"""Gradient of attention as a Pallas kernel on Mosaic GPU: dq, dk and dv from q, k, v, out, dout and logsumexp2.

    weights = exp2(scores log2(e) / sqrt(head_dim) - logsumexp2)    delta = sum(dout out)
    ds = weights (dout v^T - delta)
    dq = ds k / sqrt(head_dim)    dk = ds^T q / sqrt(head_dim)    dv = weights^T dout

One kernel makes the three gradients with five products ("FlashAttention-2", Dao, arXiv 2307.08691). A program for
Hopper owns 128 keys of one head of k and v, and loops over the queries that see them, 64 at a time, in all heads that
share these keys:

- One warpgroup copies tiles of q and dout, with their logsumexp2 and delta, by TMA into rings in shared memory.
- Two warpgroups own 64 keys each. Scores and their gradients are transposed, [keys, queries]: weights and ds are then
  left operands in registers for dv and dk, which stay in registers for the whole loop.
- ds also goes to shared memory, where dq is its product with k. TMA adds dq to a float32 array in memory. The order of
  this sum, and so its last bits, differ from run to run.
- The scores of the next tile start before the product for dk has ended.

Keys and rows beyond the sequence need no masks with a causal mask, because TMA copies zeros for them.

Shapes and dtypes: as in `attention.py`. delta is float32 [batch, heads, rows], as logsumexp2.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xlafuse.pallas.attention_parts import (
    BACKWARD,
    CONFIGS,
    L2_BYTES,
    LOG2_E,
    OWN_ROWS,
    Config,
    heads_together,
    of_case,
    place_of_program,
    visible_pairs,
)
from xlafuse.pallas.mosaic import PROGRAM, WARPGROUP, kernel, multiprocessors, tiles_in_shared_memory

CONSUMERS = 2  # warpgroups that compute; one more copies
OWN_KEYS = OWN_ROWS  # of a consumer
KEYS = CONSUMERS * OWN_KEYS
QUERIES = 64  # of a tile
COLUMNS = 64  # of dq that a consumer computes at a time


@kernel
def attention_backward_kernel(
    q, k, v, dout, logsumexp2, delta, dq, dk, dv, *, k_tiles, v_tiles, q_ring, dout_ring, row_rings, ds_tiles, dq_tiles,
    keys_loaded, q_loaded, dout_loaded, read, ds_written, finished, numbers, together, causal,
):
    """Compute dk and dv for 64 keys a consumer, and add to dq, which is a float32 array in memory.

    *_tiles, *_ring: shared memory. keys_loaded, *_loaded, read, ds_written, finished: barriers.
    """
    heads, sequence, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    sharing = heads // kv_heads
    steps = q_ring.shape[0]
    warpgroup = lax.axis_index(WARPGROUP)
    head, block = place_of_program(lax.axis_index(PROGRAM), k.shape[0] * kv_heads, pl.cdiv(sequence, KEYS), together)
    batch, kv_head = lax.div(head, kv_heads), lax.rem(head, kv_heads)
    first_key = block * KEYS
    first_tile = lax.div(first_key, QUERIES) if causal else 0
    per_head = pl.cdiv(sequence, QUERIES) - first_tile
    total = per_head * sharing

    def tile_of(step):
        """Return (head, row) of a step's tile of queries."""
        return kv_head * sharing + lax.div(step, per_head), (first_tile + lax.rem(step, per_head)) * QUERIES

    @pl.when(warpgroup == CONSUMERS)
    def copy_operands():
        plgpu.set_max_registers(24, action="decrease")

        def copy_keys(array, tiles, barrier):
            for part in range(CONSUMERS):
                source = array.at[batch, kv_head, pl.ds(first_key + part * OWN_KEYS, OWN_KEYS)]
                plgpu.copy_gmem_to_smem(source, tiles.at[part], keys_loaded.at[barrier])

        copy_keys(k, k_tiles, 0)

        @pl.loop(0, total)
        def copy_tile(step):
            at = lax.rem(step, steps)
            pl.when(step >= steps)(lambda: plgpu.barrier_wait(read.at[at]))
            head, row = tile_of(step)
            rows = batch, head, pl.ds(row, QUERIES)
            plgpu.copy_gmem_to_smem(q.at[rows], q_ring.at[at], q_loaded.at[at])
            plgpu.copy_gmem_to_smem(logsumexp2.at[rows], row_rings.at[0, at], q_loaded.at[at])
            pl.when(step == 0)(lambda: copy_keys(v, v_tiles, 1))
            plgpu.copy_gmem_to_smem(dout.at[rows], dout_ring.at[at], dout_loaded.at[at])
            plgpu.copy_gmem_to_smem(delta.at[rows], row_rings.at[1, at], dout_loaded.at[at])

        @pl.loop(jnp.maximum(total - steps, 0), total)
        def wait_for_consumers(step):
            plgpu.barrier_wait(read.at[lax.rem(step, steps)])

    @pl.when(warpgroup < CONSUMERS)
    def compute():
        plgpu.set_max_registers(240, action="increase")
        own_key = first_key + warpgroup * OWN_KEYS
        numbers[warpgroup] = plgpu.layout_cast(lax.iota(jnp.int32, QUERIES), plgpu.Layout.WGMMA.reduce(0))

        def own(step):
            """Return this consumer's number, which the compiler believes to depend on the step.

            Otherwise it would compute all operands' addresses before the loop, and there are no registers for them.
            """
            return warpgroup + lax.shift_right_logical(step, 30)

        def start_scores(scores, step):
            """Start the product of the own keys with the queries of a step, which are loaded."""
            plgpu.wgmma(scores, k_tiles.at[own(step)], q_ring.at[lax.rem(step, steps)].transpose((1, 0)))

        def first_scores(scores):
            start_scores(scores, 0)
            return scores[...]

        def masked(weights, row):
            """Return the weights with 0 for keys that a query does not see."""
            key = plgpu.broadcasted_iota(jnp.int32, weights.shape, 0, layout=plgpu.Layout.WGMMA)
            if causal:
                # From memory. Computed, the numbers would stay in registers during the loop.
                query = plgpu.load(numbers.at[warpgroup], layout=plgpu.Layout.WGMMA.reduce(0)) + (row - own_key)
                visible = key <= lax.broadcast_in_dim(query, weights.shape, (1,))
            else:
                visible = key < sequence - own_key
            return jnp.where(visible, weights, 0)

        def per_column(ring, step, like):
            numbers = plgpu.load(row_rings.at[ring, lax.rem(step, steps)], layout=plgpu.Layout.WGMMA.reduce(0))
            return lax.broadcast_in_dim(numbers, like.shape, (1,))

        def add_tile(dk_sum, dv_sum, step, scores):
            """Add a step's tile to the gradients, and return the scores of the next one."""
            at, slot = lax.rem(step, steps), lax.rem(step, 2)
            head, row = tile_of(step)
            q_tile, dout_tile = q_ring.at[at], dout_ring.at[at]

            def weights_and_gradient(product):
                plgpu.barrier_wait(dout_loaded.at[at])
                plgpu.wgmma(product, v_tiles.at[own(step)], dout_tile.transpose((1, 0)))
                weights = jnp.exp2(scores * (LOG2_E / math.sqrt(head_dim)) - per_column(0, step, scores))
                if causal or sequence % KEYS:
                    edge = row < first_key + KEYS if causal else first_key + KEYS > sequence
                    weights = lax.cond(edge, lambda: masked(weights, row), lambda: weights)
                weights = weights.astype(q.dtype)
                plgpu.wgmma(dv_sum, weights, dout_tile)
                return weights, plgpu.wgmma_accumulator_load(product, wait_n=1)

            weights, dweights = pl.run_scoped(weights_and_gradient, plgpu.ACC((OWN_KEYS, QUERIES), jnp.float32))
            ds = weights.astype(jnp.float32) * (dweights - per_column(1, step, dweights))
            ds = ds.astype(q.dtype)
            ds_tiles[slot, warpgroup] = ds
            plgpu.commit_smem()
            # Each consumer computes 64 columns of dq. With head_dim 64 these are all, and they take turns.
            if head_dim > COLUMNS:
                plgpu.barrier_arrive(ds_written.at[warpgroup, slot])
            else:
                pl.when(slot != warpgroup)(lambda: plgpu.barrier_arrive(ds_written.at[warpgroup, slot]))
            plgpu.wgmma_wait(0)

            def add_dq(dq_sum, start_dk=None):
                other = 1 - own(step)
                columns = pl.ds(own(step) * COLUMNS if head_dim > COLUMNS else 0, COLUMNS)
                plgpu.wgmma(dq_sum, ds_tiles.at[slot, own(step)].transpose((1, 0)), k_tiles.at[own(step), :, columns])
                plgpu.barrier_wait(ds_written.at[1 - warpgroup, slot])
                plgpu.wgmma(dq_sum, ds_tiles.at[slot, other].transpose((1, 0)), k_tiles.at[other, :, columns])
                if start_dk is not None:
                    start_dk()
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dq_tiles[warpgroup] = plgpu.wgmma_accumulator_load(dq_sum, wait_n=0 if start_dk is None else 1)
                plgpu.commit_smem()
                target = dq.at[batch, head, pl.ds(row, QUERIES), columns]
                plgpu.copy_smem_to_gmem(dq_tiles.at[warpgroup], target, reduction_op="add")

            def gradients(next_scores):
                def start_dk():
                    plgpu.wgmma(dk_sum, ds, q_tile)

                sums = plgpu.ACC((QUERIES, COLUMNS), jnp.float32)
                if head_dim > COLUMNS:
                    pl.run_scoped(lambda dq_sum: add_dq(dq_sum, start_dk), sums)
                else:
                    pl.when(slot == warpgroup)(lambda: pl.run_scoped(add_dq, sums))
                    start_dk()
                pl.when(step + 1 < total)(lambda: plgpu.barrier_wait(q_loaded.at[lax.rem(step + 1, steps)]))
                start_scores(next_scores, step + 1)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(read.at[at])
                return plgpu.wgmma_accumulator_load(next_scores, wait_n=0)

            return pl.run_scoped(gradients, plgpu.ACC((OWN_KEYS, QUERIES), jnp.float32))

        def all_tiles(dk_sum, dv_sum):
            plgpu.barrier_wait(keys_loaded.at[0])
            plgpu.barrier_wait(q_loaded.at[0])
            scores = pl.run_scoped(first_scores, plgpu.ACC((OWN_KEYS, QUERIES), jnp.float32))
            plgpu.barrier_wait(keys_loaded.at[1])
            lax.fori_loop(0, total, lambda step, scores: add_tile(dk_sum, dv_sum, step, scores), scores)
            return dk_sum[...], dv_sum[...]

        accumulator = plgpu.ACC((OWN_KEYS, head_dim), jnp.float32)
        dk_value, dv_value = pl.run_scoped(all_tiles, accumulator, accumulator)
        k_tile, v_tile = k_tiles.at[warpgroup], v_tiles.at[warpgroup]
        v_tile[...] = dv_value.astype(dv.dtype)
        plgpu.barrier_arrive(finished)  # the other consumer reads these keys for dq
        plgpu.barrier_wait(finished)
        k_tile[...] = (dk_value * (1 / math.sqrt(head_dim))).astype(dk.dtype)
        plgpu.commit_smem()
        own_keys = batch, kv_head, pl.ds(own_key, OWN_KEYS)
        plgpu.copy_smem_to_gmem(v_tile, dv.at[own_keys])
        plgpu.copy_smem_to_gmem(k_tile, dk.at[own_keys])
        plgpu.wait_smem_to_gmem(0)


def launch_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, logsumexp2: jax.Array, dout: jax.Array, causal: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv. XLA computes delta, fills dq's sums with zeros, and scales and rounds dq at the end."""
    batch, heads, sequence, head_dim = q.shape
    kv_heads = k.shape[1]
    steps = (config or CONFIGS[head_dim]).q_steps
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, logsumexp2.shape[2] - sequence)))
    dq = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    pairs = visible_pairs(q, causal)
    moved = (2 * q.size + 2 * k.size + 2 * v.size) * q.dtype.itemsize + 4 * (logsumexp2.size + delta.size + 2 * q.size)
    head_bytes = sequence * head_dim * (2 * q.dtype.itemsize + 4) * (heads // kv_heads)
    tiles = pl.cdiv(sequence, KEYS)
    # A program of the first keys takes twice the mean. Less work than this for each multiprocessor would wait for it.
    enough = 2 * multiprocessors() // tiles
    key_tiles = tiles_in_shared_memory((CONSUMERS, OWN_KEYS, head_dim), q.dtype)
    query_ring = tiles_in_shared_memory((steps, QUERIES, head_dim), q.dtype)
    query_loaded = plgpu.Barrier(num_arrivals=2, num_barriers=steps)
    # Without Mosaic's barriers: between a product's end and the next store to its operands, all threads that share them
    # meet at `commit_smem`, `ds_written` or `finished`.
    dk, dv = attention_backward_kernel(
        q, k, v, dout, logsumexp2, delta, dq,
        results=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        programs=batch * kv_heads * tiles, warpgroups=CONSUMERS + 1, barriers=False,
        scratch={
            "k_tiles": key_tiles, "v_tiles": key_tiles, "q_ring": query_ring, "dout_ring": query_ring,
            "row_rings": plgpu.SMEM((2, steps, QUERIES), jnp.float32),
            "ds_tiles": tiles_in_shared_memory((2, CONSUMERS, OWN_KEYS, QUERIES), q.dtype),
            "dq_tiles": tiles_in_shared_memory((CONSUMERS, QUERIES, COLUMNS), jnp.float32),
            "numbers": plgpu.SMEM((CONSUMERS, QUERIES), jnp.int32),
            "keys_loaded": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2),
            "q_loaded": query_loaded, "dout_loaded": query_loaded,
            "read": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=steps),
            # Two, for alternate steps: a consumer may write ds again before the other one has waited for its last ds.
            "ds_written": plgpu.Barrier(num_barriers=(CONSUMERS, 2)),
            "finished": plgpu.Barrier(num_arrivals=CONSUMERS),
        },
        computes=of_case(BACKWARD, causal),
        cost=pl.CostEstimate(flops=10 * pairs * head_dim, bytes_accessed=moved, transcendentals=pairs),
        together=heads_together(batch * kv_heads, max(L2_BYTES // head_bytes, enough)), causal=causal,
    )
    return (jax.freeze(dq) / math.sqrt(head_dim)).astype(q.dtype), dk, dv
