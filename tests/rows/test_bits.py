"""Row operations: a row's bits at every batch size and position, in every dtype, forward and backward."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.cross_entropy import portable as cross_entropy
from pallas_kernels.norm import portable as norm
from pallas_kernels.softmax import portable as softmax
from tests.arrays import on_device
from tests.rows.row_cases import OURS, PLAIN, all_ops, hostile_batch, labels_of, with_gradient
from tests.tiers import full_only


# One column, less than a block of lanes, some blocks and a tail, more blocks than are unrolled and a tail. XLA compiles
# programs of few and of many elements differently; for plain JAX the watershed lies within these sizes.
@pytest.mark.tier("full", fast=("(1, 33)-333-float32",))
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(1, "float32"), (77, "float32"), (333, "float32"), (4200, "float32"), (333, "bfloat16"), (333, "float16")],
)
@pytest.mark.parametrize("sizes", [(1, 33), (2, 5, 130)], ids=str)
def test_rows_keep_their_bits(columns: int, dtype: str, sizes: tuple[int, ...]) -> None:
    x, g, w = hostile_batch(columns, dtype)
    assert_batch_invariant(
        all_ops,
        x,
        g,
        w,
        batch_axes=(0, 0, None),
        batch_sizes=sizes,
        neighbours=("given", "permuted", "huge", "inf", "nan"),
        modes=("jit",),
    )


def test_control_plain_jax_differs() -> None:
    """The same harness finds that plain JAX changes bits with the batch, in the same operations."""
    x, g, w = hostile_batch(333, "float32")
    differing = {}
    for name in ("sum", "softmax", "rms_norm", "layer_norm"):
        report = batch_variance_report(
            with_gradient(PLAIN[name]),
            x,
            g,
            w,
            batch_axes=(0, 0, None),
            batch_sizes=(1, 33),
            neighbours=("given",),
            modes=("jit",),
        )
        differing[name] = report.differing_elements
    assert sum(map(bool, differing.values())) >= 2, differing


@pytest.mark.tier("full")
def test_transformations_keep_the_bits() -> None:
    x, g, w = (a[:12] if a.ndim > 1 else a for a in hostile_batch(80, "float32"))
    f, y = all_ops, all_ops(x, g, w)

    def split(a: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(3, 4, *a.shape[1:]), a)

    def join(a: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(12, *a.shape[2:]), a)

    def remat(x: jax.Array, g: jax.Array, w: jax.Array) -> Any:
        return {name: with_gradient(jax.checkpoint(op))(x, g, w) for name, op in OURS.items()}

    assert_bits_equal(jax.jit(f)(x, g, w), y, err_msg="jit")
    assert_bits_equal(jax.jit(remat)(x, g, w), y, err_msg="remat")
    nested = jax.jit(jax.vmap(jax.vmap(f, (0, 0, None)), (1, 1, None), 1))
    assert_bits_equal(join(nested(split(x), split(g), w)), y, err_msg="nested vmap")
    for name in ("rms_norm", "layer_norm"):
        mapped_weights = jax.jit(jax.vmap(with_gradient(OURS[name])))(split(x), split(g), jnp.stack([w] * 3))
        assert_bits_equal(join(mapped_weights), y[name], err_msg="vmap with weights")
    scanned = jax.lax.scan(lambda c, rows: (c, f(*rows, w)), 0, (split(x), split(g)))[1]
    assert_bits_equal(join(scanned), y, err_msg="scan")
    # The cotangent has the shape of a result, so its buffer can be reused.
    assert_bits_equal(jax.jit(f, donate_argnums=1)(x, g + 0, w), y, err_msg="donated")
    with jax.enable_x64(True):
        assert_bits_equal(jax.jit(f)(x, g, w), y, err_msg="x64")
    with jax.disable_jit():
        assert_bits_equal(bijax.rms_norm(x, w), y["rms_norm"][0], err_msg="disable_jit")


@pytest.mark.tier("full", fast=("None",))
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (2, 1)])
def test_axes_are_rows(axis: Any) -> None:
    """Whichever axes a row lies along, its bits are those of the row laid out flat."""
    x = on_device(hostile_rows(3, (5, 33, 130), "float32")["wide"])
    axes = tuple(range(3)) if axis is None else tuple(np.atleast_1d(axis) % 3)
    kept = [a for a in range(3) if a not in axes]
    order = (*kept, *sorted(axes))
    moved = x.transpose(order)
    flat = moved.reshape(*moved.shape[: len(kept)], -1)
    for op in (bijax.sum, bijax.logsumexp):
        assert_bits_equal(op(x, axis), op(flat, -1), err_msg=op.__name__)
        assert op(x, axis, keepdims=True).shape == tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    y = bijax.softmax(x, axis)
    assert_bits_equal(y.transpose(order), bijax.softmax(flat, -1).reshape(moved.shape))


@pytest.mark.tier("full")
@pytest.mark.parametrize("gradients", [False, full_only(True)], ids=["results", "and gradients"])
def test_tiles_and_their_tails(gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches run in tiles; their bits are those of one tile."""
    contract = row_contract()
    x, g, w = hostile_batch(130, "float32")
    labels = labels_of(x)[:, None]
    statistics = jnp.abs(x[:, :1]), jnp.abs(g[:, :1])
    calls = {
        "rms_norm": lambda: norm.rms_norm(x, w, g, eps=1e-6, contract=contract),
        "rms_norm_gradient": lambda: norm.rms_norm_gradient(x, statistics[0], g, w, x, contract=contract),
        "layer_norm": lambda: norm.layer_norm(x, w, w, eps=1e-6, contract=contract),
        "layer_norm_gradient": lambda: norm.layer_norm_gradient(x, *statistics, g, w, contract=contract),
        "softmax": lambda: softmax.softmax(x, contract=contract),
        "softmax_gradient": lambda: softmax.softmax_gradient(x, g, contract=contract),
        "log_softmax": lambda: softmax.log_softmax(x, contract=contract),
        "log_softmax_gradient": lambda: softmax.log_softmax_gradient(x, *statistics, g, contract=contract),
        "logsumexp": lambda: softmax.logsumexp(x, contract=contract),
        "logsumexp_gradient": lambda: softmax.logsumexp_gradient(x, *statistics, g[:, :1]),
        "cross_entropy": lambda: cross_entropy.cross_entropy(x, labels, z_loss=0.1, contract=contract),
        "cross_entropy_gradient": lambda: cross_entropy.cross_entropy_gradient(
            x, labels, *statistics, g[:, :1], z_loss=0.1
        ),
    }
    calls = {name: call for name, call in calls.items() if gradients or not name.endswith("_gradient")}
    run = jax.jit(lambda names: {name: calls[name]() for name in calls}, static_argnums=0)
    whole = run("one tile")
    monkeypatch.setattr("pallas_kernels.parts.xla.lanes.rows_at_once", lambda left, columns: min(left, 5))
    assert_bits_equal(run("tiles of 5 rows and a tail of 1"), whole)


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "name", ["rms_norm", full_only("head_rms_norm"), full_only("layer_norm"), full_only("elementwise")]
)
def test_aligned_micro_batches_add_up_to_the_whole(name: str) -> None:
    """The gradients of weights, with rows cut at multiples of 128 and with rows of zeros appended."""
    rng = np.random.default_rng(4)
    x, g = (on_device(rng.standard_normal((300, 40)).astype(np.float32)) for _ in range(2))
    w, b = (on_device(rng.standard_normal(40).astype(np.float32)) for _ in range(2))
    affine = bijax.elementwise(lambda x, w, b: jnp.tanh(x * w) + b)
    op = {
        "rms_norm": lambda x, w, b: bijax.rms_norm(x, w),
        "head_rms_norm": lambda x, w, b: bijax.head_rms_norm(x.reshape(-1, 2, 20), w.reshape(2, 20)).reshape(x.shape),
        "layer_norm": bijax.layer_norm,
        "elementwise": affine,
    }[name]

    @jax.jit
    def pulled(x: jax.Array, g: jax.Array) -> Any:
        return jax.vjp(functools.partial(op, x), w, b)[1](g)

    def gradient(rows: slice, padding: int = 0) -> Any:
        return pulled(*(np.pad(a[rows], ((0, padding), (0, 0))) for a in (x, g)))

    whole = gradient(slice(None))
    total = gradient(slice(0, 128))
    for start in (128, 256):
        total = jax.tree.map(jnp.add, total, gradient(slice(start, start + 128)))
    assert_bits_equal(total, whole)
    assert_bits_equal(gradient(slice(None), padding=50), whole)
