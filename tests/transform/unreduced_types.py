"""Types that JAX calls unreduced (values are sums of the parts of the devices) and reduced (gradients are).

Run as a program on several devices: python -m tests.transform.unreduced_types.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import bijax
from bijax.testing import assert_bits_equal

P = PartitionSpec


def message(call: Callable[..., Any], *arguments: Any) -> str:
    try:
        call(*arguments)
    except (bijax.NotInvariantError, bijax.UnsupportedError) as error:
        return f"{type(error).__name__} {error}"
    raise SystemExit(f"{call} was not refused")


def main() -> None:
    jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 96)).astype(np.float32)
    w = rng.standard_normal((96, 40)).astype(np.float32)
    rows, cut = jax.reshard(x, P("data")), jax.reshard(x, P(None, "model"))

    def of_reduced(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ jax.reshard(w, P(reduced={"data"})))

    # The value of a reduced type is whole.
    whole, weights = jnp.asarray(w), jax.reshard(w, P())
    expected = jax.jit(bijax.invariant(lambda w, x: jnp.tanh(x @ w)))(whole, jnp.asarray(x))
    assert_bits_equal(np.asarray(jax.jit(bijax.invariant(of_reduced))(weights, rows)), np.asarray(expected))
    doubled = jax.jit(bijax.invariant(lambda w: jax.reshard(w, P(reduced={"data"})) * 2))(weights)
    assert_bits_equal(np.asarray(doubled), w * 2)

    def summed(x: jax.Array) -> jax.Array:
        return lax.reduce_sum(x, axes=(1,), out_sharding=P(None, unreduced={"model"}))

    parts = jax.jit(summed)(cut)
    for call, arguments, name in (
        (jax.grad(lambda w, x: of_reduced(w, x).sum()), (weights, rows), "dot_general"),
        (lambda x: jax.reshard(summed(x), P()), (cut,), "reduce_sum"),
        (lambda s: jax.reshard(s, P()), (parts,), "reshard"),
        (lambda s: s + s, (parts,), "add"),
        (
            lambda x: lax.broadcast_in_dim(x[0], (8, 96), (1,), out_sharding=P(unreduced={"data"})),
            (whole.T,),
            "broadcast_in_dim",
        ),
        (lambda s: lax.scan(lambda c, _: (c + s, None), s, None, length=2)[0], (parts,), "scan"),
    ):
        for way in (jax.jit(bijax.invariant(call)), bijax.invariant(jax.jit(call))):
            found = message(way, *arguments)
            assert f"the operation {name}(" in found, found
            assert "XLA adds the parts of the devices, in an order of its own; use jax.shard_map" in found, found
    reduced = jax.jit(lambda w: jax.reshard(w, P(reduced={"data"})))(weights)
    for call, arguments in ((bijax.matmul, (rows, reduced)), (bijax.softmax, (parts,))):
        assert "UnsupportedError bijax: expected an array whose type is neither unreduced" in message(call, *arguments)
    assert "dot_general" in str(bijax.audit(lambda w, x: x @ w, reduced, rows))

    # Plain JAX next to invariant code is as it was.
    mixed = jax.jit(lambda x: jax.reshard(summed(bijax.invariant(jnp.tanh)(x)), P()))(cut)
    np.testing.assert_allclose(np.asarray(mixed), np.tanh(x).sum(1), rtol=1e-4, atol=1e-4)
    print("held")


if __name__ == "__main__":
    main()
