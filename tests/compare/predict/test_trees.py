"""Trees as arrays give what the library that fitted them gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from xlafuse.compare.predict.trees import Trees

DATA = Path(__file__).parents[2] / "data" / "predict"


def test_the_values_are_those_of_lightgbm() -> None:
    """The rows have missing values, also in a feature without any where the model was fitted, and zeros."""
    with np.load(DATA / "lightgbm.npz") as file:
        arrays = dict(file)
    assert np.isnan(arrays["rows"][:, [0, 4]]).any(axis=0).all()
    found = Trees.of(arrays, "model")(arrays["rows"])
    np.testing.assert_allclose(found, arrays["predicted"], rtol=1e-5, atol=1e-5)


def made_tree() -> Trees:
    """Return 1 for a first feature of at most 0.5, else 2 or 3 by the second one; NaN goes right, then left."""
    return Trees(
        np.array([0, -1, 1, -1, -1], np.int16), np.array([0.5, 1, 7, 2, 3], np.float32),
        np.array([1, 0, 3, 0, 0], np.int16), np.array([2, 0, 4, 0, 0], np.int16),
        np.array([False, True, True, True, True]), np.array([0], np.int32), 2,
    )


def test_a_threshold_belongs_to_the_left_side_and_missing_values_have_their_own() -> None:
    rows = np.array([[0.5, 9], [0.6, 7], [0.6, 7.1], [np.nan, np.nan]], np.float32)
    assert made_tree()(rows).tolist() == [1, 2, 3, 2]


def test_arrays_round_trip_and_trees_add_up() -> None:
    tree = made_tree()
    assert Trees.of(tree.arrays("x"), "x")(np.zeros((1, 2), np.float32)).tolist() == [1]
    twice = Trees(
        *(np.tile(getattr(tree, name), 2) for name in ("feature", "threshold", "left", "right", "missing_left")),
        np.array([0, 5], np.int32), 2,
    )
    assert twice(np.array([[1, 8]], np.float32)).tolist() == [6]
