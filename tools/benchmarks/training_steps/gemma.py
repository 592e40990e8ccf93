"""Training of a Gemma 3 of 270 million parameters by flax's own example, on random tokens.

The first argument is the example's folder (examples/gemma of flax 0.12). Its modules for data and logs are left out.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from unittest import mock

ATTENTION = """\
    window = self.attn_type == AttentionType.LOCAL_SLIDING
    encoded = jax.nn.dot_product_attention(
        query_scaled, key_proj, value_proj, scale=1.0, is_causal=True, implementation="cudnn",
        local_window_size=(self.sliding_window_size - 1, 0) if window else None,
    )
"""

options = argparse.ArgumentParser()
options.add_argument("example", type=Path)
options.add_argument("--version", default="gemma3_270m")
options.add_argument("--layers", type=int)
options.add_argument("--batch", type=int, default=16)
options.add_argument("--tokens", type=int, default=1024)
options.add_argument("--steps", type=int, default=24)
options.add_argument("--attention", choices=("example", "cudnn"), default="example")
options.add_argument("--loss", choices=("example", "labels"), default="example")
given = options.parse_args()
if given.attention == "cudnn":
    modules = given.example / "modules.py"
    edited = re.sub("    use_gqa = .*?(?=    attn_output = )", ATTENTION, modules.read_text(), count=1, flags=re.DOTALL)
    given.example = given.example.with_name("gemma_cudnn")
    given.example.mkdir(exist_ok=True)
    for source in modules.parent.glob("*.py"):
        (given.example / source.name).write_text(edited if source == modules else source.read_text())
sys.path.insert(0, str(given.example))
for name in ("clu", "grain", "input_pipeline", "sampler", "tokenizer"):
    sys.modules[name] = mock.MagicMock()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import train  # noqa: E402
import transformer  # noqa: E402
import transformer_cfg  # noqa: E402
from flax import nnx  # noqa: E402


def loss_of_labels(logits: jax.Array, targets: jax.Array, weights: jax.Array, label_smoothing: float) -> jax.Array:
    """Return what the example's loss returns, without one-hot targets."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets) * weights
    return losses.sum(axis=1) * len(losses) / weights.sum()


if given.loss == "labels":
    train.compute_weighted_cross_entropy = loss_of_labels
sizes = {} if given.layers is None else {
    "num_layers": given.layers,
    "attention_types": transformer_cfg.make_attention_layers_types(
        transformer_cfg.GEMMA3_ATTENTION_PATTERN, given.layers
    ),
}
mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
jax.set_mesh(mesh)
config = transformer_cfg.TransformerConfig.from_version_name(
    given.version, num_embed=35008, dtype=jnp.bfloat16,
    shd_config=transformer_cfg.ShardingConfig.no_sharding(), **sizes,
)
rngs = nnx.Rngs(params=0, dropout=0)
model = transformer.Transformer(config, rngs=rngs)
rate = train.create_learning_rate_schedule(learning_rate=0.0016, warmup_steps=1000)
optimizer = nnx.Optimizer(model, optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
train_step = nnx.jit(train.nnx_train_step, donate_argnames=("model", "optimizer"))
tokens = jax.random.randint(jax.random.key(1), (given.batch, given.tokens + 1), 1, 35008)
positions = jnp.broadcast_to(jnp.arange(given.tokens), (given.batch, given.tokens))
batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "inputs_position": positions}
for step in range(given.steps):
    start = time.perf_counter()
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
        train_step(model, optimizer, rngs, batch, metrics)
        loss = float(metrics.compute()["loss"])
    metrics.reset()
    print(step, f"{loss:.4f}", f"{(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)
