"""Code of a PyTorch user."""

import torch
import torch.nn.functional as F


class Mlp(torch.nn.Module):
    def __init__(self, width=64, hidden=128):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(hidden, width, bias=False, dtype=torch.bfloat16)

    def forward(self, x, *, activation="gelu", residual=None):
        out = self.down(getattr(F, activation)(self.up(x)))
        return out if residual is None else out + residual


def mlp():
    return Mlp()


def inputs():
    x = torch.empty(32, 64, dtype=torch.bfloat16, device="meta")
    return (x,), {"residual": x, "activation": "silu"}


def broken(x):
    y = torch.relu(x) + 1
    torch._dynamo.graph_break()
    return torch.softmax(y, -1)


def attention(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def mismatched(x):
    return x @ x  # raises for what is not square


def llama_layer():
    return _llama()[0]


def llama_inputs():
    return _llama()[1:]


def _llama():
    """A decoder layer with random weights, and what a model calls it with."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, layer_idx=0).to(torch.bfloat16)
    x = torch.randn(1, 64, 128, dtype=torch.bfloat16)
    positions = torch.arange(64)[None]
    embeddings = LlamaRotaryEmbedding(config)(x, positions)
    keywords = {"position_ids": positions, "position_embeddings": embeddings, "attention_mask": None}
    return layer, (x,), keywords


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def normed(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def scaled_in_place(x):
    torch.mul(x, 2, out=x)


def sharing_a_scalar(x, y, scale):
    return x * scale, torch.tanh(y) + scale


def two_reductions(x, weight):
    share = torch.softmax(x, -1)
    return (share * weight).sum(0), torch.tanh(share)
