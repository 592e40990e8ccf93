"""An implementation: one way to compute a block, named by a dotted string."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..backends import BACKENDS, Backend
from ..base.frameworks import Framework
from ..base.paths import PACKAGE
from .case import PHASES, Case


def load(target: str) -> Callable[..., Any]:
    """Import the module of "package.module:function", or ".module:function" of compare, and return the function."""
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module, PACKAGE), function)
    return loaded


_OWN_KERNELS = ("xlafuse.triton_side.kernels.", "xlafuse.triton_side.cuda.", "xlafuse.pallas.")


@dataclass(frozen=True)
class OwnFunction:
    """A user's function for a block, by name.

    function: "package.module:name" or "/a/file.py:name". backward: the name of its gradient, or None for the
    framework's. compiled: torch.compile wraps it. path: entries of sys.path with which these names are found.
    sources: the files of both, each with the hash of its content.
    """

    block: str
    framework: Framework
    function: str
    backward: str | None = None
    compiled: bool = False
    path: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> Any:
        """All that tells it from another function of its name; its files may lie elsewhere."""
        names = [name and name.partition(":")[2] for name in (self.function, self.backward)]
        return self.framework, self.compiled, names, [content for _, content in self.sources]

    @property
    def changed_file(self) -> str | None:
        """The first of its files that has another content now, or None."""
        return next((file for file, content in self.sources if content_hash(file) != content), None)

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2].removesuffix("()").rpartition(".")[2]

    def row(self) -> Implementation:
        """Return the implementation, named like the function."""
        shown = short_name(self.function)
        worker, backend = {"torch": ("pytorch", "own-torch"), "jax": ("xla", "xla")}[self.framework]
        target = f".workers.{worker}.own_function:implementation"
        backend = "own-inductor" if self.compiled else backend
        return Implementation(self.name, target, backend, f"your function in {shown}", own=self)


def content_hash(file: str) -> str:
    """Return the hash of a file's content, "" without the file."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def short_name(function: str) -> str:
    """Return a function's name with the file's name in place of its path."""
    where, _, what = function.partition(":")
    return f"{Path(where).name}:{what}"


@dataclass(frozen=True)
class Implementation:
    """One way to compute a block.

    target: "package.module:function" with the contract `apply(inputs, **attributes) -> outputs` on dicts of arrays.
    backend_name: the name of its backend in compare.backends.BACKENDS.
    needs_gpu: why it cannot be compiled or checked without a GPU, or None.
    unsupported: why it cannot take a case, or None.
    directions: leaves out those in which it would only repeat another implementation.
    unfused_of: the implementation that computes the same with fusion; this one shows the cost of fusing nothing. It
        runs on a block's shapes of suite `quick` only, and reports fold it away.
    rounded_sums: inputs whose gradient the program's types sum in the case's own dtype, rounded after each addition.
        Their errors have a tolerance of their own (compare.numerics.rounded_sums).
    static_inputs: inputs that a module of the user keeps at one address (weights, caches). Inductor copies all others
        into its CUDA graphs.
    by_shape: it belongs to those shapes alone that name it in their `implementations`.
    own: the user's function that it is; `target` then takes it and returns the function of that contract.
    requires: the packages that it needs beyond its framework, as pip takes them. "liger-kernel==0.8.5": any version is
        used, and this one was tested. "torch>=2.12": older ones are refused. "python>=3.12": so is an older
        interpreter. Only its worker knows whether they are installed.
    """

    name: str
    target: str
    backend_name: str
    summary: str
    needs_gpu: str | None = None
    unsupported: Callable[[Case], str | None] = field(default=lambda case: None)
    directions: tuple[str, ...] = tuple(PHASES)
    unfused_of: str | None = None
    requires: tuple[str, ...] = ()
    rounded_sums: tuple[str, ...] = ()
    static_inputs: tuple[str, ...] = ()
    by_shape: bool = False
    own: OwnFunction | None = None

    @property
    def backend(self) -> Backend:
        return BACKENDS[self.backend_name]

    def refused_by(self, tpu: str) -> str | None:
        """Return why it cannot be compiled for this TPU, or None."""
        why = self.needs_gpu or self.backend.gpu_only
        return f"{tpu} is not a GPU: {why}" if why else None

    @property
    def is_peer(self) -> bool:
        """True for kernels that neither this project nor its user wrote by hand."""
        return self.own is None and not self.backend.hand_written and not self.target.startswith(_OWN_KERNELS)

    @property
    def is_stock(self) -> bool:
        """True for a peer that comes with JAX or PyTorch, without a special library."""
        return self.is_peer and all(each.startswith(("jax", "torch", "python")) for each in self.requires)

    def load(self) -> Callable[..., Any]:
        """Import the target function and its framework; only a worker calls this."""
        target = load(self.target)
        return target if self.own is None else target(self.own)

    @property
    def request(self) -> str | dict[str, Any]:
        """Its form in a request to a worker: the name in the table of blocks, or the user's function."""
        return self.name if self.own is None else asdict(self.own)
