"""What is made ready at once on a GPU."""

from __future__ import annotations

import pytest

from compare.base import host
from compare.plan.selection import resolve
from compare.run.room import Room, needs
from compare.run.shards import Group, groups_of

GB = 1 << 30


def group(block: str, case: str) -> Group:
    (found,) = groups_of(resolve([block], suite="full", cases=[case]).work)
    return found


def test_what_is_next_is_the_first_that_there_is_memory_for() -> None:
    small = [group("gelu", "prime"), group("rmsnorm", "prime")]
    large = [group("swiglu", "llama-8b"), group("rmsnorm", "llama-8b")]
    assert not any(map(needs, small)) and needs(large[0]) > needs(large[1]) > 0
    room = Room(8, needs(large[0]))
    assert room.next([*large, *small], []) is large[0]
    assert room.next([large[1], *small], [large[0]]) is small[0]  # which are beside any
    assert room.next([large[1]], [large[0]]) is None
    assert room.next([large[1], *small], [small[1]]) is large[1]
    both = Room(8, needs(large[0]) + needs(large[1]))
    assert both.next([large[1]], [large[0]]) is large[1]


def test_what_is_large_leaves_little_room_beside_it() -> None:
    large, small = group("swiglu", "llama-8b"), group("gelu", "prime")
    assert Room(2, 3 * needs(large)).large(large) and not Room(2, 4 * needs(large)).large(large)
    assert not Room(1, needs(large)).large(large)  # nothing is beside it
    assert not Room(2, 1).large(small)


def test_what_found_too_little_takes_twice_as_much() -> None:
    small, large = group("gelu", "prime"), group("swiglu", "llama-8b")
    room = Room(8, 2 * needs(large))
    assert room.next([large], [large]) is large and room.next([small], [large, large]) is small
    assert room.next([large], [large], [large]) is None
    assert room.next([large], [], [large]) is large
    assert room.next([small], [large, large], [small]) is None


def test_what_needs_more_than_there_is_is_tried_beside_small_ones() -> None:
    large, small = group("swiglu", "llama-8b"), group("gelu", "prime")
    least = Room(8, 1)
    assert least.next([large], []) is least.next([large], [small]) is large
    assert least.next([large, small], [large]) is small


def test_inference_needs_no_memory_for_gradients() -> None:
    whole = group("swiglu", "llama-8b")
    forward = [entry for entry in whole if entry[0].direction == "fwd"]
    assert 2 * needs(forward) < needs(whole) <= 3 * needs(forward)


def test_needs_follow_what_was_planned_on_an_h200() -> None:
    """GiB of the largest call that XLA plans for jax 0.11.2: what it is given, gives and has meanwhile."""
    planned = {
        ("attention", "llama-3-8b-8k"): 26.3, ("attention", "window-16k"): 52.4,
        ("attention_packed", "llama-3-8b-4k"): 11.7, ("moe", "olmoe"): 30.3,
        ("decoder_block", "llama-8b"): 26.0, ("linear_cross_entropy", "llama-3-8k"): 8.0,
        ("cross_entropy", "llama-3"): 4.4,
    }
    for (block, case), gib in planned.items():
        assert gib < needs(group(block, case)) / GB < 4 * gib, (block, case)


def test_lanes_by_cores_memory_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cores", lambda: 16)
    assert Room.of(140 * GB, 60) == Room(10, 100 * GB, beside=2)
    assert Room.of(141 * GB, 3).lanes == 3
    assert Room.of(16 * GB, 60).lanes == 1 and Room.of(None, 60).lanes == 1
    monkeypatch.setattr(host, "usable_cores", lambda: 5)
    assert Room.of(140 * GB, 60) == Room(3, 128 * GB)
    monkeypatch.setattr(host, "usable_cores", lambda: 2)
    assert Room.of(140 * GB, 60) == Room(1, 136 * GB)
