"""Primitives that carry a program: what becomes of each, and that what is inside follows the same rules."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax.windowed_reductions import _select_and_scatter  # what jax.lax falls back to for other functions
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import xla_metadata_call

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform.rules.names import rule_name
from bijax.transform.rules.regions import IN_REGIONS, TAKEN_OUT
from bijax.transform.rules.registry import Kind, verdict
from tests.arrays import on_device
from tests.transform.carrying_primitives import carrying_primitives

pytestmark = pytest.mark.usefixtures("hopper")

X = on_device(np.random.default_rng(0).standard_normal((33, 64)), jnp.float32)
W = on_device(np.random.default_rng(1).standard_normal(64), jnp.float32)
PLACES = jnp.array([0, 3, 3, 1, 3])

ENTERED = frozenset(
    "composite cond custom_jvp_call custom_linear_solve custom_vjp_call custom_vmap_call eval_jaxpr jit linear_call"
    " remat2 remat_opt run_state scan shard_map while xla_metadata_call".split()
)
TAKEN = frozenset({"reduce", "reduce_window", "scatter_apply"})
OWN_PROGRAM = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})
BY_RULE = frozenset({"custom_fusion", "mpmd_map", "program_order", "run_scoped"})
KEPT = frozenset({"debug_callback", "inspect_sharding", "pallas_call"})
# Replaced as a whole; with a program that changes scores they are refused: test_cudnn_attention.py.
OF_CUDNN = frozenset({"dot_product_attention_fwd", "dot_product_attention_bwd"})


def curve(v: jax.Array) -> jax.Array:
    """A function of scalars, or of any arrays, whose operations are replaced or fenced."""
    return jnp.exp(jnp.tanh(v)) * 1.3 + v / 3.0


def rows(v: jax.Array) -> jax.Array:
    """A function of rows that holds a product, whose sums plain JAX cuts by the number of rows."""
    return curve(v) + (v @ W)[:, None]


def mix(a: jax.Array, b: jax.Array) -> jax.Array:
    """Associative: one plus 0.3 of it is the product of 1 + 0.3 a and 1 + 0.3 b."""
    return a * b * 0.3 + a + b


def on_shards(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(rows, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def with_rule(x: jax.Array) -> jax.Array:
    ruled = jax.custom_jvp(rows)
    ruled.defjvps(lambda t, *_: t)
    return ruled(x)


def with_both_rules(x: jax.Array) -> jax.Array:
    ruled = jax.custom_vjp(rows)
    ruled.defvjp(lambda x: (rows(x), None), lambda _, g: (g,))
    return ruled(x)


def with_batching_rule(x: jax.Array) -> jax.Array:
    ruled = custom_vmap(rows)
    ruled.def_vmap(lambda _, mapped, x: (rows(x), mapped[0]))
    return ruled(x)


def partitioned(x: jax.Array) -> jax.Array:
    ruled = custom_partitioning(curve)
    ruled.def_partition(partition=lambda *_: None, sharding_rule="... -> ...")
    return ruled(x)


def interpreted(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = curve(x_ref[...])

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def exported(x: jax.Array) -> jax.Array:
    return jax.export.export(jax.jit(rows))(x).call(x)


def solved(x: jax.Array) -> jax.Array:
    return lax.custom_linear_solve(lambda v: v * 2, x, lambda _, b: rows(b), symmetric=True)


def updating(how: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: getattr(x.at[:, PLACES], how)(curve(x[:, PLACES]))


ENTERING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "composite": lax.composite(rows, name="test.rows"),
    "cond": lambda x: lax.cond(x[0, 0] < 1e9, rows, jnp.negative, x),
    "custom_jvp_call": with_rule,
    "custom_linear_solve": solved,
    "custom_vjp_call": with_both_rules,
    "custom_vmap_call": with_batching_rule,
    "jit": jax.jit(rows),
    "linear_call": lambda x: linear_call(lambda r, v: rows(r) * v, lambda r, g: rows(r) * g, x, x),
    "remat2": jax.checkpoint(rows),
    "scan": lambda x: lax.scan(lambda c, _: (rows(c), None), x, None, length=2)[0],
    "shard_map": on_shards,
    "while": lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, rows(s[1])), (0, x))[1],
    "xla_metadata_call": lambda x: xla_metadata_call(rows, mark="test")(x),
}
TAKING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "scatter": lambda x: x.at[:, PLACES].apply(curve),
    "reduce": lambda x: lax.reduce(curve(x), np.float32(0), mix, (1,)),
    "reduce_window": lambda x: lax.reduce_window(curve(x), np.float32(0), mix, (1, 3), (1, 2), "SAME"),
}
REPLACING = {f"scatter-{how[:3]}": updating(how) for how in ("add", "subtract", "multiply", "max", "min")}
KEEPING = {
    "debug_callback": lambda x: (jax.debug.callback(lambda _: None, x), curve(x))[1],
    "pallas_call": interpreted,
}
REFUSING: dict[str, Callable[[jax.Array], jax.Array]] = {
    "call_exported": exported,
    "custom_partitioning": partitioned,
    "io_callback": lambda x: io_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "pure_callback": lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "select_and_scatter": lambda x: _select_and_scatter(
        x, lax.ge, (1, 2), (1, 2), ((0, 0), (0, 1)), x[:, ::2], np.float32(0), lambda a, b: a * 1.5 + b
    ),
}
RUNNING = {**ENTERING, **TAKING, **REPLACING, **KEEPING}


def outcome(name: str, platform: str) -> str:
    """What the tables say of a primitive."""
    names = {name, rule_name(name, {"update_jaxpr": object()})}
    kinds = {verdict(n, (jnp.dtype("float32"),), platform).kind for n in names}
    if names & TAKEN_OUT.keys() or kinds == {Kind.RECURSE}:
        return "its program is made invariant"
    if name in OWN_PROGRAM:
        return "its program is a part of JAX"
    return {Kind.REFUSE: "refused", Kind.ENTER: "its rule shows"}.get(*kinds, "kept")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_primitive_that_carries_a_program(platform: str) -> None:
    found = carrying_primitives()
    # The search finds what it must: JAX has these in every version.
    assert found >= {*ENTERING, *TAKING, *REPLACING, *REFUSING, "pallas_call"}
    expected = {
        **dict.fromkeys(found, "refused"),
        **dict.fromkeys(OWN_PROGRAM, "its program is a part of JAX"),
        **dict.fromkeys(ENTERED | TAKEN | {"scatter"}, "its program is made invariant"),
        **dict.fromkeys(KEPT | OF_CUDNN, "kept"),
        # A parameter of theirs is named `call`: the record of their operands, which is no program.
        **dict.fromkeys((name for name in found if name.startswith("bijax_")), "kept"),
        **dict.fromkeys(BY_RULE, "its rule shows"),
    }
    assert {name: outcome(name, platform) for name in found} == {name: expected[name] for name in found}
    assert set(TAKEN_OUT) == TAKEN
    assert set(IN_REGIONS) == TAKEN | OWN_PROGRAM | {"select_and_scatter"}


def primitives(jaxpr: Any) -> set[str]:
    names = {e.primitive.name for e in jaxpr.eqns}
    held = [v for e in jaxpr.eqns for p in e.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return names.union(*(primitives(p) for p in held if hasattr(p, "eqns")))


@pytest.mark.tier("full", fast=("scatter-min",))
@pytest.mark.parametrize("name", RUNNING)
def test_bits_do_not_follow_the_batch(name: str) -> None:
    program = RUNNING[name]
    assert name in primitives(jax.make_jaxpr(program)(X).jaxpr)
    run = jax.jit(bijax.invariant(program))
    whole = run(X)
    for size in (1, 5):
        assert_bits_equal(run(X[:size]), whole[:size])
    np.testing.assert_allclose(whole, program(X), rtol=1e-4, atol=1e-4)


def test_the_function_follows_the_batch_in_plain_jax() -> None:
    plain = jax.jit(ENTERING["jit"])
    assert any(not np.array_equal(plain(X[:size]), plain(X)[:size]) for size in (1, 2, 3, 5, 7))


@pytest.mark.parametrize("name", REFUSING)
def test_what_cannot_be_taken_apart_is_refused(name: str) -> None:
    with pytest.raises(bijax.NotInvariantError, match=name) as caught:
        jax.jit(bijax.invariant(REFUSING[name]))(X)
    assert caught.value.primitive == name
    assert "no invariant form is known" not in caught.value.reason
    refused = [o.primitive for o in bijax.audit(bijax.invariant(REFUSING[name]), X).variant]
    assert refused == [name]


def test_a_region_that_is_let_pass_holds_no_fences() -> None:
    program = bijax.invariant(REFUSING["select_and_scatter"], allow=("select_and_scatter",))
    assert_bits_equal(jax.jit(program)(X), jax.jit(REFUSING["select_and_scatter"])(X))
    product = bijax.invariant(lambda x: x.at[:, PLACES].multiply(x[:, PLACES]), allow=("scatter-mul",))
    np.testing.assert_allclose(product(X * 1j), (X * 1j).at[:, PLACES].multiply(X[:, PLACES] * 1j), rtol=1e-5)


@pytest.mark.parametrize("name", [*ENTERING, *TAKING])
def test_the_audit_lists_what_is_inside(name: str) -> None:
    program = TAKING.get(name) or ENTERING[name]
    inside = "mul" if name.startswith("reduce") else "tanh"
    plain, ours = (bijax.audit(f, X, platform="cpu") for f in (program, bijax.invariant(program)))
    for found, decision in ((plain, "variant"), (ours, "replaced")):
        assert {o.verdict for o in found.operations if o.primitive == inside} == {decision}
    if name in TAKING:
        assert [o.shapes for o in ours.operations if o.primitive == inside][-1].endswith("f32[]")
        assert {o.verdict for o in ours.operations if o.primitive == name} == {"replaced"}
    assert ours.invariant


def test_what_is_inside_a_function_is_refused_with_its_line() -> None:
    def largest(v: jax.Array) -> jax.Array:
        return lax.approx_max_k(jnp.stack([v, v]), 1, reduction_dimension=0)[0][0]

    program = bijax.invariant(lambda x: x.at[0].apply(largest))
    with pytest.raises(bijax.NotInvariantError, match=r"approx_top_k.*test_carried_programs\.py"):
        program(X)
    assert [o.primitive for o in bijax.audit(program, X).variant] == ["approx_top_k"]


def test_functions_that_were_traced_before() -> None:
    scatter = jax.jit(TAKING["scatter"])
    plain = scatter(X)
    traced = jax.make_jaxpr(scatter)(X)
    run = jax.jit(bijax.invariant(functools.partial(jax.core.eval_jaxpr, traced.jaxpr, traced.consts)))
    assert_bits_equal(run(X)[0], jax.jit(bijax.invariant(TAKING["scatter"]))(X))
    assert_bits_equal(jax.jit(TAKING["scatter"])(X), plain)
