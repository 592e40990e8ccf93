import pytest
import torch
from kernel_properties import cross_entropy as problem
from row_kernel_checks import DEVICE, DTYPES, random

from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.kernels import cross_entropy
from xlafuse.triton_side.kernels.shared.launch import FlatConfig

# A token that does not count leaves -inf - -inf in unused lanes, and NumPy warns about it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMOOTHING, Z_LOSS = 0.1, 0.05  # large enough here that leaving one out fails
CONFIGS = [FlatConfig(block=256, num_warps=1), FlatConfig(block=64, num_warps=2), FlatConfig(block=16, num_warps=1)]


def draw_labels(tokens: int, classes: int, ignored: float = 0.3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (tokens,), generator=generator, dtype=torch.int32)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORED
    return labels.to(DEVICE)


def configured(config: FlatConfig | None = None, module=cross_entropy):
    """Return loss and dlogits of logits, labels and dloss."""

    def launch(logits: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss, saved = module.forward(logits, labels, SMOOTHING, Z_LOSS, save=True, config=config)
        return loss, module.backward(logits, labels, saved, dloss, SMOOTHING, Z_LOSS, config)

    return launch


def public(logits: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = logits.detach().requires_grad_()
    loss = cross_entropy.apply({"logits": leaf, "labels": labels}, smoothing=SMOOTHING, z_loss=Z_LOSS)["loss"]
    return loss.detach(), *torch.autograd.grad(loss, leaf, dloss)


def agrees(launch, logits: torch.Tensor, labels: torch.Tensor) -> bool:
    dloss = torch.tensor(-1.7, device=DEVICE)
    return problem(launch, logits, labels, dloss, SMOOTHING, Z_LOSS) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (3, 1021), (7, 64), (7, 127), (2, 9001), (2, 20000)])
def test_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert agrees(public, 4 * random(*shape, dtype=dtype), draw_labels(*shape))


@pytest.mark.parametrize("columns", [203, 208, 256])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_configuration_agrees(config: FlatConfig, columns: int) -> None:
    assert agrees(configured(config), 4 * random(7, columns), draw_labels(7, columns))


def test_the_mean_over_several_blocks_of_tokens() -> None:
    losses, labels = random(9001) ** 2, draw_labels(9001, 7)
    losses[labels == IGNORED] = 0
    loss, count = torch.full((), torch.nan, device=DEVICE), torch.zeros((), dtype=torch.int32, device=DEVICE)
    cross_entropy.cross_entropy_mean_kernel[(1,)](losses, labels, loss, count, 9001, IGNORED=IGNORED, BLOCK=4096)
    assert count == (labels != IGNORED).sum()
    assert loss == (losses.double().sum() / count).float()


def test_losses_whose_sum_overflows_have_a_mean() -> None:
    logits = torch.zeros(4, 9, device=DEVICE)
    logits[:, 0] = 2e38
    labels = torch.ones(4, dtype=torch.int32, device=DEVICE)
    assert cross_entropy.cross_entropy(logits, labels).item() == logits[0, 0]


def test_gradients_of_large_logits_are_as_accurate_as_of_small_ones() -> None:
    # exp(x - lse) with lse = 1e4 in fp32 is off by 5e-4.
    logits, labels = random(5, 64) + 1e4, draw_labels(5, 64, ignored=0)
    _, got = configured()(logits, labels, torch.tensor(1.0, device=DEVICE))
    slope = 1 + 2 * Z_LOSS * logits.double().logsumexp(1, keepdim=True)
    expected = torch.softmax(logits.double(), 1) * slope - SMOOTHING / 64
    expected[torch.arange(5), labels.long()] -= 1 - SMOOTHING
    assert ((got - expected / 5).abs() <= 1e-5 * slope / 5).all()


def test_tokens_that_do_not_count_are_not_read() -> None:
    logits, labels = random(5, 40), draw_labels(5, 40, ignored=0)
    labels[1] = labels[3] = IGNORED
    one = torch.tensor(1.0, device=DEVICE)
    loss, gradient = public(logits, labels, one)
    logits[1] = torch.nan
    logits[3] = torch.inf
    spoilt_loss, spoilt_gradient = public(logits, labels, one)
    assert torch.equal(loss, spoilt_loss) and torch.equal(gradient, spoilt_gradient)
    assert (gradient[[1, 3]] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_loss_and_gradients_are_zero_without_a_counted_token(tokens: int) -> None:
    labels = torch.full((tokens,), IGNORED, dtype=torch.int32, device=DEVICE)
    loss, gradient = public(torch.full((tokens, 5), torch.nan, device=DEVICE), labels, torch.tensor(1.0, device=DEVICE))
    assert loss == 0 and gradient.shape == (tokens, 5) and (gradient == 0).all()


@pytest.mark.parametrize("label", [-1, 20, 2**31 - 1])
def test_a_label_that_is_no_class_gives_nan(label: int) -> None:
    logits, labels = random(3, 20), torch.tensor([4, label, 5], dtype=torch.int32, device=DEVICE)
    loss, gradient = public(logits, labels, torch.tensor(1.0, device=DEVICE))
    assert loss.isnan() and gradient[1].isnan().all() and gradient[[0, 2]].isfinite().all()
