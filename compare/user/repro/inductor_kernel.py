"""TITLE

Run it with Python, torch and triton (tested: torch 2.11 and 2.13). It launches one of Inductor's Triton kernels, checks
its result against the ATen operations that Inductor fused, if the dump has them, and times it on a GPU. Without a GPU,
Triton's interpreter runs a part of the kernel.

    python FILE                                  check, and time on a GPU
    python FILE --replace my_kernel.py:fn        check and time your function too
"""

import argparse
import importlib.util
import itertools
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import triton  # noqa: E402

NAME = ""
# The kernel as Inductor wrote it.
SOURCE = ""
# The launch: per argument ("name", use, size, stride, dtype), or ("name", "size", value)
ARGUMENTS: list[tuple[Any, ...]] = []
# The operations that Inductor fused, as a function of `inputs`; "" where the dump lacks them.
OPERATIONS = ""
# operations' input -> argument, operations' result -> argument
READS: dict[str, str] = {}
WRITES: dict[str, str] = {}
# integer argument -> how many values from 0 on are allowed
VALUES: dict[str, int] = {}
DTYPE = ""
# The distance from 1 to the next value of DTYPE; 0 for integers and for floats of 8 bits
EPS = 0.0
NOTES: list[str] = []

MOST_INTERPRETED = 1 << 22  # elements


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--replace", metavar="FILE.py:NAME", help="a function to check and time beside the kernel")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    for note in NOTES:
        print(f"note: {note}")
    device = "cuda" if ON_GPU else "cpu"
    torch.manual_seed(given.seed)
    tensors = {argument[0]: draw(argument, device) for argument in ARGUMENTS if argument[1] != "size"}
    inputs = {name: tensors[argument].clone() for name, argument in READS.items()}
    expected: dict[str, Any] = {}
    if OPERATIONS:
        scope: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
        exec(OPERATIONS.replace("device(type='cuda', index=0)", f"device('{device}')"), scope)
        results = scope["operations"](**inputs)
        expected = {argument: results[result] for result, argument in WRITES.items()}
        print(f"reference: {OPERATIONS.count(' = torch.ops.')} ATen operations on {device}, one by one")
    else:
        print("not checked: the dump lacks the operations of this kernel")
    right = True
    try:
        launch = on_gpu(tensors) if ON_GPU else interpreted(tensors)
        launch()
        if expected:
            right &= check(NAME, {name: tensors[name] for name in expected}, expected, partly=not ON_GPU)
    except NotInterpreted as reason:
        print(f"not run: {reason}; a GPU runs it")
        launch = None
    if given.replace:
        replaced = load(given.replace)
        print(f"{given.replace} is called with {', '.join(inputs)} and returns {', '.join(WRITES)}")
        returned = replaced(**inputs)
        got = dict(zip(WRITES.values(), returned if isinstance(returned, (tuple, list)) else [returned], strict=True))
        right &= not expected or check(given.replace, got, expected, partly=False)
    if ON_GPU:
        report_time(NAME, launch)
        if given.replace:
            report_time(given.replace, lambda: replaced(**inputs))
    else:
        print("not timed: no GPU here; the check ran in Triton's interpreter, not the GPU's code")
    return 0 if right else 1


class NotInterpreted(Exception):
    """Triton's interpreter cannot run this kernel; the message says why."""


def draw(argument: tuple[Any, ...], device: str) -> Any:
    """Return a tensor: random for an input, NaN for an output of floats."""
    name, use, size, stride, dtype = argument
    kind = getattr(torch, dtype)
    tensor = torch.empty_strided(size, stride, dtype=kind, device=device)
    if kind == torch.bool:
        return tensor.copy_(torch.randint(0, 2, size, device=device))
    if not kind.is_floating_point:
        return tensor.copy_(torch.randint(0, VALUES.get(name, 100), size, device=device))
    if name in READS.values() or not OPERATIONS and use != "write":
        return tensor.copy_(torch.randn(size, device=device))
    return tensor.fill_(float("nan"))


def module_of(source: str) -> dict[str, Any]:
    """Run the kernel's source as a module of its own. Triton asks linecache for the text."""
    name = f"{Path(__file__).with_suffix('')}.{NAME}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__file__": __file__, "__name__": NAME}
    exec(compile(source, name, "exec"), scope)
    return scope


def on_gpu(tensors: dict[str, Any]) -> Callable[[], Any]:
    """Return a launch through Inductor's own launcher, which chooses the block sizes by timing its candidates."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="repro-"))
    file = folder / f"{NAME}.py"
    file.write_text(SOURCE)  # the launcher compiles in other processes, which import a file
    spec = importlib.util.spec_from_file_location(NAME, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    kernel = getattr(module, NAME)
    values = [argument[2] if argument[1] == "size" else tensors[argument[0]] for argument in ARGUMENTS]
    before = {name: tensor.clone() for name, tensor in tensors.items()}

    def launch() -> None:
        kernel.run(*values, stream=torch.cuda.current_stream().cuda_stream)

    launch()  # tunes, which runs the kernel several times; a kernel may change its inputs
    for name, tensor in tensors.items():
        tensor.copy_(before[name])
    print("launched with " + ", ".join(str(each.config) for each in kernel.launchers))
    return launch


def interpreted(tensors: dict[str, Any]) -> Callable[[], Any]:
    """Return a launch of the first programs in Triton's interpreter."""
    kept = itertools.dropwhile(lambda line: not line.startswith("@triton.jit"), SOURCE.splitlines())
    kernel_source = "\n".join(["import triton", "import triton.language as tl", PREAMBLE, *kept, ""])
    sizes = {argument[0]: argument[2] for argument in ARGUMENTS if argument[1] == "size"}
    try:
        kernel = module_of(kernel_source)[NAME]
    except Exception as problem:
        raise NotInterpreted(f"{type(problem).__name__}: {problem}") from None
    extents = {name: sizes.get(f"{name}numel", 1) for name in "xyz"}
    reduced = 1
    blocks = {}
    for name in kernel.arg_names:
        if name.startswith("R") and name.endswith("_BLOCK"):
            blocks[name] = min(1024, triton.next_power_of_2(sizes.get(f"{name.lower().removesuffix('block')}numel", 1)))
    for name, value in sizes.items():
        if name.startswith("r"):
            reduced *= value
    for name in "zyx":
        if f"{name.upper()}BLOCK" in kernel.arg_names:
            blocks[f"{name.upper()}BLOCK"] = min(triton.next_power_of_2(extents[name]), 16 if name != "x" else 1024)
    if "XBLOCK" in blocks and reduced > 1:
        blocks["XBLOCK"] = min(blocks["XBLOCK"], 8)
    unknown = [
        name for name in kernel.arg_names
        if name not in blocks and name not in {argument[0] for argument in ARGUMENTS}
    ]
    if unknown:
        raise NotInterpreted(f"no value is known for its parameters {', '.join(unknown)}")
    grid = [-(-extents[name] // blocks.get(f"{name.upper()}BLOCK", 1)) for name in "xyz"]
    a_program = reduced * blocks.get("XBLOCK", 1) * blocks.get("YBLOCK", 1) * blocks.get("ZBLOCK", 1)
    grid[0] = max(1, min(grid[0], MOST_INTERPRETED // max(1, a_program * grid[1] * grid[2])))
    values = {
        argument[0]: argument[2] if argument[1] == "size" else tensors[argument[0]] for argument in ARGUMENTS
    }
    print(f"interpreted: {grid} programs with {blocks}")

    def launch() -> None:
        try:
            kernel[tuple(grid)](**values, **blocks)
        except Exception as problem:
            raise NotInterpreted(f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}") from None

    return launch


# The interpreter has no libdevice; these functions of triton.language stand in.
PREAMBLE = '''
from torch._inductor.runtime import triton_helpers
class Libdevice:
    def __getattr__(self, name):
        return getattr(tl.math, name)  # looked up late, because the interpreter exchanges these functions
    def tanh(self, x):
        return 2 * tl.sigmoid(2 * x) - 1
    def log1p(self, x):
        return tl.math.log(1 + x)
    def expm1(self, x):
        return tl.math.exp(x) - 1
    def isnan(self, x):
        return x != x
libdevice = tl_math = Libdevice()
'''


def check(name: str, got: dict[str, Any], expected: dict[str, Any], *, partly: bool) -> bool:
    """Compare each output: |y - expected| <= tolerance * (|expected| + rms(expected)).

    partly: compare only what was written.
    """
    tolerance, worst, written, total = 4 * EPS, 0.0, 0, 0
    for argument, want in expected.items():
        have, want = got[argument].double().flatten(), want.double().flatten()
        if have.numel() != want.numel():
            print(f"WRONG {name}: {argument} has {have.numel()} elements, expected {want.numel()}")
            return False
        mine = ~have.isnan() if partly else torch.ones_like(have, dtype=torch.bool)
        error = (have - want).abs() / (want.abs() + want.square().mean().sqrt())
        error = torch.where((have == want) | (have.isnan() & want.isnan()), torch.zeros_like(error), error)[mine]
        error = error.nan_to_num(nan=float("inf"))
        worst = max(worst, float(error.max()) if error.numel() else 0.0)
        written, total = written + int(mine.sum()), total + mine.numel()
    share = f", on {written / max(1, total):.1%} of the output" if partly else ""
    right = worst <= tolerance and written > 0
    print(f"{'ok' if right else 'WRONG'} {name}: error {worst:.2e}, tolerance {tolerance:.2e} ({DTYPE}){share}")
    return right


def report_time(name: str, run: Any) -> None:
    """Time calls with CUDA events."""
    low, middle, high = triton.testing.do_bench(run, warmup=50, rep=200, quantiles=[0.1, 0.5, 0.9])
    print(f"time {name}: {middle * 1e3:.1f} us a call [{low * 1e3:.1f}, {high * 1e3:.1f}] (L2 cleared before each)")


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
