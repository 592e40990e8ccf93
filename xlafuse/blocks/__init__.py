"""The blocks as plain JAX graphs: `apply(inputs, **attributes) -> outputs`, dicts of arrays, weights among
the inputs.

Every stage is a `jax.named_scope`, so that an HLO instruction's `op_name` says which line of the mathematics
it came from.
"""
