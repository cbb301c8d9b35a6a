"""Programs that were transformed: what XLA creates in them is distinguished from what was left to XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import bijax
from bijax import hlo

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the programs of this file are XLA:CPU's")


def trajectories(start: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As a sampler by Hamiltonian dynamics: states are kept at an index in a loop, and meet in inner products."""

    def one(q: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            i, p, kept = state
            return i + 1, p * 0.9 + q, kept.at[i % 4].set(p)

        _, p, kept = lax.while_loop(lambda s: s[0] < n, body, (jnp.int32(0), q, jnp.zeros((4, q.size))))
        return jnp.dot(p, q), kept

    return jax.vmap(one)(start, steps)


def draws(keys: jax.Array, concentration: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As a library of distributions: a gamma sample by rejection in a loop, and a log-density with a square."""

    def one(key: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.random.gamma(key, a, (3,))
        return x, -0.5 * jnp.square((x - a) / 2.0) - lax.lgamma(a)

    return jax.vmap(one)(keys, concentration)


def arguments(f: Callable[..., Any], rows: int) -> tuple[jax.Array, ...]:
    rows_of_ones = jnp.ones((rows, 3))
    if f is trajectories:
        return rows_of_ones, jnp.arange(rows, dtype=jnp.int32)
    return jax.random.split(jax.random.key(0), rows), rows_of_ones


@pytest.mark.tier("full", fast=("trajectories-5",))
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("f", [trajectories, draws])
def test_no_alarm_for_what_xla_made_anew(f: Callable[..., Any], rows: int) -> None:
    hlo.assert_hlo_invariant(jax.jit(bijax.invariant(f)), *arguments(f, rows))
    assert not hlo.inspect(f, *arguments(f, rows)).invariant  # the control


@pytest.mark.parametrize(
    ("neighbour", "expected"),
    [
        (lambda x: x.at[jnp.arange(2)].set(0.0), {"ours"}),
        (lambda x: x.at[jnp.arange(2)].add(1.0), {"ours", "variant"}),
        (jnp.square, {"ours"}),
    ],
)
def test_what_a_neighbour_says_of_products_without_a_tag(
    neighbour: Callable[[jax.Array], jax.Array], expected: set[str]
) -> None:
    """Of the products that lost their tags is known only that all sums of the program were ours, or were not."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(lambda r: bijax.matmul(r[None], r[:, None]))(x), neighbour(x)

    found = hlo.inspect(f, jnp.ones((5, 40))).findings  # shorter ones are element-wise chains
    assert {v.verdict for v in found if v.opcode == "dot"} == expected - ({"ours"} if "variant" in expected else set())


REWRITTEN = """\
HloModule rewritten, entry_computation_layout={(f32[8,2]{1,0}, f32[8,2,8]{2,1,0})->f32[8,8]{1,0}}

ENTRY %main (x: f32[8,2], w: f32[8,2,8]) -> f32[8,8] {
  %x = f32[8,2]{1,0} parameter(0)
  %w = f32[8,2,8]{2,1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, \
rhs_contracting_dims={1}, frontend_attributes={bijax="kernel"}
}
"""
WHOLE = REWRITTEN.replace("f32[8,2]{1,0}", "f32[8,2,1]{2,1,0}").replace("f32[8,8]{1,0}", "f32[8,1,8]{2,1,0}")


def test_a_product_of_a_kernel_that_lost_an_axis_is_found() -> None:
    """As XLA:CPU compiled stacks of one-row products of ours after a transpose, with other bits at batch 1."""
    report = hlo.inspect_text(REWRITTEN, platform="cpu")
    assert [(v.kind, v.verdict) for v in report.findings] == [("dot", "variant")]
    assert "took the axis" in report.variant[0].reason
    whole = hlo.inspect_text(WHOLE, platform="cpu")
    assert [v.verdict for v in whole.findings] == ["ours"]
    assert not hlo.compare(report, whole).alike
    assert hlo.compare(whole, whole).alike


def test_the_error_gives_advice_that_can_be_followed() -> None:
    def mixed(x: jax.Array) -> jax.Array:
        return bijax.matmul(x, x.T).sum(1)

    x = jnp.ones((8, 64))
    with pytest.raises(hlo.HloInvarianceError, match=r"what was transformed with bijax\.invariant and is listed"):
        hlo.assert_hlo_invariant(mixed, x)
    with pytest.raises(hlo.HloInvarianceError, match=r"or transform the function with bijax\.invariant\."):
        hlo.assert_hlo_invariant(lambda x: x.sum(1), x)
