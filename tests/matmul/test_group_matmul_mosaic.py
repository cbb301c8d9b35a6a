"""Products of rows in groups on Hopper, on a CPU: the tile scheduler, kernels under Mosaic's interpreter, bad input."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract import MatmulContract, QuantContract, WgmmaChunkContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.group_tiles import GroupTileScheduler, Table
from pallas_kernels.matmul.hopper.groups import group_matmul, group_weight_gradient
from pallas_kernels.matmul.hopper.int8 import quant_matmul
from pallas_kernels.matmul.schedule.hopper.group_matmul import bytes_in_groups, group_candidates, sums_schedule
from pallas_kernels.matmul.schedule.hopper.int8 import int8_candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, MatmulSchedule
from tests.arrays import on_device, ones
from tests.mosaic import Races, interpreter
from tests.tiers import tiered

pytestmark = pytest.mark.usefixtures("hopper")

CONTRACT, CHUNKS = WgmmaContract(), WgmmaChunkContract()
NARROW = MatmulSchedule(True, 64, 8, 128, 3)
WIDE = MatmulSchedule(False, 64, 64, 64, 3, 2, blocks=2)
G, M = 4, 43
SIZES = {
    "some": (0, 17, 3, 16),
    "one": (0, 0, M, 0),
    "none": (0, 0, 0, 0),
    "too many": (0, 40, 4, 0),
    "odd": (9, -1, 0, 0),
}

# K, N, weights stored as (N, K), result, schedule.
INTERPRETED = {
    "narrow": (136, 72, True, "float32", NARROW),
    "narrow, two pieces": (64, 136, False, "bfloat16", dataclasses.replace(NARROW, tile_rows=128, out_buffers=1)),
    "narrow, in turn": (64, 200, False, "float32", MatmulSchedule(True, 64, 8, 64, 3, 2, "tiles", blocks=2)),
    "wide": (72, 80, False, "bfloat16", WIDE),
    "in turn": (64, 80, True, "float32", MatmulSchedule(False, 64, 64, 64, 3, 2, "tiles", blocks=2)),
    "padded": (77, 21, False, "float32", None),
}


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "sizes", [(5, 0, 1, 16, 3), (0, 0, 30, 0, 0), (0, 0, 0, 0, 0), (8, 8, 8, 8, 8), (41, 0, 0, 0, 0)]
)
def test_the_scheduler_meets_every_place_once(sizes: tuple[int, ...], swap: bool) -> None:
    m, n, tile = 40, 50, 8
    fit = sum(sizes) <= m
    real = sizes if fit else (0,) * len(sizes)
    table = np.stack([np.cumsum(real), np.cumsum([-(-size // tile) for size in real])]).astype(np.int32)
    table[0, -1] = table[0, -1] if fit else -1
    scheduler = GroupTileScheduler(Table(len(sizes), m, tile), n, 16, swap, 2, 3)
    bound, met = scheduler.of(jnp.asarray(table)), np.full((m, n), -2)

    def mark(row: int, column: int, rows: int, group: int) -> None:
        part = met[row : row + rows, column : column + 16]
        assert (part == -2).all()
        part[...] = group

    for block in range(3):
        count, turns = int(bound.count(block)), int(bound.turns(block))
        for turn in range(turns):
            if turn < count:
                _, group, row, column, valid = (None if a is None else int(a) for a in bound.place(block, turn))
            else:
                (row, column), group, valid = map(int, bound.rest(block, turn)), -1, tile
            row, column = (column, row) if swap else (row, column)
            mark(row, column, min(tile, valid), group)
    expected = np.repeat([*range(len(sizes)), -1], [*real, m - sum(real)])
    np.testing.assert_array_equal(met, np.broadcast_to(expected[:, None], (m, n)))
    assert bool(bound.fit) == fit


@pytest.mark.parametrize(
    "case",
    tiered(
        [(name, sizes) for name in INTERPRETED for sizes in SIZES],
        fast=[("wide", "some")],
    ),
    ids=str,
)
def test_interpreted_kernel_multiplies(case: tuple[str, str], races: Races) -> None:
    name, sizes = case
    k, n, transpose_w, out, schedule = INTERPRETED[name]
    rng = np.random.default_rng(n)
    x, w = integers(rng, (M, k)), integers(rng, (G, k, n))
    y = group_matmul(
        jnp.asarray(x, "bfloat16"),
        jnp.asarray(w.swapaxes(1, 2) if transpose_w else w, "bfloat16"),
        jnp.asarray(SIZES[sizes], jnp.int32),
        contract=CONTRACT,
        transpose_w=transpose_w,
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    # Sums of small integers are exact in every order; the order is compared on a GPU.
    expected = products(x, w, SIZES[sizes]).astype(jnp.dtype(out))
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (y, expected)))
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize("sizes", ["some", "none", "too many"])
def test_rows_without_a_group_may_be_left_unwritten(sizes: str, races: Races) -> None:
    rng = np.random.default_rng(0)
    x, w, given = integers(rng, (M, 72)), integers(rng, (G, 72, 80)), jnp.asarray(SIZES[sizes], jnp.int32)
    operands = jnp.asarray(x, "bfloat16"), jnp.asarray(w, "bfloat16"), given
    options: dict[str, Any] = {"contract": CONTRACT, "schedule": WIDE, "zero_unused": False}
    y = group_matmul(*operands, out_dtype="float32", interpret=interpreter(), **options)
    used = sum(SIZES[sizes]) if fits(SIZES[sizes]) else M  # all are nan if sizes do not fit
    np.testing.assert_array_equal(np.asarray(y)[:used], products(x, w, SIZES[sizes])[:used])
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize("sizes", tiered(SIZES, fast=["some"]))
def test_interpreted_kernel_sums_outer_products(sizes: str, races: Races) -> None:
    rng = np.random.default_rng(0)
    k, n = 72, 70
    x, g = integers(rng, (M, k)), integers(rng, (M, n))
    schedule = MatmulSchedule(False, 64, 64, 64, 3, 2, blocks=2)
    y = group_weight_gradient(
        *(jnp.asarray(a, "bfloat16") for a in (x, g)),
        jnp.asarray(SIZES[sizes], jnp.int32),
        contract=CHUNKS,
        schedule=schedule,
        interpret=interpreter(),
    )
    expected = np.full((G, k, n), np.nan, np.float32)
    if fits(SIZES[sizes]):
        ends = np.cumsum(SIZES[sizes])
        expected = np.stack([x[e - s : e].T @ g[e - s : e] for e, s in zip(ends, SIZES[sizes], strict=True)])
    np.testing.assert_array_equal(np.asarray(y), expected)
    assert not races()


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "case",
    tiered(
        [(s, n, t) for s in (None, *SIZES) for n in (True, False) for t in (True, False)],
        fast=[(None, False, False), ("some", True, True)],
    ),
    ids=str,
)
def test_interpreted_kernel_multiplies_integers(case: tuple[str | None, bool, bool], races: Races) -> None:
    sizes, narrow, transpose_w = case
    rng, k, n = np.random.default_rng(1), 144, 72
    groups = 1 if sizes is None else G
    x, w = (rng.integers(-127, 128, shape).astype(np.int8) for shape in ((M, k), (groups, n, k)))
    # Powers of two: the interpreter contracts products and sums.
    row, column = (np.exp2(rng.integers(-9, 9, shape)).astype(np.float32) for shape in (M, (groups, n)))
    bias = None if sizes else on_device(rng.integers(-9, 9, n), "bfloat16")
    y = quant_matmul(
        jnp.asarray(x),
        jnp.asarray((w if transpose_w else w.swapaxes(1, 2))[slice(None) if sizes else 0]),
        jnp.asarray(row),
        jnp.asarray(column if sizes else column[0]),
        contract=QuantContract(),
        transpose_w=transpose_w,
        bias=bias,
        sizes=None if sizes is None else jnp.asarray(SIZES[sizes], jnp.int32),
        out_dtype="float32",
        schedule=MatmulSchedule(True, 64, 16, 128, 3) if narrow else MatmulSchedule(False, 64, 64, 128, 3, 2),
        interpret=interpreter(),
    )
    given = (M,) if sizes is None else SIZES[sizes]
    expected = products(x.astype(np.float32), (w * column[..., None]).swapaxes(1, 2), given) * row[:, None]
    np.testing.assert_array_equal(np.asarray(y), expected if bias is None else expected + np.asarray(bias, np.float32))
    assert not races()


@pytest.mark.parametrize(("m", "groups"), [(64, 256), (4096, 64)])
def test_programs_for_cuda_are_lowered_on_a_cpu(m: int, groups: int) -> None:
    x, w, sizes = (
        jax.ShapeDtypeStruct(*a)
        for a in (((m, 512), "bfloat16"), ((groups, 512, 256), "bfloat16"), ((groups,), "int32"))
    )
    text = lowered(lambda *a: group_matmul(*a, contract=CONTRACT), x, w, sizes)
    assert "mosaic_gpu" in text
    assert not re.search(r"stablehlo\.(dot|pad|transpose|slice|gather|while)", text)


def test_empty_operands() -> None:
    sizes = jnp.array([1, 2], jnp.int32)
    y = group_matmul(jnp.ones((3, 0), jnp.float16), jnp.ones((2, 0, 5), jnp.float16), sizes, contract=CONTRACT)
    assert y.shape == (3, 5)
    assert not y.any()
    y = group_matmul(jnp.ones((3, 0), jnp.float16), jnp.ones((2, 0, 5), jnp.float16), sizes + 1, contract=CONTRACT)
    assert jnp.isnan(y).all()
    assert not group_weight_gradient(
        jnp.ones((0, 4), jnp.float16), jnp.ones((0, 5), jnp.float16), sizes * 0, contract=CHUNKS
    ).any()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("groups", [8, 256, 1024])
@pytest.mark.parametrize(("k", "n"), [(7168, 4096), (768, 2048), (64, 16)])
def test_schedules_fit_the_chip(groups: int, k: int, n: int, itemsize: int) -> None:
    for m in (1, 7, 64, 512, 4096, 65536):
        found = group_candidates(m, groups, k, n, out_itemsize=itemsize)
        assert found
        assert all(bytes_in_groups(s, groups, 2, itemsize) <= SHARED_BYTES and s.blocks for s in found.values())
        integers = int8_candidates(m, k, n, groups=groups, out_itemsize=itemsize)
        assert integers
        assert all(bytes_in_groups(s, groups, 1, itemsize) <= SHARED_BYTES for s in integers.values())
        assert all(s.k_step % 128 == 0 for s in integers.values())
        assert int8_candidates(m, k, n, groups=groups, transposed_w=True, out_itemsize=itemsize)
        assert int8_candidates(m, k, n, transposed_w=True, out_itemsize=itemsize)
        assert not sums_schedule(m, groups, k, n, out_itemsize=itemsize).swap


X, W = ones((3, 16), jnp.bfloat16), ones((2, 16, 8), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": MatmulContract(512)}, "expected a WgmmaContract"),
        ({"x": ones((3, 8), jnp.bfloat16)}, r"expected x \(M, K\)"),
        ({"x": X.astype(jnp.float32)}, "one dtype, bfloat16 or float16"),
        ({"sizes": ones(3, jnp.int32)}, r"sizes int32\[2\]"),
        ({"out_dtype": "int8"}, "expected out_dtype"),
        ({"schedule": MatmulSchedule(False, 64, 88, 64, 3)}, "whole rows of 128 bytes"),
        ({"schedule": dataclasses.replace(WIDE, stages=60)}, "shared memory"),
        ({"w": ones((1025, 16, 8), jnp.bfloat16)}, "at most 1024 groups"),
    ],
)
def test_unsupported_operands_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"x": X, "w": W, "sizes": ones(2, jnp.int32), "contract": CONTRACT}
    with pytest.raises(UnsupportedError, match=message):
        group_matmul(**{**arguments, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": ones((4, 16), jnp.bfloat16)}, "int8 or float8_e4m3fn operands"),
        ({"contract": CONTRACT}, "expected the contract quant/v1"),
        ({"x": ones((3, 8), jnp.int8)}, r"expected x \(M, K\) and w \(K, N\)"),
        ({"schedule": MatmulSchedule(False, 64, 256, 128, 3, 2)}, "at most 32 KiB of weights"),
        ({"row_scale": ones(4)}, r"row_scale float32\[3\]"),
        ({"bias": ones(3)}, "a bias for each column"),
        ({"schedule": MatmulSchedule(True, 64, 16, 64, 3)}, "multiple of 128"),
        ({"schedule": MatmulSchedule(True, 64, 88, 128, 3)}, "for integers"),
    ],
)
def test_unsupported_integers_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"x": jnp.ones((3, 16), jnp.int8), "w": jnp.ones((16, 4), jnp.int8), "row_scale": jnp.ones(3)}
    with pytest.raises(UnsupportedError, match=message):
        quant_matmul(**{**arguments, "column_scale": jnp.ones(4), "contract": QuantContract(), **change})


def products(x: np.ndarray, w: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    if not fits(sizes):
        return np.full((len(x), w.shape[2]), np.nan, np.float32)
    ends = np.cumsum(sizes)
    rows = [x[end - size : end] @ one for end, size, one in zip(ends, sizes, w, strict=True)]
    return np.concatenate([*rows, np.zeros((len(x) - ends[-1], w.shape[2]), np.float32)])


def fits(sizes: tuple[int, ...]) -> bool:
    return min(sizes) >= 0 and sum(sizes) <= M


def integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-4, 5, shape).astype(np.float32)


def lowered(function: Callable[..., jax.Array], *arrays: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
