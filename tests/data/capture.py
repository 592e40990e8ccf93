"""Capture the optimized HLO in tests/data/hlo: text and proto of small functions, compiled by the installed jax.

    python tests/data/capture.py             compile everything for an H200 and for the CPU (needs jax, jaxlib,
                                             jax-cuda13-pjrt; for TPU modules libtpu too), then as below
    python tests/data/capture.py --expected  only rewrite expected.json, our reader's results, in the same folders

Run it once with each supported jax. A change in expected.json changes what users see, so review it with `git diff`
before committing.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HLO = Path(__file__).parent / "hlo"
sys.path.insert(0, str(ROOT))


def expected(path: Path) -> dict[str, Any]:
    """Return the expected fusion graph of a file, in the form of expected.json."""
    from xlafuse.compare.graph.build.from_hlo import from_hlo
    from xlafuse.hlo.file_reader import read

    graph = from_hlo(read(path), target=path.name.partition("-")[0])
    return {
        "kernels": [
            {
                "name": kernel.name,
                "kind": kernel.kind,
                "launches": kernel.launches,
                "ops": [op.op for op in kernel.source_ops],
                "stages": list(kernel.stages),
                "lines": list(kernel.lines),
                "bytes_read": kernel.bytes_read,
                "bytes_written": kernel.bytes_written,
                "flops": kernel.flops,
            }
            for kernel in graph.kernels or ()
        ],
        "unparsed": list(graph.unparsed),
    }


def _write_expected(folder: Path) -> None:
    found = {path.name.removesuffix(".hlo.txt.gz"): expected(path) for path in sorted(folder.glob("*.hlo.txt.gz"))}
    # One kernel per line, so that a diff reads as a list of kernels.
    text = json.dumps(found, indent=1)
    text = re.sub(r"\{\s+\"name\".*?\n   \}", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text, flags=re.DOTALL)
    (folder / "expected.json").write_text(text + "\n")
    print(f"{folder.relative_to(ROOT)}: {len(found)} modules, {sum(len(m['kernels']) for m in found.values())} kernels")


def _capture() -> Path:
    from xlafuse.compile.environment import configure_environment

    configure_environment(deviceless=True, tpu=importlib.util.find_spec("libtpu") is not None)
    import jax

    jax.config.update(
        "jax_hlo_source_file_canonicalization_regex", rf"^(?:{re.escape(str(ROOT))}|.*/(?:site|dist)-packages)/"
    )
    folder = HLO / f"jax-{jax.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text, proto in modules():
        # mtime=0: the same bytes for the same module.
        (folder / f"{name}.hlo.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        (folder / f"{name}.hlo.pb.gz").write_bytes(gzip.compress(proto, mtime=0))
    return folder


Part = tuple[str, Callable[..., Any], tuple[Any, ...]]  # name, function, arguments
Module = tuple[str, str, bytes]  # name, HLO text, HloModuleProto


def modules() -> Iterator[Module]:
    """Yield all modules, for each platform that the installed packages compile for."""
    import jax

    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    yield from h200_modules()
    yield from _collectives()
    swiglu_mlp = {"swiglu_mlp": _BLOCKS["swiglu_mlp"]}
    yield from _on("cpu", cpu, _CONSTRUCTS | {"linear_algebra": _linear_algebra} | swiglu_mlp)
    if importlib.util.find_spec("libtpu"):
        memory = {"padded": _padded, "prefetched": _prefetched}
        yield from _on("tpu", _tpu(), {"scan_remat": _scan_remat} | memory | swiglu_mlp)


def h200_modules() -> Iterator[Module]:
    """Yield the blocks as xlafuse compiles them, then a function for each construct of HLO."""
    import jax

    from xlafuse.compile import _jax_private, compiler

    target = compiler.Target(_h200())
    for block, parts in _BLOCKS.items():
        for part, function, args in parts():
            compiled = compiler.compile(function, args, target=target)
            yield f"h200-{block}{part}", compiled.hlo_text, compiled.hlo_proto
    (device,) = _jax_private.target_devices(target.config_text)
    yield from _on("h200", jax.sharding.SingleDeviceSharding(device), _CONSTRUCTS)


def _h200() -> str:
    import jax

    series = ".".join(jax.__version__.split(".")[:2])
    return (ROOT / "compare" / "targets" / "h200" / "xla" / f"gpu_target_config-{series}.pbtxt").read_text()


def _on(target: str, sharding: Any, functions: dict[str, Callable[[], Iterator[Part]]]) -> Iterator[Module]:
    import jax

    for name, parts in functions.items():
        for part, function, args in parts():
            placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
            yield _compiled(f"{target}-{name}{part}", function, placed)


def _compiled(name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Module:
    import jax

    from xlafuse.compile import _jax_private

    platform = {"h200": "cuda", "h200x8": "cuda"}.get(prefix := name.split("-")[0], prefix)
    compiled = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).compile()
    return name, compiled.as_text(), _jax_private.optimized_module_proto(compiled)


def _block(
    name: str, attributes: dict[str, Any] | None = None, **shapes: tuple[int, ...]
) -> Callable[[], Iterator[Part]]:
    """A block's forward pass and both halves of a training step; the backward half takes its residuals as arrays."""

    def make() -> Iterator[Part]:
        import jax
        import jax.numpy as jnp

        from xlafuse.compile import directions

        apply = importlib.import_module(f"xlafuse.blocks.{name}").apply
        inputs = {key: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for key, shape in shapes.items()}
        yield "-fwd", directions.forward(apply, attributes or {}), (inputs,)
        if name != "vector_add":
            forward, backward = directions.train_phases(apply, attributes or {})
            yield "-forward", forward, (inputs,)
            outputs, residuals = jax.eval_shape(forward, inputs)
            yield "-backward", backward, (residuals, outputs)

    return make


_ROWS = (4096, 2048)
_HEADS = (2, 16, 1024, 64)
_BLOCKS = {
    "vector_add": _block("vector_add", x=(1 << 20,), y=(1 << 20,)),
    "gelu": _block("gelu", x=_ROWS),
    "softmax": _block("softmax", x=_ROWS),
    "rmsnorm": _block("rmsnorm", {"eps": 1e-6}, x=_ROWS, weight=_ROWS[1:]),
    "swiglu_mlp": _block(
        "swiglu_mlp",
        {"eps": 1e-6},
        x=_ROWS,
        norm_weight=_ROWS[1:],
        gate_weight=(2048, 5632),
        up_weight=(2048, 5632),
        down_weight=(5632, 2048),
    ),
    "attention": _block("attention", q=_HEADS, k=_HEADS, v=_HEADS),
}


def _scan_remat() -> Iterator[Part]:
    """A training step of four equal layers, scanned and recomputed in backward: loops of known length."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, weights: Any) -> Any:
        with jax.named_scope("up"):
            h = jax.nn.gelu(x @ weights["up"])
        with jax.named_scope("down"):
            return x + h @ weights["down"], None

    def loss(weights: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        with jax.named_scope("loss"):
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(weights: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        with jax.named_scope("sgd"):
            return value, jax.tree.map(lambda w, g: w - jnp.bfloat16(0.01) * g, weights, gradients)

    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    yield "", step, ({"up": struct(4, 256, 1024), "down": struct(4, 1024, 256)}, struct(512, 256))


def _control_flow() -> Iterator[Part]:
    """A two-way and a three-way branch, and a loop whose length depends on data."""
    import jax
    import jax.numpy as jnp

    matrix = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)

    def branches(x: Any, which: Any) -> Any:
        with jax.named_scope("two"):
            x = jax.lax.cond(which > 0, lambda x: jnp.tanh(x) @ x, lambda x: x * 2, x)
        with jax.named_scope("three"):
            return jax.lax.switch(which, [jnp.sin, lambda x: jax.nn.softmax(x), lambda x: x.T + 1], x)

    def iterate(x: Any, steps: Any) -> Any:
        def again(state: Any) -> Any:
            return (jnp.sum(state * state) > 1) & (steps >= 0)

        def halve(state: Any) -> Any:
            return state * 0.5 + jnp.mean(state, axis=0)

        with jax.named_scope("until"):
            return jax.lax.while_loop(again, halve, x)

    yield "-cond", branches, (matrix, scalar)
    yield "-while", iterate, (matrix, scalar)


def _indexing() -> Iterator[Part]:
    """Slices, gathers, in-place updates, scatters, sorts: operations on a part of an operand."""
    import jax
    import jax.numpy as jnp

    def decode(cache: Any, new: Any, position: Any, table: Any, tokens: Any) -> Any:
        with jax.named_scope("cache"):
            cache = jax.lax.dynamic_update_slice(cache, new, (0, position, 0))
        with jax.named_scope("window"):
            window = jax.lax.dynamic_slice(cache, (0, position, 0), (8, 16, 128)) * 2
        with jax.named_scope("embed"):
            embedded = table[tokens] + 1
        with jax.named_scope("count"):
            counts = jnp.zeros((1000,), jnp.float32).at[tokens].add(1.0)
        with jax.named_scope("order"):
            values, order = jax.lax.top_k(counts, 16)
            return cache, window, embedded, values, order, jnp.sort(embedded, axis=0)

    yield (
        "",
        decode,
        (
            jax.ShapeDtypeStruct((8, 2048, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((8, 1, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((1000, 128), jnp.float32),
            jax.ShapeDtypeStruct((64,), jnp.int32),
        ),
    )


def _dtypes() -> Iterator[Part]:
    """FFT, random bits, int4, float8, complex numbers, constants that are arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    table = np.linspace(0, 1, 300, dtype=np.float32)

    def mixed(x: Any, key: Any, quantized: Any, eighth: Any) -> Any:
        with jax.named_scope("fft"):
            spectrum = jnp.abs(jnp.fft.rfft(x))
        with jax.named_scope("noise"):
            noise = jax.random.normal(key, x.shape) + x
        with jax.named_scope("narrow"):
            narrow = quantized.astype(jnp.bfloat16) * 2, eighth.astype(jnp.float32) + 1, (x * 7).astype(jnp.int4)
        with jax.named_scope("table"):
            return spectrum, noise, narrow, x[:, :300] * table

    yield (
        "",
        mixed,
        (
            jax.ShapeDtypeStruct((256, 512), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.uint32),
            jax.ShapeDtypeStruct((256, 256), jnp.int4),
            jax.ShapeDtypeStruct((256, 256), jnp.float8_e4m3fn),
        ),
    )


def _linear_algebra() -> Iterator[Part]:
    """Cholesky, a triangular solve, a strided convolution in groups, a window's maximum."""
    import jax
    import jax.numpy as jnp

    def solve(x: Any, image: Any, kernel: Any) -> Any:
        with jax.named_scope("solve"):
            factor = jnp.linalg.cholesky(x @ x.T + jnp.eye(256))
            solved = jax.scipy.linalg.solve_triangular(factor, x, lower=True)
        with jax.named_scope("convolution"):
            convolved = jax.lax.conv_general_dilated(
                image,
                kernel,
                (2, 2),
                ((1, 1), (1, 2)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=4,
            )
        with jax.named_scope("pool"):
            pooled = jax.lax.reduce_window(convolved, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return solved, convolved, pooled

    yield (
        "",
        solve,
        (
            jax.ShapeDtypeStruct((256, 256), jnp.float32),
            jax.ShapeDtypeStruct((2, 32, 32, 16), jnp.float32),
            jax.ShapeDtypeStruct((3, 3, 4, 32), jnp.float32),
        ),
    )


# On a GPU, Cholesky and convolutions need cuSOLVER and cuDNN, which a machine without a GPU may lack.
_CONSTRUCTS = {"scan_remat": _scan_remat, "control": _control_flow, "indexing": _indexing, "dtypes": _dtypes}


def _collectives() -> Iterator[Module]:
    """Every collective alone on eight H200s, and a tensor-parallel MLP whose sum is asynchronous."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x8", target_config=_h200())
    mesh = Mesh(np.array(topology.devices), ("x",))

    def struct(shape: tuple[int, ...], *axes: str | None) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def each(x: Any) -> Any:
        ring = [(device, (device + 1) % 8) for device in range(8)]
        return (
            jax.lax.psum(x, "x"),
            jax.lax.all_gather(x, "x"),
            jax.lax.ppermute(x, "x", ring),
            jax.lax.psum_scatter(x, "x", tiled=True),
            jax.lax.all_to_all(x, "x", 0, 0, tiled=True),
        )

    def parallel_mlp(x: Any, up: Any, down: Any) -> Any:
        with jax.named_scope("up"):
            h = jax.nn.gelu(x @ up)
        with jax.named_scope("down"):
            y = jax.lax.with_sharding_constraint(h @ down, NamedSharding(mesh, PartitionSpec()))
        with jax.named_scope("residual"):
            return x + y, jnp.sin(x)

    split, whole = PartitionSpec("x"), PartitionSpec()
    mapped = jax.shard_map(
        each, mesh=mesh, in_specs=split, out_specs=(whole, split, split, split, split), check_vma=False
    )
    yield _compiled("h200x8-collectives", mapped, (struct((512, 64), "x", None),))
    mlp = struct((512, 256)), struct((256, 1024), None, "x"), struct((1024, 256), "x", None)
    yield _compiled("h200x8-parallel_mlp", parallel_mlp, mlp)


def _padded() -> Iterator[Part]:
    """An RMSNorm of arrays that fill no whole tiles of a TPU."""
    import jax
    import jax.numpy as jnp

    def padded(x: Any, weight: Any) -> Any:
        with jax.named_scope("norm"):
            wide = x.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
            return (wide * scale * weight).astype(x.dtype)

    yield "", padded, tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((300, 1000), (1000,)))


def _prefetched() -> Iterator[Part]:
    """Three products, whose weights a TPU copies to VMEM before it needs them, the last in slices."""
    import jax
    import jax.numpy as jnp

    def prefetched(x: Any, gate: Any, up: Any, down: Any) -> Any:
        with jax.named_scope("gate"):
            gated = jax.nn.silu(x @ gate)
        with jax.named_scope("up"):
            h = gated * (x @ up)
        with jax.named_scope("down"):
            return h @ down

    shapes = (2048, 1024), (1024, 2816), (1024, 2816), (2816, 1024)
    yield "", prefetched, tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)


def _tpu() -> Any:
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=[2, 2, 1])
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", action="store_true", help="only rewrite expected.json")
    if parser.parse_args().expected:
        for folder in sorted(HLO.glob("jax-*")):
            _write_expected(folder)
    else:
        _write_expected(_capture())


if __name__ == "__main__":
    main()
