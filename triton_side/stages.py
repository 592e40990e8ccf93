"""Names for the stages of a block, which the compiler carries into its kernels."""

import contextlib

import torch
from torch.fx.traceback import annotate

_NO_STAGE = contextlib.nullcontext()


def stage(name: str) -> contextlib.AbstractContextManager[None]:
    """Mark the operations inside the `with` as stage `name` while torch.compile or torch.export traces them.

    The name reaches every FX node, forward and backward, as `node.meta["custom"]["stage"]`, provided that
    the call which triggers the compile runs under `torch.fx.traceback.preserve_node_meta()`. A stage opened
    inside another one replaces its name. Outside a compile this does nothing: `annotate` alone takes 1.4 to
    2.0 us of host time per use, as long as a small eager operation on a CPU; this takes 0.3 us (torch 2.11
    and 2.13).
    """
    if torch.compiler.is_compiling():
        return annotate({"stage": name})
    return _NO_STAGE
