"""Users' calls, turned into functions of arrays and compiled."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from xlafuse.compile import compiler, user_functions
from xlafuse.hlo import gpu_program


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def parameters(hlo_text: str) -> list[str]:
    return [name.split(".")[0] for name in gpu_program.program(gpu_program.parse(hlo_text)).inputs]


def test_arrays_are_inputs_and_the_rest_is_static():
    def function(tree, mode, *more, scale=None, flags=()):
        assert mode == "a" and flags == (True, None)
        return tree["x"] * tree["n"] + more[1] * scale

    args = ({"n": 3, "x": struct(4)}, "a", struct(2, 1), struct(1, 4))
    call, inputs = user_functions.bind(function, args, {"scale": struct(4), "flags": (True, None)})
    assert list(inputs) == ["tree", "more_0", "more_1", "scale"]
    assert jax.tree.leaves(inputs) == [struct(4), struct(2, 1), struct(1, 4), struct(4)]
    outputs, changed = jax.eval_shape(call, *inputs.values())
    assert outputs.shape == (1, 4) and changed == []
    assert call.__name__ == "function"


def test_a_wrong_call_raises_the_functions_own_error():
    call, inputs = user_functions.bind(lambda x: x, (struct(2), struct(2)), {})
    with pytest.raises(TypeError, match="positional argument"):
        jax.eval_shape(call, *inputs.values())


def test_parameters_keep_their_names_and_order(h200: compiler.Target):
    def function(zeta, alpha, *, mid):
        return zeta * alpha + mid

    compiled = user_functions.compile_call(function, (struct(8), struct(8)), {"mid": struct(8)}, target=h200)
    assert parameters(compiled.hlo_text) == ["zeta", "alpha", "mid"]
    assert "jit_function" in compiled.hlo_text
    assert set(compiled.autotuning.values()) <= {"compiled", "not autotuned"}


def test_a_jitted_function_keeps_its_options(h200: compiler.Target):
    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def step(state, count, rate):
        return state + count * rate

    compiled = user_functions.compile_call(step, (struct(8), 3, 0.5), {}, target=h200)
    assert "input_output_alias={ {}: (0" in compiled.hlo_text
    assert len(parameters(compiled.hlo_text)) == 2  # the rate is traced, the count is not


def test_stablehlo_compiles_to_the_functions_kernels(h200: compiler.Target):
    def function(x):
        return jnp.tanh(x) * 2

    text = jax.jit(function).lower(struct(16)).as_text(debug_info=True)
    compiled = user_functions.compile_stablehlo(text, target=h200)
    direct = user_functions.compile_call(function, (struct(16),), {}, target=h200)
    assert list(compiled.autotuning) == list(direct.autotuning)


def test_phases_return_the_gradients_of_float_inputs():
    def function(x, index, *, scale):
        return {"y": x[index] * scale, "index": index}

    args = (struct(8, 4), struct(3, dtype="int32"))
    forward, backward = user_functions.compile_phases(function, args, {"scale": struct(4)})
    x, index, scale = jnp.arange(32.0).reshape(8, 4), jnp.array([1, 5, 1]), jnp.arange(4.0)
    _, inputs = user_functions.bind(function, (x, index), {"scale": scale})
    (outputs, (others, _)), residuals = forward.executable(inputs)
    assert [y.shape for y in outputs] == [(3, 4)] and others[0].tolist() == [1, 5, 1]
    gradients = backward.executable(residuals, [jnp.ones((3, 4))])
    wanted = jax.grad(lambda x, scale: (x[index] * scale).sum(), argnums=(0, 1))(x, scale)
    for got, want in zip(gradients, wanted, strict=True):
        assert jnp.allclose(got, want)


def test_nothing_to_differentiate_is_an_error():
    with pytest.raises(TypeError, match="input of a floating dtype"):
        user_functions.compile_phases(lambda x: x * 2, (struct(3, dtype="int32"),), {})
    with pytest.raises(TypeError, match="output of a floating dtype"):
        user_functions.compile_phases(lambda x: x > 0, (struct(3),), {})


def test_nnx_modules_are_split_and_changed_variables_are_outputs():
    nnx = pytest.importorskip("flax.nnx")

    def train(model, x, *, other):
        model.norm.scale[...] = model.norm.scale[...] * 2
        return model.norm(x) + other["again"].norm.bias[...]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    model = Model(nnx.Rngs(0))
    call, inputs = user_functions.bind(train, (model, struct(8, 4)), {"other": {"again": model}})
    assert list(inputs) == ["nnx_params", "nnx_variables", "x"]
    outputs, changed = jax.eval_shape(call, *inputs.values())
    assert outputs.shape == (8, 4)
    assert len(changed) == 3  # the scale, the running mean and variance; not the bias
    forward, backward = user_functions.compile_phases(model.norm, (struct(8, 4),), {})
    assert len(jax.tree.leaves(backward.output_structs)) == 3  # of bias, scale and x: statistics have no gradient
    assert forward.arguments[0].startswith("[0]['nnx_params']")
