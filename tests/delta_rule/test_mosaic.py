"""The walk over chunks for Hopper: numbers under Mosaic's interpreter, which finds races, and programs for a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.delta_rule.hopper.joined import rows_and_scan
from pallas_kernels.delta_rule.hopper.rows import rows
from pallas_kernels.delta_rule.hopper.scan import Chunks, scan
from tests.delta_rule.mosaic_tokens import kernel_tokens
from tests.mosaic import Races, interpreter


def rounded(x: Any, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x, dtype), np.float64)


def sequences(dtype: str, sizes: tuple[int, int, int, int], tokens: int, lengths: list[int]) -> Chunks:
    """Random sequences with nan after their ends; T and P are any triangles, the identity and zeros after an end."""
    (j, h, d, v), b, n = sizes, len(lengths), -(-tokens // 64)
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((b, tokens, j, d)) / np.sqrt(d) for _ in range(2))
    value = rng.standard_normal((b, tokens, h, v))
    inverse, weights = (np.triu(rng.standard_normal((b, h, n, 64, 64)) / 8) for _ in range(2))
    logs = -np.cumsum(np.abs(rng.standard_normal((b, h, n, 64))) / 50, -1)
    betas = rng.uniform(0, 1, (b, h, n, 64))
    for i, length in enumerate(lengths):
        for x in (query, key, value):
            x[i, length:] = np.nan
        after = (np.arange(n * 64) >= length).reshape(n, 1, 64)
        inverse[i], weights[i] = np.where(after, np.eye(64), inverse[i]), np.where(after, 0, weights[i])
        betas[i] *= ~after[:, 0]
    state = rng.standard_normal((b, h, d, v)) / 2
    narrow = [jnp.asarray(x, dtype) for x in (query, key, value, inverse, weights)]
    wide = [jnp.asarray(x, jnp.float32) for x in (np.exp2(logs), np.exp2(logs[..., -1:] - logs), betas, state)]
    return Chunks(*narrow, *wide, jnp.asarray(lengths, jnp.int32))


def expected(x: Chunks, dtype: str, scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, last states, and states at edges in float64, rounded where the contract says."""
    q, k, value, inverse, weights, grown, later, betas, start = (np.asarray(a, np.float64) for a in x[:9])
    (b, _, h, v), d, group = value.shape, k.shape[3], value.shape[2] // k.shape[2]
    y, last, edges = np.zeros_like(value), np.zeros_like(start), np.zeros((b, betas.shape[2], h, d, v))
    for i, head in np.ndindex(b, h):
        s, length = start[i, head], int(x.lengths[i])
        for chunk in range(-(-length // 64)):
            edges[i, chunk, head] = s
            rows = slice(chunk * 64, min(chunk * 64 + 64, length))
            count = rows.stop - rows.start
            keys, queries, told = (np.zeros((64, width)) for width in (d, d, v))
            keys[:count], queries[:count] = k[i, rows, head // group], q[i, rows, head // group]
            told[:count] = value[i, rows, head]
            of_chunk, t, p = (i, head, chunk), inverse[i, head, chunk].T, weights[i, head, chunk].T
            decay, narrow = grown[of_chunk][:, None], rounded(s, dtype)
            r = rounded(betas[of_chunk][:, None] * (told - decay * (keys @ narrow)), dtype)
            y[i, rows, head] = (scale * (decay * (queries @ narrow) + p @ r))[:count]
            s = decay[-1] * s + keys.T @ rounded((t @ r) * later[of_chunk][:, None], dtype)
        last[i, head] = s
    return y, last, edges


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("dtype", "sizes", "lengths", "stages"),
    [("bfloat16", (1, 2, 64, 128), [136, 70], 2), ("float16", (2, 2, 128, 64), [0, 200, 64], 3)],
    ids=["bfloat16", "float16"],
)
def test_numbers(dtype: str, sizes: tuple[int, int, int, int], lengths: list[int], stages: int, races: Races) -> None:
    x = sequences(dtype, sizes, max(lengths), lengths)
    *found, flags = scan(x, scale=0.5, keep_edges=True, stages=stages, interpret=interpreter())
    for ours, exact in zip(found, expected(x, dtype, 0.5), strict=True):
        assert np.linalg.norm(np.asarray(ours, np.float64) - exact) < 4e-3 * np.linalg.norm(exact)
    for i, length in enumerate(lengths):
        assert not np.asarray(found[0])[i, length:].any()
    assert not np.asarray(flags).any()
    assert races() == 0


@pytest.mark.tier("full")
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 64), ("float16", 128)])
def test_rows_of_chunks(dtype: str, size: int, races: Races) -> None:
    lengths = [136, 70]
    x = kernel_tokens(dtype, (1, 2, size), 136, lengths)
    x = x._replace(g=x.g.at[0, 3, 1].set(jnp.inf), key=x.key.at[1, 66, 0, 0].set(jnp.nan))
    t, p, logs, betas, grown, later = (np.asarray(a, np.float64) for a in rows(x, interpret=interpreter()))
    query, key = (np.asarray(a, np.float64) for a in x[:2])
    for i, head, chunk in np.ndindex(2, 2, 3):
        place = slice(chunk * 64, min(chunk * 64 + 64, lengths[i]))
        n = place.stop - place.start
        if n <= 0:
            continue
        q, k, at = query[i, place, 0], key[i, place, 0], (i, head, chunk)
        g, beta = (np.asarray(a, np.float64)[i, place, head] for a in (x.g, x.beta))
        lost = np.isnan(k).any(1)
        broken, known = lost | ~np.isfinite(g), np.argmax([*lost, True])
        k, beta = np.where(lost[:, None], 0, k), np.where(broken, 0, beta)
        sums = np.cumsum(np.where(np.isfinite(g), g, 0)) * np.log2(np.e)
        np.testing.assert_array_equal(np.isnan(betas[at][:n]), broken)
        age = np.tril(np.exp2(np.minimum(sums[:, None] - sums, 0)))
        inverse = np.linalg.inv(np.eye(n) + np.tril(beta[:, None] * (k @ k.T) * age, -1))
        weights = (q @ k.T * age) @ inverse
        for ours, exact, count in ((t, inverse, n), (p, weights, known)):
            found, exact = ours[at].T[:count], exact[:count, :count]
            assert np.linalg.norm(found[:, :count] - exact) < 8e-3 * np.linalg.norm(exact)
            assert not np.triu(found, 1).any()
        for found, exact in ((logs, sums), (grown, np.exp2(sums)), (later, np.exp2(sums[-1] - sums))):
            np.testing.assert_allclose(found[at][:n], exact, rtol=1e-5, atol=1e-6)
    assert races() == 0


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("sizes", "lengths", "workers"), [((1, 2, 64, 64), [136, 70], 1), ((1, 1, 128, 64), [0, 200], 3)]
)
def test_one_kernel_computes_what_two_do(
    sizes: tuple[int, int, int, int], lengths: list[int], workers: int, races: Races
) -> None:
    """Blocks run one after the other here, so those that walk find T and P: the interpreter has nothing to wait on.

    The control has other values: one chunk's T and P are those of another sequence.
    """
    (j, h, d, v), tokens = sizes, max(lengths)
    x = kernel_tokens("bfloat16", (j, h, d), tokens, lengths)
    rng = np.random.default_rng(1)
    value = jnp.asarray(rng.standard_normal((len(lengths), tokens, h, v)), "bfloat16")
    state = jnp.asarray(rng.standard_normal((len(lengths), h, d, v)), "float32")
    options: dict[str, Any] = {"scale": 0.5, "keep_edges": True, "stages": 2}
    of_rows, found = rows_and_scan(x, value, state, **options, workers=workers, interpret=interpreter())
    seen = races()
    t, p, logs, betas, grown, later = rows(x, interpret=interpreter())
    given = Chunks(x.query, x.key, value, t, p, grown, later, betas, state, x.lengths)
    theirs = scan(given, **options, interpret=interpreter())
    assert races() == seen  # none but of blocks that would have waited
    for i, length in enumerate(lengths):
        for one, two in zip(of_rows, (t, p, logs, betas, grown, later), strict=True):
            assert_bits_equal(*(np.asarray(a)[i, :, : -(-length // 64)] for a in (one, two)))
    for one, two in zip(found, theirs, strict=True):
        assert_bits_equal(np.asarray(one), np.asarray(two))
    other = scan(given._replace(weights=jnp.roll(p, 1, 2)), **options, interpret=interpreter())
    assert (np.asarray(other[0]) != np.asarray(found[0])).any()


@pytest.mark.tier("full")
def test_columns_with_nan_are_flagged() -> None:
    x = sequences("bfloat16", (1, 1, 64, 128), 64, [64])
    x = x._replace(value=x.value.at[0, 3, 0, 70].set(jnp.inf))
    *_, flags = scan(x, scale=0.5, keep_edges=False, stages=2, interpret=interpreter())
    assert flags.tolist() == [0, 1]


@pytest.mark.tier("full", fast=("False",))
@pytest.mark.parametrize("keep_edges", [False, True])
def test_programs_for_a_gpu(keep_edges: bool) -> None:
    x = jax.eval_shape(lambda: sequences("bfloat16", (1, 2, 128, 128), 200, [200]))
    program = jax.jit(functools.partial(scan, scale=0.5, keep_edges=keep_edges, stages=3)).trace(x)
    assert "delta_rule_scan" in program.lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_of_one_kernel_for_a_gpu() -> None:
    x = jax.eval_shape(lambda: kernel_tokens("bfloat16", (1, 2, 128), 200, [200]))
    value, state = (jax.ShapeDtypeStruct(*of) for of in (((1, 200, 2, 128), "bfloat16"), ((1, 2, 128, 128), "float32")))
    program = jax.jit(functools.partial(rows_and_scan, scale=0.5, keep_edges=False, stages=3, workers=2))
    text = program.trace(x, value, state).lower(lowering_platforms=("cuda",)).as_text()
    assert "fence.proxy.async.global" in text
    assert "red.release.gpu" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_program_of_rows_for_a_gpu(dtype: str) -> None:
    x = jax.eval_shape(lambda: kernel_tokens(dtype, (1, 2, 128), 200, [200]))
    assert "mma.sync" in jax.jit(rows).trace(x).lower(lowering_platforms=("cuda",)).as_text()
