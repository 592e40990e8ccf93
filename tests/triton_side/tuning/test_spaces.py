"""Each choice of the kernels has a space, whose configurations the kernels can take."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from xlafuse.triton_side import kernels
from xlafuse.triton_side.configs.tuned import TUNED
from xlafuse.triton_side.kernels.shared.launch import RowConfig, next_power_of_2
from xlafuse.triton_side.tuning.spaces import SPACES, Choice, candidates

PRODUCT = {"precision": "ieee", "descriptors": True, "m": 8192, "n": 4096}
WHOLE = PRODUCT | {"k": 4096, "transposed": False}
HALF = {"dtype": torch.bfloat16}
ATTENTION = {  # in the order of the functions' arguments
    "dtype": None, "head_dim": None, "precision": None, "descriptors": True, "shared": False, "windowed": False,
    "packed": False, "biased": False,
}
GROUPS = HALF | {"precision": "ieee", "descriptors": True}


def choice(name: str, facts: Mapping[str, Any]) -> Choice:
    importlib.import_module(f"xlafuse.triton_side.kernels.{name.rpartition('.')[0]}")
    return Choice(name, facts, TUNED[name].__wrapped__(**facts), 132)


def test_each_choice_has_a_space() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, "xlafuse.triton_side.kernels."):
        importlib.import_module(module.name)
    assert SPACES.keys() == TUNED.keys()


ROWS = {"rows": 8192, "element_bytes": 2, "multiprocessors": 132}


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        *((name, ROWS | {"columns": columns}) for columns in (64, 768, 4096, 16384, 50257) for name in (
            "rmsnorm.configure_forward", "rmsnorm.configure_backward", "softmax.configure_forward",
            "softmax.configure_backward", "layernorm.configure_forward", "dropout_residual_norm.configure_backward",
        ) if columns <= 16384 or "softmax" in name),
        ("bias_gelu.configure_forward", {"rows": 8192, "columns": 100, "element_bytes": 2}),
        ("bias_gelu.configure_backward", ROWS | {"columns": 4096}),
        ("linear_gelu.configure_dpre", ROWS | {"columns": 4096}),
        ("linear_gelu.configure_dpre", ROWS | {"rows": 16, "columns": 16384}),
        ("embedding.configure_forward", {"columns": 2048, "element_bytes": 2}),
        ("embedding.configure_backward", {"columns": 2048, "element_bytes": 4}),
        ("gelu.configure", {"element_bytes": 2}), ("adamw.configure", {}),
        ("matmul.matmul_config", HALF | WHOLE), ("matmul.matmul_config", HALF | WHOLE | {"m": 16}),
        ("matmul.matmul_config", HALF | WHOLE | {"m": 16, "transposed": True}),
        ("matmul.matmul_config", HALF | WHOLE | {"k": 16}),
        ("matmul.matmul_config", HALF | WHOLE | {"descriptors": False}),
        ("matmul.matmul_config", WHOLE | {"dtype": torch.float32}),
        *(("matmul.matmul_config", WHOLE | {"dtype": torch.float32, "precision": precision, "m": m})
          for precision in ("tf32", "tf32x3") for m in (64, 8192)),
        ("matmul_fp8.fp8_config", PRODUCT | {"dtype": torch.float8_e4m3fn}),
        ("moe.grouped_config", GROUPS | {
            "slots": 8192, "accumulators": 2, "pairs": 1, "experts": 8, "k": 2048, "n": 3584,
        }),
        ("moe.grouped_config", GROUPS | {
            "slots": 16, "accumulators": 1, "pairs": 1, "experts": 8, "k": 2048, "n": 3584,
        }),
        ("cross_entropy.configure_forward", {"tokens": 8192, "element_bytes": 2, "multiprocessors": 132}),
        *((f"shared.attention_configs.{kernel}_config", ATTENTION | {
            "dtype": dtype, "precision": precision, "head_dim": head_dim,
          }) for kernel in ("forward", "dk_dv", "dq", "dbias") for head_dim in (16, 64, 128, 256)
          for dtype, precision in (
              (torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float32, "tf32x3"),
          )),
        ("moe.weights_gradient_config", GROUPS | {"accumulators": 1, "rows": 8192, "k": 2048, "n": 3584}),
    ],
)
def test_a_space_holds_the_rule_and_others_that_the_kernel_can_take(name: str, facts: dict[str, Any]) -> None:
    chosen = choice(name, facts)
    found = candidates(chosen)
    assert found[0] == chosen.rule and len(set(found)) == len(found) >= 3
    assert {type(config) for config in found} == {type(chosen.rule)}
    for config in found:
        fields = vars(config)
        sizes = [value for field, value in fields.items() if field.startswith(("block", "num_warps"))]
        assert all(size == next_power_of_2(size) for size in sizes)
        assert fields.get("programs", 1) >= 1 and fields["num_warps"] <= 32
        if isinstance(config, RowConfig) and "dropout" in name:
            assert config.block_columns >= facts["columns"]  # it has no loop over a row
        if fields.get("descriptors"):
            assert facts["descriptors"]
