"""The blocks as plain JAX graphs, one file each: `apply(inputs, **attributes) -> outputs`.

Inputs and outputs are dicts of arrays; weights are inputs. Every stage is a `jax.named_scope`, so an HLO instruction's
`op_name` tells which stage it came from.
"""
