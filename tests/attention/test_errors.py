"""Attention: sizes at the edge, and bad input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from pallas_kernels.contract import AttentionContract
from tests.arrays import ones

Q, K = ones((2, 3, 4, 32)), ones((2, 70, 2, 32))
PAGES = ones((6, 4, 2, 32))
TABLE = np.array([[0, 1], [2, 3]])

attend = bijax.dot_product_attention
paged = bijax.paged_attention


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 3, 4, 8), (0, 5, 2, 8)),
        ((2, 0, 4, 8), (2, 5, 2, 8)),
        ((2, 3, 4, 8), (2, 0, 2, 8)),
        ((2, 3, 0, 8), (2, 5, 2, 8)),
    ],
)
def test_edge_sizes(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    q, k = jnp.ones(query), jnp.ones(key)
    out, lse = attend(q, k, k, return_residual=True)
    assert out.shape == query
    assert lse.shape == query[:3]
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()
    gradients = jax.grad(lambda q, k, v: attend(q, k, v).sum(), (0, 1, 2))(q, k, k)
    assert [g.shape for g in gradients] == [query, key, key]


@pytest.mark.tier("full")
def test_without_a_batch() -> None:
    out, lse = attend(Q[0], K[0], K[0], key_value_seq_lengths=jnp.array([70]), return_residual=True)
    assert out.shape == (3, 4, 32)
    assert lse.shape == (3, 4)


def test_paged_edge_sizes() -> None:
    assert paged(Q[:0], PAGES, PAGES, TABLE[:0], np.zeros(0, int)).shape == (0, 3, 4, 32)
    assert paged(Q[:, :0], PAGES, PAGES, TABLE, 0).shape == (2, 0, 4, 32)
    out, lse = paged(Q, PAGES, PAGES, TABLE[:, :0], 0, query_seq_lengths=0, return_residual=True)
    assert not np.asarray(out).any()
    assert (np.asarray(lse) == -np.inf).all()


BAD: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "query must have one of the dtypes.*int32", lambda: attend(Q.astype(int), K, K)),
    (TypeError, r"share one dtype.*key bfloat16\[2,70,2,32\]", lambda: attend(Q, K.astype(jnp.bfloat16), K)),
    (ValueError, r"\(B, T, N, H\).*got query float32\[3\]", lambda: attend(jnp.ones(3), K, K)),
    (ValueError, r"\(B, T, N, H\)", lambda: attend(Q[0], K, K)),
    (ValueError, "one shape", lambda: attend(Q, K, K[:, :4])),
    (ValueError, "one shape, but for the width", lambda: attend(Q, K, K[:, :, :1])),
    (ValueError, "logits_soft_cap must be positive and finite, got 0.0", lambda: attend(Q, K, K, logits_soft_cap=0)),
    (TypeError, "logits_soft_cap must be a Python number",
     lambda: jax.jit(lambda c: attend(Q, K, K, logits_soft_cap=c))(1.0)),
    (ValueError, r"sinks must have the shape \(4,\) of the query heads, got float32\[2\]",
     lambda: attend(Q, K, K, sinks=jnp.ones(2))),
    (TypeError, "alibi_slopes must have one of the dtypes", lambda: paged(Q, PAGES, PAGES, TABLE, 8,
                                                                          alibi_slopes=jnp.ones(4, int))),
    (bijax.UnsupportedError, "no gradient of alibi_slopes.*float32\\[1,4\\]",
     lambda: jax.grad(lambda s: attend(Q, K, K, alibi_slopes=s).sum())(jnp.ones(4))),
    (ValueError, "key_scale is needed for key of int8 or float8_e4m3fn.*got none with key int8",
     lambda: attend(Q, K.astype(jnp.int8), K.astype(jnp.int8))),
    (ValueError, "value_scale is needed.*belongs to no other, got one with value float32",
     lambda: attend(Q, K, K, value_scale=jnp.ones(2))),
    (ValueError, r"key_scale must have the shape \(2,\).*or \(2, 32\)", lambda: paged(
        Q, PAGES.astype(jnp.int8), PAGES.astype(jnp.int8), TABLE, 8, key_scale=jnp.ones(3), value_scale=jnp.ones(2))),
    (TypeError, "key and value must share one dtype, got int8.*float8_e4m3fn", lambda: attend(
        Q, K.astype(jnp.int8), K.astype(jnp.float8_e4m3fn), key_scale=jnp.ones(2), value_scale=jnp.ones(2))),
    (bijax.UnsupportedError, "no gradient with quantised keys and values", lambda: jax.grad(lambda q: attend(
        q, K.astype(jnp.int8), K.astype(jnp.int8), key_scale=jnp.ones(2), value_scale=jnp.ones(2)).sum())(Q)),
    (ValueError, r"cu_query_seq_lengths.*\(T, N, H\), got query float32\[2,3,4,32\]",
     lambda: attend(Q, K, K, cu_query_seq_lengths=[0, 3])),
    (ValueError, "cu_query_seq_lengths goes without mask", lambda: attend(
        Q[0], K[0], K[0], mask=jnp.ones((3, 70), bool), cu_query_seq_lengths=[0, 3], cu_key_value_seq_lengths=[0, 70])),
    (ValueError, "cu_query_seq_lengths must be in.*got 4",
     lambda: attend(Q[0], K[0], K[0], cu_query_seq_lengths=[0, 4], cu_key_value_seq_lengths=[0, 70])),
    (ValueError, "differences of cu_key_value_seq_lengths must be in.*got -1",
     lambda: attend(Q[0], K[0], K[0], cu_query_seq_lengths=[0, 1, 3], cu_key_value_seq_lengths=[0, 9, 8])),
    (ValueError, "cu_query_seq_lengths must hold 0 and the running sums",
     lambda: attend(Q[0], K[0], K[0], cu_query_seq_lengths=[1, 3], cu_key_value_seq_lengths=[0, 70])),
    (ValueError, "there must be a key for each query, got 70 keys and 3 queries",
     lambda: attend(Q[0], K[0], K[0], cu_query_seq_lengths=[0, 3])),
    (ValueError, "belong to packed sequences", lambda: attend(Q[0], K[0], K[0], max_query_seq_length=3)),
    (ValueError, "differences of cu_query_seq_lengths must be in.*got 3",
     lambda: paged(Q[0], PAGES, PAGES, TABLE[:1], 8, cu_query_seq_lengths=[0, 3], max_query_seq_length=2)),
    (ValueError, "cu_query_seq_lengths goes without query_seq_lengths", lambda: paged(
        Q[0], PAGES, PAGES, TABLE[:1], 8, cu_query_seq_lengths=[0, 3], query_seq_lengths=3)),
    (ValueError, "width of a head", lambda: attend(Q, K[..., :4], K[..., :4])),
    (ValueError, "width of a head", lambda: attend(Q[..., :0], K[..., :0], K[..., :0])),
    (ValueError, "multiple of the number of key heads, got 4 and 3", lambda: attend(Q, *[K[:, :, [0, 0, 1]]] * 2)),
    (ValueError, "multiple.* got 4 and 0", lambda: attend(Q, K[:, :, :0], K[:, :, :0])),
    (ValueError, "as many sequences", lambda: attend(Q[:1], K, K)),
    (ValueError, r"bias must have.*broadcast to \(B, N, T, S\) = \[2, 4, 3, 70\], got float32\[2,70\]",
     lambda: attend(Q, K, K, jnp.ones((2, 70)))),
    (ValueError, r"mask must have.*\(N, T, S\) = \[4, 3, 70\], got bool\[1,1,3,70\]",
     lambda: attend(Q[0], K[0], K[0], mask=jnp.ones((1, 1, 3, 70), bool))),
    (TypeError, r"bias must be an array of float32, .*got int32\[70\]",
     lambda: attend(Q, K, K, jnp.ones(70, jnp.int32))),
    (TypeError, r"mask must be bool.*got float32\[70\]", lambda: attend(Q, K, K, mask=jnp.ones(70))),
    (TypeError, "scale must be a number", lambda: attend(Q, K, K, scale="half")),
    (TypeError, "traced value; multiply the query", lambda: jax.jit(lambda s: attend(Q, K, K, scale=s))(0.1)),
    (ValueError, "scale must be finite, got nan", lambda: attend(Q, K, K, scale=float("nan"))),
    (TypeError, r"pair of ints.*got \(1, 2, 3\)", lambda: attend(Q, K, K, local_window_size=(1, 2, 3))),
    (TypeError, "pair of ints.*got 1.5", lambda: attend(Q, K, K, local_window_size=1.5)),
    (ValueError, "must not be negative", lambda: attend(Q, K, K, local_window_size=(-1, 2))),
    (TypeError, "lengths must hold the number of keys of each sequence, got None",
     lambda: paged(Q, PAGES, PAGES, TABLE, None)),
    (TypeError, r"query_seq_lengths must hold integers, got float32\[2\]",
     lambda: attend(Q, K, K, query_seq_lengths=jnp.ones(2))),
    (ValueError, r"shape \(2,\).*got int32\[3\]", lambda: attend(Q, K, K, query_seq_lengths=jnp.ones(3, jnp.int32))),
    (ValueError, r"query_seq_lengths must be in \[0, 3\].*got 4 for sequence 1",
     lambda: attend(Q, K, K, query_seq_lengths=np.array([3, 4]))),
    (ValueError, r"key_value_seq_lengths must be in \[0, 70\].*got -1 for sequence 0",
     lambda: attend(Q, K, K, key_value_seq_lengths=np.array([-1, 4]))),
    (ValueError, "query_offset must be in.*got -2", lambda: attend(Q, K, K, query_offset=-2)),
    (ValueError, "query_offset must be in.*got 1099511627776", lambda: attend(Q, K, K, query_offset=np.int64(1 << 40))),
    (ValueError, r"key_pages and value_pages \(P, page, K, H\)", lambda: paged(Q[0], PAGES, PAGES, TABLE, 8)),
    (ValueError, "at least 1 key", lambda: paged(Q, PAGES[:, :0], PAGES[:, :0], TABLE, 0)),
    (TypeError, "page_table must hold integers", lambda: paged(Q, PAGES, PAGES, TABLE * 1.0, 8)),
    (ValueError, r"page_table must have the shape \(2, pages", lambda: paged(Q, PAGES, PAGES, TABLE[0], 8)),
    (ValueError, r"lengths must be in \[0, 8\].*got 9 for sequence 0", lambda: paged(Q, PAGES, PAGES, TABLE, 9)),
    (ValueError, "lengths must be in.*got -1", lambda: paged(Q, PAGES, PAGES, TABLE, np.array([8, -1]))),
    (ValueError, r"pages in \[0, 6\).*got 6 for sequence 1, entry 1, with 7 keys",
     lambda: paged(Q, PAGES, PAGES, np.array([[0, 1], [2, 6]]), np.array([5, 7]))),
    (ValueError, "got -1 for sequence 0, entry 0", lambda: paged(Q, PAGES, PAGES, -TABLE - 1, 5)),
    (ValueError, "query_offset must be in.*lengths counts the keys of the queries too.*got -1 for sequence 1",
     lambda: paged(Q, PAGES, PAGES, TABLE, np.array([3, 2]))),
    (TypeError, "common_prefix_length must hold integers, got float",
     lambda: paged(Q, PAGES, PAGES, TABLE, 8, common_prefix_length=4.0)),
    (ValueError, r"one integer for all sequences, got int\d+\[2\]",
     lambda: paged(Q, PAGES, PAGES, TABLE, 8, common_prefix_length=np.array([4, 4]))),
    (ValueError, r"common_prefix_length must be in \[0, 8\].*got 9",
     lambda: paged(Q, PAGES, PAGES, TABLE, 8, common_prefix_length=9)),
    (ValueError, "got page 3 for sequence 1, entry 1 .pages of 4 keys., where sequence 0 has 1",
     lambda: paged(Q, PAGES, PAGES, np.array([[0, 1], [0, 3]]), 8, common_prefix_length=jnp.array(8))),
    (bijax.UnsupportedError, "no gradient.*dot_product_attention",
     lambda: jax.grad(lambda q: paged(q, PAGES, PAGES, TABLE, 8).sum())(Q)),
    (ValueError, "key_block must be at least 1, got 0", lambda: AttentionContract(key_block=0)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), BAD)
def test_bad_input(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()


def test_forward_mode_says_no() -> None:
    with pytest.raises((TypeError, bijax.UnsupportedError), match=r"forward-mode|Forward mode"):
        jax.jit(lambda q: jax.jvp(lambda q: attend(q, K, K), (q,), (q,))).lower(Q)


def test_traced_lengths_out_of_range_give_nan() -> None:
    """Nothing can be raised under jit; nothing is clipped either, and the other sequences are as they were."""
    right = attend(Q, K, K)

    @jax.jit
    def traced(offset: Any, queries: Any, keys: Any) -> Any:
        numbers = {"query_offset": offset, "query_seq_lengths": queries, "key_value_seq_lengths": keys}
        return attend(Q, K, K, return_residual=True, **numbers)

    good = [np.array([0, 0]), np.array([3, 3]), np.array([70, 70])]
    np.testing.assert_array_equal(traced(*good)[0], right)
    for argument, bad in ((0, -1), (0, 1 << 30), (1, 4), (1, -1), (2, 71), (2, -1)):
        numbers = [n.copy() for n in good]
        numbers[argument][1] = bad
        out, lse = traced(*numbers)
        assert np.isnan(np.asarray(out[1])).all()
        assert np.isnan(np.asarray(lse[1])).all()
        np.testing.assert_array_equal(out[0], right[0])


@pytest.mark.tier("full")
def test_traced_lengths_out_of_range_give_nan_gradients() -> None:
    @jax.jit
    def traced(keys: Any) -> Any:
        return jax.grad(lambda q, k, v: attend(q, k, v, key_value_seq_lengths=keys).sum(), (0, 1, 2))(Q, K, K)

    for gradient in traced(np.array([70, 71])):
        assert np.isnan(np.asarray(gradient[1])).all()
        assert np.isfinite(np.asarray(gradient[0])).all()


@pytest.mark.tier("full")
def test_traced_pages_out_of_range_give_nan() -> None:
    run = jax.jit(lambda table, lengths: paged(Q, PAGES, PAGES, table, lengths))
    right = run(TABLE, np.array([8, 8]))
    assert np.isfinite(np.asarray(right)).all()
    unused = run(np.array([[0, -1], [2, 3]]), np.array([4, 8]))
    np.testing.assert_array_equal(unused, right)
    for table, lengths in (([[0, 1], [2, 6]], [8, 8]), ([[0, 1], [-1, 3]], [8, 8]), (TABLE, [8, 9]), (TABLE, [8, 2])):
        out = run(np.array(table), np.array(lengths))
        assert np.isnan(np.asarray(out[1])).all()
        np.testing.assert_array_equal(out[0], right[0])


@pytest.mark.tier("full")
def test_traced_pages_that_differ_in_the_common_prefix_give_nan() -> None:
    """Whole pages that the sequence has keys for count: the second ones differ."""
    table = np.array([[0, 1], [0, 3]])
    run = jax.jit(lambda table, lengths, common: paged(Q, PAGES, PAGES, table, lengths, common_prefix_length=common))
    right = paged(Q, PAGES, PAGES, table, 8)
    for lengths, common in (([8, 8], 4), ([8, 8], 7), ([8, 7], 8)):
        expected = paged(Q, PAGES, PAGES, table, np.array(lengths), common_prefix_length=common)
        np.testing.assert_array_equal(run(table, np.array(lengths), common), expected)
    for numbers, common in ((table, 8), (table, 9), (table, -1)):
        out = run(numbers, np.array([8, 8]), common)
        assert np.isnan(np.asarray(out[1])).all()
        assert np.isnan(np.asarray(out[0])).all() == (common != 8)
    np.testing.assert_array_equal(run(table, np.array([8, 8]), 8)[0], right[0])
