"""Pooling and sliding windows: forward, backward and forward-mode, with the parameters of JAX's primitives."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bijax.lax import windows
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.lax.primitive_cases import FLOATS, compared, equations, lowers_for_cuda, normal, substitute

NAMES = (
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_gather_add",
)
RULES = {name: getattr(windows, name) for name in NAMES}

WINDOWS: list[dict[str, Any]] = [
    {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 2, 2, 1), "padding": "VALID"},
    {"window_dimensions": (1, 3, 2, 1), "window_strides": (1, 2, 1, 1), "padding": "SAME"},
    {"window_dimensions": (1, 2, 3, 1), "window_strides": (1, 1, 2, 1), "padding": ((0, 0), (1, 2), (0, 3), (0, 0))},
    {"window_dimensions": (1, 9, 5, 1), "window_strides": (1, 1, 1, 1), "padding": "SAME"},
    {"window_dimensions": (2, 1, 1, 3), "window_strides": (1, 3, 1, 2), "padding": "VALID"},
]
DILATED: list[dict[str, Any]] = [
    dict(WINDOWS[1], window_dilation=(1, 2, 3, 1), padding="VALID"),
    dict(WINDOWS[2], base_dilation=(1, 2, 1, 1)),
    dict(WINDOWS[0], base_dilation=(1, 1, 3, 1), window_dilation=(1, 3, 1, 1)),
]


def pool(x: jax.Array, kind: str, **window: Any) -> jax.Array:
    init, op = {"sum": (0.0, lax.add), "max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min)}[kind]
    return lax.reduce_window(x, np.asarray(init, x.dtype), op, **window)


def everything(x: jax.Array, window: dict[str, Any]) -> dict[str, Any]:
    """Pools, and takes both derivatives in a direction made of `x`."""
    found = {}
    for kind in ("sum", "max", "min"):
        y, tangent = jax.jvp(lambda x, kind=kind: pool(x, kind, **window), (x,), (x * 0.5,))
        _, pull = jax.vjp(lambda x, kind=kind: pool(x, kind, **window), x)
        found[kind] = y, tangent, pull(y)[0]
    return found


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", FLOATS)
def test_examples_keep_their_bits(dtype: str) -> None:
    data = hostile_rows(0, (3, 8 * 7 * 3), dtype)
    x = on_device(np.concatenate([*data.values()])).reshape(-1, 8, 7, 3)
    for window in WINDOWS[1:2]:
        assert_batch_invariant(
            substitute(lambda x, window=window: everything(x, window), RULES),
            x,
            batch_sizes=(17,),
            neighbours=("given", "inf", "nan"),
            modes=("jit",),
        )


@pytest.mark.tier("full", fast=("('sum', 'max')-3-float32",))
@pytest.mark.parametrize(
    ("window", "dtype"),
    [*((i, "float32") for i in range(len(WINDOWS) + len(DILATED))), (1, "bfloat16"), (5, "float16")],
)
@pytest.mark.parametrize("kinds", [("sum", "max"), ("min",)], ids=str)
def test_results_are_those_of_lax(kinds: tuple[str, ...], window: int, dtype: str) -> None:
    x = normal(1, 3, 8, 7, 4, dtype=dtype)
    parameters = (WINDOWS + DILATED)[window]
    for kind in kinds:

        def both(x: jax.Array, kind: str = kind) -> Any:
            y, tangent = jax.jvp(lambda x: pool(x, kind, **parameters), (x,), (x * 0.5,))
            if window == len(WINDOWS) or window == len(WINDOWS) + 2:  # no gradient of dilated maxima in JAX
                return y, tangent
            return y, tangent, jax.vjp(lambda x: pool(x, kind, **parameters), x)[1](y)

        for name, rule in RULES.items():
            for equation in equations(both, x, name=name):
                stock, ours = compared(equation, rule)
                assert (stock.shape, stock.dtype) == (ours.shape, ours.dtype)
                if name in ("reduce_window_sum", "select_and_scatter_add"):
                    # At most 45 additions of numbers below 6; stock rounds each to the dtype.
                    bound = 45 * 6 * 45 * float(jnp.finfo(dtype).eps)
                    np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (ours, stock)), rtol=0, atol=bound)
                elif dtype == "float32" or name != "select_and_gather_add":  # narrow numbers tie, and stock is not firm
                    assert_bits_equal(ours, stock, err_msg=f"{name} {parameters}")


def test_sums_are_the_stated_additions() -> None:
    x = np.asarray(hostile_rows(2, (5, 40), "float32")["normal"])
    one = (1, 1)
    parameters: Any = {"window_strides": one, "padding": ((0, 0), (0, 0)), "base_dilation": one, "window_dilation": one}
    ours = windows.reduce_window_sum(jnp.asarray(x), window_dimensions=(3, 20), **parameters)
    rows = (x[0:3] + x[1:4]) + x[2:5]
    total = rows[:, 0:21]
    for k in range(1, 20):
        total = total + rows[:, k : k + 21]
    assert_bits_equal(ours, total)


def test_narrow_sums_are_rounded_once() -> None:
    """The control: stock sums of bfloat16 are rounded at every step."""
    x = normal(3, 4, 64, dtype="bfloat16")
    exact = np.asarray(x, np.float64).reshape(4, 4, 16).sum(-1)
    one = {"window_dimensions": (1, 16), "window_strides": (1, 16), "padding": "VALID"}
    (equation,) = equations(lambda x: pool(x, "sum", **one), x, name="reduce_window_sum")
    ours = windows.reduce_window_sum(x, **equation.params)
    errors = [np.abs(np.asarray(y, np.float64) - exact) for y in (ours, pool(x, "sum", **one))]
    assert (errors[0] <= 2.0**-8 * np.abs(exact) + 1e-5).all()
    assert (errors[1] > 2.0**-8 * np.abs(exact) + 1e-5).any()


def test_ties_nans_and_empty_windows() -> None:
    x = jnp.array([[1.0, 1.0, -jnp.inf, -jnp.inf, jnp.nan, 2.0, jnp.nan, jnp.nan]])
    g = jnp.array([[1.0, 2.0, 4.0, 8.0]])
    window: Any = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": "VALID"}
    for kind in ("max", "min"):

        def gradient(x: jax.Array, g: jax.Array, kind: str = kind) -> Any:
            pull = jax.vjp(lambda x: pool(x, kind, **window), x)[1]
            return pull(g), jax.jvp(lambda x: pool(x, kind, **window), (x,), (x * 3,))[1]

        assert_bits_equal(jax.jit(substitute(gradient, RULES))(x, g), jax.jit(gradient)(x, g))
    for kind in ("sum", "max", "min"):
        parameters = dict(window, window_dimensions=(1, 9))
        ours = substitute(lambda x, kind=kind, parameters=parameters: pool(x, kind, **parameters), RULES)(x)
        assert ours.shape == (1, 0)


@pytest.mark.tier("full")
def test_eight_bits_without_infinities() -> None:
    x = (normal(7, 4, 6) * 100).astype("float8_e4m3fn")
    window: Any = {"window_dimensions": (2, 2), "window_strides": (1, 2), "padding": ((0, 1), (1, 0))}
    parameters = {**window, "base_dilation": (1, 1), "window_dilation": (1, 1)}
    for kind in ("max", "min"):
        found = RULES[f"reduce_window_{kind}"](x, **parameters)
        assert found.dtype == x.dtype
        assert_bits_equal(found.astype(jnp.float32), pool(x.astype(jnp.float32), kind, **window))
    with pytest.raises(UnsupportedError, match="whose dtype has infinities"):
        windows.select_and_gather_add(x, x, select_prim=lax.ge_p, **parameters)


@pytest.mark.tier("full", fast=("max",))
@pytest.mark.parametrize("kind", ["max", "min"])
def test_gradients_where_negative_padding_cuts_elements_off(kind: str) -> None:
    # Small whole numbers: sums of them are exact. (JAX has no such gradient on a CPU, but for a cut operand.)
    x, g = jnp.round(normal(5, 5, 6) * 8), jnp.round(normal(6, 3, 3) * 8)
    window: Any = {"window_dimensions": (2, 2), "window_strides": (1, 2)}

    def gradient(x: jax.Array, g: jax.Array, padding: Any) -> jax.Array:
        return jax.vjp(lambda x: pool(x, kind, padding=padding, **window), x)[1](g)[0]

    found = jax.jit(substitute(lambda x, g: gradient(x, g, ((-1, 0), (1, -1))), RULES))(x, g)
    cut = jax.jit(lambda x, g: gradient(x, g, ((0, 0), (1, 0))))(x[1:, :5], g)
    assert_bits_equal(found, jnp.pad(cut, ((1, 0), (0, 1))))


@pytest.mark.tier("full")
def test_vmap_keeps_the_bits_and_other_platforms_lower() -> None:
    x = normal(4, 3, 2, 8, 7, 4)
    run = jax.jit(substitute(jax.vmap(lambda x: everything(x, WINDOWS[1])), RULES))
    one = jax.jit(substitute(lambda x: everything(x, WINDOWS[1]), RULES))
    assert_bits_equal(jax.tree.map(lambda a: a[1], run(x)), one(x[1]))
    assert lowers_for_cuda(substitute(lambda x: everything(x, WINDOWS[3]), RULES), x[0].astype(jnp.bfloat16))
