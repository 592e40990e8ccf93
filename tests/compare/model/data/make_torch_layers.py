"""Compile layers of torch.nn, transformers and plain PyTorch on a CPU, and keep their FX graphs.

    PYTHONPATH=. python tests/compare/model/data/make_torch_layers.py

needs torch and transformers. It writes torch_layers.tar.xz beside itself; a training step's graph is that of both
phases.
"""

import io
import math
import re
import tarfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, Gemma2Config, GPT2Config, LlamaConfig, T5Config
from transformers.models.bert.modeling_bert import BertModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.t5.modeling_t5 import T5EncoderModel

from xlafuse.triton_side.inductor import compiler

HERE = Path(__file__).parent
BATCH, SEQUENCE, WIDTH, HEADS, HEAD_DIM, HIDDEN, CLASSES = 2, 128, 256, 8, 32, 1024, 4096
LAYERS = {}


def randn(*shape, grad=False):
    return torch.randn(shape, requires_grad=grad)


X, IDS = randn(BATCH, SEQUENCE, WIDTH), torch.randint(0, CLASSES, (BATCH, SEQUENCE))
Q, KV = randn(BATCH, HEADS, SEQUENCE, HEAD_DIM), randn(BATCH, 2, SEQUENCE, HEAD_DIM)


def layer(*args, train=False):
    def kept(function):
        LAYERS[function.__name__] = function, args, train
        return function

    return kept


def module(name, made, *args, train=False):
    LAYERS[name] = made if train else made.eval(), args, train


module("layernorm", nn.LayerNorm(WIDTH), X)
module("rmsnorm", nn.RMSNorm(WIDTH), X)
module("embedding_train", nn.Embedding(CLASSES, WIDTH), IDS, train=True)
module("mlp_train", nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)), X, train=True)
ENCODER = {"activation": "gelu", "batch_first": True}
module("encoder_layer_train", nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, **ENCODER), X, train=True)
ATTENTION = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
PROJECTION = nn.Linear(WIDTH, CLASSES, bias=False)


@layer(X)
def multihead_attention(x):
    return ATTENTION(x, x, x, need_weights=False)[0]


@layer(Q, Q.clone(), Q.clone())
def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@layer(*[randn(BATCH, HEADS, SEQUENCE, HEAD_DIM, grad=True) for _ in range(3)], train=True)
def plain_attention_train(q, k, v):
    scores, positions = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM), torch.arange(SEQUENCE)
    return F.softmax(scores.masked_fill(positions[None] > positions[:, None], -math.inf), -1) @ v


@layer(Q, KV, KV.clone())
def window_capped_grouped(q, k, v):
    k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
    scores, positions = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM), torch.arange(SEQUENCE)
    distance = positions[:, None] - positions[None]
    visible = (distance >= 0) & (distance < 16)
    return F.softmax(torch.where(visible, 30 * torch.tanh(scores / 30), -math.inf), -1) @ v


@layer(*[randn(BATCH, SEQUENCE, HEADS, HEAD_DIM) for _ in range(3)], randn(1, HEADS, SEQUENCE, SEQUENCE))
def einsum_bias(q, k, v, bias):
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) + bias, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


@layer(randn(BATCH, SEQUENCE, WIDTH, grad=True), IDS, train=True)
def linear_cross_entropy_train(x, labels):
    return F.cross_entropy(PROJECTION(x).view(-1, CLASSES), labels.view(-1))


@layer(randn(BATCH * SEQUENCE, CLASSES), IDS.view(-1))
def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


@layer(*[randn(WIDTH, HIDDEN) for _ in range(4)], torch.tensor(3.0))
def plain_adamw(parameter, gradient, mean, variance, step):
    mean = torch.lerp(mean, gradient, 0.1)
    variance = variance * 0.95 + 0.05 * gradient * gradient
    rate = (mean / (1 - 0.9**step)) / ((variance / (1 - 0.95**step)).sqrt() + 1e-8)
    return parameter * (1 - 1e-4) - 1e-3 * rate, mean, variance


@layer(randn(BATCH * SEQUENCE, WIDTH), randn(WIDTH, 8), randn(8, WIDTH, 64), randn(8, WIDTH, 64), randn(8, 64, WIDTH))
def moe_dense(x, router, gate, up, down):
    best, experts = torch.topk(torch.softmax(x @ router, -1), 2)
    shares = torch.zeros(BATCH * SEQUENCE, 8).scatter(1, experts, best)
    hidden = F.silu(torch.einsum("td,edf->etf", x, gate)) * torch.einsum("td,edf->etf", x, up)
    return torch.einsum("etd,te->td", torch.einsum("etf,efd->etd", hidden, down), shares)


SIZES = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": CLASSES}
GROUPED = {**SIZES, "num_key_value_heads": 2, "num_hidden_layers": 1, "attn_implementation": "eager"}
LLAMA = LlamaForCausalLM(LlamaConfig(**GROUPED))
WINDOW = {"head_dim": HEAD_DIM, "num_hidden_layers": 2, "sliding_window": 32}
GEMMA = Gemma2ForCausalLM(Gemma2Config(**{**GROUPED, **WINDOW}))
GPT2 = GPT2LMHeadModel(GPT2Config(
    n_embd=WIDTH, n_head=HEADS, n_layer=1, vocab_size=CLASSES, n_positions=SEQUENCE, attn_implementation="eager",
))
T5 = T5EncoderModel(T5Config(
    d_model=WIDTH, d_kv=HEAD_DIM, num_heads=HEADS, d_ff=HIDDEN, num_layers=1, vocab_size=CLASSES,
))
BERT = BertModel(BertConfig(**SIZES, num_hidden_layers=1))
for model in (GEMMA, GPT2, T5, BERT):
    model.eval()


@layer(IDS, train=True)
def transformers_llama_train(ids):
    return LLAMA(ids, labels=ids, use_cache=False).loss


@layer(IDS)
def transformers_gemma2(ids):
    return GEMMA(ids, use_cache=False).logits


@layer(IDS)
def transformers_gpt2(ids):
    return GPT2(ids, use_cache=False).logits


@layer(IDS)
def transformers_t5(ids):
    return T5(ids)[0]


@layer(IDS)
def transformers_bert(ids):
    return BERT(ids)[0]


def graph_of(function, args, train):
    """Return the FX graph before Inductor's passes, without its comments."""
    torch.compiler.reset()
    with nullcontext() if train else torch.no_grad(), compiler.capture() as captured:
        compiler.compile(function, fullgraph=False)(*args)
    captured.write(folder := HERE / "captured")
    joint = folder / "joint_graph.py"
    text = (joint if joint.exists() else folder / "forward" / "fx_graph.py").read_text()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    return re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)


def main():
    with tarfile.open(HERE / "torch_layers.tar.xz", "w:xz") as packed:
        for name, layer_and_args in LAYERS.items():
            text = graph_of(*layer_and_args).encode()
            member = tarfile.TarInfo(f"{name}.txt")
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    main()
