"""The blocks in plain PyTorch, as the input of a compiler and for eager mode.

Each module has one function `apply(inputs, **attributes) -> outputs` on dicts of tensors; weights are inputs. It works
in eager mode, under autograd, and under `torch.compile(fullgraph=True)`, and has no compile decorator of its own.
`xlafuse.triton_side.calls.stages.stage` names the stages.
"""
