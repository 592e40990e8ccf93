"""Two graphs of one Llama MLP on an H200, of XLA and Inductor: a training step without some of its kernels."""

from __future__ import annotations

from xlafuse.compare.graph.model import Access, Buffer, FusionGraph, Kernel, Reason, SourceOp

X, H, W = 16777216, 58720256, 117440512  # bf16[2048,4096], bf16[2048,14336], a weight of bf16[4096,14336]
NORM, MLP = "xlafuse/blocks/rmsnorm.py", "xlafuse/blocks/swiglu_mlp.py"


def _op(op: str, stage: str, line: str, site: str = "", backward: bool = False) -> SourceOp:
    return SourceOp(op, stage, line, (site or f"{op}@{line}") + ("_backward" if backward else ""), backward)


def _uses(*buffers: tuple[str, int | None]) -> tuple[Access, ...]:
    return tuple(Access(name, size) for name, size in buffers)


XLA = FusionGraph(
    name="swiglu_mlp/llama-8b/bf16/train/xla",
    compiler="xla",
    kernels=(
        Kernel(
            "input_convert_reduce_fusion", "reduction", runtime_name="input_convert_reduce_fusion",
            source_ops=(
                _op("convert_element_type", "norm/mean_square", f"{NORM}:10"),
                _op("mul", "norm/mean_square", f"{NORM}:11"), _op("reduce_sum", "norm/mean_square", f"{NORM}:11"),
            ),
            inputs=_uses(("x", X)), outputs=_uses(("mean_square", 8192), ("x_f32", 2 * X)),
            flops=16777216.0, provenance="device", device_time_us=11.4, facts={"registers": 40, "num_warps": 4},
        ),
        Kernel(
            "loop_convert_multiply_fusion", "elementwise", runtime_name="loop_convert_multiply_fusion",
            source_ops=(
                _op("mul", "norm/normalize", f"{NORM}:13"), _op("convert_element_type", "norm/weight", f"{NORM}:15"),
                _op("mul", "norm/weight", f"{NORM}:15"),
            ),
            inputs=_uses(("x_f32", 2 * X), ("mean_square", 8192), ("norm_weight", 8192)), outputs=_uses(("h", X)),
            flops=33554432.0, provenance="device", device_time_us=15.9,
        ),
        Kernel(
            "custom-call.1", "gemm", source_ops=(_op("dot_general", "gate", f"{MLP}:22"),),
            inputs=_uses(("h", X), ("gate_weight", W)), outputs=_uses(("gate", H)), workspace_bytes=4194304,
            flops=240518168576.0, provenance="device", device_time_us=303.9,
        ),
        Kernel(
            "custom-call.0", "gemm", source_ops=(_op("dot_general", "up", f"{MLP}:24"),),
            inputs=_uses(("h", X), ("up_weight", W)), outputs=_uses(("up", H)), workspace_bytes=4194304,
            flops=240518168576.0, provenance="device", device_time_us=300.1,
        ),
        Kernel(
            "loop_convert_multiply_fusion.1", "elementwise", runtime_name="loop_convert_multiply_fusion_1",
            source_ops=(
                _op("neg", "act", f"{MLP}:26"), _op("exp", "act", f"{MLP}:26"), _op("add", "act", f"{MLP}:26"),
                _op("div", "act", f"{MLP}:26"), _op("mul", "act", f"{MLP}:26", "silu"),
                _op("mul", "act", f"{MLP}:26", "product"),
            ),
            inputs=_uses(("gate", H), ("up", H)), outputs=_uses(("hidden", H), ("silu", H)),
            flops=176160768.0, provenance="device", device_time_us=85.9,
        ),
        Kernel(
            "cublas-lt-matmul.2", "gemm",
            source_ops=(_op("dot_general", "down", f"{MLP}:28"), _op("add", "down", f"{MLP}:28")),
            inputs=_uses(("hidden", H), ("down_weight", W), ("x", X)), outputs=_uses(("y", X)),
            flops=240518168576.0, provenance="device", device_time_us=295.8,
        ),
        Kernel(
            "loop_add_fusion", "elementwise", "backward", runtime_name="loop_add_fusion",
            source_ops=(
                _op("mul", "act", f"{MLP}:26", backward=True), _op("add_any", "act", f"{MLP}:26", backward=True),
            ),
            inputs=_uses(("d_hidden", H), ("silu", H), ("up", H)), outputs=_uses(("d_gate", H)),
            provenance="device", device_time_us=61.0,
        ),
        Kernel(
            "gemm_fusion_dot_general.11", "gemm", "backward", runtime_name="gemm_fusion_dot_general_11",
            source_ops=(_op("dot_general", "gate", f"{MLP}:22", backward=True),),
            inputs=_uses(("d_gate", H), ("gate_weight", W)), outputs=_uses(("d_h", X)),
            flops=240518168576.0, provenance="not autotuned", device_time_us=290.0,
        ),
    ),
    buffers=(
        Buffer("x", (2048, 4096), "bf16", X, "input"),
        Buffer("norm_weight", (4096,), "bf16", 8192, "input"),
        Buffer("gate_weight", (4096, 14336), "bf16", W, "input"),
        Buffer("up_weight", (4096, 14336), "bf16", W, "input"),
        Buffer("down_weight", (14336, 4096), "bf16", W, "input"),
        Buffer("d_hidden", (2048, 14336), "bf16", H, "input"),
        Buffer("mean_square", (2048,), "f32", 8192, "intermediate"),
        Buffer("x_f32", (2048, 4096), "f32", 2 * X, "intermediate"),
        Buffer("h", (2048, 4096), "bf16", X, "intermediate"),
        Buffer("gate", (2048, 14336), "bf16", H, "intermediate"),
        Buffer("up", (2048, 14336), "bf16", H, "saved"),
        Buffer("hidden", (2048, 14336), "bf16", H, "intermediate"),
        Buffer("silu", (2048, 14336), "bf16", H, "saved"),
        Buffer("d_gate", (2048, 14336), "bf16", H, "intermediate"),
        Buffer("y", (2048, 4096), "bf16", X, "output"),
        Buffer("d_h", (2048, 4096), "bf16", X, "output"),
    ),
    reasons=(
        Reason(
            "input_convert_reduce_fusion", "loop_convert_multiply_fusion", "reduction",
            "not fusing a reduction into its consumer", "xla priority-fusion", bytes_saved=4 * X + 16384,
            fused_us=41.0, unfused_us=27.5,
        ),
        Reason(
            "loop_add_fusion", "gemm_fusion_dot_general.11", "gemm", "the consumer is a matrix product", "inferred",
            bytes_saved=2 * H,
        ),
    ),
    versions={"jax": "0.11.2"},
    target="h200",
)

_FORWARD = "triton_side/blocks/swiglu_mlp.py"

INDUCTOR = FusionGraph(
    name="swiglu_mlp/llama-8b/bf16/train/inductor",
    compiler="inductor",
    kernels=(
        Kernel(
            "triton_red_fused__to_copy_add_mean_mul_rsqrt_0", "reduction",
            runtime_name="triton_red_fused__to_copy_add_mean_mul_rsqrt_0",
            source_ops=(
                _op("aten.pow", "norm/mean_square", "triton_side/blocks/rmsnorm.py:9"),
                _op("aten.mean", "norm/mean_square", "triton_side/blocks/rmsnorm.py:9"),
                _op("aten.rsqrt", "norm/normalize", "triton_side/blocks/rmsnorm.py:10"),
                _op("aten.mul", "norm/normalize", "triton_side/blocks/rmsnorm.py:10"),
                _op("aten.mul", "norm/weight", "triton_side/blocks/rmsnorm.py:11"),
            ),
            inputs=_uses(("primals_1", X), ("primals_2", 8192)), outputs=_uses(("buf0", 8192), ("buf1", X)),
            provenance="device", device_time_us=12.0,
        ),
        Kernel(
            "extern_kernels.mm", "library", source_ops=(_op("aten.mm", "gate", f"{_FORWARD}:20"),),
            inputs=_uses(("buf1", X), ("primals_3", W)), outputs=_uses(("buf2", H)),
            flops=240518168576.0, device_time_us=301.0,
        ),
        Kernel(
            "extern_kernels.mm_1", "library", source_ops=(_op("aten.mm", "up", f"{_FORWARD}:21"),),
            inputs=_uses(("buf1", X), ("primals_4", W)), outputs=_uses(("buf3", H)),
            flops=240518168576.0, device_time_us=301.0,
        ),
        Kernel(
            "triton_poi_fused_mul_sigmoid_1", "elementwise", runtime_name="triton_poi_fused_mul_sigmoid_1",
            source_ops=(_op("aten.sigmoid", "act", f"{_FORWARD}:22"), _op("aten.mul", "act", f"{_FORWARD}:22")),
            inputs=_uses(("buf2", H), ("buf3", H)), outputs=_uses(("buf4", H)), device_time_us=43.0,
        ),
        Kernel(
            "extern_kernels.addmm", "library",
            source_ops=(_op("aten.mm", "down", f"{_FORWARD}:23"), _op("aten.add", "down", f"{_FORWARD}:23")),
            inputs=_uses(("buf4", H), ("primals_5", W), ("primals_1", X)), outputs=_uses(("buf5", X)),
            flops=240518168576.0, device_time_us=300.0,
        ),
        Kernel(
            "triton_poi_fused_add_mul_sigmoid_sigmoid_backward_0", "elementwise", "backward",
            source_ops=(
                _op("aten.sigmoid", "act", f"{_FORWARD}:22"),
                _op("aten.sigmoid_backward", "act", f"{_FORWARD}:22", backward=True),
            ),
            inputs=_uses(("tangents_1", H), ("buf2", H), ("buf3", H)), outputs=_uses(("buf6", H)), device_time_us=55.0,
        ),
        Kernel(
            "extern_kernels.mm_2", "library", "backward",
            source_ops=(_op("aten.mm", "gate", f"{_FORWARD}:20", backward=True),),
            inputs=_uses(("buf6", H), ("primals_3", W)), outputs=_uses(("buf7", X)), device_time_us=290.0,
        ),
    ),
    buffers=(
        Buffer("primals_1", (2048, 4096), "bf16", X, "input"),
        Buffer("primals_2", (4096,), "bf16", 8192, "input"),
        Buffer("primals_3", (4096, 14336), "bf16", W, "input"),
        Buffer("primals_4", (4096, 14336), "bf16", W, "input"),
        Buffer("primals_5", (14336, 4096), "bf16", W, "input"),
        Buffer("tangents_1", (2048, 14336), "bf16", H, "input"),
        Buffer("buf0", (2048, 1), "f32", 8192, "saved"),
        Buffer("buf1", (2048, 4096), "bf16", X, "intermediate"),
        Buffer("buf2", (2048, 14336), "bf16", H, "saved"),
        Buffer("buf3", (2048, 14336), "bf16", H, "saved"),
        Buffer("buf4", (2048, 14336), "bf16", H, "intermediate"),
        Buffer("buf5", (2048, 4096), "bf16", X, "output"),
        Buffer("buf6", (2048, 14336), "bf16", H, "intermediate"),
        Buffer("buf7", (2048, 4096), "bf16", X, "output"),
    ),
    reasons=(
        Reason(
            "triton_poi_fused_mul_sigmoid_1", "extern_kernels.addmm", "library", "the consumer is a library call",
            "inferred", bytes_saved=2 * H,
        ),
    ),
    versions={"torch": "2.11.0"},
    target="h200",
)

# Operations are known, kernels are not.
EAGER = FusionGraph(
    name="gelu/eager", compiler="eager", kernels=None,
    operations=(_op("aten.mul", "cube", "gelu.py:3"), _op("aten.tanh", "tanh", "gelu.py:4")),
)

# Everything that may be missing is, and names are those of a hostile file.
STRANGE = FusionGraph(
    name="\x1b[31mred\x1b[0m [bold]x[/bold] <script>alert(1)</script>\u202e" + "n" * 500,
    compiler="xla",
    kernels=(
        Kernel(
            'k"] \\ evil\n<b>&amp;' + "k" * 300, "custom",
            source_ops=(SourceOp("op\x1b[2J", "st<i>age", "/very/" + "long/" * 60 + "file\r.py:1"),),
            inputs=None, outputs=(Access('b"<u>', None),), launches=None,
        ),
        Kernel("no_ops", "memset", outputs=(Access('b"<u>', 8),), launches=3),
    ),
    buffers=(Buffer('b"<u>', (2, 2), "bf<16", 8, "intermediate"),),
    reasons=(Reason("", 'k"] \\ evil\n<b>&amp;' + "k" * 300, "other", "because\x1b]0;title\x07 <x>", "x<y>"),),
    unparsed=("custom-call \x1b[5m<blink>",),
)
