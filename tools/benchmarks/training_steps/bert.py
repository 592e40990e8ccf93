"""Pretraining of a BERT (Hugging Face transformers) with torch.compile, in float32, on random tokens."""

import argparse
import time

import torch
import transformers

options = argparse.ArgumentParser()
options.add_argument("--layers", type=int, default=12)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--tokens", type=int, default=512)
options.add_argument("--steps", type=int, default=24)
options.add_argument("--precision", help="of products: torch.set_float32_matmul_precision")
options.add_argument("--compiled-optimizer", action="store_true")
given = options.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if given.precision:
    torch.set_float32_matmul_precision(given.precision)
model = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=given.layers)).to(device)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
update = torch.compile(optimizer.step) if given.compiled_optimizer else optimizer.step
tokens = torch.randint(model.config.vocab_size, (given.batch, given.tokens), device=device)
labels = torch.where(torch.rand(tokens.shape, device=device) < 0.15, tokens, -100)
inputs = torch.where(labels == -100, tokens, 103)  # 103: [MASK]
for step in range(given.steps):
    start = time.perf_counter()
    loss = compiled(input_ids=inputs, labels=labels).loss
    loss.backward()
    update()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}", f"{(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)
