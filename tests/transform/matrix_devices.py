"""The compositions with programs for several devices, run as a program of its own: `test_matrix_devices` starts it.

The number of devices of a process is fixed when it starts.
"""

import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import bijax
from bijax.testing import assert_bits_equal
from tests.transform.compositions import PARAMS, Composition, X, dw_inside, dx_inside, dx_outside, forward, mlp
from tests.transform.lowered import unmarked_sums

Params = dict[str, jax.Array]


def main() -> None:
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    split = {"w1": PartitionSpec(None, "d"), "b1": PartitionSpec("d"), "w2": PartitionSpec("d"), "g": PartitionSpec()}
    params = {**PARAMS, "w1": PARAMS["w1"][:, :76], "b1": PARAMS["b1"][:76], "w2": PARAMS["w2"][:76]}

    @jax.shard_map(mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=PartitionSpec())
    def tensor_parallel(p: Params, x: jax.Array) -> jax.Array:
        return lax.psum(jnp.tanh(x * p["g"] @ p["w1"] + p["b1"]) @ p["w2"], "d")

    compositions = {
        "psum": forward(tensor_parallel, params, X),
        "psum dx outside": dx_outside(tensor_parallel, params, X),
        "psum dx inside": dx_inside(tensor_parallel, params, X),
        "psum dw inside": dw_inside(tensor_parallel, params, X),
    }
    for name in sys.argv[1:]:
        report(name, compositions[name])
    assert "stablehlo.all_reduce" in unmarked_sums(jax.jit(tensor_parallel), params, X)

    # The same bits as on one device, with the batch cut by the compiler or by hand.
    x = X[:32]
    expected = jax.jit(bijax.invariant(mlp))(PARAMS, x)
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    assert_bits_equal(jax.jit(bijax.invariant(mlp))(PARAMS, sharded), expected)
    by_hand = jax.shard_map(
        mlp, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("d")), out_specs=PartitionSpec("d")
    )
    assert_bits_equal(jax.jit(bijax.invariant(by_hand))(PARAMS, x), expected)
    assert_bits_equal(jax.jit(bijax.invariant(by_hand))(PARAMS, x[: 2 * devices]), expected[: 2 * devices])
    explicit = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        out = jax.jit(bijax.invariant(mlp))(PARAMS, jax.device_put(x, NamedSharding(explicit, PartitionSpec("d"))))
        assert out.sharding.spec == PartitionSpec("d", None)
    assert_bits_equal(out, expected)
    print("one device", flush=True)


def report(name: str, composition: Composition) -> None:
    composition.check(bijax.invariant)
    print(name, flush=True)


if __name__ == "__main__":
    main()
