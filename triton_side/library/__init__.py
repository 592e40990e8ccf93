"""Library calls that a PyTorch user would make instead of writing a kernel, with the blocks' inputs and outputs.

Each module has `apply(inputs, **attributes) -> outputs`, differentiable through autograd; attention has one such
function per backend. Each optional package (`liger`, `quack`, `flash_attention_4`) has one module, with a function per
block, and is imported nowhere else. The block's table of implementations names the cases that a backend refuses.
"""
