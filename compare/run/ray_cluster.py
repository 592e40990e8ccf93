"""A Ray cluster: connect to it, check its nodes, and run shards of a run as its tasks. All use of Ray's API is here.

Tested with Ray 2.60, over Ray Client (ray://HOST:10001) and from a node of the cluster (HOST:6379).
"""

from __future__ import annotations

import contextlib
import platform
import re
import socket
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..base import host
from ..base.paths import PACKAGE
from ..base.usage import UsageError

REQUIREMENT = "ray[client]==2.60.0"
REACH_S = 10  # for a TCP connection to the address; Ray itself gives up after 30 s
CONNECTS = 3  # attempts
CLIENT_PROCESS_FAILED = "Initialization failure from server"  # of Ray 2.60, now and then: its process is gone at once
ANSWER_S = 90  # for all nodes to start a process each and say their versions
CORES = 4  # of a task that compiles for a target: XLA, Inductor and Triton's compile and check side by side


class TaskLost(Exception):
    """A task ended without a result: its node or its process died, or it raised an error. The message says which."""


class ConnectionLost(Exception):
    """The cluster does not answer any more."""


@dataclass(frozen=True)
class Cluster:
    """A connected cluster. slots: the number of tasks that its nodes can run at once, each with `cpus` and `gpus`."""

    address: str
    nodes: int
    slots: int
    cpus: int
    gpus: int

    def submit(self, request: bytes) -> Any:
        """Start a task, or queue it until a node is free; return its reference."""
        import ray

        # Retries are the caller's, so that it can name them. A process serves one task, so none inherits a state.
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": 0, "max_calls": 1}
        task = ray.remote(**options)(_task_of(f"{PACKAGE}.run.shard_on_node"))
        with self._connection():
            return task.remote(request, self.cpus if self.gpus else None)

    def ready(self, references: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the ended tasks, as soon as there is one; none after `timeout` seconds."""
        import ray

        with self._connection():
            found, _ = ray.wait(list(references), timeout=timeout)
            return list(found)

    def result(self, reference: Any) -> bytes:
        """Return the result of an ended task. Raises TaskLost where there is none."""
        import ray

        with self._connection():
            try:
                found: bytes = ray.get(reference)
            except ray.exceptions.RayTaskError as problem:
                raise TaskLost(f"{type(problem.cause).__name__}: {problem.cause}") from None
            except ray.exceptions.RayError as problem:
                raise TaskLost(textwrap.shorten(str(problem), 160, placeholder=" ...")) from None
        return found

    def cancel(self, references: Iterable[Any]) -> None:
        """Interrupt tasks as Ctrl-C does: a running one ends with its finished records, a queued one without any."""
        import ray

        with self._connection():
            for reference in references:
                ray.cancel(reference)

    @contextlib.contextmanager
    def _connection(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as problem:
            raise ConnectionLost(f"the connection to {self.address} was lost: {problem}") from None


@contextlib.contextmanager
def connected(address: str, *, gpu: bool) -> Iterator[Cluster]:
    """Connect to a cluster whose nodes have this version of xlafuse, and with `gpu` a GPU. Disconnect at the end.

    Raises UsageError where Ray is missing, the address is not reachable, or no node can run a task.
    """
    _require_reachable(address)
    if lack := host.missing([REQUIREMENT]):
        raise UsageError(f"--on needs Ray: {lack}")
    import ray

    try:
        _connect(address)
    except Exception as problem:  # Ray raises ConnectionError, RuntimeError, ValueError or an ImportError of its own
        here = f"Python {platform.python_version()} and Ray {ray.__version__}"
        raise UsageError(
            f"--on {address}: Ray does not connect: {' '.join(str(problem).split())}; the cluster must have the same "
            f"Python 3.x and Ray as this machine ({here}), and ray://HOST:PORT names its client port (10001)"
        ) from None
    try:
        yield _cluster(address, gpu)
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    """Connect; try again where the process that the cluster starts for this client did not come up in time."""
    import ray

    for attempt in range(1, CONNECTS + 1):
        try:
            ray.init(address, log_to_driver=False, logging_level="ERROR")
            return
        except ConnectionError as problem:
            if attempt == CONNECTS or CLIENT_PROCESS_FAILED not in str(problem):
                raise
            ray.shutdown()


def _require_reachable(address: str) -> None:
    """Raise UsageError for an address of another form, or where no TCP connection can be made in time."""
    form = re.fullmatch(r"(?:ray://)?([^/:\s]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})", address)
    if form is None:
        raise UsageError(f"--on takes ray://HOST:PORT, or HOST:PORT on a node of the cluster; got {address!r}")
    try:
        socket.create_connection((form[1].strip("[]"), int(form[2])), timeout=REACH_S).close()
    except (OSError, OverflowError) as problem:
        raise UsageError(
            f"--on {address}: not reachable: {getattr(problem, 'strerror', None) or problem}; `ray start --head` "
            "listens at port 10001 for ray:// and at 6379 for its nodes"
        ) from None


def _cluster(address: str, gpu: bool) -> Cluster:
    """Return the cluster with the size of its tasks. Raises UsageError where its nodes cannot run them."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if gpu else "CPU"
    able = [node for node in alive if node["Resources"].get(resource, 0) >= 1]
    if not able:
        target = ", and a run without --target times kernels; give --target h200 to compile for one" if gpu else ""
        names = ", ".join(node["NodeManagerAddress"] for node in alive)
        raise UsageError(f"--on {address}: no node has a {resource} (nodes: {names or 'none'}){target}")
    cores = [int(node["Resources"].get("CPU", 0)) for node in able]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in able]
    _require_same_version(address, able)
    if gpu:
        return Cluster(address, len(able), sum(gpus), min(c // g for c, g in zip(cores, gpus, strict=True)), 1)
    cpus = min(CORES, max(cores))
    slots = [count // cpus for count in cores if count >= cpus]
    return Cluster(address, len(slots), sum(slots), cpus, 0)


def _require_same_version(address: str, nodes: Sequence[dict[str, Any]]) -> None:
    """Raise UsageError where a node lacks xlafuse, has another version of it, or does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(_probe_of(f"{PACKAGE}.base.host"))
    here, asked = host.xlafuse_version(), {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[probe.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()] = node
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    problems = [f"{asked[each]['NodeManagerAddress']} did not answer within {ANSWER_S} s" for each in silent]
    for each in answered:
        try:
            found = ray.get(each)
        except ray.exceptions.RayError as problem:
            found = textwrap.shorten(str(problem), 160, placeholder=" ...")
        if found != here:
            problems.append(f"{asked[each]['NodeManagerAddress']} has {found}")
    if problems:
        raise UsageError(
            f"--on {address}: every node needs xlafuse {here}, as this machine has; {'; '.join(sorted(problems))}. "
            "Install it for the Python of `ray start`, or set PYTHONPATH to a checkout there before `ray start`"
        )


# Ray pickles a nested function by its code, not by its name. So these answer also where a node lacks xlafuse.


def _probe_of(module: str) -> Callable[[], str]:
    def probe() -> str:
        import importlib
        import sys

        try:
            return str(importlib.import_module(module).xlafuse_version())
        except ImportError as problem:
            return f"no usable xlafuse for {sys.executable} ({problem})"

    return probe


def _task_of(module: str) -> Callable[[bytes, int | None], bytes]:
    def run_shard(request: bytes, cores: int | None) -> bytes:
        import importlib

        done: bytes = importlib.import_module(module).run_shard(request, cores)
        return done

    return run_shard
