"""Row kernels through jax-triton on a Hopper GPU: the bits of the CPU or of Hopper's kernels, in any schedule."""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import PTX_FUNCTIONS, QuantizeContract, chunk_contract, online_row_contract, row_contract
from pallas_kernels.schedule.jax_triton.batch_sum import ChunkSchedule
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.target import Target
from tests.quantize import cases as quantize_cases
from tests.rows import row_kernel_cases
from tests.rows.golden_rows import GOLDEN, golden_hash
from tests.rows.row_cases import OURS, PLAIN, with_gradient
from tests.rows.softmax_kernel_cases import hostile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
        reason="needs jax-triton and triton",
    ),
]
if importlib.util.find_spec("triton"):
    from pallas_kernels.cross_entropy.jax_triton import launch as cross_entropy
    from pallas_kernels.norm.jax_triton import launch as norm
    from pallas_kernels.quantize.jax_triton import launch as quantize
    from pallas_kernels.rows.jax_triton import launch as rows
    from pallas_kernels.softmax.jax_triton import launch as softmax

HOPPER = Target.parse("sm_90")
KINDS = ("normal", "wide", "cancelling", "denormal", "inf", "nan")
SHAPES = (
    (5, 1, "float32", None),
    (7, 77, "bfloat16", "float32"),
    (300, 576, "float16", None),
    (9, 5000, "bfloat16", None),
    (5, 32000, "bfloat16", "float32"),
    (3, 128256, "float32", None),
)
ROW_SCHEDULES = (
    RowSchedule(1, 1, held=True),
    RowSchedule(1, 4, held=True, preload=True),
    RowSchedule(4, 8, held=True),
    RowSchedule(8, 1, held=True),
    RowSchedule(1, 4, held=False),
    RowSchedule(2, 8, held=False, ahead=2),
    RowSchedule(1, 32, held=True, preload=True),
    RowSchedule(1, 32, held=False, ahead=4),
)
MOST_COLUMNS = 128  # of an array that a thread may have at once: more are spilled, and compile for minutes
CHUNK_SCHEDULES = [ChunkSchedule(32, 1), ChunkSchedule(128, 1), ChunkSchedule(256, 4), ChunkSchedule(1024, 4)]


@pytest.mark.parametrize(("m", "columns", "dtype", "weights"), SHAPES)
@pytest.mark.parametrize("name", [case.name for case in row_kernel_cases.cases(1, 8, "float32")])
def test_the_bits_are_those_of_the_cpu(name: str, m: int, columns: int, dtype: str, weights: str | None) -> None:
    # A GPU computes with denormal numbers, a CPU does not; a sum of infinities is another nan there.
    kinds = ("normal", "wide", "cancelling") if columns <= 5000 else ("normal",)

    def case_of(kind: str) -> row_kernel_cases.Case:
        every = row_kernel_cases.cases(m, columns, dtype, weights, kind, row_kernel_cases.triton_kernel)
        return next(case for case in every if case.name == name)

    same = [case_of(kind) for kind in kinds]
    if name == "variance" and columns == 1:
        assert not rows.variance.serves(same[0].arguments[0], **same[0].parameters)
        return
    for kind, found, expected in zip(kinds, same[0].all_found(same), same[0].all_expected(same), strict=True):
        assert_bits_equal(found, expected, err_msg=kind)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_hashes(name: str) -> None:
    assert golden_hash(name, row_kernel_cases.triton_kernel(name)) == GOLDEN[name]


def calls(columns: int, dtype: str, m: int = 9) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns functions of a schedule and arrays, and the arrays: hostile rows of every kind."""
    data = [hostile_rows(seed, (m, columns), dtype) for seed in range(3)]
    x = jnp.concatenate([jnp.asarray(data[0][kind]) for kind in KINDS])
    g, r = (jnp.concatenate([jnp.asarray(d["normal"])] * len(KINDS)) for d in data[1:])
    w, b = (jnp.asarray(hostile_rows(seed, (columns,), dtype)["normal"]) for seed in (3, 4))
    f, u = (jnp.asarray(hostile_rows(seed, (len(x), 1), "float32")["normal"]) for seed in (5, 6))
    labels = jnp.asarray(np.random.default_rng(0).integers(-1, columns + 1, (len(x), 1)), jnp.int32)
    place = labels % len(x)
    expert = labels % 4 - 2
    both: dict[str, Any] = {"contract": row_contract(), "target": HOPPER}
    int8, eight = QuantizeContract(), QuantizeContract("float8_e4m3fn")
    swiglu = {"contract": int8, "target": HOPPER, "functions": PTX_FUNCTIONS}
    return {
        "rms_norm": (lambda s, x, w, r: norm.rms_norm(x, w, r, eps=1e-6, schedule=s, **both), (x, w, r)),
        "rms_norm_gradient": (
            lambda s, x, f, g, w, r: norm.rms_norm_gradient(x, f, g, w, r, schedule=s, **both),
            (x, f, g, w, r),
        ),
        "layer_norm": (lambda s, x, w, b: norm.layer_norm(x, w, b, eps=1e-6, schedule=s, **both), (x, w, b)),
        "layer_norm_gradient": (
            lambda s, x, u, f, g, w: norm.layer_norm_gradient(x, u, f, g, w, schedule=s, **both),
            (x, u, f, g, w),
        ),
        "mean": (lambda s, x: rows.sum_axis(x[:, :, None], mean=True, schedule=s, **both), (x,)),
        "variance": (lambda s, x: rows.variance(x[:, :, None], ddof=0, schedule=s, **both), (x,)),
        "softmax": (lambda s, x: softmax.softmax(x, schedule=s, **both), (x,)),
        "softmax_gradient": (lambda s, x, g: softmax.softmax_gradient(x, g, schedule=s, **both), (x, g)),
        "log_softmax": (lambda s, x: softmax.log_softmax(x, schedule=s, **both), (x,)),
        "log_softmax_gradient": (
            lambda s, x, u, f, g: softmax.log_softmax_gradient(x, u, f, g, schedule=s, **both),
            (x, u, f, g),
        ),
        "logsumexp": (lambda s, x: softmax.logsumexp(x, schedule=s, **both), (x,)),
        "logsumexp_gradient": (
            lambda s, x, u, f, g: softmax.logsumexp_gradient(x, u, f, g, schedule=s, target=HOPPER),
            (x, u, f, f),
        ),
        "cross_entropy": (
            lambda s, x, labels: cross_entropy.cross_entropy(x, labels, z_loss=0.01, schedule=s, **both),
            (x, labels),
        ),
        "cross_entropy_gradient": (
            lambda s, x, labels, u, f: cross_entropy.cross_entropy_gradient(
                x, labels, u, f, f, z_loss=0.01, schedule=s, target=HOPPER
            ),
            (x, labels, u, f),
        ),
        "quantize": (
            lambda s, x, b, place, expert: quantize.quantize(
                x, jnp.stack([b, b + 1]), place, expert, contract=eight, schedule=s, target=HOPPER
            ),
            (x, b, place, expert),
        ),
        "quantize_swiglu": (
            lambda s, x, g, w: quantize.quantize_swiglu(jnp.concatenate([x, g], 1), w, schedule=s, **swiglu),
            (x, g, w),
        ),
        "quantize_norm": (
            lambda s, x, w, b, r: quantize.quantize_norm(x, w, b, r, eps=1e-6, quantize=int8, schedule=s, **both),
            (x, w, b, r),
        ),
    }


NAMES = tuple(calls(8, "float32", 1))
SHARED = (
    "rms_norm",
    "rms_norm_gradient",
    "layer_norm",
    "softmax",
    "log_softmax",
    "cross_entropy",
    "cross_entropy_gradient",
)
"""Those whose rows several programs can share."""


def columns_at_once(schedule: RowSchedule, columns: int) -> float:
    """Returns how many columns of an array a thread has at once."""
    lanes = row_contract().lanes(columns)
    blocks = -(-columns // lanes) if schedule.held else schedule.ahead
    return schedule.rows * blocks * lanes / (32 * schedule.warps)


@pytest.mark.parametrize(
    ("columns", "dtype"), [(77, "float32"), (576, "bfloat16"), (4096, "bfloat16"), (9000, "float16")]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_same_bits(name: str, columns: int, dtype: str) -> None:
    function, arrays = calls(columns, dtype)[name]
    first = jax.jit(lambda *a: function(None, *a))(*arrays)
    for schedule in ROW_SCHEDULES:
        if columns_at_once(schedule, columns) > MOST_COLUMNS:
            continue
        found = jax.jit(functools.partial(lambda s, *a: function(s, *a), schedule))(*arrays)
        assert_bits_equal(found, first, err_msg=str(schedule))


@pytest.mark.parametrize("columns", [40000, 128256, 300000])
@pytest.mark.parametrize("name", ["rms_norm", "softmax", "cross_entropy", "quantize"])
def test_schedules_of_wide_rows_give_the_same_bits(name: str, columns: int) -> None:
    function, arrays = calls(columns, "bfloat16", 1)[name]
    first = jax.jit(lambda *a: function(None, *a))(*arrays)
    for schedule in (
        RowSchedule(1, 32, held=True),
        *(RowSchedule(1, warps, held=False, ahead=ahead) for warps, ahead in ((8, 1), (32, 2), (16, 4), (32, 4))),
    ):
        if columns_at_once(schedule, columns) > MOST_COLUMNS:
            continue
        found = jax.jit(functools.partial(lambda s, *a: function(s, *a), schedule))(*arrays)
        assert_bits_equal(found, first, err_msg=str(schedule))


@pytest.mark.parametrize("columns", [9000, 128256])
@pytest.mark.parametrize("name", SHARED)
def test_programs_that_share_rows_give_the_same_bits(name: str, columns: int) -> None:
    function, arrays = calls(columns, "bfloat16", 1)[name]
    first = jax.jit(lambda *a: function(RowSchedule(1, 32, held=False, ahead=2), *a))(*arrays)
    for parts, warps in ((2, 32), (8, 8), (64, 1)) if columns > 100000 else ((2, 8), (8, 4), (64, 1)):
        schedule = RowSchedule(1, warps, held=True, parts=parts)
        found = jax.jit(functools.partial(lambda s, *a: function(s, *a), schedule))(*arrays)
        assert_bits_equal(found, first, err_msg=str(schedule))


@pytest.mark.parametrize("m", [1, 7, 17, 100, 128, 300, 1300])
@pytest.mark.parametrize("columns", [33, 640])
def test_every_cut_of_a_sum_over_rows(m: int, columns: int) -> None:
    data = [hostile_rows(seed, (m, columns), "bfloat16") for seed in (0, 1)]
    f, u = (jnp.asarray(hostile_rows(seed, (m, 1), "float32")["normal"]) for seed in (2, 3))
    start = jnp.asarray(hostile_rows(4, (columns,), "float32")["zeros"])
    for kind in ("wide", "zeros", "inf"):
        x, g = (jnp.asarray(d[kind]) for d in data)

        def sums(schedule: ChunkSchedule | None, x: Any = x, g: Any = g) -> Any:
            both: dict[str, Any] = {"contract": chunk_contract(), "target": HOPPER, "schedule": schedule}
            return rows.sum_rows(x, **both, accumulate=start), norm.weight_gradient(x, f, g, u, **both)

        first = sums(None)
        for schedule in CHUNK_SCHEDULES:
            assert_bits_equal(sums(schedule), first, err_msg=f"{kind} {schedule}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [576, 4096])
def test_a_contract_of_the_same_name_has_the_bits_of_hopper(columns: int, dtype: str) -> None:
    from pallas_kernels.cross_entropy import hopper as cross_entropy_hopper
    from pallas_kernels.quantize import hopper as quantize_hopper
    from pallas_kernels.softmax import hopper as softmax_hopper

    x, labels = hostile(columns, dtype)
    g = jnp.asarray(hostile_rows(1, x.shape, dtype)["normal"])
    m, log_sum = softmax.logsumexp(x, contract=row_contract(), target=HOPPER)
    number = g[:, :1].astype(jnp.float32)
    both = {"contract": row_contract()}
    swiglu = {"contract": QuantizeContract(), "functions": PTX_FUNCTIONS}
    gated = jnp.concatenate([g, g[::-1] * 3], 1)
    for ours, theirs, arrays, parameters in (
        (softmax.softmax_gradient, softmax_hopper.softmax_gradient, (g, x), both),
        (softmax.log_softmax_gradient, softmax_hopper.log_softmax_gradient, (x, m, log_sum, g), both),
        (softmax.logsumexp_gradient, softmax_hopper.logsumexp_gradient, (x, m, log_sum, number), {}),
        (
            cross_entropy.cross_entropy_gradient,
            cross_entropy_hopper.cross_entropy_gradient,
            (x, labels, m, log_sum, number),
            {"z_loss": 0.01},
        ),
        (quantize.quantize_swiglu, quantize_hopper.quantize_swiglu, (gated,), swiglu),
    ):
        found = jax.jit(functools.partial(ours, target=HOPPER, **parameters))(*arrays)
        expected = jax.jit(functools.partial(theirs, **parameters))(*arrays)
        found, expected = (jax.tree.map(_with_one_nan, a) for a in (found, expected))
        assert_bits_equal(found, expected, err_msg=str(ours))


def _with_one_nan(x: jax.Array) -> jax.Array:
    """The sign of a nan is that of an operand, whose order no contract names."""
    return jnp.where(jnp.isnan(x), jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.parametrize(
    ("m", "columns", "dtype", "smooth"),
    [(300, 576, "float16", "bfloat16"), (40, 7168, "bfloat16", "float32"), (4, 32000, "bfloat16", "float32")],
)
def test_quantised_rows_have_the_bits_of_the_cpu(m: int, columns: int, dtype: str, smooth: str) -> None:
    for case in quantize_cases.cases(m, columns, dtype, smooth, kernel=quantize_cases.triton_kernel):
        found = jax.jit(functools.partial(case.kernel, **case.parameters))(*map(jnp.asarray, case.arguments))
        with jax.default_device(jax.devices("cpu")[0]):
            there = [jnp.asarray(a) for a in case.arguments]
            expected = jax.jit(functools.partial(case.portable, **case.parameters))(*there)
        assert_bits_equal(jax.device_get(found), jax.device_get(expected), err_msg=case.name)


@pytest.mark.parametrize("columns", [77, 576, 4096, 32000])
@pytest.mark.parametrize("name", OURS)
def test_rows_at_every_position_among_any_neighbours(name: str, columns: int) -> None:
    x, g = (jnp.asarray(hostile_rows(seed, (16, columns), "bfloat16")["normal"]) for seed in (0, 1))
    w = jnp.asarray(hostile_rows(2, (columns,), "bfloat16")["normal"])
    with bijax.prefer_backend("jax_triton"):
        assert_batch_invariant(
            with_gradient(OURS[name]), x, g, w, batch_axes=(0, 0, None), batch_sizes=(2, 9, 300), modes=("jit",)
        )


def test_plain_jax_is_not_invariant() -> None:
    """The control: the sweep above finds what XLA does to norms and softmax after a product."""
    x, g = (jnp.asarray(hostile_rows(seed, (16, 1024), "float32")["normal"]) for seed in (0, 1))
    w = jnp.asarray(hostile_rows(2, (1024,), "float32")["normal"])

    def plain(x: jax.Array, g: jax.Array, w: jax.Array) -> Any:
        return [with_gradient(op)(x @ jnp.outer(w, w), g, w) for op in PLAIN.values()]

    with pytest.raises(AssertionError):
        assert_batch_invariant(plain, x, g, w, batch_axes=(0, 0, None), batch_sizes=(2, 133), modes=("jit",))


@pytest.mark.parametrize("columns", [576, 32000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_against_float64(columns: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, columns)) * 4, dtype)
    labels = jnp.asarray(rng.integers(0, columns, (20, 1)), jnp.int32)
    wide = np.asarray(x).astype(np.float64)
    shifted = wide - wide.max(1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(1, keepdims=True))
    p = np.exp(shifted - log_sum)
    both: dict[str, Any] = {"contract": row_contract(), "target": HOPPER}
    loss, m, found = cross_entropy.cross_entropy(x, labels, z_loss=0.0, **both)
    assert_bits_equal(m[:, 0], x.max(1).astype(jnp.float32))
    assert np.abs(np.asarray(found) - log_sum).max() <= 2e-6
    exact = log_sum - np.take_along_axis(shifted, np.asarray(labels), 1)
    assert np.abs(np.asarray(loss) - exact).max() <= 5e-6
    number = jnp.ones((20, 1), jnp.float32)
    gradient = cross_entropy.cross_entropy_gradient(x, labels, m, found, number, z_loss=0.0, target=HOPPER)
    hot = np.arange(columns) == np.asarray(labels)
    bound = 3e-6 if dtype == "float32" else 2**-8
    y = np.asarray(softmax.softmax(x, **both)).astype(np.float64)
    assert np.abs(y / p - 1)[p > 1e-30].max() <= bound
    assert np.abs(np.asarray(gradient).astype(np.float64) - (p - hot)).max() <= bound
    logs = np.asarray(softmax.log_softmax(x, **both)[0]).astype(np.float64)
    assert np.abs(logs - (shifted - log_sum)).max() <= (1e-5 if dtype == "float32" else 0.2)


@pytest.mark.parametrize("columns", [300, 9000])
def test_values_that_are_not_finite_mean_what_they_mean_in_jax(columns: int) -> None:
    x, labels = hostile(columns, "float32")
    with bijax.prefer_backend("jax_triton"):
        for name in ("softmax", "log_softmax", "logsumexp"):
            found, right = jax.jit(getattr(bijax, name))(x), getattr(jax.nn, name)(x, axis=-1)
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5, err_msg=name)
        loss = jax.jit(functools.partial(bijax.softmax_cross_entropy, ignore_index=-1))(x, labels[:, 0])
    assert_bits_equal(loss[5], jnp.float32(0))  # its label is ignored
    assert bool(jnp.isnan(loss[6]))  # its label is the number of columns
    assert online_row_contract(columns) != row_contract()  # so Hopper's bits differ, and have another name
