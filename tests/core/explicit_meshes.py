"""Operations of arrays whose types say that they are cut, run as a program of its own: `test_callers_settings`."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import bijax
from bijax.sampling import sample
from bijax.testing import assert_bits_equal

P = PartitionSpec


def main() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(0)
    x, w, heads, cotangent = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 8, 96), (96, 40), (8, 8, 8, 8), (2, 8, 40))
    )
    numbers = jnp.arange(8, dtype=jnp.int32)

    def attend(query: jax.Array) -> Any:
        out, pull = jax.vjp(lambda q: bijax.dot_product_attention(q, heads, heads, is_causal=True), query)
        return out, pull(heads)

    @bijax.invariant
    def attend_to_itself(x: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), x)
        return out, pull(x)

    def several_times(operation: Callable[..., jax.Array]) -> Callable[[jax.Array], Any]:
        """Three parts of a gradient, whose sum depends on their order."""
        return lambda x: jax.grad(lambda x: operation(x, x, x).ravel()[::3].sum())(x)

    square = jnp.asarray(rng.standard_normal((48, 48)), jnp.float32)

    def products(x: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: bijax.matmul(x, w), x)
        return out, pull(cotangent)

    few: list[tuple[Callable[..., Any], jax.Array, list[PartitionSpec]]] = [
        (products, x, [P(None, "data")]),
        # A product of queries and keys that are both cut has no type, in plain JAX either.
        (attend_to_itself, heads, [P("data")]),
        (several_times(lambda x, w, y: bijax.matmul(x, w, residual=y)), square, [P("data")]),
    ]
    cases = (
        few
        if sys.argv[1:] == ["few"]
        else [
            *few,
            (products, x, [P(None, None, "data")]),
            (attend, heads, [P("data"), P(None, "data"), P(None, None, "data")]),
            (several_times(functools.partial(bijax.dot_product_attention, is_causal=True)), heads, [P("data")]),
            (several_times(bijax.gated_matmul), square, [P(None, "data")]),
            (several_times(bijax.elementwise(lambda a, b, c: jnp.tanh(a) * jnp.exp(b) + c * b)), x, [P(None, "data")]),
            (lambda i: bijax.embed(w, i), numbers, [P("data")]),
            (lambda z: sample(z, seeds=numbers, positions=numbers, top_k=5), x[0], [P("data"), P(None, "data")]),
            (bijax.elementwise(lambda a: jax.nn.silu(a) * a), x, [P(None, "data")]),
        ]
    )
    for function, argument, specs in cases:
        expected = jax.jit(function)(argument)
        for spec in specs:
            with jax.set_mesh(mesh):
                cut = jax.device_put(np.asarray(argument), NamedSharding(mesh, spec))
                assert_bits_equal(jax.jit(function)(cut), expected)
                if spec == specs[0] and argument is not heads:
                    assert_bits_equal(function(cut), expected)
    print("held")


if __name__ == "__main__":
    main()
