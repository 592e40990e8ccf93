"""Code of a JAX user that calls out of XLA: Python, linear algebra, a kernel in Pallas, other GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def printed(x):
    y = jnp.tanh(x)
    jax.debug.print("mean {}", y.mean())
    return y + 1


def sine_of_numpy(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.tanh(x)) * 2


def logged(x):
    io_callback(lambda values: None, None, x, ordered=True)
    return x * 2


def factorised(x):
    return jnp.linalg.cholesky(x @ x.T) * 2


def solved(x):
    q, r = jnp.linalg.qr(x)
    return jnp.linalg.solve(x, q + r)


def eigenvectors(x):
    return jnp.linalg.eigh(x)[1] * 2


def doubled(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(jnp.tanh(x)) + 1


def summed(x, w):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

    def each(x, w):
        return jax.lax.psum(jnp.tanh(x) @ w, "i")

    return jax.shard_map(each, mesh=mesh, in_specs=(P(None, "i"), P("i")), out_specs=P())(x, w)


def over_mesh(*specs):
    """Return a sharding for each spec, over a mesh of all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(AxisType.Auto,))
    return [jax.NamedSharding(mesh, spec) for spec in specs]


def product(x, w):
    return jnp.tanh(x) @ w


def inputs_over_mesh():
    shardings = over_mesh(P(None, "i"), P("i"))
    shapes = (64, 4096), (4096, 256)
    return tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        for shape, sharding in zip(shapes, shardings, strict=True)
    )


def sharded_product():
    return jax.jit(product, in_shardings=tuple(over_mesh(P(None, "i"), P("i"))), out_shardings=over_mesh(P())[0])


def only_printed(x):
    jax.debug.print("sum {}", x.sum())
