"""The launch configurations among which `xlafuse tune` searches, for each function that chooses one.

A space holds no configuration of which a kernel would compute something else, but some that do not compile, spill or
exceed shared memory; a compile tells (trials.py). Where a space is for wide rows or large tiles, its bounds come from
sweeps on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from xlafuse.triton_side.configs.tuned import class_of, has_wgmma
from xlafuse.triton_side.kernels.bias_gelu import TileConfig
from xlafuse.triton_side.kernels.embedding import EmbeddingConfig
from xlafuse.triton_side.kernels.linear_gelu import DpreConfig
from xlafuse.triton_side.kernels.matmul import FEW_ROWS, SHORT_SUM, pointer_config
from xlafuse.triton_side.kernels.rope import RopeConfig
from xlafuse.triton_side.kernels.shared.launch import FlatConfig, RowConfig, cdiv, next_power_of_2
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig
from xlafuse.triton_side.kernels.shared.tf32_operand import PARTS

WARP = 32
MOST_WARPS = 64  # of a multiprocessor
VECTOR = 16  # bytes of a thread's largest load
FMA_PRODUCTS = 512  # multiply-adds of a thread in a product without tensor cores, as in the rules; more compile slowly
MOST_STEP = 64 * 256  # numbers of k, and of v, in a step of attention; two steps of 16 bits take 131 kB
MOST_PREFETCHED = 220_000  # bytes of a multiprocessor's shared memory


@dataclass(frozen=True)
class Choice:
    """A choice to search: the function's name, its arguments, its rule's configuration, the GPU's multiprocessors.

    The arguments have the largest number of rows of their class.
    """

    name: str
    facts: Mapping[str, Any]
    rule: Any
    multiprocessors: int

    @property
    def shape_class(self) -> dict[str, Any]:
        return class_of(self.facts)

    @property
    def element_bytes(self) -> int:
        return int(self.facts.get("element_bytes", 4))


def candidates(choice: Choice) -> list[Any]:
    """Return the rule's configuration and those of the function's space, each once."""
    return list(dict.fromkeys((choice.rule, *SPACES[choice.name](choice))))


def flat(choice: Choice) -> Iterator[FlatConfig]:
    """One to eight 16-byte vectors a thread."""
    for warps, vectors in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        yield FlatConfig(WARP * warps * vectors * VECTOR // choice.element_bytes, warps)


def whole_rows(choice: Choice, *, resident: bool = False) -> Iterator[RowConfig]:
    """Tiles of whole rows with 8 to 32 elements a thread: one tile a program, or a resident set of programs.

    resident: only the latter, for a kernel each of whose programs writes partial sums.
    """
    rows, width = choice.facts["rows"], max(choice.rule.block_columns, next_power_of_2(choice.facts["columns"]))
    for block_rows, warps in product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        if not 8 <= block_rows * width // (WARP * warps) <= 32:
            continue
        tiles = cdiv(rows, block_rows)
        if not resident:
            yield RowConfig(block_rows, width, warps, 1, tiles)
        for stages, programs in product((2, 3), (1, 2, 4)):
            if programs * warps <= MOST_WARPS and programs * choice.multiprocessors < tiles:
                yield RowConfig(block_rows, width, warps, stages, programs * choice.multiprocessors)


def looped_rows(choice: Choice) -> Iterator[RowConfig]:
    """Loops over a row in blocks with 8 to 32 elements a thread; for rows of more than 8192 columns."""
    if choice.facts["columns"] <= 8192:
        return
    for columns, warps, stages, programs in product(
        (4096, 8192, 16384), (8, 16, 32), (1, 2), (1, 2, 3, 4)
    ):
        resident = programs * choice.multiprocessors
        if warps * programs <= MOST_WARPS and 8 <= columns // (WARP * warps) <= 32 and resident <= choice.facts["rows"]:
            if columns < choice.facts["columns"]:
                yield RowConfig(1, columns, warps, stages, resident)


def rows(choice: Choice) -> Iterator[RowConfig]:
    yield from whole_rows(choice)
    yield from looped_rows(choice)


def resident_rows(choice: Choice) -> Iterator[RowConfig]:
    yield from whole_rows(choice, resident=True)
    yield from looped_rows(choice)


def halved_rows(choice: Choice) -> Iterator[RowConfig]:
    """Those of other kernels, and pairs of programs that share each row."""
    yield from resident_rows(choice)
    half = next_power_of_2(choice.facts["columns"]) // 2
    for warps, stages in product((8, 16, 32), (1, 2, 3)):
        if 4096 <= half <= WARP * WARP * warps:
            yield RowConfig(1, half, warps, stages, max(1, min(choice.facts["rows"], choice.multiprocessors // 2)))


def tiles(choice: Choice, *, resident: bool) -> Iterator[TileConfig]:
    """Tiles with one to four 16-byte vectors a thread; with `resident`, at most 64 warps a multiprocessor."""
    rows, columns = choice.facts["rows"], max(1, choice.facts["columns"])
    widths = sorted({min(width, next_power_of_2(columns)) for width in (512, 1024, 2048)})
    for warps, vectors, width in product((4, 8), (1, 2, 4), widths):
        block_rows = WARP * warps * vectors * VECTOR // choice.element_bytes // width
        if not block_rows:
            continue
        most = cdiv(rows, block_rows)
        if not resident:
            yield TileConfig(block_rows, width, warps, most)
            continue
        for programs in (2, 4, 8):
            if programs * warps <= MOST_WARPS:
                each = max(1, programs * choice.multiprocessors // cdiv(columns, width))
                yield TileConfig(block_rows, width, warps, min(most, each))


def dpre_tiles(choice: Choice) -> Iterator[DpreConfig]:
    for tile, stages in product(tiles(choice, resident=True), (1, 3)):
        yield DpreConfig(tile.block_rows, tile.block_columns, tile.num_warps, stages, tile.programs)


def looked_up_rows(choice: Choice) -> Iterator[EmbeddingConfig]:
    """One vector of each of `tokens` rows a thread."""
    for tokens, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        width = WARP * warps * VECTOR // choice.element_bytes
        if width <= next_power_of_2(choice.facts["columns"]):
            yield EmbeddingConfig(tokens, width, warps)


def summed_rows(choice: Choice) -> Iterator[EmbeddingConfig]:
    for tokens, warps, of_table in product((8, 16, 32), (2, 4, 8), (8, 16, 32, 64)):
        width = WARP * warps * VECTOR // choice.element_bytes
        if width <= next_power_of_2(choice.facts["columns"]):
            yield EmbeddingConfig(tokens, width, warps, of_table)


def rotated_heads(choice: Choice) -> Iterator[RopeConfig]:
    """One vector of angles a thread, and up to four heads at once."""
    heads = choice.facts["heads"] + choice.facts["kv_heads"]
    for warps, at_once, splits in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)):
        if splits * at_once <= heads:
            yield RopeConfig(vectors=WARP * warps, heads=at_once, splits=splits, num_warps=warps)


def cached_keys(choice: Choice) -> Iterator[Any]:
    for factor, block, warps, stages in product((1, 2, 4), (32, 64, 128), (4, 8), (3, 5)):
        chunk = cdiv(choice.rule.chunk * factor // 2, block) * block
        yield replace(choice.rule, chunk=chunk, block_kv=block, num_warps=warps, num_stages=stages)


def attention_tiles(choice: Choice, kept: str, looped: str, accumulators: int) -> Iterator[Any]:
    """Tiles whose scores and accumulators fit the registers; a kept row has `accumulators` of head_dim numbers.

    kept, looped: the block that a program keeps, and the one that it loops over. The limits come from compiled code
    (sm_90a, Triton 3.7.1): a tile of more scores a thread spills in most kernels.
    """
    facts, half = choice.facts, choice.facts["dtype"] != torch.float32
    ieee = not half and facts["precision"] == "ieee"
    most = 64 if half else FMA_PRODUCTS // facts["head_dim"] if ieee else 32
    steps, depths = ((32, 64, 128), (2, 3)) if half else ((16, 32, 64), (1, 2, 3))
    through = sorted({False, facts["descriptors"] and not ieee})
    for rows, step, warps, stages, descriptors in product((16, 32, 64, 128), steps, (4, 8), depths, through):
        threads = WARP * warps
        a_warp = ieee or 8 * warps <= rows <= 32 * warps  # rows of a warp's tensor core products
        # An illegal access in Triton 3.6: three TF32 products of 8 columns in each of two warp groups.
        narrow = facts["precision"] == "tf32x3" and not half and rows < 16 * warps and step < 32
        registers = rows * step <= most * threads and accumulators * rows * facts["head_dim"] <= 128 * threads
        if a_warp and registers and not narrow and step * facts["head_dim"] <= MOST_STEP:
            fields = {kept: rows, looped: step, "num_warps": warps, "num_stages": stages, "descriptors": descriptors}
            yield replace(choice.rule, **fields)


def one_accumulator(choice: Choice) -> Iterable[MatmulConfig]:
    """Tiles of a product for its dtype, and for how its operands are read."""
    dtype, descriptors = choice.facts["dtype"], choice.facts["descriptors"]
    if not descriptors or dtype == torch.float32:
        return read_through_pointers(dtype, choice.facts["precision"])
    rows = choice.facts.get("m")
    if not rows or rows > FEW_ROWS:
        step = choice.rule.block_k
        return short_sums(step) if step <= SHORT_SUM else many_rows(dtype.itemsize)
    whole = few_rows(rows, dtype.itemsize)
    return split_tiles(whole, choice) if "k" in choice.facts else whole


def products(choice: Choice) -> Iterable[MatmulConfig]:
    """Tiles of `matmul_kernel`, which can also read a copy of float32 operands (`shared/tf32_operand.py`)."""
    facts = choice.facts
    if facts["descriptors"] and facts["precision"] in PARTS and facts["k"] > SHORT_SUM and has_wgmma():
        yield from copied_operands(PARTS[facts["precision"]])
    yield from one_accumulator(choice)


def copied_operands(parts: int) -> Iterator[MatmulConfig]:
    """Tiles that fit 227 KiB of shared memory, for operands of which each has a copy of `parts` matrices."""
    tiles = {
        1: ((128, 128, 32, 8, 4), (128, 128, 32, 8, 5), (256, 128, 32, 8, 3), (128, 256, 16, 8, 4)),
        2: ((128, 128, 32, 8, 3), (128, 64, 32, 8, 4), (64, 128, 32, 4, 3), (128, 128, 16, 8, 6)),
    }
    for (m, n, k, warps, stages), group in product(tiles[parts], (8, 16)):
        yield MatmulConfig(m, n, k, warps, stages, group)


def split_tiles(whole: Iterable[MatmulConfig], choice: Choice) -> Iterator[MatmulConfig]:
    """Configurations whose tiles one to eight programs share, at most two programs a multiprocessor."""
    for config, splits in product(whole, (1, 2, 4, 8)):
        programs = splits * cdiv(choice.facts["n"], config.block_n)
        if splits == 1 or programs <= 2 * choice.multiprocessors and splits * config.block_k <= choice.facts["k"]:
            yield replace(config, splits=splits)


def many_rows(element_bytes: int) -> Iterator[MatmulConfig]:
    """Tiles that TMA reads, 128 bytes of the inner axis at a time."""
    k = 128 // element_bytes
    for stages, group in product((3, 4), (4, 8, 16, 32)):
        yield MatmulConfig(128, 256, k, 8, stages, group)
    for group in (8, 16):
        yield MatmulConfig(256, 128, k, 8, 4, group)
        yield MatmulConfig(128, 128, k, 8, 4, group)
        yield MatmulConfig(128, 128, k, 4, 3, group, programs=2)
        yield MatmulConfig(128, 64, k, 4, 4, group, programs=2)
        yield MatmulConfig(64, 128, k, 4, 4, group, programs=2)
    yield MatmulConfig(128, 256, k // 2, 8, 6)
    yield MatmulConfig(64, 256, k, 4, 4)
    yield MatmulConfig(64, 64, k, 4, 4, programs=3)


def short_sums(k: int) -> Iterator[MatmulConfig]:
    """Tiles of one step of `k` terms, as many as the registers of a multiprocessor hold."""
    for (m, n, warps, programs), group in product(
        ((64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 2), (64, 256, 4, 2), (128, 256, 8, 1)), (8, 16)
    ):
        yield MatmulConfig(m, n, k, warps, 3, group, programs=programs)


def few_rows(rows: int, element_bytes: int) -> Iterator[MatmulConfig]:
    """One tile of rows, whose steps of 128 to 512 bytes along the inner axis are prefetched."""
    tile = max(16, next_power_of_2(rows))
    for columns, step, stages in product((32, 64, 128), (128, 256, 512), (3, 5, 8)):
        if stages * (columns + tile) * step <= MOST_PREFETCHED:
            yield pointer_config(tile, columns, step // element_bytes, 4, stages)


def read_through_pointers(dtype: torch.dtype, precision: str) -> Iterator[MatmulConfig]:
    if dtype == torch.float32 and precision == "ieee":
        for m, n, k, warps in product((32, 64, 128), (32, 64, 128), (16, 32), (4, 8)):
            if 16 <= m * n // (WARP * warps) <= 64:
                yield pointer_config(m, n, k, warps, 2)
        return
    tiles = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)]
    if precision != "tf32x3":  # these spill both halves of an operand
        tiles += [(128, 128, 4), (128, 256, 8)]
    for (m, n, warps), k, stages in product(tiles, (32, 64), (2, 3, 4)):
        yield pointer_config(m, n, k, warps, stages)


def two_accumulators() -> Iterator[MatmulConfig]:
    for stages, group in product((3, 4), (4, 8, 16)):
        yield MatmulConfig(128, 128, 64, 8, stages, group)
    yield MatmulConfig(128, 64, 64, 4, 3, 16, programs=2)
    yield MatmulConfig(128, 64, 64, 4, 3, 8, programs=2)
    yield MatmulConfig(256, 64, 64, 8, 4)
    yield MatmulConfig(128, 128, 32, 8, 6)


def grouped(choice: Choice) -> Iterable[MatmulConfig]:
    if not choice.rule.descriptors and choice.facts["descriptors"]:  # few slots
        return few_rows(choice.rule.block_m, choice.facts["dtype"].itemsize)
    if choice.facts["accumulators"] == 1 or not choice.facts["descriptors"] or choice.facts["dtype"] == torch.float32:
        return one_accumulator(choice)
    return two_accumulators()


SPACES: dict[str, Callable[[Choice], Iterable[Any]]] = {
    "adamw.configure": flat,
    "bias_gelu.configure_backward": lambda choice: tiles(choice, resident=True),
    "bias_gelu.configure_forward": lambda choice: tiles(choice, resident=False),
    "cross_entropy.configure_backward": flat,
    "cross_entropy.configure_forward": flat,
    "decode_attention.decode_config": cached_keys,
    "dropout_residual_norm.configure_backward": lambda choice: whole_rows(choice, resident=True),
    "dropout_residual_norm.configure_forward": whole_rows,
    "embedding.configure_backward": summed_rows,
    "embedding.configure_forward": looked_up_rows,
    "gelu.configure": flat,
    "layernorm.configure_backward": halved_rows,
    "layernorm.configure_forward": rows,
    "linear_gelu.configure_dpre": dpre_tiles,
    "matmul.matmul_config": products,
    "matmul_fp8.fp8_config": one_accumulator,
    "moe.grouped_config": grouped,
    "moe.weights_gradient_config": grouped,
    "rmsnorm.configure_backward": resident_rows,
    "rmsnorm.configure_forward": rows,
    "rope.configure": rotated_heads,
    "shared.attention_configs.dbias_config": lambda choice: attention_tiles(choice, "block_q", "block_kv", 0),
    "shared.attention_configs.dk_dv_config": lambda choice: attention_tiles(choice, "block_kv", "block_q", 2),
    "shared.attention_configs.dq_config": lambda choice: attention_tiles(choice, "block_q", "block_kv", 1),
    "shared.attention_configs.forward_config": lambda choice: attention_tiles(choice, "block_q", "block_kv", 1),
    "shared.gated_unit.configure": flat,
    "softmax.configure_backward": rows,
    "softmax.configure_forward": rows,
    "vector_add.configure": flat,
}
