"""Programs that XLA divides among eight devices, run as a program of its own: `test_sharded_arguments` starts it.

Each must have the bits of one device. Numbers hold zeros of both signs: XLA gathers what it has cut by adding zeros.
"""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.arrays import on_device

Function = Callable[..., Any]
P = PartitionSpec


@functools.cache
def line() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def grid() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def cuts() -> dict[str, tuple[jax.sharding.Mesh, tuple[PartitionSpec, ...]]]:
    return {
        "rows": (line(), (P("data"), P(), P())),
        "sums": (line(), (P(None, "data"), P("data"), P("data"))),
        "weights": (grid(), (P("data"), P(None, "model"), P("model"))),
        "everything": (grid(), (P(("data", "model")), P("data", "model"), P("model", "data"))),
    }


RNG = np.random.default_rng(0)


def numbers(*shape: int) -> jax.Array:
    values = RNG.standard_normal(shape).astype(np.float32)
    values[RNG.random(shape) < 0.1] = -0.0
    return jnp.asarray(values)


X, W, V = numbers(64, 512), numbers(512, 128) / 32, numbers(128, 512) / 8
HEADS = numbers(8, 16, 8, 8)
PLACES = on_device(RNG.integers(0, 64, 64), jnp.int32)


def network(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(jax.nn.gelu(x @ w) @ v, axis=-1).sum(-1)


def small(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """A network of few kernels, for what does not depend on the function."""
    return (jnp.tanh(x @ w) @ v).sum(-1)


def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(jnp.tanh(x @ w) @ v, axis=-1).mean()


def sums(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return x.sum(0), jnp.std(x, -1), x.prod(1), jnp.cumsum(x, 0), x.max(0), (x - x.mean(-1, keepdims=True)) @ w


def moves(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    y = jnp.concatenate([x, -x * 3])[::-1]
    part = lax.dynamic_slice(y, (PLACES[0], 3), (5, 7))
    return jnp.take(y, 2 * PLACES, axis=0), part, jnp.sort(x, 0), jnp.roll(x, 3, 0), x.at[PLACES].add(x * 0.1)


def attention(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


def loops(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c = jnp.tanh((c @ w) @ v)
        return lax.with_sharding_constraint(c, NamedSharding(line(), P("data"))), c.sum()

    return lax.scan(body, x, None, length=2)


def kernels(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    y = bijax.matmul(x, w)
    return bijax.softmax(y), bijax.sum(x, axis=0), bijax.rms_norm(y), bijax.embed(x, PLACES)


def kernel_gradients(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    return jax.grad(lambda x, w: jnp.max(bijax.logsumexp(bijax.matmul(x, w))), (0, 1))(x, w)


def kernel_of_attention(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return bijax.dot_product_attention(x, x, x, is_causal=True)


# A program, its first argument, and whether it is made invariant or holds the library's own operations.
PROGRAMS: dict[str, tuple[Function, jax.Array, bool]] = {
    "network": (network, X, True),
    "gradients": (jax.grad(loss, (0, 1, 2)), X, True),
    "sums": (sums, X, True),
    "moves": (moves, X, True),
    "attention": (attention, HEADS, True),
    "loops": (loops, X, True),
    "kernels": (kernels, X, False),
    "kernels' gradients": (kernel_gradients, X, False),
    "kernel of attention": (kernel_of_attention, HEADS, False),
}


made_invariant = functools.cache(bijax.invariant)  # compiled for one device once, whatever the cuts


def put(mesh: jax.sharding.Mesh, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))  # an array of a device is cut by a program


def check(cut: str, names: Sequence[str]) -> int:
    """Compares programs with one device; returns in how many plain JAX differs."""
    mesh, specs = cuts()[cut]
    differ = 0
    for name in names:
        function, first, transformed = PROGRAMS[name]
        arguments = (first, W, V)
        given = [put(mesh, x, spec) for x, spec in zip(arguments, specs, strict=True)]
        made = made_invariant(function) if transformed else function
        assert_bits_equal(jax.jit(made)(*given), jax.jit(made)(*arguments))
        if transformed:
            plain = zip(*(jax.tree.leaves(jax.jit(function)(*a)) for a in (given, arguments)), strict=True)
            differ += any((bits(a) != bits(b)).any() for a, b in plain)
    return differ


def check_places() -> None:
    """Where the cut comes from, and where in a program its invariant part stands."""
    invariant = bijax.invariant(small)
    rows = put(line(), X, P("data"))
    expected = jax.jit(invariant)(X, W, V)
    whole, cut = NamedSharding(line(), P()), NamedSharding(line(), P("data"))
    result = jax.jit(invariant, in_shardings=(cut, whole, whole), out_shardings=cut)(X, W, V)
    assert result.sharding.spec == P("data")
    assert_bits_equal(result, expected)
    assert_bits_equal(invariant(rows, W, V), expected)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(jax.jit(small)(rows, W, V), expected)
    assert_bits_equal(jax.jit(bijax.invariant(lambda w: small(rows, w, V)))(W), expected)

    def partly(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (bijax.invariant(lambda c: jnp.tanh((c @ W) @ V))(c), None), x, None, length=2)[0]

    assert_bits_equal(jax.jit(partly)(rows), jax.jit(partly)(X))

    # Some axes by hand and the others by XLA; all of them by hand, which leaves the rows where they are.
    for mesh, axes in ((grid(), {"data"}), (line(), {"data"})):
        specs = (P("data"), P(), P())
        by_hand = jax.shard_map(small, mesh=mesh, in_specs=specs, out_specs=P("data"), axis_names=axes)
        given = put(mesh, X, P("data")), put(mesh, W, P(None, "model") if mesh is grid() else P()), V
        result = jax.jit(bijax.invariant(by_hand))(*given)
        assert result.sharding.spec == P("data")
        assert_bits_equal(result, expected)
    text = jax.jit(bijax.invariant(by_hand)).lower(rows, W, V).as_text()
    assert "sharding_constraint" not in text

    mapped = jax.pmap(bijax.invariant(small), in_axes=(0, None, None))(X.reshape(8, 8, -1), W, V)
    assert_bits_equal(mapped.reshape(-1), expected)

    # Nothing is added over devices.
    gradient = jax.jit(bijax.invariant(jax.grad(loss, (1, 2)))).lower(rows, W, V).compile().as_text()
    assert set(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)\(", gradient)) == {"all-gather"}

    explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        result = jax.jit(invariant)(put(explicit, X, P("data")), W, V)
    assert result.sharding.spec == P("data")
    assert_bits_equal(result, expected)


def check_former_partitioner() -> None:
    jax.config.update("jax_use_shardy_partitioner", False)
    assert check("rows", ["network", "moves"])
    specs = (P("data"), P(), P())
    partly = jax.shard_map(network, mesh=grid(), in_specs=specs, out_specs=P("data"), axis_names={"data"})
    with pytest.raises(bijax.NotInvariantError, match="shard_map"):  # XLA would end the process
        jax.jit(bijax.invariant(partly))(X, put(grid(), W, P(None, "model")), V)


def main() -> None:
    if sys.argv[1:] == ["everything"]:
        for cut in cuts():
            assert check(cut, list(PROGRAMS)), cut
        check_former_partitioner()
    else:
        assert check("rows", ["network", "kernels"]) == 1
        assert check("weights", ["gradients"])
        assert check("sums", ["network"])
        check_places()
    print("held")


if __name__ == "__main__":
    main()
