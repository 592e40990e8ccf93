import kernel_properties as properties
import pytest
import torch
from row_kernel_checks import DEVICE, DTYPES, random

from xlafuse.triton_side.kernels import adamw
from xlafuse.triton_side.kernels.shared.launch import FlatConfig

SETTINGS = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "decay": 0.1}


def problem(config=None, module=adamw, elements=1000, dtype=torch.float32, step=3, **tensors) -> str | None:
    def launch(param, gradient, mu, nu):
        count = torch.tensor(step, dtype=torch.int32, device=DEVICE)
        return module.adamw(param, gradient, mu, nu, count, **SETTINGS, config=config)

    drawn = {
        "param": random(elements, dtype=dtype), "gradient": random(elements, dtype=dtype, seed=1),
        "mu": random(elements, seed=2), "nu": random(elements, seed=3).square(),
    }
    return properties.adamw(launch, **{**drawn, **tensors}, step=step, **SETTINGS)


def operands(*shape: int) -> dict[str, torch.Tensor]:
    names = ("param", "gradient", "mu", "nu")
    tensors = {name: random(*shape, seed=seed).abs() for seed, name in enumerate(names)}
    return {**tensors, "step": torch.tensor(7, dtype=torch.int32, device=DEVICE)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [1, 7, 1024, 2049])
@pytest.mark.parametrize("step", [1, 50, 100_000])
def test_agrees_with_the_formula(elements: int, dtype: torch.dtype, step: int) -> None:
    assert not problem(elements=elements, dtype=dtype, step=step)


def test_a_first_step_follows_the_sign_of_the_gradient() -> None:
    """Both moments then come from the gradient alone; with a gradient of zero only decay changes the parameter."""
    given = operands(100)
    given |= {"mu": torch.zeros_like(given["mu"]), "nu": torch.zeros_like(given["nu"]), "step": given["step"] // 7}
    given["gradient"][::2] = 0
    param, _, _ = adamw.adamw(**given, **SETTINGS | {"eps": 1e-12})
    expected = given["param"] * (1 - 1e-3) - 1e-2 * given["gradient"].sign()
    torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-7)


def test_any_configuration_gives_the_same() -> None:
    given = operands(1000)
    for a, b in zip(
        adamw.adamw(**given, **SETTINGS), adamw.adamw(**given, **SETTINGS, config=FlatConfig(64, 1)), strict=True
    ):
        assert torch.equal(a, b)


def test_writes_into_given_memory_or_in_place() -> None:
    given, expected = operands(3, 50), adamw.adamw(**operands(3, 50), **SETTINGS)
    stacked = tuple(torch.zeros(2, 3, 50, device=DEVICE) for _ in range(3))
    written = adamw.adamw(**given, **SETTINGS, out=tuple(x[1] for x in stacked))
    in_place = adamw.adamw(**given, **SETTINGS, out=(given["param"], given["mu"], given["nu"]))
    for whole, y, z, right in zip(stacked, written, in_place, expected, strict=True):
        assert torch.equal(whole[1], right) and not whole[0].any()
        assert torch.equal(y, right) and torch.equal(z, right)
    assert torch.equal(given["mu"], expected[1])


def test_several_parameters_in_one_call_get_what_each_gets_alone() -> None:
    # More than one launch takes, with sizes around a block's and a program's, one in place, one empty and one strided.
    sizes = [1, 511, 512, 513, 0, 4096, 4097, 9000, *range(3, 33)]
    step, updates, expected = operands(1)["step"], [], []
    for seed, size in enumerate(sizes):
        param, gradient, mu, nu = (random(size, seed=4 * seed + i).abs() for i in range(4))
        if size == 513:
            gradient = random(2 * size, seed=seed)[::2]
        expected.append(adamw.adamw(param, gradient, mu, nu, step, **SETTINGS))
        results = (param, mu, nu) if size == 512 else map(torch.empty_like, expected[-1])
        updates.append(adamw.Update(param, (gradient,), mu, nu, *results))
    adamw.update_all(updates, step, **SETTINGS)
    for update, right in zip(updates, expected, strict=True):
        for y, z in zip(update[4:], right, strict=True):
            assert torch.equal(y, z)


@pytest.mark.parametrize("layers", [1, 2, 70])
def test_a_parameter_with_a_gradient_for_each_layer(layers: int) -> None:
    """As many layers as one launch takes, and more; the update is that of the stacked gradients."""
    given = [operands(3, 2), operands(layers, 5, 7)]
    expected = [adamw.adamw(**each, **SETTINGS) for each in given]
    updates = [
        adamw.Update(each["param"], each["gradient"].unbind(), each["mu"], each["nu"], *map(torch.empty_like, right))
        for each, right in zip(given, expected, strict=True)
    ]
    adamw.update_all(updates, given[0]["step"], **SETTINGS)
    for update, right in zip(updates, expected, strict=True):
        assert all(map(torch.equal, update[4:], right))


def test_rejects_a_parameter_unlike_the_first() -> None:
    def update(*shape: int, dtype: torch.dtype = torch.float32) -> adamw.Update:
        param, gradient, new_param = (random(*shape, dtype=dtype) for _ in range(3))
        mu, nu, new_mu, new_nu = (random(*shape) for _ in range(4))
        return adamw.Update(param, (gradient,), mu, nu, new_param, new_mu, new_nu)

    step = operands(1)["step"]
    with pytest.raises(TypeError, match="all tensors must have one dtype"):
        adamw.update_all([update(3), update(4, dtype=torch.float16)], step, **SETTINGS)
    with pytest.raises(ValueError, match=r"param's shape \(4,\), got out of nu \(3,\)"):
        adamw.update_all([update(3), update(4)._replace(new_nu=random(3))], step, **SETTINGS)
    for gradients in ([random(5)], [random(5)] * 3, [random(2, 5), random(5)]):
        with pytest.raises(ValueError, match=r"one gradient of param's shape \(2, 5\), or one for each index"):
            adamw.update_all([update(2, 5)._replace(gradients=gradients)], step, **SETTINGS)
    adamw.update_all([], step, **SETTINGS)


@pytest.mark.gpu
def test_rejects_cpu_tensors() -> None:
    with pytest.raises(ValueError, match="must be on a GPU"):
        adamw.adamw(**{name: x.cpu() for name, x in operands(4).items()}, **SETTINGS)


def test_rejects_memory_that_results_do_not_fit() -> None:
    given = operands(4)
    with pytest.raises(ValueError, match="out must be contiguous"):
        adamw.adamw(**given, **SETTINGS, out=tuple(random(8)[::2] for _ in range(3)))
    with pytest.raises(TypeError, match="out of mu and nu must be float32"):
        adamw.adamw(**given, **SETTINGS, out=(random(4), random(4).half(), random(4).half()))
