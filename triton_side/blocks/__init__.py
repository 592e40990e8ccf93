"""The blocks as plain PyTorch: what a compiler is given, and what eager mode runs one operation at a time.

Each module has one function `apply(inputs, **attributes) -> outputs` on dicts of tensors, weights among the
inputs. It works in eager mode, under autograd, and under `torch.compile(fullgraph=True)`; it carries no
compile decorator of its own. Stages are named with `triton_side.calls.stages.stage`.
"""
