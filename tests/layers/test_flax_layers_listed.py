"""Every public layer of Flax has a drop-in or a reason, and the newer drop-ins have rows that stand alone."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import flax_layers
from bijax.testing import assert_bits_equal
from tests.layers.drop_ins import assert_same_bits, rows, with_gradient
from tests.tiers import full_only

HOLDS = "it only holds other modules, and computes nothing"
BASE = "a base class, without a method that computes"
FP8 = "it rounds to 8 bits with scales taken from the whole batch"
WITHOUT: dict[str, dict[str, str]] = {
    "nnx": {"Module": BASE, "RNNCellBase": BASE, "Sequential": HOLDS, "List": HOLDS, "Dict": HOLDS},
    "linen": {
        "Module": BASE,
        "RNNCellBase": BASE,
        "Sequential": HOLDS,
        **dict.fromkeys(("Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralOp", "Fp8Einsum"), FP8),
        "NANOOFp8DotGeneralOp": FP8,
    },
}
MODULES = {"nnx": (nnx, flax_layers.nnx, nnx.Module), "linen": (linen, flax_layers.linen, linen.Module)}
FLAX_POOLING = {"nnx": ("avg_pool", "max_pool", "min_pool", "pool"), "linen": ("avg_pool", "max_pool", "pool")}


@pytest.mark.parametrize("kind", MODULES)
def test_every_layer_of_flax_is_covered_or_named_with_a_reason(kind: str) -> None:
    theirs, ours, base = MODULES[kind]
    public = {n: c for n, c in vars(theirs).items() if inspect.isclass(c) and issubclass(c, base) and n[0] != "_"}
    covered = {name for name, layer in public.items() if layer in ours.DROP_INS}
    assert {name for name in covered if getattr(ours, name, None) is not ours.DROP_INS[public[name]]} == set()
    assert set(public) - covered == set(WITHOUT[kind])


@pytest.mark.parametrize("kind", MODULES)
def test_pooling_is_there_under_its_names(kind: str) -> None:
    theirs, ours, _ = MODULES[kind]
    pooling = theirs.pooling if kind == "linen" else theirs
    assert all(getattr(ours, name).__wrapped__ is getattr(pooling, name) for name in FLAX_POOLING[kind])


Layers = Any
Made = Callable[[jax.Array], Any]


def of_each_trace(made: Any) -> Callable[[], Any]:
    """Returns a function that makes nnx layers anew from their state, which may change where they are made."""
    structure, state = nnx.split(made)
    return lambda: nnx.merge(structure, jax.tree.map(lambda a: a, state))


def nnx_layers(layers: Layers, features: int = 5) -> Made:
    rngs, columns = nnx.Rngs(0), max(7, features // 2)
    normed = layers.WeightNorm(nnx.Linear(features, columns, rngs=rngs), rngs=rngs)
    spectral = layers.SpectralNorm(nnx.Linear(features, columns, rngs=rngs), rngs=rngs, update_stats=False)
    kept = layers.PReLU(0.3), normed, spectral
    fresh = of_each_trace(kept)

    def call(x: jax.Array) -> Any:
        pooled = layers.avg_pool(jnp.exp(x), (3,), strides=(2,)), layers.max_pool(x * x, (2,))
        return *(layer(x) for layer in fresh()), *pooled

    return call


def nnx_recurrent(layers: Layers, features: int = 5) -> Made:
    one, two = (layers.RNN(nnx.SimpleCell(features, 6, rngs=nnx.Rngs(i))) for i in range(2))
    fresh = of_each_trace(layers.Bidirectional(one, two))
    return lambda x: fresh()(x)


def linen_layers(layers: Layers, features: int = 5) -> Made:
    kinds = (layers.PReLU(), {}), (layers.WeightNorm(linen.Dense(7)), {})
    kinds = *kinds, (layers.SpectralNorm(linen.Dense(7)), {"update_stats": False})
    variables = [layer.init(jax.random.key(0), jnp.ones((1, 7, features)), **options) for layer, options in kinds]

    def call(x: jax.Array) -> Any:
        pooled = layers.avg_pool(jnp.exp(x), (3,), strides=(2,)), layers.max_pool(x * x, (2,))
        made = (layer.apply(v, x, **options) for v, (layer, options) in zip(variables, kinds, strict=True))
        return *made, *pooled

    return call


def linen_recurrent(layers: Layers, features: int = 5) -> Made:
    layer = layers.Bidirectional(layers.RNN(linen.SimpleCell(6)), layers.RNN(linen.SimpleCell(6)))
    variables = layer.init(jax.random.key(0), jnp.ones((1, 7, features)))
    return lambda x: layer.apply(variables, x)


CASES = [
    pytest.param(nnx_layers, flax_layers.nnx, id="nnx"),
    full_only(linen_layers, flax_layers.linen),
    full_only(nnx_recurrent, flax_layers.nnx),
    full_only(linen_recurrent, flax_layers.linen),
]


@pytest.mark.parametrize(("make", "layers"), CASES)
@pytest.mark.parametrize("gradient", [False, full_only(True)], ids=["results", "and gradients"])
def test_rows_do_not_depend_on_their_batch(gradient: bool, make: Callable[[Layers], Made], layers: Layers) -> None:
    x = rows(6, 7, 5)
    run = jax.jit(with_gradient(make(layers)) if gradient else make(layers))
    whole = run(x)
    hostile = run(x.at[jnp.array([0, 2, 5])].set(jnp.nan))
    alone = run(x[3:4])
    for w, h, a in zip(*map(jax.tree.leaves, (whole, hostile, alone)), strict=True):
        assert_bits_equal(np.asarray(h)[[1, 3, 4]], np.asarray(w)[[1, 3, 4]])
        assert_bits_equal(a, w[3:4])


@pytest.mark.parametrize(("make", "original"), [(nnx_layers, nnx), full_only(linen_recurrent, linen)])
def test_the_numbers_are_those_of_the_originals_which_follow_the_batch(
    make: Callable[..., Made], original: Layers
) -> None:
    ours = flax_layers.nnx if original is nnx else flax_layers.linen
    x = rows(6, 7, 5)
    stock = jax.jit(make(original))
    for mine, theirs in zip(*(jax.tree.leaves(run(x)) for run in (jax.jit(make(ours)), stock)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
    # How many rows, features and columns it takes depends on the processor and the version of JAX.
    x, stock = rows(33, 7, 512), jax.jit(make(original, 512))
    whole, alone = (jax.tree.leaves(stock(part)) for part in (x, x[:1]))
    assert any((np.asarray(a) != np.asarray(w)[:1]).any() for a, w in zip(alone, whole, strict=True))


@pytest.mark.tier("full")
def test_dropout_of_a_row_follows_key_and_place_not_the_batch() -> None:
    x = rows(8, 12)

    def run(x: jax.Array, key: jax.Array) -> jax.Array:
        return flax_layers.linen.Dropout(0.4, deterministic=False).apply({}, x, rngs={"dropout": key})

    run = jax.jit(run)
    whole = run(x, jax.random.key(1))
    assert 0 < int((whole == 0).sum()) < whole.size
    assert_same_bits(run(x[:3], jax.random.key(1)), whole[:3])
    # With a key for each row it goes with the row.
    keys = jax.random.split(jax.random.key(2), 8)
    each = jax.jit(jax.vmap(run))
    assert_same_bits(each(x[4:6], keys[4:6]), each(x, keys)[4:6])
