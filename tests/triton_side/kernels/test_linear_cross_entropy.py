from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from kernel_properties import linear_cross_entropy as problem
from row_kernel_checks import DEVICE, DTYPES, random
from test_cross_entropy import SMOOTHING, Z_LOSS, draw_labels
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.kernels import linear_cross_entropy
from xlafuse.triton_side.kernels.shared.matmul_tiles import MatmulConfig

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The last has descriptors.
CONFIGS = [
    MatmulConfig(32, 64, 64, num_warps=4, num_stages=1, group_m=1, descriptors=False),
    MatmulConfig(16, 128, 32, num_warps=4, num_stages=2, group_m=3, descriptors=False),
    MatmulConfig(16, 64, 32, num_warps=4, num_stages=2, group_m=2),
]
ONE = torch.tensor(1.0, device=DEVICE)


def tensors(tokens: int, width: int, classes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return h, w and labels whose logits resemble the block's."""
    w = (random(classes, width, seed=1) * max(width, 1) ** -0.5).to(dtype)
    return [4 * random(tokens, width, dtype=dtype), w, draw_labels(tokens, classes)]


def configured(config: MatmulConfig | None = None, module=linear_cross_entropy, workspace: int = 1):
    """Return loss, dh and dw of h, w, labels and dloss; with several steps of tiles and as many chunks as possible."""
    chosen = {} if config is None else {"choose": lambda *about: config}

    def launch(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor) -> tuple:
        with mock.patch.object(module, "TILES_PER_STEP", 2):
            loss, *gradients, count = module.training_pass(
                h, w, labels, SMOOTHING, Z_LOSS, workspace=workspace, **chosen
            )
        for gradient in gradients:
            module.launch_scaling(gradient, dloss, count)
        return loss, *gradients

    return launch


def public(
    h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor = ONE, **attributes: int
) -> tuple:
    leaves = [x.detach().requires_grad_() for x in (h, w)]
    loss = linear_cross_entropy.linear_cross_entropy(*leaves, labels, SMOOTHING, Z_LOSS, **attributes)
    return loss.detach(), *torch.autograd.grad(loss, leaves, dloss)


def in_chunks(h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor = ONE) -> tuple:
    """Return what `public` does, with a workspace too small for more than MIN_TOKENS tokens at once."""
    return public(h, w, labels, dloss, workspace=1)


def agrees(launch, h: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> bool:
    dloss = torch.tensor(-1.7, device=DEVICE)
    return problem(launch, h, w, labels, dloss, SMOOTHING, Z_LOSS) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1), (17, 37, 67), (40, 64, 136), (3, 8, 600)], ids=str)
def test_agrees_with_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert agrees(public, *tensors(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_float64_in_several_chunks(dtype: torch.dtype) -> None:
    assert agrees(in_chunks, *tensors(131, 37, 67, dtype))


@pytest.mark.parametrize(
    ("config", "dtype"), list(zip(CONFIGS, (torch.float32, torch.float32, torch.float16), strict=True)), ids=str
)
def test_any_configuration_agrees_in_several_chunks(config: MatmulConfig, dtype: torch.dtype) -> None:
    # Two chunks and part of a third.
    assert agrees(configured(config), *tensors(300, 40, 136, dtype))


@pytest.mark.parametrize("classes", [1, 257, 1000, 5000, 128256, 10**7])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 2048, 8192, 10**6])
def test_chunks_have_equal_size_and_fit_the_workspace(tokens: int, classes: int) -> None:
    least, workspace = linear_cross_entropy.MIN_TOKENS, linear_cross_entropy.WORKSPACE
    chunk = linear_cross_entropy.tokens_per_chunk(tokens, classes, 2)
    assert chunk % least == 0 and chunk <= max(least, tokens + least - 1)
    assert 2 * classes * chunk <= max(workspace, 2 * classes * least)
    assert chunk <= linear_cross_entropy.MOST_IN_AXIS
    chunks = -(-tokens // chunk)
    assert chunk - tokens / chunks < least  # no larger than all of them together


def test_a_certain_class_has_no_gradient() -> None:
    """The softmax of stored logits adds to one; with the sum of exact ones, up to 45 * 2^-12 would be left."""
    w = random(40, 16, dtype=torch.float16)
    w[5] = 1.4
    h = torch.full((4, 16), 2.0234375, dtype=torch.float16, device=DEVICE)
    labels = torch.full((4,), 5, device=DEVICE)
    _, dh, _, _ = linear_cross_entropy.training_pass(h, w, labels, 0.0, 0.0)
    assert dh.abs().max() < 1e-6


def test_loss_and_gradients_are_zero_without_a_counted_token() -> None:
    h, w, _ = tensors(5, 8, 67)
    loss, dh, dw = public(h, w, torch.full((5,), IGNORED, dtype=torch.int32, device=DEVICE))
    assert loss == 0 and (dh == 0).all() and (dw == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 8, 12), (5, 0, 12)])
def test_empty(shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing was written to holds zeros, so its inverse is infinite."""
    monkeypatch.setattr(torch, "empty", torch.zeros)
    h, w, labels = tensors(*shape)
    h, w = h.to(dtype), w.to(dtype)
    loss, dh, dw = public(h, w, labels)
    assert loss.isfinite() and dh.shape == h.shape and dw.shape == w.shape and (dw == 0).all()


@pytest.mark.parametrize("label", [-1, 20, 2**31 - 1])
def test_a_label_that_is_no_class_gives_nan(label: int) -> None:
    h, w, _ = tensors(3, 8, 20)
    loss, dh, _ = public(h, w, torch.tensor([4, label, 5], dtype=torch.int32, device=DEVICE))
    assert loss.isnan() and dh[1].isnan().all() and dh[[0, 2]].isfinite().all()


def test_logits_of_any_size() -> None:
    w, labels = torch.eye(8, device=DEVICE), torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    h = torch.zeros(2, 8, device=DEVICE)
    h[:, 0] = 2e38
    assert linear_cross_entropy.linear_cross_entropy(h, w, labels).item() == h[0, 0]
    h[:, 1:] = -torch.inf  # its product with w's zeros is NaN
    assert linear_cross_entropy.linear_cross_entropy(h, w, labels).isnan()


def test_bits_of_several_chunks_repeat() -> None:
    inputs = tensors(131, 24, 67)
    assert all(torch.equal(a, b) for a, b in zip(in_chunks(*inputs), in_chunks(*inputs), strict=True))


def test_only_training_saves_and_only_wanted_gradients_are_computed() -> None:
    h, w, labels = tensors(3, 8, 50)
    whole = public(h, w, labels)
    function = linear_cross_entropy.linear_cross_entropy
    assert function(h, w, labels).grad_fn is None
    for leaf, other, expected in zip((h, w), (w, h), whole[1:], strict=True):
        leaf.requires_grad_()
        with torch.no_grad():
            assert function(h, w, labels).grad_fn is None
        loss = function(h, w, labels, SMOOTHING, Z_LOSS)
        with _Allocations() as allocated:
            (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(gradient, expected)
        assert 4 * leaf.numel() in allocated.bytes and 4 * other.numel() not in allocated.bytes
        leaf.requires_grad_(False)


class _Allocations(TorchDispatchMode):
    """Records the bytes of each new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        new = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in _tensors(result)}
        self.bytes += [size for storage, size in new.items() if storage not in given]
        return result


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


@pytest.mark.full
def test_no_tensor_has_the_size_of_the_logits() -> None:
    tokens, width, classes = 300, 16, 1500
    h, w, labels = tensors(tokens, width, classes)
    with _Allocations() as allocated:
        configured(MatmulConfig(64, 256, 16, num_warps=8, num_stages=1, descriptors=False))(h, w, labels, ONE)
    chunk = 4 * linear_cross_entropy.MIN_TOKENS * classes
    assert max(allocated.bytes) == max(chunk, 4 * classes * width)
    with _Allocations() as plain:
        h @ w.T
    assert plain.bytes == [4 * tokens * classes]


def test_small_float16_gradients_survive_if_the_loss_is_scaled() -> None:
    """Each token's share of dh is about 1e-8, under float16's smallest number."""
    h, w, labels = tensors(300, 16, 40, torch.float16)
    w = w / 1024
    wide_h, wide_w = (x.float().requires_grad_() for x in (h, w))
    logits = wide_h @ wide_w.T
    mean = torch.nn.functional.cross_entropy(logits, labels.long(), ignore_index=IGNORED)
    expected, _ = torch.autograd.grad(mean, (wide_h, wide_w), torch.tensor(65536.0, device=DEVICE))
    leaf = h.detach().requires_grad_()
    loss = linear_cross_entropy.linear_cross_entropy(leaf, w, labels)
    (dh,) = torch.autograd.grad(loss, leaf, torch.tensor(65536.0, device=DEVICE))
    assert (dh - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("workspace", [1, linear_cross_entropy.WORKSPACE])
def test_a_second_backward_pass_is_refused(workspace: int) -> None:
    h, w, labels = tensors(131, 8, 12)
    h.requires_grad_()
    loss = linear_cross_entropy.linear_cross_entropy(h, w, labels, workspace=workspace)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()
