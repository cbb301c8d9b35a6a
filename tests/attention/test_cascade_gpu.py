"""A common prefix of the sequences on a GPU: the bits of sequences that read each their own pages."""

import functools
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention import hopper
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.contract import split_attention_contract
from tests.goldens import cases

pytestmark = pytest.mark.gpu

HEADS, KEY_HEADS, PAGE, ENTRIES, PAGES = 8, 2, 16, 224, 1000
COMMON: Final = 2100
LENGTHS: Final = np.array([2101, 2112, 2113, 2175, 2176, 2177, 2303, 2304, 3071, 3072, 3073, 3200] * 4)
KINDS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {},
    "float16, heads of 64, 3 queries": {"dtype": "float16", "size": 64, "queries": 3},
    "heads of 256, 16 queries": {"size": 256, "queries": 16},
    "cap and sinks": {"logits_soft_cap": 5.0, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)},
    "int8": {"stored": "int8"},
    "float8_e4m3fn, heads of 64": {"stored": "float8_e4m3fn", "size": 64},
}


def array(seed: int, *shape: int, dtype: Any = "bfloat16") -> jax.Array:
    return jnp.asarray(cases.array(seed, shape, jnp.dtype(dtype)))


def given(name: str) -> tuple[tuple[jax.Array, ...], np.ndarray, dict[str, Any]]:
    """Returns queries and pages, a table whose rows begin alike, and the options of a call."""
    options = dict(KINDS[name])
    dtype, size, stored = options.pop("dtype", "bfloat16"), options.pop("size", 128), options.pop("stored", None)
    rng = np.random.default_rng(0)
    common = COMMON // PAGE
    table = np.stack([rng.permutation(np.arange(common, PAGES))[:ENTRIES] for _ in LENGTHS])
    table[:, :common] = rng.permutation(common)
    q = array(0, len(LENGTHS), options.pop("queries", 1), HEADS, size, dtype=dtype)
    pages = [array(i, PAGES, PAGE, KEY_HEADS, size, dtype=dtype) for i in (1, 2)]
    if stored:
        pages = [(40 * x).astype(stored) for x in pages]
        shape = (KEY_HEADS, size) if stored == "int8" else (KEY_HEADS,)
        options |= {
            f"{x}_scale": jnp.abs(array(i, *shape, dtype="float32")) / 20 for i, x in ((7, "key"), (8, "value"))
        }
    return (q, *pages), table, options


@pytest.mark.parametrize("name", KINDS)
def test_bits_do_not_depend_on_what_is_shared(name: str) -> None:
    arrays, table, options = given(name)
    attend = jax.jit(functools.partial(bijax.paged_attention, return_residual=True, **options))
    for lengths in (LENGTHS, np.where(np.arange(len(LENGTHS)) == 5, 1024, LENGTHS)):  # one that ends in the prefix
        own = attend(*arrays, table, lengths)
        assert np.isfinite(np.asarray(own[1])).all()
        for common in (0, 1023, 1024, 1040, 2047, 2048, 2049, COMMON - COMMON % PAGE):
            assert_bits_equal(attend(*arrays, table, lengths, common_prefix_length=common), own, err_msg=f"{common}")
        alone = attend(arrays[0][3:4], *arrays[1:], table[3:4], lengths[3:4])
        assert_bits_equal(tuple(x[3:4] for x in own), alone)


def test_shared_splits_are_read_for_the_first_sequence_alone() -> None:
    """Where the others list pages of nan for them; a control of the test above."""
    (q, *pages), table, _ = given("bfloat16")
    k, v = (jnp.concatenate([x, jnp.full_like(x[:1], jnp.nan)]) for x in pages)
    poisoned = table.copy()
    poisoned[1:, : COMMON // 1024 * 1024 // PAGE] = PAGES
    limits = np.stack([LENGTHS - 1, np.ones_like(LENGTHS), LENGTHS], axis=1).astype(np.int32)
    contract = split_attention_contract(128, "bfloat16")
    assert contract is not None
    attend = jax.jit(functools.partial(hopper.attention, contract=contract))
    call = AttentionCall(q, k, v, jnp.asarray(limits), AttentionOptions(128**-0.5, causal=True))
    own = attend(replace(call, page_table=jnp.asarray(table, jnp.int32)))
    listed = replace(call, page_table=jnp.asarray(poisoned, jnp.int32))
    assert_bits_equal(attend(replace(listed, common_prefix=jnp.array([COMMON], jnp.int32))), own)
    assert np.isnan(np.asarray(attend(listed)[1][1:])).all()


def test_traced_tables_that_differ_give_nan() -> None:
    arrays, table, _ = given("bfloat16")
    attend = jax.jit(bijax.paged_attention)
    table[4, 100] = 5
    found = attend(*arrays, table, LENGTHS, common_prefix_length=2048)
    wrong = np.isnan(np.asarray(found, np.float32)).any(axis=(1, 2, 3))
    assert wrong.tolist() == [i == 4 for i in range(len(LENGTHS))]
