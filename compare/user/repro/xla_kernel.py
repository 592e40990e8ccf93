"""TITLE

Run it with Python and jax (tested: 0.10 and 0.11). It compiles the operations of one kernel, draws inputs, checks the
result against the same operations without fusion on the CPU, and times it on a GPU.

    python FILE                                  check, and time on a GPU
    python FILE --replace my_kernel.py:fn        check and time your function too; it takes the inputs as jax arrays
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:  # jax has no public way to compile HLO; these private names exist in jax 0.10 and 0.11
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jax._src.lib.mlir import ir
    from jaxlib import _hlo  # type: ignore[attr-defined]
except ImportError as missing:
    sys.exit(f"{missing}: this file uses private names of jax 0.10 and 0.11, and this is jax {jax.__version__}")

# The operations of the kernel, one by one. Each parameter is an input.
OPERATIONS = ""
# (shape, dtype, None or the number of allowed values of an integer), per input
INPUTS: list[tuple[tuple[int, ...], str, int | None]] = []
# The coarsest floating-point dtype of the operations; "" for integers
DTYPE = ""
# The distance from 1 to the next value of DTYPE; 0 for integers and for floats of 8 bits
EPS = 0.0
NOTES: list[str] = []

FUSION_PASSES = "fusion,fusion-wrapper"  # of XLA for CPUs
NO_LAUNCH = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--replace", metavar="FILE.py:NAME", help="a function to check and time beside the kernel")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    jax.config.update("jax_enable_x64", True)
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    on_gpu = device.platform in ("gpu", "cuda")
    for note in NOTES:
        print(f"note: {note}")
    inputs = draw(given.seed)
    unfused = Program(OPERATIONS, cpu, {"xla_disable_hlo_passes": FUSION_PASSES, "xla_allow_excess_precision": False})
    expected = [np.asarray(value) for value in unfused(*put(inputs, cpu))]
    print(f"reference: {unfused.launches()} operations on the CPU, one by one ({unfused.fusions()} fusions)")
    try:
        kernel = Program(OPERATIONS, device, {})
    except jax.errors.JaxRuntimeError as problem:
        print(f"failed: XLA does not compile the kernel: {' '.join(str(problem).split())[:300]}")
        return 1
    print(f"kernel: compiled for {device.device_kind}: {kernel.launches()} kernels, {kernel.fusions()} fusions")
    if on_gpu and kernel.launches() != 1:
        print("note: the dump has one kernel; XLA made several of the same operations here")
    arguments = put(inputs, device)
    candidates: dict[str, Callable[..., Any]] = {"kernel": kernel}
    if given.replace:
        candidates[given.replace] = jax.jit(load(given.replace))
    right = [check(name, run(*arguments), expected) for name, run in candidates.items()]
    if on_gpu:
        report_times(candidates, arguments)
    else:
        print("not timed: no GPU here; the check ran the code of XLA's CPU compiler, not the GPU's kernel")
    return 0 if all(right) else 1


class Program:
    """A compiled HLO module. Called with arrays on its device, it returns a list of arrays."""

    def __init__(self, text: str, device: Any, options: dict[str, Any]) -> None:
        module = _hlo.hlo_module_from_text(text)
        lowered = _jax.mlir.hlo_to_stablehlo(module.as_serialized_hlo_module_proto())
        with mlir.make_ir_context():
            self._executable: Any = compiler.backend_compile_and_load(
                device.client, ir.Module.parse(lowered), _jax.DeviceList((device,)),
                compiler.get_compile_options(
                    num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]]),
                    env_options_overrides=options, backend=device.client,
                ),
                [],
            )
        (self._optimized,) = self._executable.hlo_modules()

    def __call__(self, *arguments: Any) -> list[Any]:
        results = self._executable.execute_sharded(arguments)
        return [shards[0] for shards in results.disassemble_into_single_device_arrays()]

    def fusions(self) -> int:
        return sum(" fusion(" in line for line in self._entry())

    def launches(self) -> int:
        """Count the entry's instructions that compute or move data."""
        return sum(" = " in line and not any(f" {each}(" in line for each in NO_LAUNCH) for line in self._entry())

    def _entry(self) -> list[str]:
        return str(self._optimized.to_string()).partition("\nENTRY ")[2].splitlines()


def draw(seed: int) -> list[Any]:
    generator = np.random.default_rng(seed)
    drawn = []
    for shape, dtype, values in INPUTS:
        kind = jax.numpy.dtype(dtype)
        if kind == np.dtype(bool):
            drawn.append(generator.integers(0, 2, shape).astype(kind))
        elif jax.numpy.issubdtype(kind, jax.numpy.integer):
            drawn.append(generator.integers(0, values or 100, shape).astype(kind))
        else:
            drawn.append(generator.standard_normal(shape, dtype=np.float32).astype(kind))
    return drawn


def put(inputs: list[Any], device: Any) -> list[Any]:
    return [jax.device_put(value, device) for value in inputs]


def check(name: str, result: Any, expected: list[Any]) -> bool:
    """Compare each output: |y - expected| <= tolerance * (|expected| + rms(expected))."""
    outputs = [np.asarray(value) for value in jax.tree.leaves(result)]
    if [value.shape for value in outputs] != [value.shape for value in expected]:
        print(f"WRONG {name}: shapes {[value.shape for value in outputs]}, expected {[v.shape for v in expected]}")
        return False
    tolerance, worst = 4 * EPS, 0.0
    for got, want in zip(outputs, expected, strict=True):
        kind = np.complex128 if np.iscomplexobj(want) else np.float64
        got, want = got.astype(kind), want.astype(kind)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        scale = np.sqrt(np.mean(np.abs(np.where(np.isfinite(want), want, 0)) ** 2)) if want.size else 0.0
        with np.errstate(all="ignore"):
            error = np.where(same, 0.0, np.abs(got - want) / (np.abs(want) + scale))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0)))
    print(f"{'ok' if worst <= tolerance else 'WRONG'} {name}: error {worst:.2e}, tolerance {tolerance:.2e} ({DTYPE})")
    return worst <= tolerance


def report_times(candidates: dict[str, Callable[..., Any]], arguments: list[Any]) -> None:
    """Time rounds of 50 calls each, the candidates in turn."""
    calls = 50
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round in range(12):
        for name, run in candidates.items():
            began = time.perf_counter()
            for _ in range(calls):
                last = run(*arguments)
            jax.block_until_ready(last)
            if round >= 2:
                times[name].append((time.perf_counter() - began) / calls * 1e6)
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"time {name}: {middle:.1f} us a call [{min(found):.1f}, {max(found):.1f}] (launches included, L2 warm)")


def load(name: str) -> Callable[..., Any]:
    file, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file) if Path(file).is_file() else None
    if spec is None or spec.loader is None:
        sys.exit(f"--replace {name}: expected FILE.py:NAME of an existing file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, function):
        sys.exit(f"--replace {name}: {file} has no {function!r}")
    found: Callable[..., Any] = getattr(module, function)
    return found


if __name__ == "__main__":
    sys.exit(main())
