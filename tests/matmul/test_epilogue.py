"""Epilogues, gated pairs and splits of K in the Hopper kernel, on a CPU: under Mosaic's interpreter, and lowered."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import SplitWgmmaContract, WgmmaContract, add_as_tree, split_count
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper import launch
from pallas_kernels.matmul.hopper.epilogue import Epilogue, make_store
from pallas_kernels.matmul.hopper.launch import gated_matmul, matmul
from pallas_kernels.matmul.schedule.hopper.fused_matmul import SplitKSchedule, split_k_schedules
from pallas_kernels.matmul.schedule.hopper.leaf_levels import shared_bytes
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, MatmulSchedule
from tests.arrays import on_device
from tests.matmul.operands import operands
from tests.mosaic import Races, interpreter

pytestmark = pytest.mark.usefixtures("hopper")

CONTRACT = WgmmaContract()
NARROW = MatmulSchedule(True, 64, 8, 128, 3)
WIDE = MatmulSchedule(False, 64, 64, 64, 3, 2)
DTYPE = "bfloat16"

# (M, K, N), weights stored as (N, K), result, schedule.
RESIDUALS = {
    "wide persistent": ((130, 128, 136), True, "bfloat16", dataclasses.replace(WIDE, blocks=2)),
    "in turn": ((70, 128, 144), False, "float32", dataclasses.replace(WIDE, split="tiles", blocks=2)),
    "narrow ragged": ((13, 136, 72), True, "float32", NARROW),
    "whole tiles": ((256, 192, 256), False, "bfloat16", dataclasses.replace(WIDE, tile_columns=128, blocks=3)),
    "whole tiles in turn": ((128, 128, 192), True, "bfloat16", dataclasses.replace(WIDE, split="tiles", blocks=2)),
    "padded": ((9, 77, 21), False, "bfloat16", None),
}
PAIRS = {
    "wide persistent": ((130, 128, 136), True, "bfloat16", dataclasses.replace(WIDE, tile_columns=128, blocks=2)),
    "in turn": ((70, 128, 144), False, "float32", dataclasses.replace(WIDE, split="tiles", blocks=2)),
    "narrow ragged": ((13, 136, 72), True, "float32", MatmulSchedule(True, 128, 16, 64, 3)),
}
SPLITS = {
    "inside": ((70, 512, 136), True, "bfloat16", SplitKSchedule(1, WIDE)),
    "in memory": ((70, 512, 256), True, "bfloat16", SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=192))),
    "in two parts": ((70, 512, 136), False, "float32", SplitKSchedule(2, WIDE)),
    "across": ((5, 512, 128), False, "float32", SplitKSchedule(4, NARROW)),
    "short split": (
        (5, 456, 128),
        False,
        "float32",
        SplitKSchedule(4, dataclasses.replace(NARROW, k_step=64)),
    ),
    "padded": ((9, 300, 21), False, "bfloat16", None),
}


@pytest.mark.tier("full", fast=("in turn", "whole tiles in turn"))
@pytest.mark.parametrize("name", RESIDUALS)
def test_activation_and_residual(name: str, races: Races) -> None:
    (m, k, n), transpose_w, out, schedule = RESIDUALS[name]
    x, w = operands((m, k), n, transpose_w, DTYPE)
    bias, residual = normal((n,)), normal((m, n), out)
    y = matmul(
        x,
        w,
        contract=CONTRACT,
        transpose_w=transpose_w,
        bias=bias,
        activation="silu",
        residual=residual,
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    z = product(x, w, transpose_w) + bias.astype(jnp.float32)
    close(y, jax.nn.silu(z) + residual.astype(jnp.float32), k)
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", PAIRS)
def test_gated_pair(name: str, races: Races) -> None:
    (m, k, n), transpose_w, out, schedule = PAIRS[name]
    x, gate = operands((m, k), n, transpose_w, DTYPE)
    up = gate[::-1]
    y = gated_matmul(
        x,
        gate,
        up,
        contract=CONTRACT,
        transpose_w=transpose_w,
        activation="gelu",
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    close(y, jax.nn.gelu(product(x, gate, transpose_w)) * product(x, up, transpose_w), 8 * k)
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", SPLITS)
def test_shards_of_k(name: str, races: Races) -> None:
    (m, k, n), transpose_w, out, schedule = SPLITS[name]
    x, w = operands((m, k), n, transpose_w, DTYPE)
    bias, residual = normal((n,)), normal((m, n), out)
    y = matmul(
        x,
        w,
        contract=SplitWgmmaContract(4),
        transpose_w=transpose_w,
        bias=bias,
        activation="relu",
        residual=residual,
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    z = product(x, w, transpose_w) + bias.astype(jnp.float32)
    close(y, jax.nn.relu(z) + residual.astype(jnp.float32), k)
    assert not races()


TREES = {  # K splits, their schedule
    "in registers": (8, SplitKSchedule(1, WIDE)),
    "one level in the result's memory": (8, SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=128, blocks=1))),
    "one level in GPU memory": (8, SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=128, stages=6))),
    "two levels in memory": (8, SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=192))),
    "one accumulator": (8, SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=256, stages=2))),
    "sixteen": (16, SplitKSchedule(1, dataclasses.replace(WIDE, tile_columns=128))),
    "two parts": (8, SplitKSchedule(2, dataclasses.replace(WIDE, tile_columns=128))),
    "four parts": (8, SplitKSchedule(4, WIDE)),
    "weights as rows": (8, SplitKSchedule(2, dataclasses.replace(NARROW, k_step=64))),
}


@pytest.mark.tier("full", fast=("one level in the result's memory",))
@pytest.mark.parametrize("name", TREES)
def test_tree_over_splits(name: str, races: Races) -> None:
    """Each K split has one term, so that the interpreter's sums are exact and the result shows the tree alone."""
    splits, schedule = TREES[name]
    m, n, length = 70, 160, 64
    rng = np.random.default_rng(0)
    terms = rng.normal(size=(splits, n)) * 2.0 ** rng.integers(-12, 12, (splits, n))
    x, w = np.zeros((m, splits * length), np.float32), np.zeros((splits * length, n))
    x[:, ::length], w[::length] = 1, terms
    weights = on_device(w, DTYPE)
    y = matmul(
        on_device(x, DTYPE),
        weights,
        contract=SplitWgmmaContract(splits),
        out_dtype="float32",
        schedule=schedule,
        interpret=interpreter(),
    )
    rows = np.asarray(weights[::length], np.float32)
    expected = add_as_tree(lambda i: rows[i], splits)
    assert (expected != rows.sum(0, dtype=np.float32)).any()
    assert_bits_equal(y, np.broadcast_to(expected, (m, n)))
    assert not races()


@pytest.mark.parametrize(
    ("m", "k", "n", "splits"), [(2048, 8192, 2048, 8), (8192, 14336, 4096, 8), (2048, 7168, 4096, 4)]
)
def test_blocks_of_long_prompts_sum_all_splits_without_gpu_memory(m: int, k: int, n: int, splits: int) -> None:
    found = split_k_schedules(m, k, n, splits=splits, length=k // splits, out_itemsize=2 if splits == 8 else 4)[0]
    assert found.parts == 1
    assert shared_bytes(found.tiles, splits, 2, 2 if splits == 8 else 4) <= SHARED_BYTES


@pytest.mark.tier("full")
def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums of many rows would take much memory: blocks of rows are multiplied one after another."""
    rng = np.random.default_rng(0)  # integers, whose sums are exact: the interpreter's depend on the tiles
    x, w, bias, residual = (
        on_device(rng.integers(-8, 9, shape), dtype)
        for shape, dtype in (((11, 128), DTYPE), ((128, 128), DTYPE), ((128,), DTYPE), ((11, 128), "float32"))
    )

    def run() -> jax.Array:
        options: dict[str, Any] = {"bias": bias, "residual": residual, "out_dtype": "float32"}
        y: jax.Array = matmul(x, w, contract=SplitWgmmaContract(2), interpret=interpreter(), **options)
        return y

    whole = run()
    expected = np.asarray(x, np.float32) @ np.asarray(w, np.float32) + np.asarray(bias, np.float32) + residual
    assert_bits_equal(whole, expected)
    monkeypatch.setattr(launch, "rows_at_once", lambda m, n, *, parts: min(m, 8))
    assert_bits_equal(run(), whole)


X, W = jax.ShapeDtypeStruct((24, 512), DTYPE), jax.ShapeDtypeStruct((512, 128), DTYPE)
R = jax.ShapeDtypeStruct((24, 128), DTYPE)
STACK_X, STACK_W = jax.ShapeDtypeStruct((3, 24, 512), DTYPE), jax.ShapeDtypeStruct((3, 512, 128), DTYPE)

# A program and how many kernels it launches.
PROGRAMS = {
    "activation": (lambda x, w: bijax.matmul(x, w, activation="gelu"), (X, W), 1),
    "residual": (lambda x, w, r: bijax.matmul(x, w, activation="silu", residual=r), (X, W, R), 1),
    "gated": (bijax.gated_matmul, (X, W, W), 1),
    "split": (lambda x, w: bijax.matmul(x, w, split_k=4), (X, W), 2),
    "split stack": (lambda x, w: bijax.matmul(x, w, split_k=4), (STACK_X, STACK_W), 2),
    "mapped rows": (jax.vmap(lambda x, w: bijax.matmul(x, w, activation="silu"), (0, None)), (STACK_X, W), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_for_hopper_holds_kernels_and_no_dot(name: str) -> None:
    function, arguments, launches = PROGRAMS[name]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == launches
    assert "stablehlo.dot" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "mish"}, "expected an activation among gelu, silu, relu"),
        ({"residual": jnp.ones((2, 8))}, r"expected a residual \[2, 8\] of the result's dtype bfloat16"),
        ({"contract": SplitWgmmaContract(2), "schedule": SplitKSchedule(2, NARROW)}, "k_step divides the 64"),
    ],
)
def test_unsupported_operands_are_named(options: dict[str, object], message: str) -> None:
    x, w = jnp.ones((2, 128), DTYPE), jnp.ones((128, 8), DTYPE)
    with pytest.raises(UnsupportedError, match=message):
        matmul(x, w, **{"contract": CONTRACT, **options})


def test_a_pair_needs_rows_of_both_weights_in_a_warpgroup() -> None:
    x, w = jnp.ones((2, 64), DTYPE), jnp.ones((64, 64), DTYPE)
    with pytest.raises(UnsupportedError, match="64 rows of both weights"):
        gated_matmul(x, w, w, contract=CONTRACT, schedule=NARROW)
    with pytest.raises(UnsupportedError, match="two weights of one shape"):
        gated_matmul(x, w, w[:, :8], contract=CONTRACT)


@pytest.mark.parametrize(("k", "n", "splits"), [(8192, 1280, 4), (4096, 1024, 4), (8192, 8192, 1), (576, 64, 1)])
def test_shards_follow_the_weights(k: int, n: int, splits: int) -> None:
    assert split_count(k, n) == splits


@pytest.mark.parametrize(
    ("m", "n", "dtype", "schedule", "plain"),
    [
        (1, 1280, "float32", MatmulSchedule(True, 128, 88, 64, 4, 2, "tiles"), True),  # 11 blocks of 8 rows
        (64, 32, "float32", MatmulSchedule(False, 64, 64, 64, 3), True),  # two blocks of 32 columns
        (8, 64, "bfloat16", dataclasses.replace(NARROW, warpgroups=2), True),
        # One block, many tiles in a block or in the result: every index is kept, or always 0.
        (1, 1280, "float32", NARROW, False),
        (8, 1280, "bfloat16", MatmulSchedule(True, 128, 64, 64, 4, 2, "tiles"), False),
        (16, 1280, "float32", MatmulSchedule(True, 128, 88, 64, 4), False),
        (64, 32, "float32", MatmulSchedule(False, 64, 32, 64, 3), False),
        (64, 64, "float32", MatmulSchedule(False, 64, 128, 64, 3), False),
    ],
)
def test_blocks_outside_of_a_result_one_tile_wide_leave_as_plain_rows(
    m: int, n: int, dtype: str, schedule: MatmulSchedule, plain: bool
) -> None:
    """Mosaic GPU drops a dimension of one tile from a copy, and the index that says that a block is outside."""
    shape = (schedule.tile_rows, schedule.tile_columns)
    assert make_store(schedule, shape, m, n, jnp.dtype(dtype), Epilogue()).ragged == plain


def product(x: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
    return x.astype(jnp.float32) @ (w.T if transpose_w else w).astype(jnp.float32)


def normal(shape: tuple[int, ...], dtype: str = DTYPE) -> jax.Array:
    return on_device(np.random.default_rng(7).standard_normal(shape), dtype)


def close(y: jax.Array, expected: jax.Array, terms: int) -> None:
    """One rounding of the result and float32 sums of `terms` products of normal numbers."""
    roundoff = 2.0**-8 if y.dtype == jnp.bfloat16 else 2.0**-20
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    assert (np.abs(y - expected) <= roundoff * np.abs(expected) + terms * 2.0**-20).all()
