"""Row programs under Mosaic's interpreter against the pieces that they stand for, and where they are found."""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal

import bijax
from bijax.lax.product_of_parts import product_of_parts
from bijax.testing import assert_bits_equal
from bijax.transform.fusion import _layout, _programs
from bijax.transform.fusion._products import PRODUCT, products_of
from bijax.transform.fusion._regions import Program
from pallas_kernels.contract import row_contract
from pallas_kernels.matmul.hopper import parts
from pallas_kernels.registry import Kernel, registered
from pallas_kernels.row_program import hopper
from pallas_kernels.rows.fold import fold_axis
from tests.arrays import on_device

Arrays = tuple[jax.Array, ...]
ROWS, HEADS, COLUMNS = 3, 2, 128


INTERPRETED = "sm_999"
"""A target whose kernels are Hopper's under the interpreter."""


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    kernel = functools.partial(hopper.run_program, interpret=plgpu.InterpretGPUParams())
    with registered(Kernel("row_program", INTERPRETED, kernel, row_contract())), bijax.lowering_for(INTERPRETED):
        yield


def rewritten(jaxpr: Any) -> Any:
    return _programs.with_row_programs(jaxpr, lambda eqn: not eqn.effects)


def evaluate(jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], *, plain: bool = False) -> Arrays:
    """Computes a program operation by operation, sums in the order of the contract if they are not to be plain."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        given, name = [read(v) for v in eqn.invars], eqn.primitive.name
        found: Any
        if eqn.primitive is _programs.ROW_PROGRAM:
            found = _layout.run_row_program(*given, **eqn.params)
        elif name in ("jit", "pjit"):
            found = evaluate(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, given, plain=plain)
        elif name == "reduce_sum" and eqn.params["axes"] == (given[0].ndim - 1,) and not plain:
            total = fold_axis(given[0], fold="sum", contract=row_contract(), axis=given[0].ndim - 1)
            found = [total.astype(given[0].dtype)]
        else:
            found = eqn.primitive.bind(*given, **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
        values |= dict(zip(eqn.outvars, found, strict=True))
    return tuple(read(v) for v in jaxpr.outvars)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def put(x: np.ndarray, place: tuple[int, ...], number: float) -> np.ndarray:
    """Returns an array with another number at a place."""
    x = x.copy()
    x[place] = number
    return x


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    visible = jnp.arange(COLUMNS) < 40 * (1 + jnp.arange(ROWS)[:, None])
    return jax.nn.dot_product_attention(q, k, v, mask=visible[None, None], implementation="xla")


def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    """Of something after it: otherwise the gradient would not wait for the forward pass."""
    y, pull = jax.vjp(lambda *a: jnp.tanh(attention(*a)), q, k, v)
    return (y, *pull(y))


def narrow_gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    """The same with scores and probabilities of bfloat16, as Flax's own attention has them."""
    visible = (jnp.arange(COLUMNS) < 40 * (1 + jnp.arange(ROWS)[:, None]))[None, None]
    k, v = jnp.repeat(k, HEADS, 2), jnp.repeat(v, HEADS, 2)

    def narrow(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(linen.dot_product_attention(q, k, v, mask=visible))

    y, pull = jax.vjp(narrow, q, k, v)
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


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy as one writes it in JAX; labels that are no columns count as nan."""
    scores = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).mean()


def loss_and_gradient(logits: jax.Array, labels: jax.Array) -> Arrays:
    loss, slopes = jax.value_and_grad(mean_loss)(logits, labels)
    return loss, slopes


def residual_norm(x: jax.Array, y: jax.Array, weight: jax.Array) -> Arrays:
    """RMSNorm after a residual addition, both of which go on."""
    total = x + y
    wide = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    return total, (wide * scale * (weight.astype(jnp.float32) + 1)).astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """As Flax computes it; the mean of the squares less the square of the mean may be a negative number."""
    layer = linen.LayerNorm(dtype=jnp.bfloat16)
    normed: Any = layer.apply({"params": {"scale": weight, "bias": bias}}, x)
    return jnp.asarray(normed)


def optax_gradient(logits: jax.Array, labels: jax.Array) -> Arrays:
    """The same loss as optax has it, which treats rows of nothing but -inf apart."""

    def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean(), each

    slopes, each = jax.grad(loss, has_aux=True)(logits)
    return each, slopes


SCORES = normal(3, 2, ROWS, COLUMNS, dtype="float32")
ROW = normal(6, 1, 2, 1, 384)
LOGITS = put(put(normal(4, 2, ROWS, 520, dtype="float32"), (0, 1, 7), np.nan), (1, 0, 3), np.inf)
LABELS = np.array([[3, -1, 519], [520, 5000, 0]], np.int32)
CASES: dict[str, tuple[Callable[..., Any], Arrays, int]] = {
    "gradients": (gradients, queries(), 2),
    "mapped gradients": (jax.vmap(gradients), queries(2), 2),
    "bfloat16 scores": (narrow_gradients, queries(), 2),
    "parts used elsewhere": (with_parts, (SCORES,), 1),
    "not finite": (with_parts, (put(put(SCORES, (0, 1, 3), np.nan), (1, 1, 2), np.inf),), 1),
    "cross entropy": (loss_and_gradient, (LOGITS, LABELS), 1),
    "cross entropy of a sequence": (loss_and_gradient, (LOGITS[1:], LABELS[1:]), 1),
    "cross entropy of last tokens": (loss_and_gradient, (LOGITS[:, 1:2], LABELS[:, 1:2]), 1),
    "cross entropy of a token": (loss_and_gradient, (LOGITS[:1, :1], LABELS[:1, :1]), 1),
    "optax": (optax_gradient, (put(LOGITS, (1, 1), -np.inf), LABELS), 1),
    "norm": (residual_norm, (ROW, normal(7, 1, 2, 1, 384), normal(8, 384)), 1),
    "layer norm": (layer_norm, (put(ROW, (0, 0), 3), normal(7, 384, dtype="float32"), normal(8, 384)), 1),
    "norm of float32": (residual_norm, (SCORES, SCORES, SCORES[0, 0]), 0),
    "something between": (with_something_between, (SCORES,), 0),
    "short rows": (jax.nn.softmax, (SCORES[..., :120],), 0),
}
FEW = (*("not finite", "cross entropy", "norm of float32", "something between", "short rows"),)


@pytest.mark.tier("full", fast=FEW)
@pytest.mark.parametrize("name", CASES)
def test_programs_have_the_bits_of_the_pieces(name: str) -> None:
    function, arrays, count = CASES[name]
    traced = jax.make_jaxpr(function)(*arrays)
    program = rewritten(traced.jaxpr)
    assert sum(e.primitive is _programs.ROW_PROGRAM for e in program.eqns) == count
    if not count:
        assert program is traced.jaxpr
        return
    found = evaluate(program, traced.consts, arrays)
    assert_bits_equal(found, evaluate(traced.jaxpr, traced.consts, arrays))


@pytest.mark.tier("full")
@pytest.mark.parametrize("weights", [(COLUMNS, 16), pytest.param((16, COLUMNS), marks=pytest.mark.tier("full"))])
def test_gradients_of_logits_are_written_in_parts(weights: tuple[int, int]) -> None:
    """Where products by bfloat16 alone take them: the parts are those that the products would make."""
    x, w = normal(5, 2, 8, 16), normal(6, *weights)
    labels = on_device(np.random.default_rng(7).integers(0, COLUMNS, (2, 8)))
    spelling = "btd,vd->btv" if weights[0] == COLUMNS else "btd,dv->btv"

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return mean_loss(jnp.einsum(spelling, x, w, preferred_element_type=jnp.float32), labels)

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w)
    program = rewritten(traced.jaxpr)
    (rows,) = (e for e in program.eqns if e.primitive is _programs.ROW_PROGRAM)
    assert [e.invars[0] for e in program.eqns if e.primitive is PRODUCT] == rows.outvars[:1] * 2
    logits = program.eqns[0].outvars[0]
    short = program.replace(eqns=program.eqns[: program.eqns.index(rows) + 1], outvars=[rows.outvars[0], logits])
    found, taken = evaluate(short, traced.consts, (x, w))
    slopes = jax.make_jaxpr(jax.grad(lambda z: mean_loss(z, labels)))(taken)
    (pieces,) = evaluate(slopes.jaxpr, slopes.consts, (taken,))
    assert_bits_equal(found, parts._interleaved(pieces.reshape(16, COLUMNS), 2, 16))


def exact_product(x: jax.Array, w: jax.Array, *, transpose_w: bool, **_: Any) -> jax.Array:
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    return jnp.matmul(x, w.mT if transpose_w else w, precision="highest")


def exact_gradient(x: jax.Array, g: jax.Array, **_: Any) -> jax.Array:
    return exact_product(x.mT, g, transpose_w=False)


Dimensions = tuple[tuple[int, ...], tuple[int, ...]]

PRODUCTS: list[tuple[tuple[int, ...], Dimensions, Dimensions, bool]] = [
    ((128, 3), ((2,), (0,)), ((), ()), True),
    ((3, 5, 128), ((2,), (2,)), ((), ()), True),
    ((2, 16, 3), ((0, 1), (0, 1)), ((), ()), True),
    ((16, 2, 3), ((0, 1), (1, 0)), ((), ()), True),
    ((128, 2, 3), ((2,), (0,)), ((0,), (1,)), True),
    ((2, 5, 3, 128), ((2,), (3,)), ((0,), (0,)), True),
    ((16, 2, 3), ((1,), (0,)), ((0,), (1,)), True),
    ((2, 3, 16), ((1,), (2,)), ((0,), (0,)), False),  # the other operand is stored by rows
    ((16, 3), ((1,), (0,)), ((), ()), False),  # some rows are contracted
    ((16, 128, 3), ((2,), (1,)), ((1,), (0,)), False),  # the rows of an entry do not lie together
    ((2, 16, 128, 3), ((2,), (2,)), ((0, 1), (0, 1)), False),  # an entry has one row
]
"""The other operand of a product, what is contracted, what is a batch, and whether it takes the parts of rows."""


@pytest.mark.tier("full")
@pytest.mark.parametrize("on_the_left", [True, False])
def test_products_take_parts(on_the_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "launch", SimpleNamespace(matmul=exact_product, weight_gradient=exact_gradient))
    draw = np.random.default_rng(0)
    x = on_device(draw.integers(-300, 300, (2, 16, 128)), jnp.float32)
    for shape, contracting, batch, fits in PRODUCTS:
        other = on_device(draw.integers(-3, 3, shape), jnp.bfloat16)
        numbers = (contracting, batch) if on_the_left else (contracting[::-1], batch[::-1])
        multiply = functools.partial(
            jax.lax.dot_general, dimension_numbers=numbers, precision="highest", preferred_element_type=jnp.float32
        )
        operands = (x, other) if on_the_left else (other, x)
        jaxpr = jax.make_jaxpr(multiply)(*operands).jaxpr
        value = jaxpr.invars[0 if on_the_left else 1]
        found = products_of(value, Program(jaxpr.eqns, (), [True]), lambda _: True)
        # Sums over several dimensions go along the order of the left operand's.
        assert bool(found) == (fits and (on_the_left or contracting[1] == tuple(sorted(contracting[1])))), shape
        for product in found.values():
            with bijax.lowering_for("sm_90"):
                y = product_of_parts(parts._interleaved(x.reshape(32, 128), 3, 16), other, product=product)
            assert_bits_equal(y, multiply(*operands))


def test_plain_sums_differ() -> None:
    """The control: the order of the sum is in the bits."""
    traced = jax.make_jaxpr(jax.nn.softmax)(SCORES)
    found = evaluate(rewritten(traced.jaxpr), traced.consts, (SCORES,))
    plain = evaluate(traced.jaxpr, traced.consts, (SCORES,), plain=True)
    assert (np.asarray(found[0]) != np.asarray(plain[0])).any()


@pytest.mark.parametrize(("architecture", "count"), [("sm_90", 1), ("sm_80", 0)])
def test_programs_for_hopper_have_them(architecture: str, count: int) -> None:
    x = jax.ShapeDtypeStruct((4, 8, 256), jnp.float32)

    def lowered(function: Callable[..., Any]) -> str:
        with bijax.lowering_for(architecture):
            return str(jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text())

    assert lowered(bijax.invariant(jax.nn.softmax)).count("custom_call @mosaic_gpu") == count
    assert "mosaic_gpu" not in lowered(jax.nn.softmax)
