"""What is made ready at once on a GPU."""

from __future__ import annotations

import pytest

from compare import machine
from compare.parts import Group, groups_of
from compare.room import Room, needs
from compare.selection import resolve

GB = 1 << 30


def group(block: str, case: str) -> Group:
    (found,) = groups_of(resolve([block], suite="full", cases=[case]).work)
    return found


def names(batches: list[list[Group]]) -> list[list[str]]:
    return [[group[0][0].name for group in batch] for batch in batches]


def test_in_order_as_many_as_there_are_lanes() -> None:
    small = [group("gelu", "prime"), group("rmsnorm", "prime"), group("swiglu", "prime")]
    assert not any(map(needs, small))
    assert list(Room(2, 100 * GB).batches(small)) == [small[:2], small[2:]]


def test_large_ones_are_as_many_as_fit_and_small_ones_are_beside_any() -> None:
    large, small = [group(block, "llama-8b") for block in ("swiglu", "rmsnorm", "gelu")], group("gelu", "prime")
    room = Room(8, needs(large[0]) + needs(large[1]))
    assert names(list(room.batches([*large, small]))) == [["llama-8b", "llama-8b", "prime"], ["llama-8b"]]
    least = Room(8, 1)  # what needs more than there is, is tried
    assert names(list(least.batches([large[0], small, large[1]]))) == [["llama-8b", "prime"], ["llama-8b"]]
    assert names(list(least.batches([small, large[0]]))) == [["llama-8b", "prime"]]  # who needs most finds most


def test_what_needs_most_of_the_room_goes_while_there_are_small_ones_to_be_beside_it() -> None:
    large, small = group("swiglu", "llama-8b"), [group(block, "prime") for block in ("gelu", "rmsnorm", "swiglu")]
    room = Room(2, needs(large))
    assert list(room.batches([*small, large])) == [[large, small[0]], small[1:]]


def test_needs_follow_what_was_planned_on_an_h200() -> None:
    """GiB of the largest call that XLA plans for jax 0.11.2: what it is given, gives and has meanwhile."""
    planned = {
        ("attention", "llama-3-8b-8k"): 26.3, ("attention", "window-16k"): 52.4,
        ("attention_packed", "llama-3-8b-4k"): 11.7, ("moe", "olmoe"): 30.3,
        ("decoder_block", "llama-8b"): 26.0, ("linear_cross_entropy", "llama-3-8k"): 8.0,
        ("cross_entropy", "llama-3"): 4.4,
    }  # fmt: skip
    for (block, case), gib in planned.items():
        assert 1.5 * gib < needs(group(block, case)) / GB < 8 * gib, (block, case)


def test_lanes_by_cores_memory_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 16)
    assert Room.of(141 * GB, 60) == Room(8, 109 * GB)
    assert Room.of(141 * GB, 3).lanes == 3
    assert Room.of(16 * GB, 60).lanes == 1 and Room.of(None, 60).lanes == 1
    monkeypatch.setattr(machine, "usable_cores", lambda: 5)
    assert Room.of(141 * GB, 60).lanes == 2
