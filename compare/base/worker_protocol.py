"""The messages between a runner and its workers: one JSON object a line, over pipes of their own.

Request: {"method", "params"}. Reply: {"result"} or {"error": {"kind", "message"}}. The kinds of error:

- wrong: a result that must not be timed
- skipped: this machine or package set cannot do it; the message says what would help
- not_autotuned: the compile needs autotuning, and the request did not allow it (compare.workers.autotune_lock)
- out_of_memory: the GPU has too little free memory for it
- lost: this process cannot use its GPU any more, and ends
- failed: any other error
"""

from __future__ import annotations

# One process each. `torch` runs PyTorch, Inductor, Triton and CUDA on the machine's own device. `interpreter` and
# `target` are processes of their own, because Triton's interpreter and the pretended GPU each change a whole process.
ROLES = ("reference", "xla", "torch", "interpreter", "target")


class Skip(Exception):
    """A request that this machine cannot serve; the message names what is missing and the command that helps."""


class NotAutotuned(Exception):
    """A compile that needs autotuning, in a request that did not allow it."""
