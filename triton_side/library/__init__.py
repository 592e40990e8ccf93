"""What a PyTorch user would call instead of writing a kernel, in the blocks' contract.

Each module has `apply(inputs, **attributes) -> outputs` (attention has one such function a backend),
differentiable through autograd. Optional packages (`liger`, `quack`, `flash_attention_4`) have a module each, with a
function a block, and are imported nowhere else. Where a backend does not take every case, a function beside it names
what it refuses, and why.
"""
