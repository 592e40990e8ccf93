"""Run every hand-written kernel under NVIDIA's compute-sanitizer: memcheck, and racecheck for shared memory.

    python -m tools.sanitizer.run --out reports/sanitize.md        (make sanitize ARGS="--out reports/sanitize.md")

Each kernel is launched, forward and backward, on small odd shapes: once without a tool, which records the launches and
fills Triton's cache, and once under each tool. `--limit` covers all of it. When time is up, a process ends after its
current case. The summary is rewritten after each tool, and lists the cases that were not checked.

Exit status: 0 without errors; 1 with errors, or if not everything was checked; 2 if nothing could be checked (no GPU,
no compute-sanitizer, or one that refuses the device).

PyTorch's caching allocator would hide accesses past a tensor but inside its block, so it is off
(PYTORCH_NO_CUDA_MEMORY_CACHING), and the sanitizer pads every allocation. Errors that CUDA calls return are not
reported, because cuda.bindings and PyTorch probe for functions by calling them (NVIDIA/cuda-python issue 562).

Use the newest version, whatever the driver's. According to its release notes:
- before 2025.4, racecheck reported false hazards around mbarriers, and before 2026.1 around warpgroups on Hopper;
- before 2026.4, memcheck reported cp.async with zero-fill (a masked load that Triton pipelines);
- from 2026.2 on, memcheck follows TMA loads.
racecheck also reports threads that write equal sums in a Triton reduction across warps (triton-lang/triton issue 7264,
open). Version 2026.4 follows an mbarrier only for the threads that arrive there. In Triton one thread arrives, after a
barrier of all, and racecheck reports what the others did in shared memory before.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tools.sanitizer.log import Launched, Outcome, end_of, joined, parse, summary
from xlafuse.triton_side.blocks.cross_entropy import IGNORED
from xlafuse.triton_side.kernels import matmul
from xlafuse.triton_side.parallel.moe_kernels import launch_gather

TOOLS = ("memcheck", "racecheck")
WHEEL = "nvidia-cuda-sanitizer-api"
PADDING = 4096  # bytes after every allocation
PRINTED = 1000  # reports that a tool prints before it only counts
COMPILE_SHARE = 0.5  # of the limit, for the launches without a tool: they compile, which takes longest
START_SHARE = 0.75  # of a tool's time: later it starts no case, because the last case takes time, too
PROCESSES = 8  # for each GPU, that compile or run under a tool at the same time
EPS = 1e-6


class CannotCheck(RuntimeError):
    """Nothing could be checked; the message says why and what to do."""


Result = TypeVar("Result")
_RUNNING: set[subprocess.Popen[str]] = set()  # the processes of all threads

Shapes = dict[str, "tuple[int, ...] | torch.Tensor"]  # shapes of random inputs, or given inputs
Call = Callable[[], object]


def cases(device: str) -> Iterator[tuple[str, Call]]:
    """Yield names and calls that together launch every hand-written kernel, forward and backward.

    bfloat16 takes every path of an operation, float32 only the first, because the tools are slow. Inputs that are given
    as tensors have their own dtype, once. Each case launches a kernel and has its own name, so the names tell which
    cases were checked.
    """
    for dtype in (torch.bfloat16, torch.float32):
        paths = slice(None) if dtype == torch.bfloat16 else slice(1)
        for module, every_shapes, attributes in _operations():
            for shapes in every_shapes[paths]:
                if dtype == torch.float32 and all(isinstance(shape, torch.Tensor) for shape in shapes.values()):
                    continue
                folder, block = module.split(".")
                sizes = " ".join(
                    "x".join(map(str, getattr(shape, "shape", shape))) or "scalar" for shape in shapes.values()
                )
                given = "".join(f"{name}={value} " for name, value in attributes.items())
                apply = importlib.import_module(f"xlafuse.triton_side.{module}").apply
                name = f"{folder} {block} {sizes} {given}{dtype}"
                yield name, _training(apply, shapes, dtype, device, **attributes)
    yield "parallel gather 37x131 torch.float32", partial(_gather, device)
    yield "kernels matmul 40x64 64x136 copied operands torch.float32", partial(_copied_operands, device)


def _copied_operands(device: str) -> None:
    a, b = torch.randn(40, 64, device=device), torch.randn(64, 136, device=device)
    matmul.launch_matmul(a, b, matmul.copied_operands_config("tf32x3"))


def _gather(device: str) -> None:
    x, rows = torch.randn(37, 131, device=device), torch.arange(36, -1, -1, dtype=torch.int32, device=device)
    launch_gather(x, rows, torch.empty_like(x))


def _operations() -> list[tuple[str, list[Shapes], dict[str, Any]]]:
    """Return (module, shapes of its inputs, attributes) for each operation."""
    rows: list[Shapes] = [{"x": (7, 131)}]
    gated: list[Shapes] = [{"gate": (7, 131), "up": (7, 131)}]
    biased: list[Shapes] = [{"x": (19, columns), "bias": (columns,)} for columns in (131, 136)]
    flat: list[Shapes] = [{"x": (1021,), "y": (1021,)}]
    looped: list[Shapes] = [{"x": (3, columns)} for columns in (8201, 16400)]  # streamed; one reduction for both
    # A row per warp (scalar and 16-byte loads), per block and per cluster of blocks; a streamed row.
    of_cuda: list[Shapes] = [{"x": (3, columns)} for columns in (131, 136, 2056, 16387, 65543)]
    norms: list[Shapes] = [{"x": (5, columns), "weight": (columns,)} for columns in (131, 16391)]
    layernorms: list[Shapes] = [{**shapes, "bias": shapes["weight"]} for shapes in norms]
    layernorms.append({"x": (5, 8201), "weight": (8201,), "bias": (8201,)})  # two programs a row
    # Several rows per block; scalar and 16-byte loads; streamed rows.
    norms_of_cuda: list[Shapes] = [
        {"x": (rows, columns), "weight": (columns,)} for rows, columns in ((1100, 131), (5, 2056), (5, 16392))
    ]
    layernorms_of_cuda: list[Shapes] = [{**shapes, "bias": shapes["weight"]} for shapes in norms_of_cuda]
    chains = [_chain(5, columns) for columns in (131, 4097)]
    # Several rows per block of several warps with 16-byte loads; scalar loads of a row that a cluster of blocks shares.
    chains_of_cuda = [_chain(1100, 264), _chain(5, 8201)]
    # The first shape is read through pointers, the second, in bfloat16, through tensor descriptors.
    mlps: list[Shapes] = [
        {
            "x": (tokens, width), "norm_weight": (width,), "gate_weight": (width, hidden),
            "up_weight": (width, hidden), "down_weight": (hidden, width),
        }
        for tokens, width, hidden in ((17, 37, 67), (40, 64, 136))
    ]
    # Incomplete tiles, tensor descriptors, and a split inner axis; for CUDA C++ tiles incomplete along both axes.
    products: list[Shapes] = [
        {"a": (m, k), "b": (k, n)} for m, k, n in ((17, 37, 67), (40, 64, 136), (17, 1032, 72))
    ]
    of_cuda_products: list[Shapes] = [{"a": (131, 37), "b": (37, 67)}]
    layers: list[Shapes] = [
        {"x": (m, k), "weight": (k, n), "bias": (n,)} for m, k, n in ((67, 37, 67), (40, 64, 136))
    ]
    added: list[Shapes] = [{"x": (17, 37), "weight": (37, 67), "residual": (17, 67)}]
    # On a Hopper GPU the last takes its own kernel, in two sums.
    fp8: list[Shapes] = [
        {
            **{name: torch.randn(rows, k).to(torch.float8_e4m3fn) for name, rows in (("a", m), ("b", n))},
            "a_scale": torch.tensor(0.37), "b_scale": torch.tensor(0.011),
        }
        for m, k, n in ((17, 37, 67), (40, 64, 136), (131, 2320, 264))
    ]
    mixtures: list[Shapes] = [
        {
            "x": (tokens, width), "router": (experts, width), "w_gate": (experts, width, hidden),
            "w_up": (experts, width, hidden), "w_down": (experts, hidden, width),
        }
        for tokens, width, hidden, experts in ((37, 37, 29, 5), (40, 64, 136, 8))
    ]
    ids = torch.tensor([3, 36, 3, 0, 3, 17, 36, 35], dtype=torch.int32)
    tables: list[Shapes] = [{"table": (37, columns), "ids": ids} for columns in (131, 1032)]
    entropy = {"smoothing": 0.1, "z_loss": 1e-4}
    labels = torch.tensor([3, IGNORED, 130, 0, 64], dtype=torch.int32)
    logits: list[Shapes] = [{"logits": (5, columns), "labels": labels} for columns in (131, 8208)]
    # The first shape is read through pointers, the second, in bfloat16, through tensor descriptors.
    projected: list[Shapes] = [
        {"h": (5, width), "w": (classes, width), "labels": labels} for width, classes in ((37, 131), (64, 136))
    ]
    # A chunk has at least 128 tokens, so there are two.
    in_chunks: list[Shapes] = [{"h": (131, 24), "w": (136, 24), "labels": labels.repeat(27)[:131]}]
    heads: list[Shapes] = [dict.fromkeys("qkv", (1, 2, 67, head_dim)) for head_dim in (16, 128)]
    shared: list[Shapes] = [
        {"q": (1, 4, 67, head_dim), "k": (1, 2, 67, head_dim), "v": (1, 2, 67, head_dim)} for head_dim in (64, 256)
    ]
    few: list[Shapes] = [dict.fromkeys("qkv", (1, 2, 3, 64))]
    # On a Hopper GPU these take its own kernels, with several tiles in each loop.
    long: list[Shapes] = [
        {"q": (1, 2, 400, head_dim), "k": (1, 1, 400, head_dim), "v": (1, 1, 400, head_dim)}
        for head_dim in (128, 64, 256)
    ]
    split: list[Shapes] = [  # heads that backward divides among programs
        {"q": (1, 32, 136, head_dim), "k": (1, 1, 136, head_dim), "v": (1, 1, 136, head_dim)}
        for head_dim in (128, 64, 256)
    ]
    # One head, because racecheck took over four minutes for two of 256 on an H100.
    windowed: list[Shapes] = [dict.fromkeys("qkv", (1, 1, 264, head_dim)) for head_dim in (128, 64, 256)]
    under_bias: list[Shapes] = [
        {**dict.fromkeys("qkv", (2, 2, 67, head_dim)), "bias": (2, 67, 67)} for head_dim in (64, 128)
    ]
    boundaries = torch.tensor([0, 1, 40, 40, 67], dtype=torch.int32)
    packed: list[Shapes] = [
        {"q": (67, 4, head_dim), "k": (67, 2, head_dim), "v": (67, 2, head_dim), "cu_seqlens": boundaries}
        for head_dim in (16, 128)
    ]
    # Chunks with and without keys; pages that end within a tile.
    lengths = torch.tensor([0, 131, 67], dtype=torch.int32)
    decoded: list[Shapes] = [
        {"q": (3, 6, head_dim), **dict.fromkeys(("k_cache", "v_cache"), (3, 2, 131, head_dim)), "lengths": lengths}
        for head_dim in (16, 128)
    ]
    decoded.append(decoded[-1] | {"q": (3, 6, 5, 128)})
    page_table = torch.arange(3 * 11, dtype=torch.int32).flip(0).view(3, 11)
    decoded_from_pages: list[Shapes] = [
        {"q": (3, 6, 64), **dict.fromkeys(("k_pages", "v_pages"), (33, 13, 2, 64)), "page_table": page_table,
         "lengths": lengths}
    ]
    decoded_from_pages.append(decoded_from_pages[-1] | {"q": (3, 5, 6, 64)})
    # One group of heads, and several in a loop; half heads whose size is a power of two, and not.
    positions = torch.arange(2 * 67, dtype=torch.int32).view(2, 67)
    rotated: list[Shapes] = [
        {"q": (2, heads, 67, head_dim), "k": (2, 1, 67, head_dim), "positions": positions}
        for heads, head_dim in ((3, 10), (9, 64))
    ]
    # Fewer keys than queries, and operands that tensor descriptors read.
    decoder: list[Shapes] = [
        {
            "x": (1, 67, width), "positions": positions[:1], "attention_norm": (width,), "w_qkv": (width, 4 * 16),
            "w_o": (2 * 16, width), "mlp_norm": (width,), "w_gate": (width, hidden), "w_up": (width, hidden),
            "w_down": (hidden, width),
        }
        for width, hidden in ((37, 67), (64, 136))
    ]
    seeds = torch.tensor([[3, -5], [7, 11]], dtype=torch.int32)
    gpt2: list[Shapes] = [
        {
            "x": (1, 67, width), "seed": seeds, "w_qkv": (width, 96), "b_qkv": (96,), "w_o": (32, width),
            "w_up": (width, hidden), "b_up": (hidden,), "w_down": (hidden, width),
            **{f"{half}_norm_{kind}": (width,) for half in ("attention", "mlp") for kind in ("weight", "bias")},
            "b_o": (width,), "b_down": (width,),
        }
        for width, hidden in ((37, 67), (64, 136))
    ]
    moments = {"mu": torch.zeros(1021), "nu": torch.ones(1021), "step": torch.tensor(3, dtype=torch.int32)}
    updates: list[Shapes] = [{"param": (1021,), "gradient": (1021,), **moments}]
    optimizer = {"rate": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 1e-2}
    return [
        # First, because racecheck takes longest for them, and a process takes its cases in this order.
        ("kernels.attention", long, {}), ("kernels.attention", windowed, {"causal": 1, "window": 150}),
        ("kernels.vector_add", flat, {}), ("cuda.vector_add", flat, {}), ("kernels.adamw", updates, optimizer),
        ("kernels.gelu", rows, {}), ("cuda.gelu", rows, {}),
        ("kernels.swiglu", gated, {}), ("kernels.geglu", gated, {}),
        ("kernels.bias_gelu", biased, {}), ("cuda.bias_gelu", biased, {}),
        ("kernels.softmax", rows + looped, {}), ("cuda.softmax", of_cuda, {}),
        ("kernels.matmul", products, {}), ("cuda.matmul", of_cuda_products, {}), ("kernels.linear_gelu", layers, {}),
        ("kernels.matmul_fp8", fp8, {}), ("kernels.linear", layers, {}), ("kernels.linear_residual", added, {}),
        ("kernels.rmsnorm", norms, {"eps": EPS}), ("cuda.rmsnorm", norms_of_cuda, {"eps": EPS}),
        ("kernels.swiglu_mlp", mlps, {"eps": EPS}),
        ("kernels.moe", mixtures, {"top_k": 2}),
        ("kernels.layernorm", layernorms, {"eps": EPS}), ("cuda.layernorm", layernorms_of_cuda, {"eps": EPS}),
        ("kernels.dropout_residual_norm", chains, {"p": 0.1, "eps": EPS}),
        ("cuda.dropout_residual_norm", chains_of_cuda, {"p": 0.1, "eps": EPS}),
        ("kernels.rope", rotated, {"theta": 500000.0}), ("kernels.attention", heads, {}),
        ("kernels.attention", few, {}), ("kernels.attention", split, {}),
        ("kernels.attention", split[1:2], {"kernels": "portable"}),
        ("kernels.attention", shared, {"causal": 1, "window": 19}), ("kernels.attention", shared, {"causal": 0}),
        ("kernels.attention", heads, {"kernels": "portable"}), ("kernels.attention", shared, {"kernels": "portable"}),
        ("kernels.attention_bias", under_bias, {}), ("kernels.attention_packed", packed, {"longest": 39}),
        ("kernels.decode_attention", decoded, {}), ("kernels.decode_attention_paged", decoded_from_pages, {}),
        ("kernels.decoder_block", decoder, {"heads": 2, "kv_heads": 1, "eps": EPS, "theta": 500000.0}),
        ("kernels.gpt2_block", gpt2, {"heads": 2, "p": 0.1, "eps": EPS}),
        ("kernels.embedding", tables, {}), ("kernels.cross_entropy", logits, entropy),
        ("kernels.linear_cross_entropy", projected, entropy),
        ("kernels.linear_cross_entropy", in_chunks, {**entropy, "workspace": 1}),
    ]


def _chain(rows: int, columns: int) -> Shapes:
    """Return the inputs of dropout_residual_norm."""
    matrices, vectors = dict.fromkeys(("x", "residual"), (rows, columns)), ("bias", "weight", "shift")
    seed = torch.tensor([3, -5], dtype=torch.int32)
    return {**matrices, **dict.fromkeys(vectors, (columns,)), "seed": seed}


def _training(
    apply: Callable[..., dict[str, torch.Tensor]], shapes: Shapes, dtype: torch.dtype, device: str, **attributes: Any
) -> Call:
    def made(given: tuple[int, ...] | torch.Tensor) -> torch.Tensor:
        if isinstance(given, torch.Tensor):
            return given.to(device)
        return torch.randn(given, dtype=dtype, device=device).requires_grad_()

    def call() -> object:
        outputs = apply({name: made(given) for name, given in shapes.items()}, **attributes)
        trained = [out for out in outputs.values() if out.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.randn_like(out) for out in trained])
        return outputs

    return call


def launch_all(names: Sequence[str], record: Path | None = None, until: float | None = None) -> None:
    """Run the cases of these names, and print each name before its case.

    until: start no case after this time.time(). record: write the launches to this file, as JSON.
    """
    from xlafuse.triton_side.calls.launches import Launch, record_launches

    case = ""

    def begun() -> Iterator[Call]:
        nonlocal case
        for case, call in cases("cuda"):
            if case not in names:
                continue
            if until is not None and time.time() > until:
                return
            print(case, flush=True)
            yield call

    if record is None:
        for call in begun():
            call()
            torch.cuda.synchronize()
        return
    found: dict[str, Launched] = {}
    resources: dict[str, int] = {}

    def add(launch: Launch) -> None:
        kernel = launch.label.partition("<")[0]
        entry = found.setdefault(kernel, Launched(kernel, "CUDA C++" if launch.kind == "cuda" else "Triton"))
        entry.launches += 1
        entry.names = sorted({*entry.names, kernel, launch.name})
        signature = f"{launch.name} {launch.signature} {launch.constants}"
        if signature not in resources:
            resources[signature] = launch.resources.shared_bytes
        entry.shared_bytes = max(entry.shared_bytes, resources[signature])
        if case not in entry.cases:
            entry.cases.append(case)

    with record_launches(launched=add):
        for call in begun():
            call()
    torch.cuda.synchronize()
    record.write_text(json.dumps([vars(entry) for entry in found.values()]))


def find_sanitizer() -> str:
    """Return compute-sanitizer from its wheel, from PATH or from a CUDA toolkit.

    The wheel comes first, because it may be newer than the toolkit.

    Raises:
        CannotCheck: there is none.
    """
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.parts[-2:] == ("bin", "compute-sanitizer")]
    if found := shutil.which("compute-sanitizer"):
        places.append(Path(found))
    places += [Path(toolkit, "bin", "compute-sanitizer") for toolkit in toolkits if toolkit]
    for place in places:
        if os.access(place, os.X_OK):
            return str(place)
    raise CannotCheck(
        f"compute-sanitizer is not on PATH, nor in $CUDA_HOME/bin or /usr/local/cuda/bin: pip install {WHEEL}, "
        "or install the CUDA toolkit"
    )


def run_tool(
    sanitizer: str, tool: str, launched: list[Launched], limit: float, begin_for: float | None = None
) -> Outcome:
    """Run the recorded cases under `tool`, in several processes at the same time.

    begin_for: start no case after so many seconds. limit: kill the tool after so many seconds, without its summary.
    """
    until = time.time() + (limit if begin_for is None else begin_for)
    names = _cases_of(launched)
    jobs = min(_processes(), max(1, len(names)))
    return joined(
        _in_parallel(
            lambda number: _run_share(sanitizer, tool, launched, names[number::jobs], limit, until, number), jobs
        )
    )


def _cases_of(launched: list[Launched]) -> list[str]:
    return list(dict.fromkeys(case for entry in launched for case in entry.cases))


def _run_share(
    sanitizer: str, tool: str, launched: list[Launched], names: Sequence[str], limit: float, until: float, number: int
) -> Outcome:
    """Run cases in one process of `run_tool`. If it fails, it has checked none of them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [
            sanitizer, "--tool", tool, "--report-api-errors", "no", "--print-limit", str(PRINTED),
            "--show-backtrace", "no", "--destroy-on-device-error", "kernel",
            "--launch-timeout", "60", "--target-processes", "application-only", "--log-file", str(log),
            *(("--padding", str(PADDING)) if tool == "memcheck" else ()),
            *_launching(names, Path(folder)), "--until", str(until),
        ]
        status, output = _run(command, limit, number)
        text = log.read_text(errors="replace") if log.is_file() else ""
    if "Device not supported" in text + output:
        raise CannotCheck(f"{tool} refuses this device ('Device not supported'), as on some virtualised GPUs")
    outcome = parse(tool, text, launched)
    failure = outcome.failure
    if status is None:
        failure = f"{tool} was stopped after {limit:.0f} s (--limit), in: {end_of(output, 1)}"
    elif status != 0 and outcome.errors is not None:
        failure = f"{tool}: the launches ended with status {status}, later kernels were not checked: {end_of(output)}"
    checked = set() if failure else {*names} & {*output.splitlines()}
    return replace(outcome, failure=failure, checked=frozenset(checked))


def _in_parallel(run: Callable[[int], Result], jobs: int) -> list[Result]:
    """Return the results of run(0) to run(jobs - 1), each in a thread. An exception ends their processes."""
    with ThreadPoolExecutor(jobs) as threads:
        try:
            return list(threads.map(run, range(jobs)))
        except BaseException:
            for process in list(_RUNNING):  # a signal reaches the main thread only
                _kill(process)
            raise


def _gpus() -> list[str]:
    """Return the visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def _processes() -> int:
    return min(PROCESSES * max(1, len(_gpus())), os.cpu_count() or 1)


def _run(command: list[str], limit: float, number: int = 0) -> tuple[int | None, str]:
    """Return the exit status, or None past the limit, and all output. The command's children end with it.

    number: of the process; processes take turns with the GPUs.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if gpus := _gpus():
        environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(
        command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return None, output
    except KeyboardInterrupt:
        _kill(process)
        process.wait()
        raise
    finally:
        _RUNNING.discard(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def version_of(sanitizer: str) -> str:
    """Return the version, such as "2025.3.1", or "unknown"."""
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"[Vv]ersion (\d+[\d.]*\d)", said)
    return found[1] if found else "unknown"


def check(
    tools: tuple[str, ...], limit: float, sanitizer: str | None = None, write: Callable[[str], None] | None = None,
    only: Sequence[str] = (),
) -> tuple[str, bool]:
    """Return the summary, and whether everything ran without an error.

    limit: seconds for everything. write: called with the summary after each tool, so that a later failure loses none of
    it. only: texts of which a case's name must contain one. A KeyboardInterrupt stops the tools; the summary is still
    returned.

    Raises:
        CannotCheck: no GPU, no compute-sanitizer, no such case, the cases fail without a tool, or the tool refuses the
            device.
    """
    end = time.monotonic() + limit
    sanitizer = sanitizer or find_sanitizer()
    if not torch.cuda.is_available():
        raise CannotCheck("compute-sanitizer checks kernels as they run, and no NVIDIA GPU is visible to PyTorch")
    every = [name for name, _ in cases("cuda") if not only or any(text in name for text in only)]
    if not every:
        raise CannotCheck(f"no case has {' or '.join(map(repr, only))} in its name, such as {next(cases('cuda'))[0]!r}")
    launched = _launched(limit, every)
    recorded = set(_cases_of(launched))
    environment = "" if not only else f"Only cases with {' or '.join(map(repr, only))} in their names. "
    environment += (
        f"compute-sanitizer {version_of(sanitizer)}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {importlib.metadata.version('triton')}"
    )
    if len(recorded) < len(every):
        late = ", ".join(name for name in every if name not in recorded)
        environment += f"\n\n**{len(recorded)} of {len(every)} cases were compiled in time (--limit); not: {late}**"
    outcomes: list[Outcome] = []
    for number, tool in enumerate(tools):
        left = max(0.0, end - time.monotonic())
        try:
            begin_for = START_SHARE * left / (len(tools) - number)
            outcomes.append(run_tool(sanitizer, tool, launched, left, begin_for))
        except KeyboardInterrupt:
            outcomes += [Outcome(each, (), None, 0, f"{each} was stopped by a signal") for each in tools[number:]]
            break
        if write:
            write(summary(launched, outcomes, environment))
    clean = len(recorded) == len(every) and all(
        outcome.errors == 0 and not outcome.failure and outcome.checked == recorded for outcome in outcomes
    )
    return summary(launched, outcomes, environment), clean


def _launching(names: Sequence[str], folder: Path) -> list[str]:
    """Return the command that launches these cases in a process of its own, which reads their names from the folder."""
    file = folder / "names.json"
    file.write_text(json.dumps(names))
    return [sys.executable, "-m", "tools.sanitizer.run", "--launch", str(file)]


def _launched(limit: float, names: Sequence[str]) -> list[Launched]:
    """Return what the cases launch without a tool, within their share of the limit. Raises CannotCheck if they fail."""
    end, until = time.monotonic() + limit, str(time.time() + COMPILE_SHARE * limit)
    _compile_in_parallel(names, until, limit)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "launched.json")
        command = [*_launching(names, Path(folder)), "--record", str(record), "--until", until]
        status, output = _run(command, end - time.monotonic())
        if status != 0:
            how = f"did not end in {limit:.0f} s" if status is None else f"ended with status {status}"
            raise CannotCheck(f"the launches fail without a tool, too: {how}: {end_of(output)}")
        launched = [Launched(**entry) for entry in json.loads(record.read_text())]
    if not launched:
        raise CannotCheck(f"nothing was launched in {limit:.0f} s: give it more time (--limit)")
    return launched


def _compile_in_parallel(names: Sequence[str], until: str, limit: float) -> None:
    """Compile every Triton kernel into Triton's cache, in parallel. Failures are ignored; they recur in later runs."""
    jobs = _processes()

    def compile_share(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            _run([*_launching(names[number::jobs], Path(folder)), "--until", until], limit, number)

    _in_parallel(compile_share, jobs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sanitizer.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the summary, in Markdown, to this file")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="only this tool; may be repeated")
    parser.add_argument("--sanitizer", metavar="PATH", help="the compute-sanitizer to use, instead of looking for one")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="SECONDS",
        help="time for everything (default: 600); the summary lists the cases that were not checked",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="TEXT",
        help="only cases with TEXT in their names, such as 'kernels attention'; may be repeated",
    )
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.launch:
        launch_all(json.loads(options.launch.read_text()), options.record, options.until)
        return 0

    def write(text: str) -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)

    try:
        text, clean = check(tuple(options.tool or TOOLS), options.limit, options.sanitizer, write, options.case)
    except CannotCheck as problem:
        print(f"sanitize: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sanitize: stopped before a tool had run", file=sys.stderr)
        return 2
    print(text, end="")
    write(text)
    return 0 if clean else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # writes a summary also when a scheduler stops it
    sys.exit(main())
