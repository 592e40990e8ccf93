"""What an orchestrator and a worker say to each other: one JSON object a line, over pipes of their own.

Request {"method", "params"}; reply {"result"} or {"error": {"kind", "message"}}. The kinds of error:
`wrong` (a result that must not be timed), `skipped` (this machine or package set cannot do it; the message says what
would), `untuned` (left, because it would tune and the request did not let it; see compare.workers.autotune_lock),
`lost` (a failure after which this process cannot use its GPU any more; it ends), `failed` (anything else).
"""

from __future__ import annotations

# One process each. torch runs PyTorch, Inductor, Triton and CUDA on the machine's own device; the next two are kept
# apart from it because each poisons its process: Triton's interpreter, and the pretended GPU.
ROLES = ("reference", "xla", "torch", "interpreter", "target")


class Skip(Exception):
    """Cannot be done here; the message names what is missing and, where there is one, the command that helps."""


class Untuned(Exception):
    """It would tune, and the request did not let it; see compare.workers.autotune_lock."""
