"""The softmax family and cross entropy on a Hopper GPU: bits in every schedule and batch, values against float64."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import online_row_contract
from pallas_kernels.cross_entropy import hopper as cross_entropy
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule
from pallas_kernels.softmax import hopper as softmax
from tests.rows.row_cases import labels_of
from tests.rows.softmax_kernel_cases import hostile, schedules

pytestmark = pytest.mark.gpu

THREADS = 14  # kernels compile outside of the interpreter lock


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (12, "float16"),
        (16, "bfloat16"),
        (60, "float16"),
        (64, "bfloat16"),
        (77, "float32"),
        (128, "float32"),
        (576, "bfloat16"),
        (2528, "float32"),
        (8192, "float16"),
        (9600, "float32"),
        (32000, "bfloat16"),
    ],
)
def test_every_schedule_gives_the_same_bits(columns: int, dtype: str) -> None:
    x, labels = hostile(columns, dtype)
    contract = online_row_contract(columns)

    def run(schedule: OnlineSchedule) -> Any:
        def both(x: Any, labels: Any) -> Any:
            loss = cross_entropy.cross_entropy(x, labels, z_loss=0.01, schedule=schedule, contract=contract)
            return softmax.log_softmax(x, schedule=schedule, contract=contract), loss

        return jax.jit(both)(x, labels)

    every = schedules(columns, x.dtype.itemsize)
    with ThreadPoolExecutor(THREADS) as pool:
        first, *others = pool.map(run, every)
    for schedule, other in zip(every[1:], others, strict=True):
        assert_bits_equal(other, first, err_msg=str(schedule))


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_block_alone_has_the_bits_of_a_block_with_an_empty_one(columns: int, dtype: str) -> None:
    """Of one block the exponentials are not computed: all are of zero, or of a number that is not finite."""
    x, _ = hostile(columns, dtype)
    x = jnp.concatenate([x] * (300 // len(x) + 1))

    def run(x: jax.Array) -> Any:
        contract = online_row_contract(x.shape[1])
        y, m, log_sum = softmax.log_softmax(x, contract=contract)
        return softmax.softmax(x, contract=contract)[:, :columns], y[:, :columns], m, log_sum

    longer = jnp.pad(x, ((0, 0), (0, 256 - columns)), constant_values=-jnp.inf)
    assert_bits_equal(jax.jit(run)(x), jax.jit(run)(longer))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp", "softmax_cross_entropy"])
def test_rows_at_every_position_among_any_neighbours(name: str) -> None:
    def both(x: jax.Array) -> Any:
        """The result and the gradient of the rows."""
        more = (labels_of(x),) if name == "softmax_cross_entropy" else ()
        y, pull = jax.vjp(lambda x: getattr(bijax, name)(x, *more), x)
        return y, pull(jnp.cos(y))[0]

    def sweep(columns: int) -> None:
        x = jnp.asarray(hostile_rows(0, (16, columns), "float32")["normal"])
        sizes = (2, 133) if columns > 4096 else (9, 530)
        assert_batch_invariant(both, x, batch_axes=(0,), batch_sizes=sizes, modes=("jit",))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(sweep, (77, 576, 4096, 32000)))


@pytest.mark.parametrize("columns", [300, 9000])
def test_values_that_are_not_finite_mean_what_they_mean_in_jax(columns: int) -> None:
    x, _ = hostile(columns, "float32")
    for name in ("softmax", "log_softmax", "logsumexp"):
        found, right = getattr(bijax, name)(x, -1), getattr(jax.nn, name)(x, axis=-1)
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("columns", [576, 32000, 50257])
def test_values_and_gradients_against_float64(columns: int) -> None:
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((20, columns)).astype(np.float32) * scale for scale in (4, 1))
    labels = rng.integers(0, columns, 20)
    wide, g64 = x.astype(np.float64), g.astype(np.float64)
    shifted = wide - wide.max(1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(1, keepdims=True))
    p = np.exp(shifted - log_sum)
    weight = 1 + 0.02 * (log_sum + wide.max(1, keepdims=True))
    hot = np.arange(columns) == labels[:, None]
    exact = {
        "softmax": (p, p * (g64 - (p * g64).sum(1, keepdims=True))),
        "log_softmax": (shifted - log_sum, g64 - p * g64.sum(1, keepdims=True)),
        "logsumexp": ((log_sum + wide.max(1, keepdims=True))[:, 0], p * g64[:, :1]),
        "softmax_cross_entropy": (None, g64[:, :1] * (p * weight - hot)),
    }
    for name, (value, gradient) in exact.items():
        more = (labels,) if value is None else ()
        parameters = {"z_loss": 0.01} if value is None else {}
        op = functools.partial(getattr(bijax, name), **parameters)
        y, pull = jax.vjp(lambda x, op=op, more=more: op(x, *more), jnp.asarray(x))
        (dx,) = pull(jnp.asarray(g if y.ndim == 2 else g[:, 0]))
        if value is not None:
            assert np.abs(np.asarray(y) - value).max() <= 3e-7 * np.abs(value).max(), name
        assert np.abs(np.asarray(dx) - gradient).max() <= 2e-6 * np.abs(gradient).max(), name
        if name == "softmax":
            # Every probability keeps its digits, the small ones too: exponentials are corrected.
            assert np.abs(np.asarray(y) / value - 1).max() <= 3e-6


def test_cross_entropy_needs_no_memory_for_the_softmax() -> None:
    x, labels = jnp.zeros((2048, 32000), jnp.bfloat16), jnp.zeros(2048, jnp.int32)

    def total(x: jax.Array, labels: jax.Array) -> jax.Array:
        return bijax.softmax_cross_entropy(x, labels).sum()

    program = jax.jit(jax.value_and_grad(total)).lower(x, labels).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 1 << 20
