"""PyTorch functions whose graph breaks, or that work in place."""

import torch
from torch import nn


def number(x):
    return x * x.sum().item()


def mask(x):
    return x[x > 0] * 2


def branch(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def indices(x):
    return torch.nonzero(x) + 1


def counted(x):
    return torch.bincount(x.relu().long()) + 1


def piece(x):
    return torch.relu(x) * 2


def repeated(x):
    for _ in range(3):
        x = piece(x)
        torch._dynamo.graph_break()
        x = x @ x.T @ x
    return x


def uncompiled(x):
    for _ in range(3):
        x = x + 1
        torch._dynamo.graph_break()
        x = torch.relu(x)
    return x


def nothing(x):
    x.add_(1)


def in_place(x):
    x.mul_(2)
    return x


def relu(x):
    return torch.relu(x) * 2


def dynamic():
    return torch.compile(relu, dynamic=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True, dtype=torch.bfloat16, device="meta").eval()

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]
