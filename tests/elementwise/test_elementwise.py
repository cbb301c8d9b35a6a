"""Element-wise functions: the same bits at every batch size, in every place, and one compilation for equal programs."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops.elementwise._straight_line import straight_line
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from tests.arrays import on_device
from tests.tiers import full_only

Function = Callable[..., Any]

UNARY: tuple[Function, ...] = (
    jnp.tanh,
    jax.nn.silu,
    jax.nn.gelu,
    jax.nn.softplus,
    jnp.exp,
    jnp.sin,
    jnp.cbrt,
    jax.scipy.special.erf,
    lambda a: jnp.log1p(jnp.abs(a)),
    lambda a: jax.lax.rsqrt(a * a + 1),
    lambda a: jnp.power(jnp.abs(a) + 0.1, 1.7),
    lambda a: a**3,
)
TERNARY: tuple[Function, ...] = (
    lambda a, b, c: a * b + c,
    lambda a, b, c: a / (1 + b * b) + c,
    lambda a, b, c: jnp.where(a > b, a * c, b + c * a),
    lambda a, b, c: jnp.maximum(a, b) * c + a,
    lambda a, b, c: a * b * c + a * b - c,
)


def random_program(seed: int) -> Function:
    """A function of x, y and w: ten random steps, each on some of the values before it."""
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(2), rng.integers(60), rng.integers(0, 9, 3), float(rng.normal())) for _ in range(10)]

    def program(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        values = [x, y, w]
        for kind, which, (i, j, k), number in steps:
            if kind:
                values.append(UNARY[which % len(UNARY)](values[-1 - i % 3] * number))
            else:
                f = TERNARY[which % len(TERNARY)]
                values.append(f(values[-1 - i % 3], values[-1 - j % len(values)], values[-1 - k % len(values)]))
        return values[-1] + values[-2] * values[-3] + 0 * x * w

    return program


FUNCTIONS: dict[str, Function] = {
    "swiglu": lambda x, y, w: jax.nn.silu(x) * y,
    "rotary": lambda x, y, w: (x * w - y * (1 - w), y * w + x * (1 - w)),
    "masked": lambda x, y, w: {"gelu": jnp.where(x > y, jax.nn.gelu(x), w), "mask": x > y},
}


def with_gradients(f: Function) -> Function:
    """Returns a function of x, y, a cotangent and w: the results and the gradients of x and y."""

    def both(x: jax.Array, y: jax.Array, g: jax.Array, w: jax.Array) -> Any:
        def floats(x: jax.Array, y: jax.Array) -> list[jax.Array]:
            return [leaf for leaf in jax.tree.leaves(f(x, y, w)) if leaf.dtype != bool]

        results, pull = jax.vjp(floats, x, y)
        return f(x, y, w), pull([g.astype(r.dtype) for r in results])

    return both


def batch(columns: int, dtype: str, *, hostile: bool) -> tuple[jax.Array, ...]:
    if hostile:
        x, y = (np.concatenate(list(hostile_rows(seed, (3, columns), dtype).values())) for seed in (0, 1))
    else:
        x, y = (hostile_rows(seed, (27, columns), dtype)["normal"] for seed in (0, 1))
    g = hostile_rows(2, x.shape, dtype)["normal"]
    w = hostile_rows(3, (1, columns), dtype)["normal"][0]
    return jnp.asarray(x), jnp.asarray(y[::-1].copy()), jnp.asarray(g), jnp.asarray(w)


@pytest.mark.tier("full", fast=("(1, 33)-bfloat16",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(1, 33), (2, 130)], ids=str)
def test_functions_keep_their_bits(dtype: str, sizes: tuple[int, ...]) -> None:
    assert_batch_invariant(
        lambda *a: {name: with_gradients(bijax.elementwise(f))(*a) for name, f in FUNCTIONS.items()},
        *batch(77, dtype, hostile=True),
        batch_axes=(0, 0, 0, None),
        batch_sizes=sizes,
        neighbours=("given", "huge", "inf", "nan"),
        modes=("jit",),
    )


# Programs whose bits plain JAX changes with the batch, on the machines seen.
SEEDS = (22, 27)


@pytest.mark.tier("full", fast=("(22,)-5",))
@pytest.mark.parametrize("columns", [5, 300])
@pytest.mark.parametrize("seeds", [SEEDS[:1], SEEDS], ids=str)
def test_random_programs_keep_their_bits(seeds: tuple[int, ...], columns: int) -> None:
    assert_batch_invariant(
        lambda *a: [with_gradients(bijax.elementwise(random_program(seed)))(*a) for seed in seeds],
        *batch(columns, "float32", hostile=False),
        batch_axes=(0, 0, 0, None),
        batch_sizes=(7, 257),
        neighbours=("given",),
        modes=("jit",),
    )


def test_control_plain_jax_differs() -> None:
    """The same harness finds that plain JAX changes the bits of such programs with the batch."""
    report = batch_variance_report(
        lambda *a: [with_gradients(random_program(seed))(*a) for seed in SEEDS],
        *batch(5, "float32", hostile=False),
        batch_axes=(0, 0, 0, None),
        batch_sizes=(7, 33),
        neighbours=("given",),
        modes=("jit",),
    )
    assert report.differing_elements > 0


def test_an_element_does_not_know_its_place() -> None:
    x = on_device(hostile_rows(4, (1, 1000), "float32")["normal"][0])
    f = bijax.elementwise(lambda x: jax.nn.gelu(x) * 0.3 + jnp.exp(-x * x))
    whole = f(x)
    for start, stop in ((0, 1), (3, 130), (128, 256), (7, 999), (500, 517)):
        assert_bits_equal(f(x[start:stop]), whole[start:stop], err_msg=f"[{start}:{stop}]")
    assert_bits_equal(f(x.reshape(10, 100).T), whole.reshape(10, 100).T, err_msg="transposed")
    assert_bits_equal(f(x[5]), whole[5], err_msg="without dimensions")


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["few", "every"])
def test_transformations_keep_the_bits(every: bool) -> None:
    x, y, g, w = (a[:12] if a.ndim > 1 else a for a in batch(77, "float32", hostile=False))
    f = with_gradients(bijax.elementwise(FUNCTIONS["masked"]))
    expected = f(x, y, g, w)

    def split(a: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(3, 4, *a.shape[1:]), a)

    def join(a: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(12, *a.shape[2:]), a)

    rows = split((x, y, g))
    assert_bits_equal(jax.jit(f)(x, y, g, w), expected, err_msg="jit")
    with jax.disable_jit():
        assert_bits_equal(f(x, y, g, w), expected, err_msg="disable_jit")
    if not every:
        assert_bits_equal(join(jax.vmap(f)(*rows, jnp.stack([w] * 3))), expected, err_msg="vmap with weights")
        return
    assert_bits_equal(jax.vmap(f, (0, 0, 0, None))(x, y, g, w), expected, err_msg="vmap")
    nested = jax.vmap(jax.vmap(f, (0, 0, 0, None)), (1, 1, 1, None), 1)
    assert_bits_equal(join(nested(*rows, w)), expected, err_msg="nested vmap")
    assert_bits_equal(join(jax.vmap(f)(*rows, jnp.stack([w] * 3))), expected, err_msg="vmap with weights")
    assert_bits_equal(join(jax.lax.scan(lambda c, r: (c, f(*r, w)), 0, rows)[1]), expected, err_msg="scan")
    remat = with_gradients(jax.checkpoint(bijax.elementwise(FUNCTIONS["masked"])))
    assert_bits_equal(jax.jit(remat)(x, y, g, w), expected, err_msg="remat")
    with jax.enable_x64(True):
        assert_bits_equal(jax.jit(f)(x, y, g, w), expected, err_msg="x64")


@pytest.mark.tier("full")
def test_gradients_of_broadcast_arguments_do_not_mind_the_layout() -> None:
    """A number, a row, a column: summed in one fixed order, eager, under jit and vmap."""
    x, _, g, w = batch(77, "float32", hostile=False)
    f = bijax.elementwise(lambda x, w, column, number: jnp.tanh(x * w) * column + number)
    column, number = x[:, :1] * 2, jnp.float32(0.3)

    def gradients(g: jax.Array) -> Any:
        return jax.vjp(f, x, w, column, number)[1](g)

    expected = gradients(g)
    assert [a.shape for a in expected] == [x.shape, w.shape, column.shape, ()]
    assert_bits_equal(jax.jit(gradients)(g), expected)
    stacked = jax.vmap(gradients)(jnp.stack([g, 2 * g]))
    assert_bits_equal(jax.tree.map(lambda a: a[0], stacked), expected)
    assert_bits_equal(jax.tree.map(lambda a: a[1], stacked), gradients(2 * g))
    assert_bits_equal(expected[3], bijax.sum(g))
    products = bijax.elementwise(lambda x, w, g: jnp.tanh(x * w) * g)(x, w, g)
    assert_bits_equal(expected[2], bijax.sum(products, 1, keepdims=True))


def line(f: Function, count: int = 1, dtype: str = "float32") -> Any:
    shape = jax.ShapeDtypeStruct((3, 5), dtype)
    return straight_line("test", jax.jit(f).trace(*[shape] * count).jaxpr, (3, 5))


def test_equal_programs_are_one() -> None:
    """So a new lambda at each call does not compile anew; programs that differ in anything do not meet."""
    first, second = (line(lambda x, y: jax.nn.silu(x) * y, 2) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    others = [
        line(lambda x, y: y * jax.nn.silu(x), 2),
        line(lambda x: jnp.maximum(x, 0.0)),
        line(lambda x: jnp.maximum(x, -0.0)),
        line(lambda x: jnp.maximum(x, 1e-45)),
        line(lambda x: x.astype(jnp.bfloat16)),
        line(lambda x: x.astype(jnp.float16)),
        line(lambda x: x**2),
        line(lambda x: x**3),
    ]
    assert len({first, *others}) == 9


def test_functions_are_let_go() -> None:
    def use() -> weakref.ref[Any]:
        def f(x: jax.Array) -> jax.Array:
            return jnp.tanh(x) * 3

        jax.grad(lambda x: bijax.elementwise(f)(x).sum())(jnp.ones(3))
        return weakref.ref(f)

    alive = use()
    gc.collect()
    assert alive() is None
