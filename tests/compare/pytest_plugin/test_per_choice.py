"""A value for two choices gives an answer that both share, and else is undetermined."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest

from xlafuse.compare.pytest_plugin.assertion_messages import comparison
from xlafuse.compare.pytest_plugin.per_choice import PerChoice, Undetermined, combine, for_each_choice


def two(a: Any, b: Any) -> Any:
    return combine({"a": a, "b": b})


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda v: v > 1, True), (lambda v: v <= 1, False), (lambda v: v == 9, False), (lambda v: v != 9, True),
        (lambda v: 10 > v, True), (lambda v: v * 2 >= 4, True), (lambda v: 1.5 * v < 3, False),
        (lambda v: v - v == 0, True), (lambda v: v / two(2, 3) == 1, True), (lambda v: 10 - v < 9, True),
        (lambda v: bool(v), True),
        (lambda v: v + 1 == two(3, 4), True),
    ],
)
def test_a_common_answer_is_given(question: Callable[[Any], Any], answer: bool):
    assert question(two(2, 3)) is answer


@pytest.mark.parametrize(
    "question",
    [lambda v: v == 2, lambda v: v != 2, lambda v: v < 3, lambda v: 3 <= v, lambda v: not v - 2, lambda v: v * 2 > 5,
     lambda v: v == two(2, 2.5), list, lambda v: bool(v < 9) and bool(v - 3)],
)
def test_different_answers_are_undetermined(question: Callable[[Any], Any]):
    with pytest.raises(Undetermined, match=r"undetermined: [\s\S]*a: [\s\S]*b: [\s\S]*docs/pytest-plugin.md"):
        question(two(2, 3))


def test_choices_of_two_compilers_are_compared_pairwise():
    jax, torch = combine({"Triton GEMM": 1, "cuBLAS": 2}), combine({"ATen": 2, "ATen, padded": 3})
    assert jax <= torch and not jax > torch and torch >= jax and jax != torch + 1 and jax * 2 <= torch + 2
    assert sorted((torch - jax)._values.items()) == [
        ("ATen / Triton GEMM", 1), ("ATen / cuBLAS", 0), ("ATen, padded / Triton GEMM", 2), ("ATen, padded / cuBLAS", 1)
    ]
    with pytest.raises(Undetermined, match=r"cuBLAS / ATen: 2 and 2: False\n  cuBLAS / ATen, padded: 2 and 3: True"):
        _ = jax < torch
    assert comparison(">", jax, torch) == [
        ">: false for every autotune choice", "Triton GEMM / ATen: 1 > 2", "Triton GEMM / ATen, padded: 1 > 3",
        "cuBLAS / ATen: 2 > 2", "cuBLAS / ATen, padded: 2 > 3",
    ]
    assert comparison("<", jax, 1) == ["<: false for every autotune choice", "Triton GEMM: 1 < 1", "cuBLAS: 2 < 1"]
    assert comparison("<", 1, 1) is None


def test_only_equal_numbers_and_strings_become_plain():
    assert type(two(2, 2)) is int and two("x", "x") == "x" and two(None, None) is None
    assert isinstance(two([2], [2]), PerChoice)  # equal lists may hold different objects
    assert combine({"": [2]}) == [2]


def test_containers():
    boxes = two(["x", "y"], ["y", "z"])
    assert "y" in boxes and "w" not in boxes and len(boxes) == 2 and boxes[0] != "q"
    for question in (lambda: "x" in boxes, lambda: "x" not in boxes, lambda: boxes[0] == "x", lambda: list(boxes)):
        with pytest.raises(Undetermined):
            question()
    with pytest.raises(Undetermined, match="their number"):
        len(two([], [1]))


def test_attributes_and_calls_apply_to_all_choices():
    assert repr(two("ab", "cd").upper()) == "<a: AB | b: CD>"
    assert two("ab", "ad").startswith("a") is True
    with pytest.raises(AttributeError, match="nothing"):
        _ = two("ab", "cd").nothing
    with pytest.raises(TypeError):
        hash(two(1, 2))
    with pytest.raises(TypeError):
        operator.index(two(1, 2))
    assert repr(copy.copy(two(1, 2))) == "<a: 1 | b: 2>"


def test_an_error_of_one_choice_is_undetermined():
    with pytest.raises(Undetermined, match="by zero"):
        for_each_choice(lambda choice: 1 // {"a": 0, "b": 1}[choice], {"a": 0, "b": 0})
    with pytest.raises(ZeroDivisionError):
        for_each_choice(lambda choice: 1 // 0, {"a": 0, "b": 0})
    with pytest.raises(Undetermined, match="KeyError|'k'"):
        _ = two({"k": 1}, {})["k"]


def test_hostile_values_stay_short():
    shown = str(pytest.raises(Undetermined, bool, two("<script>\n" * 10_000, "")).value)
    assert len(shown) < 2000
