"""Rows on explicit meshes, with arrays that other axes cut, run as a program of its own: `test_sharded_rows`."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import bijax
from bijax.testing import assert_bits_equal

RNG = np.random.default_rng(0)
X, W, V = (RNG.standard_normal(shape).astype(np.float32) for shape in ((16, 64), (64, 128), (128, 64)))


def grid(*kinds: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


def put(mesh: Mesh, x: np.ndarray[Any, Any], spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, spec))


def network(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w / 8) @ v


def gradient(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return jax.grad(lambda x, w, v: jnp.cos(network(x, w, v)).sum(), (0, 1, 2))(x, w, v)


def moved_between(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    there = reshard(jnp.tanh(reshard(x, P(None, "data"))), P("data"))
    return reshard(there, P()) @ w


def library(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The library gathers arrays that types cut, so that a type says that rows are whole which are not."""
    return bijax.softmax(bijax.matmul(jnp.tanh(x), w))


def plain(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return jax.nn.softmax(jnp.tanh(x) @ w), jnp.where(x > 0, x, 0.1 * x)


def columns() -> None:
    """Results of operations on rows whose types cut them along their columns as well."""
    mesh = grid(AxisType.Explicit, AxisType.Explicit)
    megatron = P("data"), P(None, "model"), P("model")
    cases: list[tuple[Callable[..., Any], tuple[P, ...]]] = [
        (network, (P("data"), P(None, "model"), P())),
        (gradient, (P("data"), P(None, "model"), P(None, "model"))),
        (moved_between, (P("data"), P(), P())),
        (library, (P("data"), P(None, "model"), P())),
        (lambda x, w, v: jnp.dot(jax.nn.gelu(x @ w / 8), v, out_sharding=P("data")), megatron),
    ]
    alone = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), mesh.axis_names, axis_types=mesh.axis_types)
    for function, specs in cases:
        program = bijax.invariant(function)
        with jax.set_mesh(alone):  # some of the programs name axes
            expected = jax.jit(program)(*(put(alone, x, P()) for x in (X, W, V)))
        with jax.set_mesh(mesh):
            given = [put(mesh, x, spec) for x, spec in zip((X, W, V), specs, strict=True)]
            result = jax.jit(program)(*given)
            traced = jax.make_jaxpr(program)(*given).out_avals
            specs_of = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(result)]
            assert specs_of == [aval.sharding.spec for aval in traced]
        assert_bits_equal(result, expected)


def mixed() -> None:
    """Without `jax.jit`, results keep the types of JAX's on a mesh of which an axis is automatic."""
    program = bijax.invariant(plain)
    expected = jax.jit(program)(X, W, V)
    for kinds in ((AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)):
        mesh = grid(*kinds)
        with jax.set_mesh(mesh):
            given = put(mesh, X, P("data", "model")), put(mesh, W, P()), put(mesh, V, P())
            if kinds[1] == AxisType.Auto:
                results = program(*given)
                assert_bits_equal(results, expected)
                assert list(map(jax.typeof, results)) == list(map(jax.typeof, plain(*given)))
            assert jax.typeof(bijax.invariant(jnp.tanh)(given[0])) == jax.typeof(jnp.tanh(given[0]))


def sixteen_bits() -> None:
    """Numbers in 16 bits are rounded where one device rounds them: nothing stands between the operations of a chain."""

    def chain(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.bfloat16)
        return jnp.exp(x - x.max(-1, keepdims=True))

    def in_a_function(x: jax.Array) -> jax.Array:
        return jnp.exp(jax.checkpoint(lambda y: y - y.max(-1, keepdims=True))(x.astype(jnp.bfloat16)))

    def partly(x: jax.Array) -> jax.Array:
        return jax.shard_map(chain, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)

    expected = jax.jit(bijax.invariant(chain))(X)
    assert_bits_equal(bijax.invariant(chain)(jnp.asarray(X)), expected)
    explicit, automatic = (AxisType.Explicit,) * 2, (AxisType.Auto,) * 2
    # Where a mesh has one device along its second axis, nothing is partitioned, but values have types.
    for mesh in (grid(*explicit), grid(*automatic), jax.make_mesh((8, 1), ("data", "model"), axis_types=automatic)):
        with jax.set_mesh(mesh):
            for function, spec in ((chain, P()), (in_a_function, P("data")), (partly, P("data"))):
                assert_bits_equal(jax.jit(bijax.invariant(function))(put(mesh, X, spec)), expected)


def accumulated() -> None:
    """Examples whose types cut them are gathered, as the library's operations gather them."""
    step = bijax.accumulate_gradients(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), unit=2)
    mesh = grid(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        given = put(mesh, W, P(None, "model")), put(mesh, X, P("data"))
        assert_bits_equal(jax.jit(step)(*given), jax.jit(step)(W, X))


def control() -> None:
    """Plain JAX computes other bits than one device."""
    mesh = grid(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = P("data"), P(None, "model"), P()
        result = jax.jit(network)(*(put(mesh, x, spec) for x, spec in zip((X, W, V), specs, strict=True)))
    assert (np.asarray(result) != np.asarray(jax.jit(network)(X, W, V))).any()


CHECKS: dict[str, Callable[[], None]] = {
    "columns": columns,
    "mixed": mixed,
    "sixteen bits": sixteen_bits,
    "accumulated": accumulated,
    "control": control,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
