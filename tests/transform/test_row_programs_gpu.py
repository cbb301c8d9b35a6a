"""Row programs on a Hopper GPU against the pieces that they stand for, and rows alone against rows in a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform.fusion import _regions

pytestmark = pytest.mark.gpu

Arrays = tuple[jax.Array, ...]


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def with_gradient(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Arrays:
    y, pull = jax.vjp(lambda *a: jnp.tanh(attention(*a)), q, k, v)
    return (y, *pull(g))


def narrow(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Arrays:
    """Flax's attention, with scores and probabilities of bfloat16."""
    causal = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))[None, None]
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(linen.dot_product_attention(q, k, v, mask=causal))

    y, pull = jax.vjp(attend, q, k, v)
    return (y, *pull(g))


def masked(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Arrays:
    """A mask that differs by sequence and head, a row without keys, and scores that are used besides."""
    visible = jnp.abs(jnp.sin(jnp.arange(q.shape[0] * 2 * 64.0))).reshape(-1, 2, 64)
    visible = jnp.repeat(visible, q.shape[2] // 2, 1)[..., None] > jnp.linspace(0.1, 1.0, k.shape[1])
    scores = jnp.einsum("btnh,bsnh->bnts", q[:, :64], jnp.repeat(k, 4, 2), preferred_element_type=jnp.float32) * 0.3
    scores = jnp.where(visible, scores, -jnp.inf)
    p = jax.nn.softmax(scores, -1)
    return p.astype(v.dtype), jnp.exp(scores - scores.max(-1, keepdims=True)), p.max(-1), scores


def pieces_and_program(function: Callable[..., Arrays], *arrays: jax.Array) -> tuple[Arrays, Arrays]:
    found = []
    for columns in (0, _regions.MOST_COLUMNS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_regions, "MOST_COLUMNS", columns)
            program = jax.jit(bijax.invariant(lambda *a: function(*a))).lower(*arrays).compile()
            assert ("bijax_row_program" in str(program.as_text())) == (columns > 0)
            found.append(program(*arrays))
    return found[0], found[1]


@pytest.mark.parametrize("function", [with_gradient, narrow])
@pytest.mark.parametrize("keys", [128, 520, 2048])
def test_attention_has_the_bits_of_its_pieces(keys: int, function: Callable[..., Arrays]) -> None:
    q, k, v, g = (normal(i, 2, keys, n, 64) for i, n in enumerate((8, 2, 2, 8)))
    pieces, program = pieces_and_program(function, q, k, v, g)
    assert_bits_equal(program, pieces)
    alone, _ = pieces_and_program(function, q[1:], k[1:], v[1:], g[1:])
    assert_bits_equal(tuple(a[1:] for a in program), alone)


@pytest.mark.parametrize("special", [1e30, np.inf, np.nan])
def test_masks_and_numbers_that_are_not_finite(special: float) -> None:
    q, k, v, g = (normal(i, 2, 512, n, 64) for i, n in enumerate((8, 2, 2, 8)))
    q = q.at[0, 3, 2, 5].set(special).at[1, 7].multiply(special)
    pieces, program = pieces_and_program(masked, q, k, v, g)
    assert_bits_equal(program, pieces)


def test_mapped_attention_has_the_bits_of_its_pieces() -> None:
    q, k, v, g = (normal(i, 3, 2, 256, n, 64) for i, n in enumerate((8, 2, 2, 8)))
    pieces, program = pieces_and_program(jax.vmap(with_gradient), q, k, v, g)
    assert_bits_equal(program, pieces)


def written_out(logits: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1)[..., 0]


def with_gradients(loss: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    def found(x: jax.Array, w: jax.Array, labels: jax.Array) -> Arrays:
        def total(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = loss(jnp.einsum("btd,vd->btv", x, w, preferred_element_type=jnp.float32), labels)
            return each.sum() / 64, each

        slopes, each = jax.grad(total, (0, 1), has_aux=True)(x, w)
        return each, *slopes

    return found


def norms(x: jax.Array, y: jax.Array, weight: jax.Array, bias: jax.Array) -> Arrays:
    """RMSNorm after a residual addition, both of which go on, and Flax's LayerNorm of another sum."""
    total = x + y
    wide = total.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    scaled = (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
    layer = linen.LayerNorm(dtype=x.dtype)
    normed: Any = layer.apply({"params": {"scale": weight, "bias": bias}}, jnp.sin(x) + y)
    return total, scaled, normed


@pytest.mark.parametrize("columns", [128, 1000, 2048, 3072, 20480])
def test_norms_have_the_bits_of_their_pieces(columns: int) -> None:
    x, y, weight, bias = normal(0, 3, 70, columns), normal(1, 3, 70, columns), normal(2, columns), normal(3, columns)
    x = x.at[0, 1].set(3).at[1, 2, 5].set(np.inf).at[1, 3, 7].set(np.nan).at[2, 4].multiply(1e30).at[2, 5].set(-0.0)
    y = y.at[0, 1].set(0).at[2, 5].set(-0.0).at[2, 6].multiply(1e-38)
    pieces, program = pieces_and_program(norms, x, y, weight, bias)
    assert_bits_equal(program, pieces)
    _, alone = pieces_and_program(norms, x[2:, 4:5], y[2:, 4:5], weight, bias)
    assert_bits_equal([a[2:, 4:5] for a in program], list(alone))


@pytest.mark.parametrize("special", [1.0, np.inf, np.nan])
@pytest.mark.parametrize("columns", [1160, 128256])
@pytest.mark.parametrize("loss", [written_out, optax.softmax_cross_entropy_with_integer_labels])
def test_cross_entropy_has_the_bits_of_its_pieces(loss: Callable[..., jax.Array], columns: int, special: float) -> None:
    """Of rows that one cluster shares; the gradients of the logits go to both products in parts."""
    x, w = normal(0, 2, 32, 256) * 0.3, normal(1, columns, 256)
    x = x.at[1, 3, 5].multiply(special)
    labels = jnp.asarray(np.random.default_rng(2).integers(0, columns, (2, 32))).at[0, 1].set(-1).at[0, 2].set(columns)
    pieces, program = pieces_and_program(with_gradients(loss), x, w, labels)
    assert_bits_equal(program, pieces)
    # JAX takes the labels of one sequence in another way.
    pieces, alone = pieces_and_program(with_gradients(loss), x[:1], w, labels[:1])
    assert_bits_equal(alone, pieces)
    assert_bits_equal([a[:1] for a in program[:2]], list(alone[:2]))


def test_plain_attention_differs() -> None:
    """The control."""
    q, k, v, g = (normal(i, 2, 520, n, 64) for i, n in enumerate((8, 2, 2, 8)))
    pieces, _ = pieces_and_program(with_gradient, q, k, v, g)
    plain = jax.jit(with_gradient)(q, k, v, g)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(plain, pieces, strict=True))
