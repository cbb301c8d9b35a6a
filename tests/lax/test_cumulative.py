"""Cumulative reductions: an element's bits depend on its prefix alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from bijax.lax import cumulative
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from tests.arrays import on_device
from tests.lax.primitive_cases import FLOATS, lowers_for_cuda, normal, substitute

NAMES = ("cumsum", "cumprod", "cumlogsumexp")
RULES = {name: getattr(cumulative, name) for name in NAMES}


def every(x: jax.Array, axis: int, reverse: bool = False) -> dict[str, jax.Array]:
    return {name: rule(x, axis=axis, reverse=reverse) for name, rule in RULES.items()}


@pytest.mark.tier("full", fast=("(33,)-150-bfloat16",))
@pytest.mark.parametrize(("columns", "dtype"), [(150, "float32"), (150, "bfloat16")])
@pytest.mark.parametrize("sizes", [(33,), (2, 33)], ids=str)
def test_rows_keep_their_bits(sizes: tuple[int, ...], columns: int, dtype: str) -> None:
    rows = on_device(np.concatenate([*hostile_rows(0, (3, columns), dtype).values()]))
    assert_batch_invariant(
        lambda x: (every(x, 1), every(x, 1, True)),
        rows,
        batch_sizes=sizes,
        neighbours=("given", "huge", "nan"),
        modes=("jit",),
    )


@pytest.mark.tier("full")
def test_the_length_of_the_axis_does_not_matter() -> None:
    run = jax.jit(lambda x: every(x, 1))
    for name, data in hostile_rows(1, (2, 17000), "float32").items():
        whole = run(data)
        for n in (1, 128, 5000):
            prefix = jax.tree.map(lambda a, n=n: a[:, :n], whole)
            assert_bits_equal(run(data[:, :n]), prefix, err_msg=f"{name} {n}")


@pytest.mark.tier("full")
def test_a_prefix_does_not_see_what_follows() -> None:
    x = normal(2, 3, 300)
    hostile = x.at[:, 77:].set(jnp.nan).at[:, 200].set(jnp.inf)
    run = jax.jit(lambda x: every(x, 1))
    assert_bits_equal(*(jax.tree.map(lambda a: a[:, :77], run(a)) for a in (x, hostile)))


def test_a_triangular_product_does() -> None:
    """The control: another way to the same sums, in which what follows counts as zero times itself."""
    x = normal(2, 1, 300)
    hostile = x.at[:, 77:].set(jnp.nan)
    triangle = jnp.triu(jnp.ones((300, 300)))
    here, there = (np.asarray((a @ triangle)[:, :77]).view(np.uint32) for a in (x, hostile))
    assert (here != there).any()


@pytest.mark.tier("full", fast=("float32-True",))
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_results_are_those_of_lax(dtype: str, reverse: bool) -> None:
    with jax.enable_x64(dtype == "float64"):
        for shape in ((3, 0), (2, 140, 3)):
            x = normal(4, *shape).astype(dtype)
            for axis in range(len(shape)):
                found = jax.jit(every, static_argnums=(1, 2))(x, axis, reverse)
                order = -1 if reverse else 1
                wide = np.flip(np.asarray(x, np.float64), axis) if reverse else np.asarray(x, np.float64)
                expected = {
                    "cumsum": np.cumsum(wide, axis),
                    "cumprod": np.cumprod(wide, axis),
                    "cumlogsumexp": np.logaddexp.accumulate(wide, axis),
                }
                scale = {"cumsum": np.cumsum(np.abs(wide), axis), "cumlogsumexp": 8 + np.abs(expected["cumlogsumexp"])}
                for name, result in found.items():
                    assert (result.shape, result.dtype) == (x.shape, x.dtype)
                    ours = np.asarray(result, np.float64)
                    theirs = np.flip(expected[name], axis) if order < 0 else expected[name]
                    size = (
                        np.flip(scale.get(name, np.abs(expected[name])), axis)
                        if order < 0
                        else scale.get(name, np.abs(expected[name]))
                    )
                    # A chain of log2(128) + 1 combinations, 150 at most, and one rounding of the result.
                    eps = float(jnp.finfo("float64" if dtype == "float64" else "float32").eps)
                    bound = 150 * eps * size + float(jnp.finfo(dtype).eps) * np.abs(theirs)
                    smallest = float(jnp.finfo(dtype).tiny)
                    assert (np.abs(ours - theirs) <= bound + smallest).all(), (name, shape, axis)


def test_sums_are_the_stated_additions() -> None:
    def emulated(x: np.ndarray) -> np.ndarray:
        blocks = np.pad(x, (0, -len(x) % 128)).reshape(-1, 128)
        for k in range(7):
            blocks = np.concatenate([blocks[:, : 1 << k], blocks[:, : -(1 << k)] + blocks[:, 1 << k :]], axis=1)
        if len(blocks) > 1:
            blocks = np.concatenate([blocks[:1], emulated(blocks[:-1, -1])[:, None] + blocks[1:]])
        return blocks.ravel()[: len(x)]

    x = np.asarray(hostile_rows(5, (20000,), "float32")["normal"])
    cumsum = jax.jit(functools.partial(cumulative.cumsum, axis=0, reverse=False))
    assert_bits_equal(cumsum(jnp.asarray(x)), emulated(x))


def test_gradients_and_vmap() -> None:
    x, g = normal(6, 4, 200), normal(7, 4, 200)

    def gradient(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: lax.cumsum(x, 0), x)[1](g)[0]

    run = jax.jit(substitute(jax.vmap(gradient), RULES))
    expected = np.flip(np.cumsum(np.flip(np.asarray(g, np.float64), 1), 1), 1)
    np.testing.assert_allclose(run(x, g), expected, rtol=0, atol=1e-4)
    assert_bits_equal(run(x[2:3], g[2:3])[0], run(x, g)[2])


@pytest.mark.tier("full")
def test_zeros_infinities_and_other_platforms() -> None:
    zeros = cumulative.cumsum(jnp.array([-0.0, -0.0]), axis=0, reverse=False)
    assert_bits_equal(zeros, jnp.zeros(2))
    far = cumulative.cumlogsumexp(jnp.array([-jnp.inf, -jnp.inf, 0.0, jnp.inf, 1.0]), axis=0, reverse=False)
    assert np.asarray(far).tolist() == [-np.inf, -np.inf, 0.0, np.inf, np.inf]
    assert lowers_for_cuda(lambda x: every(x, 0), jnp.ones((300, 3), jnp.bfloat16))
