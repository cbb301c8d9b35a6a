"""Checks on eight devices of a CPU, run as a program of its own, which `test_devices` starts with the checks to run.

The number of devices of a process is fixed when it starts. `test_several_gpus_gpu` calls some of the checks on GPUs.
"""

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT
from tests.arrays import on_device
from tests.jax_triton.packages import HAS_JAX_TRITON, launches_in

CHECKS: dict[str, Callable[[], None]] = {}
AXIS = "cut"


def check(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return add


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def array(seed: int, *shape: int, dtype: Any = jnp.float32, huge: bool = False) -> jax.Array:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if huge:
        values = values * 2.0 ** rng.integers(-30, 30, shape)
        values.reshape(-1)[:: max(1, values.size // 3)] = np.inf
    return jnp.asarray(values, dtype)


def sharded(function: Callable[..., Any], devices: int, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    mapped: Callable[..., Any] = jax.shard_map(function, mesh=mesh(devices), in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped)


def differing(a: Any, b: Any) -> int:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return sum(int((np.asarray(x) != np.asarray(y)).sum()) for x, y in pairs)


def products(dtype: Any, inner: int, counts: tuple[int, ...], ways: tuple[bool, ...], huge: bool = False) -> None:
    """Two products with biases, and all gradients: on one device, on several, and with cut rows."""
    x, w1, b1 = (
        array(1, 8, 3, 96, dtype=dtype, huge=huge),
        array(2, 96, inner, dtype=dtype),
        array(3, inner, dtype=dtype),
    )
    w2, b2 = array(4, inner, 40, dtype=dtype), array(5, 40, dtype=dtype)
    g = array(6, 8, 3, 40, dtype=dtype)

    def block(axis: str | None, rows: int | None) -> Callable[..., Any]:
        def forward(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> jax.Array:
            h = parallel.column_parallel(x, w1, axis, bias=b1, gather_dimension=rows)
            h = bijax.elementwise(jnp.tanh)(h)
            return parallel.row_parallel(h, w2, axis, bias=b2, scatter_dimension=rows)

        def run(g: jax.Array, *given: jax.Array) -> Any:
            y, pull = jax.vjp(forward, *given)
            return y, *pull(g)

        return run

    def plain(g: jax.Array, x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array, b2: jax.Array) -> Any:
        def forward(x: jax.Array, w1: jax.Array, b1: jax.Array, w2: jax.Array) -> jax.Array:
            return lax.psum(jnp.tanh(x @ w1 + b1) @ w2, AXIS)

        y, pull = jax.vjp(forward, x, w1, b1, w2)
        return y, *pull(g)

    given = (x, w1, b1, w2, b2)
    expected = jax.jit(block(None, None))(g, *given)
    for devices in counts:
        for cut_rows in ways:
            rows = P(AXIS) if cut_rows else P()
            specs = (rows, P(None, AXIS), P(AXIS), P(AXIS), P())
            run = sharded(block(AXIS, 0 if cut_rows else None), devices, (rows, *specs), (rows, *specs))
            assert_bits_equal(run(g, *given), expected)
    if ways == (False, True):
        alone = jax.jit(block(None, None))(g[:1], x[:1], *given[1:])
        assert_bits_equal(alone[:2], (expected[0][:1], expected[1][:1]))
    if dtype == jnp.float32:
        cut = (P(), P(None, AXIS), P(AXIS), P(AXIS))
        one, many = (sharded(plain, n, (P(), *cut, P()), (P(), *cut))(g, *given) for n in (1, counts[-1]))
        assert differing(one[:2], many[:2]), "plain JAX has the same bits: the check proves nothing"


@check("products")
def _products() -> None:
    products(jnp.float32, 8 * 43, (8,), (False,))


@check("products with cut rows")
def _products_with_cut_rows() -> None:
    products(jnp.float32, 8 * 43, (1, 2, 4, 8), (False, True))


@check("products in bfloat16")
def _products_in_bfloat16() -> None:
    products(jnp.bfloat16, 8 * 64, (1, 2, 4, 8), (False, True))


@check("products of huge numbers")
def _products_of_huge_numbers() -> None:
    products(jnp.float32, 8 * 24, (2, 4, 8), (False,), huge=True)


@check("leaves of 11008, 8960 and 6912")
def _leaves() -> None:
    """Lengths of K whose eighth is no multiple of 64."""
    for k in (11008, 8960, 6912):
        x, w = array(1, 3, k), array(2, k, 8)
        expected = jax.jit(lambda x, w: parallel.row_parallel(x, w, None))(x, w)
        run = sharded(lambda x, w: parallel.row_parallel(x, w, AXIS), 8, (P(None, AXIS), P(AXIS)), P())
        assert_bits_equal(run(x, w), expected)
        halves = sharded(lambda x, w: parallel.row_parallel(x, w, AXIS), 2, (P(None, AXIS), P(AXIS)), P())
        assert_bits_equal(halves(x, w), expected)
        assert differing(bijax.matmul(x, w), expected), "one chain has the bits of the tree"


@check("sums")
def _sums() -> None:
    sums((2, 8))


def sums(counts: tuple[int, ...]) -> None:
    """A sum over devices is a tree; a device may add a subtree first."""
    most = counts[-1]
    for dtype, shape in ((jnp.float32, (7,)), (jnp.bfloat16, (1100, 256))):
        x = array(1, 8, *shape, dtype=dtype, huge=True)
        expected = jax.jit(parallel.tree_sum)(x)
        wide = x.astype(jnp.float32)
        by_hand = ((wide[0] + wide[1]) + (wide[2] + wide[3])) + ((wide[4] + wide[5]) + (wide[6] + wide[7]))
        assert_bits_equal(expected, by_hand.astype(dtype))

        def add(x: jax.Array, axis: str = AXIS) -> jax.Array:
            return parallel.psum(parallel.tree_sum(x, dtype=jnp.float32), axis, dtype=x.dtype)

        for devices in counts:
            assert_bits_equal(sharded(add, devices, P(AXIS), P())(x), expected)
        if shape[0] % 2 == 0:
            scatter = sharded(
                lambda x: parallel.psum_scatter(
                    parallel.tree_sum(x, dtype=jnp.float32), AXIS, scatter_dimension=1, dtype=x.dtype
                ),
                most,
                P(AXIS),
                P(None, AXIS),
            )
            assert_bits_equal(scatter(x), expected)
    terms = array(9, 8, 64)
    upwards = functools.reduce(jnp.add, terms)
    assert differing(upwards, parallel.tree_sum(terms)), "ascending order has the bits of the tree"
    # The derivative is that of lax.psum.
    x, g = array(2, most, 8), array(3, 8)

    def gradient(reduce: Callable[[jax.Array], jax.Array], out: Any) -> jax.Array:
        found: jax.Array = jax.jit(jax.grad(lambda x: (sharded(reduce, most, P(AXIS), out)(x) * g).sum()))(x)
        return found

    assert_bits_equal(gradient(lambda x: parallel.psum(x[0], AXIS), P()), gradient(lambda x: lax.psum(x[0], AXIS), P()))
    assert_bits_equal(gradient(lambda x: parallel.psum_scatter(x[0], AXIS), P(AXIS)), jnp.broadcast_to(g, (most, 8)))


@check("weights of leaves")
def _weights_of_leaves() -> None:
    weights_of_leaves((2, 8))


def weights_of_leaves(counts: tuple[int, ...]) -> None:
    """A weight that every device applies to other rows."""
    for dtype in (jnp.float32, jnp.bfloat16):
        scale, x = array(2, 24, dtype=dtype), array(1, 16, 24, dtype=dtype)
        expected = jax.jit(functools.partial(of_leaves, None, 8))(scale, x)
        for devices in counts:
            specs = (P(), P(AXIS)), (P(AXIS), P(), P(AXIS))
            assert_bits_equal(
                sharded(functools.partial(of_leaves, AXIS, 8 // devices), devices, *specs)(scale, x), expected
            )


def of_leaves(axis: str | None, own: int, scale: jax.Array, x: jax.Array) -> Any:
    """A norm of each leaf of rows with its copy of the scale, and the gradients."""

    def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
        scales = parallel.broadcast_to_leaves(scale, axis)
        leaves = x.reshape(own, -1, x.shape[1])
        return jnp.stack([bijax.rms_norm(leaf, s) for leaf, s in zip(leaves, scales, strict=True)]).reshape(x.shape)

    y, pull = jax.vjp(norm, scale, x)
    return y, *pull(y)


@check("gradients")
def _gradients() -> None:
    gradients_of_a_batch(8)


def gradients_of_a_batch(devices: int) -> None:
    """Data parallelism: examples cut over devices, and units in lanes."""
    w = {"a": array(1, 40, 24), "b": array(2, 24, dtype=jnp.bfloat16)}
    x = array(3, 32, 40)

    def loss(w: dict[str, jax.Array], x: jax.Array) -> Any:
        return jnp.mean(jnp.tanh(x @ w["a"] + w["b"]) ** 2), {"mean": x.mean(), "rows": jnp.float32(x.shape[0])}

    expected = jax.jit(parallel.accumulate_gradients(loss, unit=2, axis=None, has_aux=True))(w, x)
    gradient = parallel.accumulate_gradients(loss, unit=2, axis=AXIS, has_aux=True)
    assert_bits_equal(sharded(lambda w, x: gradient(w, x), devices, (P(), P(AXIS)), P())(w, x), expected)

    # Parameters that are cut as well (FSDP): gathered before, their gradients cut after.
    def with_cut_weights(w: dict[str, jax.Array], x: jax.Array) -> Any:
        whole = jax.tree.map(lambda a: lax.all_gather(a, AXIS, tiled=True, to="invarying"), w)
        _, grads = gradient(whole, x)
        first = lax.axis_index(AXIS)
        parts = jax.tree.map(lambda a: a.shape[0] // devices, grads)
        return jax.tree.map(lambda a, part: lax.dynamic_slice_in_dim(a, first * part, part), grads, parts)

    assert_bits_equal(sharded(with_cut_weights, devices, (P(AXIS), P(AXIS)), P(AXIS))(w, x), expected[1])

    def plain(w: dict[str, jax.Array], x: jax.Array) -> Any:
        return jax.tree.map(
            lambda g: lax.psum(g, AXIS), jax.grad(lambda w: loss(w, x)[0])(lax.pcast(w, AXIS, to="varying"))
        )

    one, many = (sharded(plain, n, (P(), P(AXIS)), P())(w, x) for n in (1, devices))
    assert differing(one["a"], jax.tree.map(lambda g: g / devices, many)["a"]), "plain JAX has the same bits"

    counted = parallel.accumulate_gradients(
        lambda w, x: ((w * x).sum(), (x > 0).sum()), unit=1, axis=AXIS, has_aux=True, reduction="sum"
    )
    (_, positive), _ = sharded(lambda w, x: counted(w, x), devices, (P(), P(AXIS)), P())(jnp.ones(40), x)
    assert int(positive) == int((x > 0).sum())


@check("vocabulary")
def _vocabulary() -> None:
    vocabulary((2, 8))


def vocabulary(counts: tuple[int, ...]) -> None:
    """Rows and columns of a vocabulary that is cut: their bits move, and are not added as numbers."""
    size = 48
    table = array(1, size, 6, dtype=jnp.bfloat16).at[3, 2].set(-0.0).at[5, 1].set(jnp.nan)
    odd = array(2, size, 5, dtype=jnp.bfloat16).at[3, 2].set(-0.0)
    tokens = jnp.asarray([[0, 3, 47, 3], [12, 48, -1, 5]])
    many = jnp.tile(tokens.reshape(-1), 1700)  # their bits travel as integers
    z = array(3, 5, size).at[1, 7].set(9.0).at[1, 30].set(9.0).at[2, 47].set(jnp.inf)
    chosen, seeds = jnp.asarray([1, 2, 3, 40, 47]), jnp.arange(5, dtype=jnp.uint32)

    def run(axis: str | None) -> Callable[..., Any]:
        def of(table: jax.Array, odd: jax.Array, z: jax.Array) -> Any:
            rows, pull_rows = jax.vjp(lambda t: parallel.vocab_parallel_embed(t, tokens, axis), table)
            logprobs, pull_logits = jax.vjp(lambda z: parallel.vocab_parallel_logprobs(z, chosen, axis), z)
            options: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": jnp.full(5, 0.9), "num_top": 2}
            drawn = parallel.vocab_parallel_sample(z, axis, seeds=seeds, positions=seeds, **options)
            whole = (
                rows,
                parallel.vocab_parallel_embed(odd, tokens, axis),
                *(parallel.vocab_parallel_embed(t, many, axis) for t in (table, odd)),
                parallel.vocab_parallel_embed(odd.astype(jnp.float32), tokens, axis),
                parallel.vocab_parallel_argmax(z, axis),
                logprobs,
                drawn,
            )
            return whole, pull_rows(jnp.where(jnp.isnan(rows), 1, rows)), pull_logits(jnp.arange(5.0))

        return of

    expected = jax.jit(run(None))(table, odd, z)
    assert_bits_equal(expected[0][0], bijax.embed(table, tokens))
    assert_bits_equal(expected[0][5], jnp.argmax(z, -1).astype(jnp.int32))
    assert np.signbit(np.asarray(expected[0][0].astype(jnp.float32)))[0, 1, 2]
    for devices in counts:
        specs = (P(AXIS), P(AXIS), P(None, AXIS))
        got = sharded(run(AXIS), devices, specs, (P(), (P(AXIS),), (P(None, AXIS),)))(table, odd, z)
        assert_bits_equal(got, expected)

    # A sum over devices that adds zeros as numbers loses the sign of a zero.
    def plain(table: jax.Array) -> jax.Array:
        places = tokens - lax.axis_index(AXIS) * table.shape[0]
        mine = (places >= 0) & (places < table.shape[0])
        return lax.psum(jnp.where(mine[..., None], table[places], 0), AXIS)

    lost = np.asarray(sharded(plain, counts[-1], P(AXIS), P())(table).astype(jnp.float32))
    assert not np.signbit(lost)[0, 1, 2]


@check("experts")
def _experts() -> None:
    experts_cut(8)


def experts_cut(devices: int) -> None:
    """Experts and tokens cut over devices, with any routing: the results and all gradients."""
    hidden, inner, experts, topk = 16, 8, 8, 4
    x, gate_up, down = array(1, 16, hidden), array(2, experts, hidden, 2 * inner), array(3, experts, inner, hidden)
    weights = jax.nn.softmax(array(4, 16, topk))
    spread = on_device(np.random.default_rng(5).permuted(np.tile(np.arange(experts), (16, 1)), axis=1)[:, :topk])

    def layer(axis: str | None, to: Any, x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array) -> Any:
        sent = parallel.moe_dispatch(x, to, axis, num_experts=experts)
        inner = bijax.swiglu(bijax.group_matmul(sent.rows, gate_up, sent.counts))
        return parallel.moe_combine(bijax.group_matmul(inner, down, sent.counts), sent, weights, axis)

    def gradients(axis: str | None, to: jax.Array, *given: jax.Array) -> Any:
        y, pull = jax.vjp(lambda *given: layer(axis, to, *given), *given)
        return y, *pull(y)

    def one_device(to: jax.Array, *given: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, weights, *kernels: INVARIANT.experts(x, to, weights, *kernels), *given)
        return y, *pull(y)

    def plain(x: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array, to: jax.Array) -> jax.Array:
        first = lax.axis_index(AXIS) * gate_up.shape[0]
        total = jnp.zeros_like(x)
        for e in range(gate_up.shape[0]):
            gate, up = jnp.split(x @ gate_up[e], 2, axis=-1)
            share = jnp.where(to == first + e, weights, 0).sum(-1)
            total += share[:, None] * ((jax.nn.silu(gate) * up) @ down[e])
        return lax.psum(total, AXIS)

    given = (x, weights, gate_up, down)
    cut = (P(AXIS),) * 4
    routings = {"spread": spread, "to the first": jnp.tile(jnp.arange(topk)[::-1], (16, 1)), "skipped": spread - 4}
    expected = jax.jit(one_device)
    alone, many = (
        jax.jit(functools.partial(gradients, None)),
        sharded(functools.partial(gradients, AXIS), devices, (P(AXIS), *cut), (P(AXIS), *cut)),
    )
    for routing in routings.values():
        wanted = expected(routing, *given)
        assert_bits_equal(alone(routing, *given), wanted)
        assert_bits_equal(many(routing, *given), wanted)
    specs = (P(), P(), P(AXIS), P(AXIS), P())
    one, several = (sharded(plain, n, specs, P())(*given, spread) for n in (1, devices))
    assert differing(one, several), "plain JAX has the same bits"


@check("experts on any number of devices")
def _experts_on_any_number() -> None:
    """There is no sum over devices, so three devices will do."""
    x, down = array(1, 12, 16, dtype=jnp.bfloat16), array(2, 12, 16, 16, dtype=jnp.bfloat16)
    to, weights = on_device(np.random.default_rng(3).integers(0, 12, (12, 1))), jnp.ones((12, 1))

    def layer(axis: str | None, x: jax.Array, to: jax.Array, down: jax.Array, weights: jax.Array) -> jax.Array:
        sent = parallel.moe_dispatch(x, to, axis, num_experts=12)
        return parallel.moe_combine(bijax.group_matmul(sent.rows, down, sent.counts), sent, weights, axis)

    expected = jax.jit(functools.partial(layer, None))(x, to, down, weights)
    for devices in (2, 3, 4):
        run = sharded(functools.partial(layer, AXIS), devices, (P(AXIS),) * 4, P(AXIS))
        assert_bits_equal(run(x, to, down, weights), expected)


@check("experts in parts")
def _experts_in_parts() -> None:
    """Results of experts that travel back in parts, with any routing: those of all rows together."""
    hidden, experts, topk = 16, 8, 3
    x, gate_up, down = array(1, 16, hidden), array(2, experts, hidden, 16), array(3, experts, 8, hidden)
    weights, rng = jax.nn.softmax(array(4, 16, topk)), np.random.default_rng(5)
    spread = jnp.asarray(rng.permuted(np.tile(np.arange(experts), (16, 1)), axis=1)[:, :topk])
    routings = (spread, jnp.tile(jnp.arange(topk)[::-1], (16, 1)), spread - 4, jnp.full((16, topk), experts))

    def layer(axis: str | None, parts: int | None, moved: int, x: jax.Array, to: jax.Array, *given: jax.Array) -> Any:
        weights, gate_up, down = given
        sent = parallel.moe_dispatch(x, to, axis, num_experts=experts)
        inner = bijax.swiglu(bijax.group_matmul(sent.rows, gate_up, sent.counts))
        if parts is None:
            return parallel.moe_combine(bijax.group_matmul(inner, down, sent.counts), sent, weights, axis)
        split = parallel.split_dispatched(sent, axis, parts=parts)
        products = [bijax.group_matmul(part.take(inner), down, jnp.roll(part.counts, moved)) for part in split]
        starts = [part.combine_start(y, axis) for part, y in zip(split, products, strict=True)]
        arrived = parallel.join_parts([start.start() for start in starts], axis)
        return parallel.moe_combine_done(arrived, sent, weights)

    expected = jax.jit(functools.partial(layer, None, None, 0))
    cut = (P(AXIS),) * 5
    for devices, parts in ((1, 2), (4, 2), (8, 3), (2, 100)):
        run = sharded(functools.partial(layer, AXIS, parts, 0), devices, cut, P(AXIS))
        for to in routings:
            assert_bits_equal(run(x, to, weights, gate_up, down), expected(x, to, weights, gate_up, down))
    # The control: a part whose rows are counted for other experts.
    wrong = sharded(functools.partial(layer, AXIS, 2, 1), 4, cut, P(AXIS))
    assert differing(wrong(x, spread, weights, gate_up, down), expected(x, spread, weights, gate_up, down))
    with pytest.raises(ValueError, match="parts must be at least 1, got 0"):
        layer(None, 0, 0, x, spread, weights, gate_up, down)
    part = parallel.split_dispatched(parallel.moe_dispatch(x, spread, None, num_experts=experts), None)[0]
    with pytest.raises(ValueError, match=r"rows must have the 24 rows of the part, got float32\[3,2\]"):
        part.combine_start(jnp.ones((3, 2)), None)


@check("rows")
def _rows() -> None:
    """Rows that all devices have, cut and put together: the numbers, and gradients of a function between."""
    x, numbers = array(1, 5, 3).at[2, 1].set(-0.0), jnp.arange(5)

    def between(axis: str | None, x: jax.Array, numbers: jax.Array) -> Any:
        def run(x: jax.Array) -> jax.Array:
            own = parallel.own_rows(x, axis)
            return parallel.all_rows(own * 2, axis, number=5)

        y, pull = jax.vjp(run, x)
        filled = parallel.all_rows(parallel.own_rows(numbers, axis, fill=-1), axis)
        return y, *pull(-jnp.zeros_like(y)), filled

    *expected, same = between(None, x, numbers)
    assert same.tolist() == numbers.tolist()
    for devices in (1, 2, 4, 8):
        *found, filled = sharded(functools.partial(between, AXIS), devices, (P(), P()), P())(x, numbers)
        assert_bits_equal(found, expected)
        assert filled.tolist() == [*range(5), *[-1] * (-5 % devices)]

    def plain(x: jax.Array) -> jax.Array:  # the control: JAX adds the zeros of the other devices, and -0 is lost
        def run(x: jax.Array) -> jax.Array:
            own = lax.dynamic_slice_in_dim(jnp.pad(x, ((0, 3), (0, 0))), lax.axis_index(AXIS), 1)
            return lax.all_gather(own, AXIS, tiled=True, to="invarying")[:5]

        y, pull = jax.vjp(run, x)
        return pull(-jnp.zeros_like(y))[0]

    assert np.signbit(expected[1]).all()
    assert not np.signbit(sharded(plain, 8, P(), P())(x)).all()


@check("bad input")
def _bad_input() -> None:
    x, w = jnp.ones((4, 48)), jnp.ones((48, 48))

    def message(function: Callable[..., Any], devices: int, in_specs: Any, *given: jax.Array) -> str:
        mapped = jax.shard_map(function, mesh=mesh(devices), in_specs=in_specs, out_specs=P(AXIS), check_vma=False)
        with pytest.raises(ValueError, match="bijax") as error:
            jax.eval_shape(mapped, *given)
        return str(error.value)

    cut = (P(None, AXIS), P(AXIS))

    def row(**options: Any) -> Callable[..., Any]:
        return lambda x, w: parallel.row_parallel(x, w, AXIS, **options)

    said = message(row(), 3, cut, x, w)
    assert "axis 'cut'" in said
    assert "must be a power of two, got 3; use a mesh whose axis has 1, 2, 4, 8" in said
    assert "got 4 leaves for the 8 devices of axis 'cut'; use at most 4 devices" in message(row(leaves=4), 8, cut, x, w)
    assert "positive multiple of its 4 leaves of the sum, got 6" in message(row(), 2, cut, x[:, :12], w[:12])
    assert "must divide the scatter_dimension 0" in message(row(scatter_dimension=0), 8, cut, x, w)
    for function in (lambda x: parallel.psum(x, AXIS), lambda x: parallel.vocab_parallel_argmax(x, AXIS)):
        assert "must be a power of two, got 3" in message(function, 3, P(None, AXIS), x)
    said = message(lambda x: parallel.moe_dispatch(x, jnp.zeros((4, 1), int), AXIS, num_experts=6).rows, 4, P(None), x)
    assert "the 4 devices of axis 'cut' must divide num_experts, got 6" in said
    gradient = parallel.accumulate_gradients(lambda w, x: (x @ w).mean(), unit=1, axis=AXIS, lanes=4)
    said = message(lambda w, x: gradient(w, x)[0][None], 8, (P(), P(AXIS)), w, jnp.ones((8, 48)))
    assert "got 4 lanes for the 8 devices" in said
    said = message(lambda w, x: gradient(w, x)[0][None], 2, (P(), P(AXIS)), w, jnp.ones((6, 48)))
    assert "must have a multiple of 4 examples" in said
    column = jax.shard_map(
        lambda x, w: parallel.column_parallel(x, w, AXIS), mesh=mesh(2), in_specs=(P(AXIS), P()), out_specs=P(AXIS)
    )
    with pytest.raises(ValueError, match="x must be the same on all devices of axis 'cut', got an array that varies"):
        jax.eval_shape(column, x, w)
    own = jax.shard_map(lambda x: parallel.own_rows(x, AXIS), mesh=mesh(2), in_specs=P(AXIS), out_specs=P(AXIS))
    with pytest.raises(ValueError, match="an array that varies over cut; it is cut already"):
        jax.eval_shape(own, x)
    assert "number must be from 0 to 8, the rows of all devices, got 9" in message(
        lambda x: parallel.all_rows(x, AXIS, number=9), 2, P(AXIS), jnp.ones((8, 1))
    )
    with pytest.raises(ValueError, match="x must have at least one dimension, got float32"):
        parallel.own_rows(jnp.ones(()), None)


@check("gradients without types")
def _gradients_without_types() -> None:
    """Results are the same with check_vma=False; gradients, which would be wrong, are refused."""
    x, w = array(1, 2, 64), array(2, 64, 16)
    table, tokens = array(3, 16, 4), jnp.asarray([3, 15])

    def unchecked(function: Callable[..., Any], in_specs: Any) -> Callable[..., Any]:
        mapped: Callable[..., Any] = jax.shard_map(
            function, mesh=mesh(8), in_specs=in_specs, out_specs=P(), check_vma=False
        )
        return mapped

    row = unchecked(lambda x, w: parallel.row_parallel(x, w, AXIS), (P(None, AXIS), P(AXIS)))
    assert_bits_equal(jax.jit(row)(x, w), jax.jit(lambda x, w: parallel.row_parallel(x, w, None))(x, w))
    embed = unchecked(lambda t: parallel.vocab_parallel_embed(t, tokens, AXIS), P(AXIS))
    add = unchecked(lambda x: parallel.psum(x, AXIS), P(None, AXIS))
    for function, given in ((row, (x, w)), (embed, (table,)), (add, (x,))):
        with pytest.raises(bijax.UnsupportedError, match=r"expected a gradient .* with check_vma=True"):
            jax.eval_shape(jax.grad(lambda *a, f=function: f(*a).sum()), *given)


@check("fingerprints")
def _fingerprints() -> None:
    """The contracts of a program name the leaves and not the devices."""
    x, w = array(1, 4, 512), array(2, 512, 96)

    def loss(axis: str | None) -> Callable[..., Any]:
        def of(x: jax.Array, w: jax.Array) -> Any:
            y, pull = jax.vjp(lambda x, w: parallel.row_parallel(x, w, axis), x, w)
            return pull(y)

        return of

    specs = (P(None, AXIS), P(AXIS))
    found = [bijax.contracts(loss(None), x, w, platform=platform, architecture=a) for platform, a in TARGETS]
    for devices in (2, 8):
        run = sharded(loss(AXIS), devices, specs, specs)
        for (platform, architecture), expected in zip(TARGETS, found, strict=True):
            manifest = bijax.contracts(run, x, w, platform=platform, architecture=architecture)
            assert manifest.fingerprint == expected.fingerprint, (manifest.terms, expected.terms)
            assert any("ksplit8" in i for i in manifest.ids), manifest.ids
    other = bijax.contracts(lambda x, w: parallel.row_parallel(x, w, None, leaves=4), x, w, platform="cpu")
    assert other.fingerprint != found[0].fingerprint


TARGETS = (("cpu", None), ("cuda", "sm_90"))


@check("lowering for Hopper")
def _lowering_for_hopper() -> None:
    """Each device runs the kernels for Hopper, and what travels is float32."""

    def gradient(x: jax.Array, w1: jax.Array, w2: jax.Array) -> Any:
        def loss(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
            y = parallel.row_parallel(parallel.column_parallel(x, w1, AXIS), w2, AXIS)
            return bijax.sum(y.astype(jnp.float32), axis=(0, 1))

        return jax.grad(loss, (0, 1, 2))(x, w1, w2)

    specs = (P(), P(None, AXIS), P(AXIS))
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 512), (512, 1024), (1024, 512))]

    def lowered(function: Callable[..., Any], devices: int, *cut: Any) -> str:
        program: Any = sharded(function, devices, *cut)
        with bijax.lowering_for("sm_90"):
            text: str = program.trace(*given[: len(cut[0])]).lower(lowering_platforms=("cuda",)).as_text()
        return text

    text = lowered(gradient, 4, specs, specs)
    assert "mosaic_gpu" in text
    assert "all_reduce" not in text
    assert "reduce_scatter" not in text
    moved = [line for line in text.splitlines() if "stablehlo.all_to_all" in line]
    assert moved
    assert all("xf32>" in line for line in moved), moved
    # Two terms have one sum: XLA's all-reduce. One kernel multiplies all leaves of a device, and adds them or leaves a
    # few sums to another.
    text = lowered(lambda x, w: parallel.row_parallel(x, w, AXIS), 2, (P(None, AXIS), P(AXIS)), P())
    assert len(re.findall(r"stablehlo.all_reduce.*?-> tensor<512x1024xf32>", text, re.DOTALL)) == 1
    assert "all_to_all" not in text
    assert "all_gather" not in text
    assert text.count("stablehlo.custom_call @mosaic_gpu") in (1, 2), text.count("stablehlo.custom_call @mosaic_gpu")
    # XLA calls a library for sums alone: the reduction has no fences, in an invariant program neither.
    summed = bijax.invariant(lambda x: lax.psum(x.astype(jnp.float32), AXIS))
    text = lowered(summed, 2, (P(None, AXIS),), P())
    assert re.search(r"all_reduce.*\n.*\n +%\d+ = stablehlo\.add .*\n +stablehlo\.return", text), text


@check("few rows on Hopper")
def _few_rows_on_hopper() -> None:
    """In programs of several GPUs Triton's kernels multiply few rows, under equal contracts."""
    fingerprints = set()

    def launches(rows: int, devices: int) -> tuple[bool, bool]:
        cut = sharded(lambda x, w: parallel.row_parallel(x, w, AXIS), devices, (P(None, AXIS), P(AXIS)), P())
        given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, 4096), (4096, 512))]
        program: Any = cut
        with bijax.lowering_for("sm_90"):
            text = program.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
            contracts = bijax.contracts(cut, *given, platform="cuda")
        fingerprints.add(contracts.fingerprint)
        return launches_in(text) > 0, "@mosaic_gpu" in text

    assert launches(8, 1) == (False, True)
    assert launches(32, 2) == (False, True)
    assert launches(8, 2) == (HAS_JAX_TRITON, not HAS_JAX_TRITON)
    assert len(fingerprints) == 1


def main() -> None:
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)


if __name__ == "__main__":
    main()
