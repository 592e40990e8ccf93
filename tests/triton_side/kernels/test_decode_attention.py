import kernel_properties as properties
import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, random

from xlafuse.triton_side.kernels import decode_attention, decode_attention_paged
from xlafuse.triton_side.kernels.decode_attention import DecodeConfig

# Many chunks, a few, one; tiles as long as the chunk, and shorter.
CONFIGS = [
    DecodeConfig(chunk=16, block_kv=16, num_warps=4, num_stages=1),
    DecodeConfig(chunk=48, block_kv=16, num_warps=4, num_stages=2),
    DecodeConfig(chunk=512, block_kv=32, num_warps=4, num_stages=1),
]
PAGE_SIZES = [None, 1, 5, 16]


def draw_lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def caches(lengths: torch.Tensor, kv_heads: int, capacity: int, head_dim: int, dtype=torch.float32, seed: int = 1):
    """Return k and v, NaN past each sequence's length."""
    beyond = torch.arange(capacity, device=DEVICE) >= lengths[:, None]
    both = (random(len(lengths), kv_heads, capacity, head_dim, dtype=dtype, seed=seed + i) for i in range(2))
    return tuple(cache.masked_fill(beyond[:, None, :, None], torch.nan) for cache in both)


def in_pages(cache: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of a cache [batch, kv_heads, capacity, head_dim], mixed with pages of NaN, and their table."""
    batch, kv_heads, capacity, head_dim = cache.shape
    each = -(-capacity // page_size)
    whole = cache.new_full((batch, each * page_size, kv_heads, head_dim), torch.nan)
    whole[:, :capacity] = cache.transpose(1, 2)
    order = torch.randperm(batch * each + 3, generator=torch.Generator().manual_seed(0)).to(cache.device)
    pages = cache.new_full((batch * each + 3, page_size, kv_heads, head_dim), torch.nan)
    table = order[: batch * each].to(torch.int32).view(batch, each)
    pages[table.long()] = whole.view(batch, each, page_size, kv_heads, head_dim)
    return pages, table


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Swap the axes of heads and queries, as the blocks with and without pages differ in them."""
    return x.transpose(1, 2) if x.ndim == 4 else x


def configured(config: DecodeConfig | None, page_size: int | None = None, module=decode_attention) -> properties.Launch:
    """Return a function q, k, v, lengths -> out; with page_size it puts the caches in pages.

    Queries, if q has that axis, come after heads.
    """

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor]:
        if page_size is None:
            return (module.launch(q, k, v, lengths, None, config),)
        (k_pages, table), (v_pages, _) = in_pages(k, page_size), in_pages(v, page_size)
        out = module.launch(tokens_first(q), k_pages.transpose(1, 2), v_pages.transpose(1, 2), lengths, table, config)
        return (tokens_first(out),)

    return launch


def public(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor]:
    return (decode_attention.apply({"q": q, "k_cache": k, "v_cache": v, "lengths": lengths})["out"],)


def public_paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor]:
    (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
    given = {"q": tokens_first(q), "k_pages": k_pages, "v_pages": v_pages, "page_table": table, "lengths": lengths}
    return (tokens_first(decode_attention_paged.apply(given)["out"]),)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 16), (6, 2, 64), (17, 1, 32)])
def test_agrees_with_float64(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    lengths = draw_lengths(0, 1, 67)
    q, (k, v) = random(3, heads, head_dim, dtype=dtype), caches(lengths, kv_heads, 67, head_dim, dtype)
    assert not properties.decode_attention(public, q, k, v, lengths)
    assert not properties.decode_attention(public_paged, q, k, v, lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "head_dim"), [(1, 1, 16, 64), (6, 2, 3, 16), (2, 1, 2, 128), (4, 1, 16, 32)]
)
def test_several_queries_agree_with_float64(
    heads: int, kv_heads: int, queries: int, head_dim: int, dtype: torch.dtype
) -> None:
    """One sequence has fewer keys than queries, and one has several chunks."""
    lengths = draw_lengths(0, queries - 1, 67)
    q, (k, v) = random(3, heads, queries, head_dim, dtype=dtype), caches(lengths, kv_heads, 67, head_dim, dtype)
    assert not properties.decode_attention(public, q, k, v, lengths)
    assert not properties.decode_attention(public_paged, q, k, v, lengths)
    assert not properties.decode_attention(public_paged, between(q), between(k), between(v), lengths)


def between(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with the second and third axis swapped in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_one_query_with_its_axis_is_one_query_without() -> None:
    lengths = draw_lengths(0, 67)
    q, (k, v) = random(2, 6, 32), caches(lengths, 2, 67, 32)
    for launch in (public, public_paged):
        assert torch.equal(launch(q[:, :, None], k, v, lengths)[0][:, :, 0], launch(q, k, v, lengths)[0])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration_agrees_for_several_queries(config: DecodeConfig, page_size: int | None) -> None:
    """A chunk may hold keys that the last queries of a sequence see and its first ones do not."""
    lengths = draw_lengths(2, 17, 50)
    q, (k, v) = random(3, 3, 5, 16), caches(lengths, 1, 50, 16)
    assert not properties.decode_attention(configured(config, page_size), q, k, v, lengths)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("config", CONFIGS)
def test_any_configuration_agrees(config: DecodeConfig, page_size: int | None) -> None:
    lengths = draw_lengths(15, 16, 17, 48, 80)
    q, (k, v) = random(5, 3, 16), caches(lengths, 1, 80, 16)
    assert not properties.decode_attention(configured(config, page_size), q, k, v, lengths)


def growing(*queries: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and lengths of up to 18 chunks of 16 keys; the maximum score grows from chunk to chunk."""
    lengths = draw_lengths(0, 33, 280)
    k, v = caches(lengths, 2, 280, 16)
    return 3 * random(3, 6, *queries, 16), k * torch.linspace(0.1, 1.5, 280, device=DEVICE)[:, None], v, lengths


@pytest.mark.parametrize("queries", [(), (4,)])
def test_more_chunks_than_one_step_combines(queries: tuple[int, ...]) -> None:
    q, k, v, lengths = growing(*queries)
    for page_size in (None, 5):
        assert not properties.decode_attention(configured(CONFIGS[0], page_size), q, k, v, lengths)


def test_large_scores_stay_finite() -> None:
    lengths = draw_lengths(40)
    q, (k, v) = 1e4 * random(1, 2, 16), caches(lengths, 2, 40, 16)
    for config in CONFIGS:
        assert configured(config)(q, 1e4 * k, v, lengths)[0].isfinite().all()


def test_keys_of_score_minus_infinity_have_weight_zero() -> None:
    lengths = draw_lengths(40)
    q, (k, v) = random(1, 1, 16).abs(), caches(lengths, 1, 40, 16)
    k[0, 0, :33] = -torch.inf
    for config in CONFIGS:
        (out,) = configured(config)(q, k, v, lengths)
        rest = configured(config)(q, k[:, :, 33:], v[:, :, 33:], draw_lengths(7))[0]
        torch.testing.assert_close(out, rest)


def test_lengths_out_of_range_are_clamped() -> None:
    q, (k, v) = random(2, 2, 16), caches(draw_lengths(20, 20), 1, 20, 16)
    for config in CONFIGS:
        (out,) = configured(config)(q, k, v, draw_lengths(-3, 2000))
        (expected,) = configured(config)(q, k, v, draw_lengths(0, 20))
        assert torch.equal(out, expected) and not out[0].any()


def test_no_keys_give_zeros() -> None:
    lengths = draw_lengths(0, 0)
    assert public(random(0, 2, 16), *caches(draw_lengths(), 1, 4, 16), draw_lengths())[0].shape == (0, 2, 16)
    assert not public(random(2, 2, 16), *caches(lengths, 1, 0, 16), lengths)[0].any()
    assert not public(random(2, 2, 3, 16), *caches(lengths, 1, 0, 16), lengths)[0].any()


@pytest.mark.parametrize(
    ("capacity", "programs", "splits"),
    [
        (8192, 256, 4),  # no longer than LONGEST_CHUNK
        (2000, 256, 1),
        (8192, 8, 32),  # 264 programs run at once, as many as fit
        (65536, 8, 32),
        (64, 8, 1),
        (1, 1, 1),
        (0, 1, 0),
    ],
)
def test_chunks_fill_an_h200(capacity: int, programs: int, splits: int) -> None:
    chunk = decode_attention.split_keys(capacity, programs, 132, 64, 16)
    assert chunk % 64 == 0 and 64 <= chunk <= decode_attention.LONGEST_CHUNK
    assert -(-capacity // chunk) == splits


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_partial_results_of_many_rows_are_few_bytes(rows: int) -> None:
    """They are at most a thirtieth of the bytes of a chunk's keys and values, written or read."""
    chunk = decode_attention.split_keys(65536, 256, 132, 64, rows)
    assert 30 * 4 * rows * (128 + 2) <= 2 * 2 * 128 * chunk
