"""Every CUDA C++ kernel, broken in one place, still compiles (anywhere), and the tests catch it (on a GPU).

If a kernel's text changes, `sound` no longer occurs exactly once, and the test fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import kernel_properties as properties
import pytest
import torch
from property_checks import FINITE, NOT_FINITE, ORDINARY, matrix, placed
from test_dropout_residual_norm import problem as dropout_residual_norm_problem

from xlafuse.triton_side.calls import cuda_program
from xlafuse.triton_side.cuda import (
    bias_gelu,
    dropout_residual_norm,
    gelu,
    layernorm,
    matmul,
    rmsnorm,
    softmax,
    vector_add,
)

SOURCES = cuda_program.SOURCE_FOLDER


@dataclass(frozen=True)
class Mutation:
    """One broken place in a kernel.

    sound: text in the source or in a header. columns: row length that selects the kernel.
    instance: the template's arguments, for a machine that only compiles.
    """

    kernel: str
    source: str
    sound: str
    broken: str
    columns: int
    instance: str


MUTATIONS = [
    Mutation(
        "vector_add", "vector_add.cu",
        "return values[0] + values[1];", "return values[0] + values[0];",
        67, "float, 4, 2, 256",
    ),
    Mutation(
        "gelu_forward", "gelu.cu",
        "1.0f + exp2f(exponent(x))", "1.0f + exp2f(0.99f * exponent(x))",
        67, "float, 4, 2, 256",
    ),
    Mutation(
        "gelu_backward", "gelu.cu",
        "const float s = x < 0.0f ? lower : upper;", "const float s = upper;",
        67, "float, 4, 2, 256",
    ),
    Mutation(
        "bias_gelu_forward", "bias_gelu.cu",
        "values[i] = gelu(values[i] + shift[i]);", "values[i] = gelu(values[i]);",
        67, "float, 1, 8, 128",
    ),
    Mutation(
        "bias_gelu_backward", "bias_gelu.cu",
        "sums[i] += gradients[i];", "sums[i] = gradients[i];",
        67, "float, 1, 8, 128",
    ),
    Mutation(
        "bias_gelu_sum_partials", "bias_gelu.cu",
        "sum += of_warp[warp][threadIdx.x];", "sum = of_warp[warp][threadIdx.x];",
        67, "float, 32",
    ),
    Mutation(
        "dropout_residual_norm_forward", "dropout_residual_norm.cu",
        "dropped(values[i] + biases[i], mask, i, dropout)", "dropped(values[i], mask, i, dropout)",
        67, "float, 1, 8, 32",
    ),
    Mutation(
        "dropout_residual_norm_backward", "dropout_residual_norm.cu",
        "uniforms<LANES>(dropout.key, row, column)", "uniforms<LANES>(dropout.key, row, first)",
        67, "float, 1, 8, 32, 16",
    ),
    Mutation(
        "dropout_residual_norm_backward_cluster", "dropout_residual_norm.cu",
        "mean_gradients<true, THREADS, CLUSTER>(h, of.weight", "mean_gradients<true, THREADS, 1>(h, of.weight",
        10007, "float, 1, 16, 512, 2",
    ),
    Mutation(
        "dropout_residual_norm_sum_partials", "dropout_residual_norm.cu",
        "vector == 1 ? dweight : dshift", "vector == 1 ? dshift : dweight",
        67, "float, 16",
    ),
    Mutation(
        "layernorm_forward", "layernorm.cu",
        "    if ((v * THREADS + threadIdx.x) * LANES < columns) of_thread += sum_of_squares(packs[v], row_mean);",
        "    of_thread += sum_of_squares(packs[v], row_mean);",
        67, "float, 1, 4, 32",
    ),
    Mutation(
        "layernorm_forward_streaming", "layernorm.cu",
        "a.squares + b.squares + apart * apart * a.count * share", "a.squares + b.squares",
        10007, "float, 1, 512",
    ),
    Mutation(
        "layernorm_backward", "layernorm.cu",
        "store(of_bias + column, pack<float>(dbias[v]));", "store(of_bias + column, pack<float>(dweight[v]));",
        67, "float, 1, 4, 32",
    ),
    Mutation(
        "layernorm_backward_streaming", "layernorm.cu",
        "dx[i] = of_row.rstd * (gradients[i] * weights[i] - means.gradient - n * means.projection);",
        "dx[i] = of_row.rstd * (gradients[i] * weights[i] - n * means.projection);",
        10007, "float, 1, 512",
    ),
    Mutation(
        "layernorm_partials", "layernorm.cu",
        "for (int row = group; row < rows", "for (int row = group + 1; row < rows",
        10007, "float, 1, 128",
    ),
    Mutation(
        "layernorm_sum_partials", "layernorm.cu",
        "for (int warp = 1; warp < WARPS; ++warp) sum += of_warp[warp][threadIdx.x];", "",
        67, "float, 16",
    ),
    Mutation(
        "matmul", "matmul.cu",
        "i < extent && d < depth ? to_float(*source) : 0.0f", "i < extent ? to_float(*source) : 0.0f",
        67, "float, true, false, 128, 16",
    ),
    Mutation(
        "rmsnorm_forward", "rmsnorm.cu",
        "squares += sum_of_squares(packs[v], 0.0f);", "squares = sum_of_squares(packs[v], 0.0f);",
        67, "float, 1, 4, 32",
    ),
    Mutation(
        "rmsnorm_forward_streaming", "rmsnorm.cu",
        "squares += sum_of_squares(load<LANES>(x + column), 0.0f);",
        "squares = sum_of_squares(load<LANES>(x + column), 0.0f);",
        10007, "float, 1, 512",
    ),
    Mutation(
        "rmsnorm_backward", "rmsnorm.cu",
        "accumulate(x_packs[v], dy_packs[v], of_row, dweight[v], dbias[v]);",
        "accumulate(x_packs[v], dy_packs[v], {0.0f, 1.0f}, dweight[v], dbias[v]);",
        67, "float, 1, 4, 32",
    ),
    Mutation(
        "rmsnorm_backward_streaming", "rmsnorm.cu",
        "total += projection(load<LANES>(x + column)", "total = projection(load<LANES>(x + column)",
        10007, "float, 1, 512",
    ),
    Mutation(
        "rmsnorm_partials", "rmsnorm.cu",
        "for (int row = group; row < rows", "for (int row = group + 1; row < rows",
        10007, "float, 1, 128",
    ),
    Mutation(
        "rmsnorm_sum_partials", "rmsnorm.cu",
        "sum_columns<WARPS>(partial, dweight, partials,", "sum_columns<WARPS>(partial, dweight, partials - 1,",
        67, "float, 16",
    ),
    Mutation(
        "softmax_forward", "softmax.cu",
        "packs[v] = column < columns ? load<LANES>(x + column) : filled<T, LANES>(-CUDART_INF_F);",
        "packs[v] = column < columns ? load<LANES>(x + column) : filled<T, LANES>(0.0f);",
        67, "float, 1, 4, 32, 4",
    ),
    Mutation(
        "softmax_backward", "softmax.cu",
        "for (int v = 0; v < VECTORS; ++v) dot += dot_product(y_packs[v], dy_packs[v]);",
        "for (int v = 0; v < VECTORS; ++v) dot = dot_product(y_packs[v], dy_packs[v]);",
        67, "float, 1, 4, 32, 4",
    ),
    Mutation(
        "softmax_forward_cluster", "softmax.cu",
        "const Normalizer of_row = reduce_row<THREADS, CLUSTER>(of_thread);",
        "const Normalizer of_row = reduce_row<THREADS, 1>(of_thread);",
        10007, "float, 1, 16, 512, 2",
    ),
    Mutation(
        "softmax_backward_cluster", "softmax.cu",
        "dot = reduce_row<THREADS, CLUSTER>(dot);", "dot = reduce_row<THREADS, 1>(dot);",
        10007, "float, 1, 16, 512, 2",
    ),
    Mutation(
        "softmax_forward_streaming", "softmax.cu",
        "of_thread = merge(of_thread, {largest, sum_of_exponentials(pack, largest)});",
        "of_thread = {largest, sum_of_exponentials(pack, largest)};",
        70001, "float, 1, 1024",
    ),
    Mutation(
        "softmax_backward_streaming", "softmax.cu",
        "dot += dot_product(load<LANES>(y + column), load<LANES>(dy + column));",
        "dot = dot_product(load<LANES>(y + column), load<LANES>(dy + column));",
        70001, "float, 1, 1024",
    ),
]

each = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.kernel)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels' sources, from which kernels compile. The compile cache is emptied before and after."""
    folder = tmp_path / "cuda"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    monkeypatch.setattr(cuda_program, "SOURCE_FOLDER", folder)
    cuda_program.compile_kernel.cache_clear()
    yield folder
    cuda_program.compile_kernel.cache_clear()


def mutate(folder: Path, mutation: Mutation) -> None:
    """Break the place in the kernel's own file, or in the header that has it."""
    files = folder / mutation.source, *folder.rglob("*.cuh")
    path = next(path for path in files if mutation.sound in path.read_text())
    text = path.read_text()
    assert text.count(mutation.sound) == 1
    path.write_text(text.replace(mutation.sound, mutation.broken))


def problems(mutation: Mutation) -> list[str]:
    def draw(seed: int, kinds=(ORDINARY,)) -> torch.Tensor:
        return placed(matrix(7, mutation.columns, kinds, seed, torch.float32), "dense", "cuda")

    if mutation.kernel.startswith("dropout_residual_norm"):
        text = dropout_residual_norm_problem(7, mutation.columns, module=dropout_residual_norm)
        return [text] if text else []
    dy = draw(1)
    if mutation.kernel == "matmul":
        dc = placed(matrix(7, 7, (ORDINARY,), 2, torch.float32), "dense", "cuda")
        text = properties.trained_matmul(properties.training(matmul.matmul), draw(0), dy.T, dc)
        return [text] if text else []
    found = []
    for x in (draw(0), draw(0, FINITE), draw(0, NOT_FINITE)):
        if mutation.kernel == "vector_add":
            found.append(properties.vector_add(lambda x, y: (vector_add.vector_add(x, y),), x, dy))
        elif mutation.kernel.startswith("bias_gelu"):
            found.append(properties.bias_gelu(properties.training(bias_gelu.bias_gelu), x, dy[0], dy))
        elif mutation.kernel.startswith("gelu"):
            found.append(properties.gelu(properties.training(gelu.gelu), x, dy))
        elif mutation.kernel.startswith("layernorm"):
            launch = properties.training(lambda x, w, b: layernorm.layernorm(x, w, b, 1e-6))
            found.append(properties.layernorm(launch, x, draw(2)[0], draw(3)[0], dy, 1e-6))
        elif mutation.kernel.startswith("rmsnorm"):
            launch = properties.training(lambda x, w: rmsnorm.rmsnorm(x, w, 1e-6))
            found.append(properties.rmsnorm(launch, x, draw(2)[0], dy, 1e-6))
        else:
            found.append(properties.softmax(properties.training(softmax.softmax), x, dy))
    return [text for text in found if text]


def test_every_kernel_has_a_mutation() -> None:
    written = {
        name
        for path in SOURCES.glob("*.cu")
        for name in re.findall(r"__global__[^;{(]*(?:\([^)]*\)[^;{(]*)*?\b(\w+)\(const \w+\*", path.read_text())
    }
    assert {mutation.kernel for mutation in MUTATIONS} == written


@pytest.mark.full
@each
def test_the_mutation_compiles_to_another_kernel(mutation: Mutation, sources: Path) -> None:
    expression = f"{mutation.kernel}<{mutation.instance}>"
    sound = cuda_program.compile_kernel(mutation.source, expression, "sm_90", "--ftz=true")
    mutate(sources, mutation)
    cuda_program.compile_kernel.cache_clear()
    assert cuda_program.compile_kernel(mutation.source, expression, "sm_90", "--ftz=true").ptx != sound.ptx


@pytest.mark.gpu
@each
def test_the_sound_kernel_passes(mutation: Mutation) -> None:
    assert problems(mutation) == []


@pytest.mark.gpu
@each
def test_the_mutation_is_caught(mutation: Mutation, sources: Path) -> None:
    mutate(sources, mutation)
    assert problems(mutation), f"{mutation.kernel}: {mutation.sound!r} as {mutation.broken!r} passes"
