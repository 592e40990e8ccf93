"""Training of an OLMoE (Hugging Face transformers) of four layers with torch.compile, on random tokens."""

import argparse
import time

import torch
import transformers

options = argparse.ArgumentParser()
options.add_argument("--experts", default="eager", help="experts_implementation of transformers")
options.add_argument("--layers", type=int, default=4)
options.add_argument("--batch", type=int, default=4)
options.add_argument("--tokens", type=int, default=2048)
options.add_argument("--steps", type=int, default=24)
options.add_argument("--compiled-optimizer", action="store_true")
given = options.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = transformers.OlmoeConfig(num_hidden_layers=given.layers, experts_implementation=given.experts)
model = transformers.OlmoeForCausalLM(config).to(device, torch.bfloat16)
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
update = torch.compile(optimizer.step) if given.compiled_optimizer else optimizer.step
tokens = torch.randint(config.vocab_size, (given.batch, given.tokens), device=device)
for step in range(given.steps):
    start = time.perf_counter()
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    update()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}", f"{(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)
