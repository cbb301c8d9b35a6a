"""The cross entropy of a linear layer in chunks of rows: the bits of the product and of the cross entropy after it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.dispatch import linear_cross_entropy as module
from bijax.testing import assert_bits_equal, hostile_rows
from tests.arrays import on_device
from tests.tiers import full_only

ROWS, WIDTH, COLUMNS = 300, 40, 33
OPTIONS: dict[str, Any] = {"ignore_index": 3, "z_loss": 0.01}


def pair(x: Any, w: Any, labels: Any, *, transpose_w: bool = False, **options: Any) -> jax.Array:
    logits = bijax.matmul(x, w, transpose_w=transpose_w, preferred_element_type="float32")
    return bijax.softmax_cross_entropy(logits, labels, **options)


def given(dtype: str, transpose_w: bool) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x = on_device(hostile_rows(1, (ROWS, WIDTH), dtype)["wide"])
    w = rng.standard_normal((COLUMNS, WIDTH) if transpose_w else (WIDTH, COLUMNS)) / 8
    labels, ct = rng.integers(0, COLUMNS, ROWS), rng.standard_normal(ROWS)
    return x, jnp.asarray(w, dtype), jnp.asarray(labels), jnp.asarray(ct, "float32")


def with_gradients(function: Any, x: jax.Array, w: jax.Array, labels: jax.Array, ct: jax.Array) -> Any:
    out, pull = jax.vjp(lambda x, w: function(x, w, labels), x, w)
    return out, pull(ct)


@pytest.mark.parametrize(("dtype", "transpose_w"), [full_only("float32", False), ("bfloat16", True)])
def test_bits_are_those_of_the_pair(dtype: str, transpose_w: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one chunk, and in three, of which the last one is short."""
    arrays = given(dtype, transpose_w)
    options = {**OPTIONS, "transpose_w": transpose_w}
    expected = jax.jit(functools.partial(with_gradients, functools.partial(pair, **options)))(*arrays)
    for most in (1024, 128):
        monkeypatch.setattr(module, "CHUNK", most)
        monkeypatch.setattr(module, "_LOGITS", 0)
        fused = functools.partial(with_gradients, functools.partial(bijax.linear_cross_entropy, **options))
        assert_bits_equal(jax.jit(fused)(*arrays), expected, err_msg=f"chunks of {most}")


def test_rows_do_not_depend_on_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "_LOGITS", 0)
    x, w, labels, _ = given("float32", False)
    loss = jax.jit(bijax.linear_cross_entropy)
    whole = loss(x, w, labels)
    assert_bits_equal(loss(x[290:], w, labels[290:]), whole[290:])
    stacked = jax.jit(jax.vmap(bijax.linear_cross_entropy, (0, None, 0)))
    assert_bits_equal(stacked(x.reshape(2, 150, WIDTH), w, labels.reshape(2, 150)), whole.reshape(2, 150))


@pytest.mark.tier("full")
def test_no_array_of_all_logits_is_made() -> None:
    """8192 rows of 128256 words: 4 GiB of logits, and as much for their gradients."""
    shapes = ((8192, 64), "bfloat16"), ((64, 128256), "bfloat16"), ((8192,), "int32")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]

    def temporary(function: Any) -> int:
        gradients = jax.grad(lambda *a: function(*a).sum(), (0, 1))
        memory = jax.jit(gradients).lower(*arrays).compile().memory_analysis()
        assert memory is not None
        return int(memory.temp_size_in_bytes)

    assert temporary(bijax.linear_cross_entropy) < 0.35 * temporary(pair)


def test_bad_input() -> None:
    x, w, labels, _ = given("float32", False)
    loss = bijax.linear_cross_entropy
    with pytest.raises(TypeError, match="dtype"):
        loss(x, w.astype("bfloat16"), labels)
    with pytest.raises(ValueError, match="contracted dimension K=33"):
        loss(x, w, labels, transpose_w=True)
    with pytest.raises(ValueError, match="labels must have the shape of x without its last dimension"):
        loss(x, w, labels[1:])
    with pytest.raises(ValueError, match=r"bijax.linear_cross_entropy: labels must be in \[0, 33\)"):
        loss(x, w, labels.at[7].set(33))
    with pytest.raises(ValueError, match="w must have 2 dimensions"):
        loss(x[None], w[None], labels[None])
    with pytest.raises(TypeError, match="labels must be integers"):
        loss(x, w, labels.astype("float32"))
    assert loss(x[:0], w, labels[:0]).shape == (0,)
