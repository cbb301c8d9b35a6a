"""Reductions with the parameters of JAX's primitives: bits, values and the cases that stock JAX leaves open."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.lax import reduce
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla import lanes
from pallas_kernels.rows.fold import fold_axis
from tests.arrays import on_device
from tests.lax.primitive_cases import FLOATS, lowers_for_cuda, normal
from tests.tiers import full_only

NAMES = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")


def every(x: jax.Array, axes: tuple[int, ...]) -> dict[str, jax.Array]:
    return {name: getattr(reduce, name)(x, axes=axes) for name in NAMES}


@pytest.mark.tier("full", fast=("77-float32",))
@pytest.mark.parametrize(
    ("columns", "dtype"), [*((n, "float32") for n in (1, 77, 2500)), (77, "bfloat16"), (77, "float16")]
)
def test_rows_keep_their_bits(columns: int, dtype: str) -> None:
    rows = on_device(np.concatenate([*hostile_rows(0, (3, columns), dtype).values()]))
    assert_batch_invariant(
        lambda x: every(x, (1,)),
        rows,
        batch_sizes=(2, 33),
        neighbours=("given", "permuted", "huge", "inf", "nan"),
        modes=("jit",),
    )


@pytest.mark.tier("full")
def test_columns_and_scattered_axes_keep_their_bits() -> None:
    x = on_device(hostile_rows(1, (8, 5, 3, 41), "float32")["wide"])
    sizes: Any = {"batch_sizes": (2, 17), "neighbours": ("given", "nan"), "modes": ("jit",)}
    assert_batch_invariant(lambda x: every(x, (1, 3)), x, **sizes)
    assert_batch_invariant(lambda x: every(x, (0,)), x.reshape(8, -1).T, batch_axes=1, **sizes)
    inside = jax.jit(lambda x: every(x, (0, 1, 2)))
    mapped = jax.jit(lambda x: every(x, (0, 2, 3)))(x.transpose(1, 0, 2, 3))
    assert_bits_equal(jax.tree.map(lambda a: a[3], mapped), inside(x[3]), err_msg="an axis between the reduced ones")


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("shape", "axes"), [((3, 2, 300), (2,)), ((3, 5, 2, 41), (0, 1)), ((2, 3, 5, 7), (1, 3)), ((4, 0), (1,))]
)
def test_programs_for_a_gpu_have_the_same_bits(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """They keep the dimensions apart that others merge, and leave maxima to XLA."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal(shape).astype(np.float32) * 2.0 ** draw.integers(-30, 30, shape)
    x = jnp.asarray(np.where(draw.random(shape) < 0.1, draw.choice([0.0, -0.0, np.nan, np.inf, -np.inf], shape), x))
    found = jax.jit(lambda x: {name: getattr(reduce, name)(x, axes=axes, on_gpu=True) for name in NAMES})(x)
    assert_bits_equal(found, jax.jit(lambda x: every(x, axes))(x))


def test_stock_sums_do_not() -> None:
    """The control."""
    report = batch_variance_report(
        lambda x: lax.reduce_sum(x, (1,)),
        on_device(hostile_rows(0, (8, 77), "float32")["normal"]),
        batch_sizes=(64, 130),
        neighbours=("given",),
        modes=("jit",),
    )
    assert report.differing_elements


@pytest.mark.tier("full", fast=("float16-()", "float16-(3, 0, 4)"))
@pytest.mark.parametrize("shape", [(), (3, 0, 4), (2, 3, 129)])
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_results_are_those_of_lax(shape: tuple[int, ...], dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        x = normal(2, *shape).astype(dtype)
        wide = np.asarray(x, np.float64)
        eps = float(jnp.finfo(jnp.float32 if dtype != "float64" else dtype).eps)
        for count in range(len(shape) + 1):
            for axes in itertools.combinations(range(len(shape)), count):
                found = jax.jit(every, static_argnums=1)(x, axes)
                n = int(np.prod([shape[a] for a in axes], dtype=int))
                bounds = {
                    "reduce_sum": n * eps * np.abs(wide).sum(axes) + float(jnp.finfo(dtype).eps),
                    "reduce_prod": n * eps * np.abs(wide.prod(axes)),
                    "reduce_max": 0.0,
                    "reduce_min": 0.0,
                }
                for name in NAMES:
                    stock = jax.eval_shape(lambda x, axes=axes, name=name: getattr(lax, name)(x, axes), x)
                    assert (found[name].shape, found[name].dtype) == (stock.shape, stock.dtype)
                    if n == 0:
                        assert_bits_equal(found[name], getattr(lax, name)(x, axes))
                        continue
                    expected = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[name[7:]](wide, axis=axes)
                    error = np.abs(np.asarray(found[name], np.float64) - expected)
                    rounding = np.abs(expected) * float(jnp.finfo(dtype).eps) * (name[7:] in ("sum", "prod"))
                    rounding += float(jnp.finfo(dtype).tiny) * (name == "reduce_prod")
                    assert (error <= bounds[name] + rounding).all(), (name, axes)


@pytest.mark.parametrize("axes", [full_only((1,)), (2, 0)], ids=str)
def test_sums_are_those_of_bijax(axes: tuple[int, ...]) -> None:
    x = normal(3, 6, 300, 7)
    assert_bits_equal(reduce.reduce_sum(x, axes=axes), bijax.sum(x, axes))


@pytest.mark.tier("full", fast=("float16",))
@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_maxima_of_zeros_nans_and_infinities(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        nan, inf = np.nan, np.inf
        rows = np.array([[0.0, -0.0], [-0.0, 0.0], [nan, 1], [-inf, nan], [-nan, inf], [-inf, -inf], [-0.0, -0.0]])
        x = jnp.asarray(rows, dtype)
        greatest = np.array([0.0, 0.0, nan, nan, nan, -inf, -0.0])
        smallest = np.array([-0.0, -0.0, nan, nan, nan, -inf, -0.0])
        largest = jax.jit(lambda x: reduce.reduce_max(x, axes=(1,)))
        assert_bits_equal(largest(x), jnp.asarray(greatest, dtype))
        assert_bits_equal(jax.jit(lambda x: reduce.reduce_min(x, axes=(1,)))(x), jnp.asarray(smallest, dtype))
        tiny = jnp.asarray([[0.0, float(jnp.finfo(dtype).smallest_subnormal)]], dtype)
        assert_bits_equal(largest(tiny), tiny[:, 1])


@pytest.mark.parametrize("shape", [(4, 3), (8, 3), (33,)])
def test_maxima_of_subnormal_numbers_in_a_batch_and_alone(shape: tuple[int, ...]) -> None:
    """Loops that compare bfloat16 numbers moved them through float32 where many rows are vectorised."""
    numbers = np.resize(np.array([1, 0x7F, 2, 3], np.uint16), shape)
    for bits in (numbers, numbers | 0x8000):
        row = bits.view(jnp.bfloat16)
        for op, expected in ((reduce.reduce_max, bits.max(0)), (reduce.reduce_min, bits.min(0))):
            if bits is not numbers:
                expected = bits.min(0) if op is reduce.reduce_max else bits.max(0)
            run = jax.jit(functools.partial(op, axes=(1,)))
            for count in (1, 12, 100, 1000):
                found = np.asarray(run(jnp.asarray(np.broadcast_to(row, (count, *shape)))))
                assert (found.view(np.uint16) == expected).all(), (count, op)


@pytest.mark.tier("full", fast=("float8_e4m3",))
@pytest.mark.parametrize("dtype", ["float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2"])
def test_maxima_of_eight_bits(dtype: str) -> None:
    x = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    numbers = x[~np.isnan(x.astype(np.float32))]
    rows = np.random.default_rng(0).choice(numbers, (5, 19))

    def same(found: jax.Array, expected: np.ndarray) -> bool:
        return bool((np.asarray(found).view(np.uint8) == expected.astype(dtype).view(np.uint8)).all())

    for op, expected in ((reduce.reduce_max, np.max), (reduce.reduce_min, np.min)):
        rule = jax.jit(op, static_argnames="axes")
        assert same(rule(jnp.asarray(rows), axes=(1,)), expected(rows.astype(np.float32), axis=1))
        # Each number by itself comes back as it is, and a nan wins.
        assert same(rule(jnp.asarray(numbers)[:, None], axes=(1,)), numbers)
        assert np.isnan(np.asarray(rule(jnp.asarray(x), axes=(0,)), np.float32))
        least = -expected(numbers.astype(np.float32), keepdims=True)
        assert same(rule(jnp.zeros((1, 0), dtype), axes=(1,)), least)


def test_stock_argmax_is_exact_already() -> None:
    """Ties and nans among batches of every size: the first one wins, so these primitives need no replacement."""
    rng = np.random.default_rng(0)
    for columns in (16, 131):
        x = rng.integers(-2, 3, (65, columns)).astype(np.float32)
        x[::3] *= -1.0
        x[4::5, columns // 2 :] = np.nan
        x[1::7] = np.inf
        for op, expected in ((lax.argmax, np.argmax(x, 1)), (lax.argmin, np.argmin(x, 1))):
            compiled = jax.jit(lambda x, op=op: (op(x, 1, np.int32), op(x.T, 0, np.int32)))
            for rows in (1, 2, 33, 65):
                for found in compiled(x[:rows]):
                    assert (np.asarray(found) == expected[:rows]).all()


def test_errors_and_other_platforms() -> None:
    with pytest.raises(UnsupportedError, match="reduce_sum: a batch-invariant order is defined for float32"):
        reduce.reduce_sum(jnp.ones(3, jnp.complex64), axes=(0,))
    for dtype in ("float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn"):
        with pytest.raises(UnsupportedError, match=f"got {dtype}; convert the operand"):
            reduce.reduce_max(jnp.ones(3, dtype), axes=(0,))
    assert lowers_for_cuda(lambda x: every(x, (0,)), jnp.ones((200, 3), jnp.bfloat16))


@pytest.mark.tier("full")
@pytest.mark.parametrize(("shape", "axis"), [((3, 2048), 1), ((2, 2, 700), 2), ((2, 300, 40), 1)])
def test_passes_of_a_gpu_keep_the_order(shape: tuple[int, ...], axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into how many passes a sum is cut depends on the number of elements, the order does not."""
    x = on_device(np.random.default_rng(3).standard_normal(shape), jnp.float32)
    expected = fold_axis(x, fold="sum", contract=row_contract(), axis=axis)
    for name, limit in (("_FEW", 0), ("_CACHED", 0)):
        monkeypatch.setattr(lanes, name, limit)
        total = jax.jit(lambda x: fold_axis(x, fold="sum", contract=row_contract(), axis=axis, fused=True))(x)
        assert_bits_equal(total, expected)
    other = fold_axis(jnp.roll(x, 1, axis), fold="sum", contract=row_contract(), axis=axis)
    assert (np.asarray(other) != np.asarray(expected)).any()  # the control: the order moves bits
