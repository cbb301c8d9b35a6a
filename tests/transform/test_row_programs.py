"""Row programs under Mosaic's interpreter against the pieces that they stand for, and where they are found."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform import _row_layout, _row_programs
from pallas_kernels.contract import row_contract
from pallas_kernels.ops.row_program import hopper
from pallas_kernels.ops.rows.fold import fold_axis

Arrays = tuple[jax.Array, ...]
ROWS, HEADS, COLUMNS = 3, 2, 128


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted = functools.partial(hopper.run_program, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(_row_layout, "hopper", SimpleNamespace(run_program=interpreted))


def rewritten(jaxpr: Any) -> Any:
    with bijax.lowering_for("sm_90"):
        return _row_programs.with_row_programs(jaxpr, lambda eqn: not eqn.effects)


def evaluate(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], *, plain: bool = False) -> Arrays:
    """Computes a program operation by operation, sums in the order of the contract if they are not to be plain."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        given, name = [read(v) for v in eqn.invars], eqn.primitive.name
        found: Any
        if eqn.primitive is _row_programs.ROW_PROGRAM:
            found = _row_layout.run_row_program(*given, **eqn.params)
        elif name in ("jit", "pjit"):
            found = evaluate(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, given, plain=plain)
        elif name == "reduce_sum" and eqn.params["axes"] == (given[0].ndim - 1,) and not plain:
            found = [fold_axis(given[0], fold="sum", contract=row_contract(), axis=given[0].ndim - 1)]
        else:
            found = eqn.primitive.bind(*given, **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
        values |= dict(zip(eqn.outvars, found, strict=True))
    return tuple(read(v) for v in jaxpr.outvars)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    visible = jnp.arange(COLUMNS) < 40 * (1 + jnp.arange(ROWS)[:, None])
    return jax.nn.dot_product_attention(q, k, v, mask=visible[None, None], implementation="xla")


def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    """Of something behind it: otherwise the gradient would not wait for the forward pass."""
    y, pull = jax.vjp(lambda *a: jnp.tanh(attention(*a)), q, k, v)
    return (y, *pull(y))


def queries(*lead: int) -> Arrays:
    return (
        normal(0, *lead, 1, ROWS, HEADS, 16),
        normal(1, *lead, 1, COLUMNS, 1, 16),
        normal(2, *lead, 1, COLUMNS, 1, 16),
    )


def with_parts(x: jax.Array) -> Arrays:
    """A softmax whose maximum, exponentials and sum are used besides, turned round, in a mask of its own."""
    visible = jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) > 0
    x = jnp.where(visible.at[0, 0].set(False), x * 0.5, -jnp.inf)
    m = x.max(-1, keepdims=True)
    e = jnp.exp(x - m)
    s = e.sum(-1, keepdims=True)
    total = s[..., 0]  # which nan a sum gives is the processor's business
    return (e / s).swapaxes(0, 1), m, e.astype(jnp.bfloat16), jnp.where(jnp.isnan(total), 0, total), jnp.tanh(e)


def with_something_between(x: jax.Array) -> Arrays:
    """What divides has gone through an operation that no row program has: one kernel cannot stand on both sides."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / jnp.tanh(e.sum(-1, keepdims=True)), e


SCORES = normal(3, 2, ROWS, COLUMNS, dtype="float32")
CASES: dict[str, tuple[Callable[..., Any], Arrays, int]] = {
    "gradients": (gradients, queries(), 2),
    "mapped gradients": (jax.vmap(gradients), queries(2), 2),
    "parts used elsewhere": (with_parts, (SCORES,), 1),
    "not finite": (with_parts, (SCORES.at[0, 1, 3].set(jnp.nan).at[1, 1, 2].set(jnp.inf),), 1),
    "something between": (with_something_between, (SCORES,), 0),
    "short rows": (jax.nn.softmax, (SCORES[..., :120],), 0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] if "mapped" in name else []) for name in CASES]
)
def test_programs_have_the_bits_of_the_pieces(name: str) -> None:
    function, arrays, count = CASES[name]
    traced = jax.make_jaxpr(function)(*arrays)
    program = rewritten(traced.jaxpr)
    assert sum(e.primitive is _row_programs.ROW_PROGRAM for e in program.eqns) == count
    if not count:
        assert program is traced.jaxpr
        return
    found = evaluate(program, traced.consts, arrays)
    assert_bits_equal(found, evaluate(traced.jaxpr, traced.consts, arrays))


def test_plain_sums_differ() -> None:
    """The control: the order of the sum is in the bits."""
    traced = jax.make_jaxpr(jax.nn.softmax)(SCORES)
    found = evaluate(rewritten(traced.jaxpr), traced.consts, (SCORES,))
    plain = evaluate(traced.jaxpr, traced.consts, (SCORES,), plain=True)
    assert (np.asarray(found[0]) != np.asarray(plain[0])).any()


@pytest.mark.parametrize(("architecture", "count"), [("sm_90", 1), ("sm_80", 0)])
def test_programs_for_hopper_have_them(architecture: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_row_layout, "hopper", hopper)
    x = jax.ShapeDtypeStruct((4, 8, 256), jnp.float32)

    def lowered(function: Callable[..., Any]) -> str:
        with bijax.lowering_for(architecture):
            return str(jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text())

    assert lowered(bijax.invariant(jax.nn.softmax)).count("custom_call @mosaic_gpu") == count
    assert "mosaic_gpu" not in lowered(jax.nn.softmax)
