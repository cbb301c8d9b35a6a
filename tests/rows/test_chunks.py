"""Sums over the rows of a batch are added in the order that their contract names, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import chunk_contract
from pallas_kernels.matmul.cpu.exact import fused_chains
from tests.tiers import tiered

ROWS, COLUMNS, TOKENS = chunk_contract().rows, 9, 7


def added_by_trees(x: np.ndarray) -> np.ndarray:
    total = np.zeros(x.shape[1:], np.float32)
    for start in range(0, len(x), ROWS):
        chunk = np.zeros((ROWS, *x.shape[1:]), np.float32)
        chunk[: len(x[start : start + ROWS])] = x[start : start + ROWS]
        while len(chunk) > 1:
            chunk = chunk[: len(chunk) // 2] + chunk[len(chunk) // 2 :]
        total = total + chunk[0]
    return total


def added_by_token(tokens: np.ndarray, g: np.ndarray) -> np.ndarray:
    total = np.zeros((TOKENS, g.shape[1]), np.float32)
    for start in range(0, len(g), ROWS):
        chunk = np.zeros_like(total)
        for token, row in zip(tokens[start : start + ROWS], g[start : start + ROWS], strict=True):
            chunk[token] = chunk[token] + row
        total = total + chunk
    return total


@pytest.mark.parametrize("rows", tiered([1, 5, 127, 128, 129, 300, 513], fast=[300]))
def test_gradients_of_matrices_biases_and_embeddings(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, g = (rng.standard_normal((rows, COLUMNS)) * np.exp(rng.uniform(-5, 5, (rows, COLUMNS))) for _ in range(2))
    x, g = x.astype(np.float32), g.astype(np.float32)
    tokens = rng.integers(0, TOKENS, rows).astype(np.int32)
    weights = np.eye(COLUMNS, dtype=np.float32), np.zeros(COLUMNS, np.float32), np.zeros((TOKENS, COLUMNS), np.float32)

    def ours(w: jax.Array, bias: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        return bijax.matmul(x, w), bijax.layer_norm(x, jnp.ones(COLUMNS), bias), bijax.embed(table, tokens)

    def plain(w: jax.Array, bias: jax.Array, table: jax.Array) -> tuple[jax.Array, ...]:
        return x @ w, x + bias, table[tokens]

    found, control = (jax.jit(lambda f=f: jax.vjp(f, *weights)[1]((g, g, g)))() for f in (ours, plain))
    expected = fused_chains(x.T, g, ROWS), added_by_trees(g), added_by_token(tokens, g)
    assert_bits_equal(found, expected)
    if rows >= ROWS:
        assert any((np.asarray(a) != b).any() for a, b in zip(control, expected, strict=True))
