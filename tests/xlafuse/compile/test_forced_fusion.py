"""Two kernels of XLA made one within its compile: what becomes of the module, and what is refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xlafuse.compile import compiler, forced_fusion, hlo_edit, user_functions
from xlafuse.compile.forced_fusion import NAME, NotForced, error
from xlafuse.hlo.gpu_program import kernels, parse

apart = jax.lax.optimization_barrier


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def names(text: str) -> list[str]:
    return [kernel.name for kernel in kernels(parse(text))]


class Compiled:
    """The default compile of a function, and its compiles with two kernels as one."""

    def __init__(self, function: Callable[..., Any], *args: Any, target: compiler.Target) -> None:
        self._compile = partial(user_functions.compile_call, function, args, {}, target=target)
        self.text = self._compile().hlo_text
        self.kernels = names(self.text)

    def forced(self, first: str, second: str) -> str:
        """Return the optimized HLO with two kernels as one, whose results are those of the two."""
        edit = partial(forced_fusion.fuse, module=parse(self.text).name, first=first, second=second)
        edited: list[tuple[bytes, bytes]] = []

        def keep(module: bytes) -> bytes | None:
            if (after := edit(module)) is not None and (before := edit(module, nested=True)) is not None:
                edited.append((before, after))
            return after

        text = self._compile(edit=keep).hlo_text
        (pair,) = edited
        assert error(*pair)[0] < 1e-5
        self.edited = pair
        return text

    def named(self, word: str) -> str:
        (name,) = (name for name in self.kernels if word in name)
        return name


def test_two_kernels_become_one_and_the_others_stay(h200: compiler.Target) -> None:
    def function(x, y):
        a = apart(x * 2 + y)
        return apart(jnp.tanh(a) * y).T + 1, a

    made = Compiled(function, struct(64, 128), struct(64, 128), target=h200)
    first, second, third = made.kernels
    text = made.forced(second, first)
    assert names(text) == [NAME, third]
    fusion = parse(text).computations[parse(text).entry].instructions[NAME]
    assert fusion.fusion_kind == "kLoop" and len(fusion.shapes) == 2  # `a` is a result, and stays one


def test_one_result_that_only_the_other_kernel_reads_vanishes(h200: compiler.Target) -> None:
    made = Compiled(lambda x, y: jnp.exp(apart(x * y)) + y, struct(64, 128), struct(64, 128), target=h200)
    text = made.forced(*made.kernels)
    (kernel,) = kernels(parse(text))
    assert (kernel.name, kernel.bytes_read, kernel.bytes_written) == (NAME, 2 * 64 * 128 * 4, 64 * 128 * 4)
    assert names(made.forced(*made.kernels)) == [NAME] and len(made.kernels) == 2  # the default compile is as before
    assert names(made._compile().hlo_text) == made.kernels


def test_a_reduction_that_others_wait_for_becomes_a_triton_kernel_of_rows(h200: compiler.Target) -> None:
    made = Compiled(lambda x: jnp.tanh(x) * apart(jnp.sum(x * x, -1))[:, None], struct(64, 1000), target=h200)
    text = made.forced(*made.kernels)
    assert names(text) == [NAME] and '"output_tiles":[{"sizes":["1","1000"]}]' in text.replace(" ", "")
    assert error(*made.edited)[1] == "float32"


def test_the_tiles_that_xla_chose_for_one_of_the_two_are_kept(h200: compiler.Target) -> None:
    made = Compiled(lambda x, y: jnp.tanh(apart(jax.nn.softmax(x))) * y, struct(64, 256), struct(64, 256), target=h200)
    text = made.forced(*made.kernels)
    before, after = (re.findall(r'"output_tiles":\[.*?"num_ctas"', each) for each in (made.text, text))
    assert len(before) == 1 and after == before


def test_kernels_that_read_one_array_are_fused_side_by_side(h200: compiler.Target) -> None:
    def function(x):
        a, b = apart((jnp.tanh(x), jnp.exp(x)))
        return a.sum(0), a * b, b

    made = Compiled(function, struct(64, 128), target=h200)
    tanh, exp, last = made.named("tanh"), made.named("exponential"), made.named("reduce")
    beside = made.forced(tanh, exp)
    assert names(beside) == [NAME, last]
    behind = made.forced(tanh, last)  # a kernel of several results, and one between them and the tuple of a barrier
    assert names(behind) == [exp, NAME]


def test_another_function_is_told_apart(h200: compiler.Target) -> None:
    made = Compiled(lambda x, y: jnp.exp(apart(x * y)) + y, struct(64, 128), struct(64, 128), target=h200)
    other = Compiled(lambda x, y: jnp.exp(apart(x * y)) - y, struct(64, 128), struct(64, 128), target=h200)
    for each in (made, other):
        each.forced(*each.kernels)
    assert error(made.edited[0], other.edited[1])[0] > 0.1


@pytest.fixture(scope="module")
def loop(h200: compiler.Target) -> Compiled:
    def function(x, w):
        def body(carry, row):
            carry = apart(jnp.tanh(carry) * row)
            return jnp.exp(carry) * row, carry.sum()

        carry, sums = jax.lax.scan(body, x, w)
        return apart(carry @ carry.T) * 2, sums, carry.sum(1)

    return Compiled(function, struct(128, 128), struct(5, 128, 128), target=h200)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (r"gemm.*", r"loop_multiply_fusion\.1", "gemm_fusion_dot.* is a matrix product"),
        (r"gemm.*", r"loop_multiply_fusion", "not in one computation"),
        (r"loop_multiply_fusion", r"loop_add_fusion", "would make a cycle"),
        (r"input_multiply_reduce_fusion", r"loop_dynamic_update_slice_fusion|fusion-start", "in place|fuses nothing"),
        (r"loop_broadcast_fusion", r"copy\.12", r"one loop, and the results of these two need \[128,128\] and \[5\]"),
    ],
)
def test_a_pair_that_cannot_be_one(loop: Compiled, first: str, second: str, reason: str) -> None:
    one, other = (next(each for each in loop.kernels if re.fullmatch(name, each)) for name in (first, second))
    with pytest.raises(NotForced, match=reason):
        loop.forced(one, other)


def test_a_module_of_another_name_stays_as_it_is(h200: compiler.Target) -> None:
    seen = []

    def edit(module: bytes) -> bytes | None:
        seen.append(forced_fusion.fuse(module, "jit_other", "a", "b"))
        return None

    with hlo_edit.editing(edit):
        Compiled(lambda x: x + 1, struct(8), target=h200)
    assert seen and set(seen) == {None}


def test_an_exception_of_an_edit_is_raised_behind_the_compile(h200: compiler.Target) -> None:
    made = Compiled(lambda x, y: jnp.exp(apart(x * y)) + y, struct(64, 128), struct(64, 128), target=h200)
    with pytest.raises(NotForced, match="nowhere"):
        made.forced(made.kernels[0], "nowhere")
