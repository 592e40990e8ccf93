"""The switches of `xlafuse capture --try`: their names, and how one is set in a program.

A switch is the default of an argument, or a setting of a framework, so a program that sets it itself keeps its own
value. `compare/user/capture.py` runs this file in the program's interpreter, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

MEANINGS = {
    "attention:cudnn": 'jax.nn.dot_product_attention(implementation="cudnn"); in PyTorch, SDPA prefers cuDNN',
    "attention:flash": "in PyTorch, SDPA prefers FlashAttention",
    "attention:efficient": "in PyTorch, SDPA prefers the memory-efficient kernels",
    "compile:max-autotune": 'torch.compile(mode="max-autotune")',
    "compile:max-autotune-no-cudagraphs": 'torch.compile(mode="max-autotune-no-cudagraphs")',
    "compile:reduce-overhead": 'torch.compile(mode="reduce-overhead")',
    "matmul:tf32": "products of float32 arrays in TF32; JAX does that on a GPU unless a higher precision is set",
    "xla:--xla_FLAG=VALUE": "a flag of XLA, after those in XLA_FLAGS",
}
TF32 = {"jax": "tensorfloat32", "torch": "high"}  # in the words of each framework
_SDPA = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}

_OF_PYTORCH = ("attention:flash", "attention:efficient", "compile:")

Action = tuple[str, Callable[[ModuleType], None]]


def is_of_pytorch(name: str) -> bool:
    """Return whether a switch changes nothing in a program without PyTorch."""
    return name.startswith(_OF_PYTORCH)


class Switch:
    """A switch in this program; "" sets nothing.

    used, kept: calls of a function that took the switch's value, and calls that gave another one themselves.
    """

    def __init__(self, name: str) -> None:
        self._kind, _, self._value = name.partition(":")
        self._used = self._kept = 0
        self._context: Any = None  # ends when it is collected

    def actions(self) -> list[Action]:
        """Return what to do after the import of which module. A flag of XLA needs nothing: the environment has it."""
        match self._kind:
            case "attention":
                default = [("jax.nn", self._set_implementation)] if self._value == "cudnn" else []
                return [*default, ("torch", self._prefer_sdpa)]
            case "compile":
                return [("torch", self._set_mode)]
            case "matmul":
                return [
                    ("jax", lambda jax: jax.config.update("jax_default_matmul_precision", TF32["jax"])),
                    ("torch", lambda torch: torch.set_float32_matmul_precision(TF32["torch"])),
                ]
        return []

    def facts(self) -> dict[str, Any]:
        """Return how often the switch was used, and the precision of float32 products in each imported framework."""
        found = {"used": self._used, "kept": self._kept}
        matmul: dict[str, str] = {}
        if (jax := sys.modules.get("jax")) is not None:
            matmul["jax"] = str(jax.config.jax_default_matmul_precision)
        if (torch := sys.modules.get("torch")) is not None:
            matmul["torch"] = torch.get_float32_matmul_precision()
        return {**found, "matmul": matmul}

    def _set_implementation(self, module: ModuleType) -> None:
        self._set_default(module, "dot_product_attention", "query", "implementation")

    def _set_mode(self, module: ModuleType) -> None:
        def has_no_mode(given: Mapping[str, Any]) -> bool:
            return bool(given.get("options")) or given.get("backend") not in (None, "inductor")

        self._set_default(module, "compile", "model", "mode", has_no_mode)

    def _set_default(
        self, module: ModuleType, name: str, first: str, argument: str,
        keeps: Callable[[Mapping[str, Any]], bool] = lambda given: False,
    ) -> None:
        """Change the default of a function's argument. first: the name of its first argument."""
        function = getattr(module, name)

        def call(*args: Any, **given: Any) -> Any:
            if not args and given.get(first) is None:  # torch.compile as a decorator, which calls it again
                return function(**given)
            if given.get(argument) is not None or keeps(given):
                self._kept += 1
            else:
                self._used += 1
                given[argument] = self._value
            return function(*args, **given)

        with contextlib.suppress(AttributeError):
            # Frames of the framework's own files are in no traceback of an operation, so its line stays the program's.
            call.__code__ = call.__code__.replace(co_filename=function.__code__.co_filename)
        setattr(module, name, functools.update_wrapper(call, function))

    def _prefer_sdpa(self, module: ModuleType) -> None:
        """Let SDPA use one backend where it can, and else no fused kernel."""
        attention = importlib.import_module("torch.nn.attention")
        preferred = getattr(attention.SDPBackend, _SDPA[self._value])
        self._context = attention.sdpa_kernel([preferred, attention.SDPBackend.MATH], set_priority=True)
        self._context.__enter__()
