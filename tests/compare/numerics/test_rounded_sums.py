"""Tolerances of gradients whose sums a program's types round after each addition, and the mistakes that they catch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.numerics import reference, rounded_sums  # noqa: E402
from xlafuse.compare.numerics.errors import worst_row  # noqa: E402
from xlafuse.compare.numerics.tolerance import Scale, share_worst_error  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402

EPS = 2.0**-7
LINEAR = Case("linear", "wide", {"m": 4096, "k": 8, "n": 256}, "bfloat16", "train")
EMBEDDING = Case(
    "embedding", "words", {"rows": 2000, "columns": 512, "tokens": 4096, "distinct": 1500}, "bfloat16", "train"
)


def rounded_once(values: torch.Tensor) -> torch.Tensor:
    return values.float().sum(0).to(values.dtype)


def in_partial_sums(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Sum groups of rows in float32, round each group's sum, and add these in float32."""
    return rounded_once(torch.stack([rounded_once(group) for group in values.split(rows)]))


def test_a_sum_is_rounded_after_each_addition_in_the_order_of_threads() -> None:
    ones = torch.zeros(2 * rounded_sums.THREADS + 3, 1, dtype=torch.bfloat16)
    ones[0], ones[rounded_sums.THREADS], ones[2 * rounded_sums.THREADS] = 1.0, 2.0**-8, 2.0**-8  # in one thread
    assert rounded_sums.sum_over_rows(ones).item() == 1.0
    # The sums of two other threads are added to each other first.
    ones[2] = ones[3] = 2.0**-8
    assert rounded_sums.sum_over_rows(ones).item() == 1.0 + 2.0**-7
    assert rounded_once(ones).item() > 1.0 + 2.0**-7


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 4096, 4097, 20000])
def test_a_sum_has_all_rows_once(rows: int) -> None:
    values = torch.zeros(rows, rows if rows < 50 else 2, dtype=torch.bfloat16)
    if rows < 50:
        values.fill_diagonal_(3.0)
        assert rounded_sums.sum_over_rows(values).tolist() == [3.0] * rows
    else:
        values[-1] = values[rows // 2] = 1.0
        assert rounded_sums.sum_over_rows(values).tolist() == [2.0, 2.0]


def test_a_scatter_adds_the_terms_of_a_row_in_order() -> None:
    terms = torch.tensor([[1.0], [3.0], [2.0**-8], [2.0**-8], [5.0]])
    found = rounded_sums.scatter_in_order(
        torch.zeros(3, 1), torch.tensor([0, 2, 0, 0, 2]), terms, torch.bfloat16
    )
    assert found.flatten().tolist() == [1.0, 0.0, 8.0]


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor, Scale]:
    """Return the cotangent of y, the exact gradient of bias, and its scale."""
    folder = tmp_path_factory.mktemp("linear")
    scale = Scale(**reference.produce(LINEAR, 0, folder)["d_bias"])
    dy = torch.from_numpy(np.load(folder / "cotangent.y.npy")).view(torch.bfloat16)
    return dy, torch.from_numpy(np.load(folder / "gradient.bias.npy")), scale


def error_of(found: torch.Tensor, exact: torch.Tensor, scale: Scale) -> float:
    return float((found.double() - exact.double()).abs().max()) / scale.rms


def test_partial_sums_in_bfloat16_have_a_tolerance_of_their_own(linear: Any) -> None:
    dy, exact, scale = linear
    own, everybodys = scale.tolerance(EPS, rounded_sums=True), scale.tolerance(EPS)
    assert own > everybodys
    assert error_of(rounded_once(dy), exact, scale) <= everybodys
    for rows in (1, 2, 32, 64, 1024):
        assert error_of(in_partial_sums(dy, rows), exact, scale) <= own


@pytest.mark.parametrize("mistake", ["lost tile", "a tile twice", "rounded one by one", "zeros"])
def test_a_wrong_sum_is_caught(linear: Any, mistake: str) -> None:
    dy, exact, scale = linear
    match mistake:
        case "lost tile":
            found = rounded_once(dy[:-32])
        case "a tile twice":
            found = rounded_once(torch.cat([dy, dy[:32]]))
        case "rounded one by one":  # 4096 additions, each rounded: no program that sums so is sound
            found = dy[0]
            for row in dy[1:]:
                found = found + row
        case _:
            found = torch.zeros_like(dy[0])
    assert error_of(found, exact, scale) > scale.tolerance(EPS, rounded_sums=True)


def test_only_narrow_dtypes_have_rounded_sums(tmp_path: Path) -> None:
    case = Case("linear", "small", {"m": 9, "k": 4, "n": 5}, "float32", "train")
    scales = reference.produce(case, 0, tmp_path)
    assert {scale["rounded_error"] for scale in scales.values()} == {None}
    scale = Scale(**scales["d_bias"])
    assert scale.tolerance(2.0**-23, rounded_sums=True) == scale.tolerance(2.0**-23)


def test_input_sets_share_the_largest_rounded_error() -> None:
    each = {"rms": 1.0, "largest": 4.0, "independent_error": 0.1}
    found = share_worst_error([{"d_b": each | {"rounded_error": 0.2}}, {"d_b": each | {"rounded_error": 0.3}}])
    assert [scales["d_b"]["rounded_error"] for scales in found] == [0.3, 0.3]
    assert share_worst_error([{"y": each | {"rounded_error": None}}])[0]["y"]["rounded_error"] is None


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("embedding")
    reference.produce(EMBEDDING, 0, folder)
    return {
        "dy": torch.from_numpy(np.load(folder / "cotangent.y.npy")).view(torch.bfloat16).float(),
        "ids": torch.from_numpy(np.load(folder / "input.ids.npy")).long(),
        "exact": torch.from_numpy(np.load(folder / "gradient.table.npy")).double(),
        "tolerances": np.load(folder / "tolerance.table.npy").tolist(),
    }


def scattered(data: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Scatter the tokens in this order, rounding after each addition."""
    start = torch.zeros_like(data["exact"], dtype=torch.float32)
    return rounded_sums.scatter_in_order(start, data["ids"][tokens], data["dy"][tokens], torch.bfloat16)


def passes(data: dict[str, Any], found: torch.Tensor) -> bool:
    differences = (found.double() - data["exact"]).abs().amax(-1).tolist()
    error, tolerance = worst_row(differences, data["tolerances"], 1.0)
    return error <= tolerance


def test_a_scatter_may_add_tokens_in_any_order(embedding: dict[str, Any]) -> None:
    count = len(embedding["ids"])
    for seed in range(4):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(100 + seed))
        assert passes(embedding, scattered(embedding, order))
    exact = embedding["exact"].to(torch.bfloat16)
    assert passes(embedding, exact)  # sums in float32


@pytest.mark.parametrize("mistake", ["a lost token", "a token twice", "a wrong row", "lost half of a word", "zeros"])
def test_a_wrong_scatter_is_caught(embedding: dict[str, Any], mistake: str) -> None:
    ids = embedding["ids"]
    counts = torch.bincount(ids)
    rare = int(torch.nonzero(counts[ids] == 1)[0])
    frequent = torch.nonzero(ids == counts.argmax()).flatten()
    every = torch.arange(len(ids))
    match mistake:
        case "a lost token":
            found = scattered(embedding, every[every != rare])
        case "a token twice":
            found = scattered(embedding, torch.cat([every, every[rare : rare + 1]]))
        case "a wrong row":
            found = scattered(embedding, every)
            found[int(torch.nonzero(counts == 0)[0])] = 0.1
        case "lost half of a word":
            found = scattered(embedding, every[~torch.isin(every, frequent[::2])])
        case _:
            found = torch.zeros_like(embedding["exact"])
    assert not passes(embedding, found)


def test_the_worst_row_is_the_one_furthest_beyond_its_own_tolerance() -> None:
    assert worst_row([4.0, 1.0], [8.0, 1.5], 2.0) == (0.5, 0.75)
    assert worst_row([4.0, math.nan], [8.0, 1.0], 2.0)[0] == math.inf


def test_only_the_rows_of_jax_declare_rounded_sums() -> None:
    rows = [i for block in BLOCKS.values() for i in block.implementations if i.rounded_sums]
    assert rows and all(i.backend.worker == "xla" for i in rows)
    assert all({t.name for t in b.inputs} >= set(i.rounded_sums) for b in BLOCKS.values() for i in b.implementations)
