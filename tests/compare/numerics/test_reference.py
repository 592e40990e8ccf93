"""The float64 references: NumPy and PyTorch agree, gradients agree with finite differences, bits come from the seed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from xlafuse.compare.numerics import (  # noqa: E402
    input_arrays,
    reference,
)
from xlafuse.compare.numerics.tolerance import Scale  # noqa: E402
from xlafuse.compare.spec.block import Block  # noqa: E402
from xlafuse.compare.spec.blocks import BLOCKS, attention, attention_bias, attention_packed, lm_step  # noqa: E402
from xlafuse.compare.spec.case import Case  # noqa: E402

SMALL = {
    "vector_add": {"elements": 5},
    "gelu": {"rows": 2, "columns": 3},
    "swiglu": {"rows": 2, "columns": 3},
    "geglu": {"rows": 2, "columns": 3},
    "bias_gelu": {"rows": 2, "columns": 3},
    "softmax": {"rows": 4, "columns": 4, "masked": 2},
    "rmsnorm": {"rows": 2, "columns": 4},
    "layernorm": {"rows": 2, "columns": 4},
    "dropout_residual_norm": {"rows": 2, "columns": 5, "words": 2},
    "matmul": {"m": 2, "k": 3, "n": 4},
    "matmul_fp8": {"m": 2, "k": 3, "n": 4},
    "linear": {"m": 2, "k": 3, "n": 4},
    "linear_residual": {"m": 2, "k": 3, "n": 4},
    "linear_gelu": {"m": 2, "k": 3, "n": 4},
    "swiglu_mlp": {"tokens": 2, "width": 3, "hidden": 4},
    "rope": {"batch": 2, "heads": 2, "kv_heads": 1, "sequence": 3, "head_dim": 4},
    "embedding": {"rows": 4, "columns": 3, "tokens": 5, "distinct": 2},
    "cross_entropy": {"tokens": 3, "classes": 4, "ignored_percent": 34},
    "attention": attention.sizes(2, 4, 3, 2, kv_heads=2, window=2),
    "attention_bias": attention_bias.sizes(2, 2, 3, 2, hidden=4),
    "attention_packed": attention_packed.sizes(7, 3, 4, 2, 2),
    "linear_cross_entropy": {"tokens": 3, "width": 2, "classes": 4, "ignored_percent": 34},
    "decode_attention": {"batch": 3, "heads": 4, "kv_heads": 2, "capacity": 5, "head_dim": 2, "shortest": 0},
    "decode_attention_paged": {
        "batch": 3, "heads": 4, "kv_heads": 2, "page_size": 2, "pages": 9, "pages_per_sequence": 3, "head_dim": 2,
        "shortest": 0,
    },
    "moe": {"tokens": 4, "width": 5, "hidden": 3, "experts": 4, "top_k": 2, "used": 3},
    "gpt2_block": {
        "batch": 2, "sequence": 3, "width": 4, "heads": 2, "qkv": 12, "attended": 4, "hidden": 3, "dropouts": 2,
        "words": 2,
    },
    "decoder_block": {
        "batch": 2, "sequence": 3, "width": 4, "heads": 2, "kv_heads": 1, "qkv": 8, "attended": 4, "hidden": 3,
    },
    "adamw": {"elements": 5, "step": 3},
    "mlp_parallel": {"tokens": 4, "width": 3, "hidden": 2, "ranks": 2},
    "moe_parallel": {
        "tokens": 6, "width": 5, "hidden": 3, "experts": 4, "top_k": 2, "used": 3, "ranks": 2,
    },
    "lm_step": lm_step.sizes(
        layers=2, batch=1, sequence=4, width=4, heads=2, kv_heads=1, head_dim=2, hidden=3, vocabulary=5, distinct=3,
        step=7,
    ),
}


def small_case(block: Block) -> Case:
    return Case(block.name, "small", SMALL[block.name], "float32", block.directions[-1])


def drawn(block: Block) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    case = small_case(block)
    kinds = {t.name: np.int64 if t.dtype in ("int32", "int64") else np.float64 for t in block.inputs}
    inputs = {t.name: input_arrays.draw(case, t, 0).astype(kinds[t.name]) for t in block.inputs}
    cotangents = {t.name: input_arrays.draw(case, t, 1).astype(np.float64) for t in block.outputs}
    return inputs, cotangents


def as_torch(group: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(reference.device()) for name, array in group.items()}


# Without lm_step, whose reference differentiates; test_lm_step.py compares its loss.
@pytest.mark.parametrize("block", [b for b in BLOCKS.values() if b.name != "lm_step"], ids=lambda b: b.name)
def test_numpy_and_torch_evaluate_one_formula(block: Block) -> None:
    inputs, _ = drawn(block)
    expected = block.reference(np, inputs, **block.attributes_of(small_case(block)))
    found = reference.evaluate(small_case(block), as_torch(inputs), {}, torch.float64)
    assert set(found) == set(expected) == {t.name for t in block.outputs}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name].cpu().numpy(), values, rtol=1e-12, atol=1e-12)


TRAINED = [b for b in BLOCKS.values() if "train" in b.directions or b.spans_gpus]


@pytest.mark.parametrize("block", TRAINED, ids=lambda b: b.name)
def test_gradients_agree_with_finite_differences(block: Block) -> None:
    inputs, cotangents = drawn(block)
    found = reference.evaluate(small_case(block), as_torch(inputs), as_torch(cotangents), torch.float64)

    def loss(values: dict[str, np.ndarray]) -> float:
        outputs = block.reference(np, values, **block.attributes_of(small_case(block)))
        return float(sum((outputs[n] * cotangents[n]).sum() for n in outputs))

    step = 1e-6
    for name in (t.name for t in block.inputs if t.differentiable):
        array = inputs[name]
        expected = np.empty_like(array)
        for position in np.ndindex(array.shape):
            up, down = ({**inputs, name: array.copy()} for _ in range(2))
            up[name][position] += step
            down[name][position] -= step
            expected[position] = (loss(up) - loss(down)) / (2 * step)
        np.testing.assert_allclose(found[f"d_{name}"].cpu().numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["decode_attention", "decode_attention_paged"])
def test_each_of_several_queries_is_one_query_of_a_shorter_sequence(name: str) -> None:
    block, queries = BLOCKS[name], 3
    axis = block.tensor("q").axes.index("queries")
    case = Case(name, "small", {**SMALL[name], "queries": queries}, "float32", "fwd")
    inputs = {t.name: input_arrays.draw(case, t, 0) for t in block.inputs}
    found = reference.evaluate(case, as_torch(inputs), {}, torch.float64)["out"].cpu().numpy()
    assert inputs["q"].shape == found.shape and found.shape[axis] == queries
    for query in range(queries):
        lengths = np.maximum(inputs["lengths"] - queries + 1 + query, 0)
        alone = inputs | {"q": inputs["q"].take(query, axis).astype(np.float64), "lengths": lengths}
        expected = block.reference(np, alone)["out"]
        np.testing.assert_allclose(found.take(query, axis), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("causal", "window", "of_first", "of_last"),
    [(1, 0, [1, 2], [2]), (1, 2, [1], [2]), (1, 1, [], []), (0, 0, [0, 1, 2], [0, 1, 2])],
)
def test_attention_masks_follow_parameters(causal: int, window: int, of_first: list[int], of_last: list[int]) -> None:
    """A changed first or last key changes these rows; a single visible key keeps weight 1."""
    block = BLOCKS["attention"]
    inputs, _ = drawn(block)
    before = block.reference(np, inputs, causal, window)["out"]
    for key, rows in ((0, of_first), (2, of_last)):
        changed = inputs | {"k": inputs["k"].copy()}
        changed["k"][..., key, :] += 1.0
        after = block.reference(np, changed, causal, window)["out"]
        assert [row for row in range(3) if not np.array_equal(before[..., row, :], after[..., row, :])] == rows


def test_a_bias_of_minus_infinity_hides_a_key() -> None:
    """Hidden keys change nothing, and a query without visible keys gives zeros."""
    biased, plain = BLOCKS["attention_bias"], BLOCKS["attention"]
    inputs, _ = drawn(biased)
    assert np.isneginf(inputs["bias"][:, 1]).all() and np.isfinite(inputs["bias"][:, 0]).any()
    assert not biased.reference(np, inputs)["out"][:, :, 1].any()
    seen = np.broadcast_to(np.tril(np.ones((3, 3))), inputs["bias"].shape) > 0
    causal = biased.reference(np, inputs | {"bias": np.where(seen, 0.0, -np.inf)})["out"]
    np.testing.assert_allclose(causal, plain.reference(np, inputs, 1, 0)["out"])


def test_scores_of_minus_infinity_are_hidden_from_softmax() -> None:
    block = BLOCKS["softmax"]
    inputs, cotangents = drawn(block)
    hidden = np.isneginf(inputs["x"])
    assert hidden.sum(axis=1).tolist() == [3, 2, 4, 4]
    found = reference.evaluate(small_case(block), as_torch(inputs), as_torch(cotangents), torch.float64)
    y, gradient = found["y"].cpu().numpy(), found["d_x"].cpu().numpy()
    assert not y[hidden].any() and not gradient[hidden].any()
    np.testing.assert_allclose(y.sum(axis=1), [1, 1, 0, 0])
    with np.errstate(invalid="ignore"):
        spoilt = block.reference(np, {"x": np.array([[np.nan, -np.inf, 1.0], [np.inf, -np.inf, 1.0]])})
    assert np.isnan(spoilt["y"]).all()


def test_an_unmasked_softmax_draws_normal_values() -> None:
    """The values span more than one chunk, each with its own random stream."""
    (x,) = BLOCKS["softmax"].inputs
    case = Case("softmax", "long", {"rows": 3, "columns": input_arrays._CHUNK // 2 + 7}, "float32", "fwd")
    np.testing.assert_array_equal(input_arrays.draw(case, x, 0), input_arrays.draw(case, replace(x, draw=None), 0))


def test_packed_sequences_are_attention_of_each() -> None:
    packed, plain = BLOCKS["attention_packed"], BLOCKS["attention"]
    inputs, _ = drawn(packed)
    offsets = inputs["cu_seqlens"]
    assert offsets[0] == 0 and sorted(np.diff(offsets)) == [1, 2, 4]
    out = packed.reference(np, inputs, 4)["out"]
    for first, last in zip(offsets, offsets[1:], strict=False):
        one = {name: inputs[name][first:last].swapaxes(0, 1)[None] for name in "qkv"}
        np.testing.assert_allclose(out[first:last], plain.reference(np, one, 1, 0)["out"][0].swapaxes(0, 1))


@pytest.mark.parametrize(("tokens", "sequences"), [(2, 2), (5, 3), (67, 5), (8192, 16)])
def test_packed_lengths_fill_the_tokens(tokens: int, sequences: int) -> None:
    lengths = attention_packed.lengths(tokens, sequences)
    assert len(lengths) == sequences and sum(lengths) == tokens and min(lengths) == 1


def test_attention_heads_share_in_order() -> None:
    block = BLOCKS["attention"]
    inputs, _ = drawn(block)
    repeated = {name: np.repeat(array, 1 if name == "q" else 2, axis=1) for name, array in inputs.items()}
    np.testing.assert_allclose(*(block.reference(np, given, 1, 0)["out"] for given in (inputs, repeated)))


def test_scores_of_one_head_are_in_memory_at_a_time_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a half type, a sum over more slices would round more often and widen the tolerance."""
    block = attention.BLOCK
    case = Case("attention", "shared", attention.sizes(2, 6, 5, 4, kv_heads=2), "bfloat16", "train")
    inputs = {t.name: torch.randn(t.shape(case.sizes), dtype=torch.float64) for t in block.inputs}
    cotangents = {"out": torch.randn_like(inputs["q"])}
    seen: list[tuple[int, int]] = []

    def watched(xp, views, **attributes):  # type: ignore[no-untyped-def]
        seen.append((views["q"].shape[1], views["k"].shape[1]))
        return block.reference(xp, views, **attributes)

    monkeypatch.setitem(BLOCKS, "attention", replace(block, reference=watched))
    exact = reference.evaluate(case, inputs, cotangents, torch.float64)
    assert seen == [(1, 1)] * 12
    seen.clear()
    low = reference.evaluate(case, inputs, cotangents, torch.bfloat16)
    assert seen == [(3, 1)] * 4
    assert all(torch.allclose(low[name].double(), exact[name], rtol=0.1, atol=0.1) for name in exact)


def test_rope_positions_count_up_from_a_random_start() -> None:
    inputs, _ = drawn(BLOCKS["rope"])
    positions = inputs["positions"]
    assert (np.diff(positions, axis=1) == 1).all() and 0 <= positions.min() and positions[0, 0] != positions[1, 0]


def test_rope_angles_are_not_computed_in_a_half_type() -> None:
    block = BLOCKS["rope"]
    inputs, cotangents = drawn(block)
    inputs["positions"] += 100_000
    exact, low = (
        reference.evaluate(small_case(block), as_torch(inputs), as_torch(cotangents), dtype)
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert low.keys() == exact.keys() == {"q_out", "k_out", "d_q", "d_k"}
    for name, values in low.items():
        # x, cos, their product and the sum are rounded, each twice; a rotated pair keeps its length, at most 4.
        assert (values.double() - exact[name]).abs().max() <= 8 * 2**-8 * 4, name


def test_plain_float32_errs_by_two_units_in_the_last_place() -> None:
    exponents = torch.linspace(-1, 0, 101, device=reference.device())
    with reference.PlainFloat32("ieee"):
        powers, cosines = 500000.0**exponents, torch.cos(exponents)
    for found, exact in ((powers, 500000.0 ** exponents.double()), (cosines, torch.cos(exponents.double()))):
        ulps = ((found.double() - exact) / exact).abs() / 2**-23
        assert 1 < ulps.max() <= 3.5  # two, and the library's own error
    assert powers[-1] == 1


def test_a_single_value_errs_by_the_full_two_units() -> None:
    """All results that it scales share its error, so a random size of it would be luck."""
    with reference.PlainFloat32("ieee"):
        powers = [0.5 ** torch.tensor(float(t), device=reference.device()) for t in range(1, 30)]
    ulps = [(float(found) * 2**t - 1) / 2**-23 for t, found in enumerate(powers, 1)]
    assert {abs(error) for error in ulps} <= {2.0} and len(set(ulps)) == 2


def test_both_signs_of_a_single_error_are_tried() -> None:
    """On an H200 two ulps cancelled the rounding of AdamW's beta, and the tolerance was half of plain code's error."""
    case = Case("adamw", "x", {"elements": 20_000, "step": 10}, "float32", "fwd")
    inputs, _ = reference._draw(case, 0)
    exact = reference.evaluate(case, inputs, {}, torch.float64)
    found = reference._independent_errors(case, inputs, {}, exact)["new_param"]
    signs = [
        reference._errors_of(reference.PlainFloat32("ieee", sign), case, inputs, {}, exact)["new_param"]
        for sign in (1, -1)
    ]
    assert found == max(signs) > 1.2 * min(signs)


def test_the_tolerance_of_a_scatter_add_shows_one_missing_token() -> None:
    sizes = {"rows": 2000, "columns": 64, "tokens": 900, "distinct": 300}
    case = Case("embedding", "x", sizes, "bfloat16", "train")
    inputs, cotangents = reference._draw(case, 0)
    ids = inputs["ids"].long()
    assert len(ids.unique()) == 300 and ids.bincount().max() > 80
    exact = reference.evaluate(case, inputs, cotangents, torch.float64)["d_table"]
    error = reference._independent_errors(case, inputs, cotangents, {"d_table": exact})["d_table"]
    tolerance = Scale(reference._rms(exact), float(exact.abs().max()), error).tolerance(2.0**-7) * reference._rms(exact)
    assert tolerance <= 2.0**-7 * float(exact.abs().max())
    dy = cotangents["y"]
    for token in range(0, 900, 90):  # leave out one token of a row with many tokens or with one
        missing = exact.clone()
        missing[ids[token]] -= dy[token]
        assert (missing - exact).abs().max() > tolerance


def test_the_same_seed_draws_the_same_bits_and_another_does_not() -> None:
    block = BLOCKS["rmsnorm"]
    case = Case("rmsnorm", "long", {"rows": 3, "columns": input_arrays._CHUNK // 2 + 7}, "float32", "fwd")
    x, weight = block.inputs
    np.testing.assert_array_equal(input_arrays.draw(case, x, 0), input_arrays.draw(case, x, 0))
    assert not np.array_equal(input_arrays.draw(case, x, 0), input_arrays.draw(case, x, 1))
    drawn = input_arrays.draw(case, x, 0)
    assert not np.array_equal(drawn[0], drawn[1])
    assert abs(drawn.std() - 1) < 0.01 and abs(drawn.mean()) < 0.01
    assert abs(input_arrays.draw(case, weight, 0).mean() - 1) < 0.01


def test_stored_bits_are_the_inputs(tmp_path: Path) -> None:
    case = Case("softmax", "odd", {"rows": 3, "columns": 5}, "bfloat16", "train")
    scales = reference.produce(case, 0, tmp_path)
    assert set(scales) == {"y", "d_x"}
    stored = torch.from_numpy(np.load(input_arrays.path_of(tmp_path, "input", "x"))).view(torch.bfloat16)
    drawn = torch.from_numpy(input_arrays.draw(case, BLOCKS["softmax"].inputs[0], 0))
    torch.testing.assert_close(stored, drawn.bfloat16(), rtol=0, atol=0)
    y = np.load(input_arrays.path_of(tmp_path, "output", "y"))
    assert y.dtype == np.float32  # its error is 2**-17 of bfloat16's
    np.testing.assert_array_equal(y, torch.softmax(stored.double(), -1).float().numpy())
    assert np.isfinite([s["independent_error"] for s in scales.values()]).all()


def test_the_reference_of_a_float32_output_is_stored_in_float64(tmp_path: Path) -> None:
    case = Case("cross_entropy", "odd", {"tokens": 3, "classes": 5, "ignored_percent": 0}, "bfloat16", "train")
    reference.produce(case, 0, tmp_path)
    loss, gradient = (
        np.load(input_arrays.path_of(tmp_path, role, name))
        for role, name in (("output", "loss"), ("gradient", "logits"))
    )
    assert loss.dtype == np.float64 and gradient.dtype == np.float32


def test_sums_in_float32_make_a_half_precision_tolerance_that_of_float32() -> None:
    """A loss summed in bfloat16 would be allowed errors of percents."""
    case = Case("cross_entropy", "x", {"tokens": 64, "classes": 50, "ignored_percent": 10}, "bfloat16", "train")
    inputs, cotangents = reference._draw(case, 0)
    assert (inputs["labels"] == -100).sum() == 6
    exact = reference.evaluate(case, inputs, cotangents, torch.float64)
    errors = reference._independent_errors(case, inputs, cotangents, exact)
    assert 0 < errors["loss"] < 8 * 2.0**-23
    largest = float(exact["d_logits"].abs().max()) / reference._rms(exact["d_logits"])
    assert 2.0**-10 < errors["d_logits"] < 2.0**-8 * largest  # the rounding of storing it


def test_small_outputs_are_evaluated_on_more_draws_than_large_inputs() -> None:
    block = BLOCKS["cross_entropy"]
    redraws = {case.name: reference._redraws(block, case) for case in (*block.cases("full"), *block.cases("check"))}
    assert (redraws["llama-3"], redraws["32k"], redraws["prime"], redraws["all-ignored"]) == (4, 4, 16, 16)


LARGE = [case for block in BLOCKS.values() for case in block.cases("check") if "magnitude" in case.sizes]


def test_large_values_are_near_the_largest_of_their_dtype() -> None:
    """The largest value exceeds a 32nd of the dtype's largest, or of its square root where z-loss squares it."""
    for case in LARGE:
        (large,) = (input_arrays.draw(case, t, 0) for t in BLOCKS[case.block].inputs if t.magnified)
        most = torch.finfo(getattr(torch, case.dtype)).max
        bound = most**0.5 if (case.block, case.name) == ("cross_entropy", "large") else most
        assert bound / 32 < np.abs(large).max() < bound, case.id


def test_overflowing_squares_do_not_widen_the_tolerance(tmp_path: Path) -> None:
    """In float16 a norm of values near 65504 evaluates to zero, an error of 100%."""
    for case in LARGE:
        if case.block in ("rmsnorm", "layernorm", "dropout_residual_norm"):
            scale = Scale(**reference.produce(case, 0, tmp_path / case.block)["y"])
            assert scale.independent_error < 2.0**-9, case.id


def test_inputs_are_kept_until_their_references_or_another_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed reference must not keep the other seed's inputs for good."""
    drawn: list[str] = []
    kept: list[bool] = []

    def store(case: Case, seed: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        drawn.append(f"{folder.parent.name} {seed}")
        return {}, {}

    def produce(case: Case, seed: int, folder: Path, inputs: object) -> None:
        kept.append(inputs is not None)
        if len(kept) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reference, "store_inputs", store)
    monkeypatch.setattr(reference, "produce", produce)
    asked = reference.methods()
    case = BLOCKS["gelu"].cpu_check_cases()[0].to_json()
    for name in ("one", "other"):
        for seed in (0, 1):
            asked["draw"](case, seed, str(tmp_path / name / str(seed)), keep=True)
        with pytest.raises(torch.OutOfMemoryError) if name == "one" else nullcontext():
            asked["produce"](case, 0, str(tmp_path / name / "0"))
    assert drawn == ["one 0", "one 1", "other 0", "other 1"] and kept == [True, True]
    asked["produce"](case, 1, str(tmp_path / "one" / "1"))  # the first case's other seed was dropped
    asked["produce"](case, 1, str(tmp_path / "other" / "1"))
    assert kept[2:] == [False, True]
