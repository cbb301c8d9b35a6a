"""The float32 matmuls for Hopper on a CPU: interpreted kernels, the split of operands, the program, bad input."""

import dataclasses
import functools
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import SplitContract, Tf32Contract, WgmmaContract, split_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper import bf16x6, tf32
from pallas_kernels.matmul.schedule.hopper.bf16x6 import SplitSchedule
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.matmul.schedule.hopper.tf32 import Tf32Schedule, tf32_schedule
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule
from tests.arrays import on_device, ones
from tests.mosaic import Races, interpreter
from tests.tiers import full_only, tiered

pytestmark = pytest.mark.usefixtures("hopper")

MATMULS: dict[str, Callable[..., jax.Array]] = {
    "tf32": functools.partial(tf32.matmul, contract=Tf32Contract()),
    "highest": functools.partial(bf16x6.matmul, contract=SplitContract(128)),
}
RING = MatmulSchedule(False, 64, 64, 32, 3)
TILES = MatmulSchedule(True, 64, 16, 64, 3)

# Which, (..., M, K, N), weights stored as (N, K), schedule: every form, every kind of edge. The interpreter multiplies
# float32 operands of wgmma with all their bits.
INTERPRETED: dict[str, tuple[str, tuple[int, ...], bool, Any]] = {
    "tf32 wide": ("tf32", (70, 128, 72), True, Tf32Schedule(RING)),
    "tf32 wide, transposed by a copy": ("tf32", (70, 100, 20), False, Tf32Schedule(RING)),
    "tf32 narrow": ("tf32", (5, 128, 128), True, Tf32Schedule(dataclasses.replace(TILES, tile_columns=8))),
    "tf32 transposed": ("tf32", (13, 200, 128), False, Tf32Schedule(dataclasses.replace(TILES, warpgroups=2), 1)),
    "tf32 transposed, rows first": (
        "tf32",
        (70, 264, 64),
        False,
        Tf32Schedule(MatmulSchedule(False, 64, 32, 64, 4, blocks=2), 2),
    ),
    "tf32 transposed, narrow": (
        "tf32",
        (13, 264, 72),
        False,
        Tf32Schedule(MatmulSchedule(False, 64, 8, 128, 2, out_buffers=1), 1),
    ),
    "tf32 transposed, narrow, two transposers": (
        "tf32",
        (70, 200, 64),
        False,
        Tf32Schedule(MatmulSchedule(False, 64, 16, 64, 4, blocks=3, out_buffers=1), 2),
    ),
    "tf32 transposed, result in parts": (
        "tf32",
        (70, 64, 64),
        False,
        Tf32Schedule(MatmulSchedule(True, 64, 128, 32, 2, out_buffers=1), 1),
    ),
    "tf32 from registers": (
        "tf32",
        (13, 200, 128),
        False,
        Tf32Schedule(dataclasses.replace(TILES, warpgroups=2), from_registers=True),
    ),
    "tf32 columns in registers": ("tf32", (13, 200, 72), False, ChainSchedule(32, 16, 64, 3)),
    "tf32 columns in registers, narrow": ("tf32", (5, 100, 20), False, ChainSchedule(8, 8, 64, 2)),
    "tf32 columns in registers, transposed": ("tf32", (13, 200, 72), True, ChainSchedule(32, 16, 64, 3)),
    "tf32 columns in memory": ("tf32", (5, 256, 40), True, ChainSchedule(8, 16, 64, 3, "memory")),
    "tf32 columns in both": ("tf32", (5, 256, 40), True, ChainSchedule(16, 8, 64, 3, "both", 2)),
    "tf32 transposed stack": ("tf32", (2, 20, 64, 40), False, Tf32Schedule(dataclasses.replace(TILES, blocks=3), 1)),
    "highest": ("highest", (5, 200, 96), True, SplitSchedule(dataclasses.replace(TILES, tile_columns=8))),
    "highest in parts": ("highest", (13, 320, 64), False, SplitSchedule(dataclasses.replace(TILES, blocks=2), True)),
    "highest two warpgroups": (
        "highest",
        (70, 256, 128),
        False,
        SplitSchedule(dataclasses.replace(TILES, warpgroups=2)),
    ),
    "highest stack": ("highest", (2, 9, 77, 21), False, None),
}


@pytest.mark.parametrize("name", tiered(INTERPRETED, fast=["tf32 narrow", "highest"]))
def test_interpreted_kernel_multiplies(name: str, races: Races) -> None:
    which, (*lead, m, k, n), transpose_w, schedule = INTERPRETED[name]
    x, w = operands((*lead, m, k), n, transpose_w)
    bias = on_device(np.random.default_rng(n).standard_normal(n), jnp.float32)
    options = {"transpose_w": transpose_w, "bias": bias, "schedule": schedule, "interpret": interpreter()}
    y = MATMULS[which](x, w, **options)
    assert (y.shape, y.dtype) == ((*lead, m, n), jnp.float32)
    left, right = np.asarray(x, np.float64), np.asarray(w, np.float64)
    right = right.swapaxes(-1, -2) if transpose_w else right
    exact, scale = left @ right + np.asarray(bias), np.abs(left) @ np.abs(right) + np.abs(np.asarray(bias))
    assert (np.abs(np.asarray(y, np.float64) - exact) <= 2.0**-22 * scale).all()
    assert not races()


@pytest.mark.parametrize("kind", ["normal", "wide", "huge", "linspace"])
def test_three_parts_hold_a_float32(kind: str) -> None:
    x = hostile_rows(3, (16, 64), "float32")[kind]
    parts = np.asarray(jax.jit(bf16x6._parts)(x), np.float64).reshape(16, 3, 64)
    np.testing.assert_array_equal(parts.sum(1), x)
    assert (np.abs(parts[:, 1]) <= 2.0**-7 * np.abs(parts[:, 0])).all()
    assert (np.abs(parts[:, 2]) <= 2.0**-15 * np.abs(parts[:, 0])).all()


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling", "positive"])
def test_six_products_have_float32_accuracy(kind: str) -> None:
    """The products that are left out are no more than what rounding every product to float32 would cost."""
    x = hostile_rows(3, (8, 256), "float32")["normal" if kind == "positive" else kind]
    w = hostile_rows(4, (8, 256), "float32")["normal" if kind == "positive" else kind]
    if kind == "positive":
        x, w = np.abs(x), np.abs(w)
    left, right = (
        np.asarray(bf16x6._parts(jnp.asarray(a)), np.float64).reshape(8, 4, 3, 64).swapaxes(0, 2) for a in (x, w)
    )
    kept = sum(left[i] * right[j] for i in range(3) for j in range(3) if i + j < 3)
    exact = left.sum(0) * right.sum(0)
    assert (np.abs(kept - exact) <= 2.0**-24 * np.abs(exact)).all()
    assert np.sqrt(((kept - exact) ** 2).sum()) <= 2.0**-26 * np.sqrt((exact**2).sum())


@pytest.mark.tier("full")
@pytest.mark.parametrize("which", MATMULS)
def test_a_matrix_belongs_to_every_entry_of_a_stack(which: str) -> None:
    x, _ = operands((5, 64), 32, False)
    _, w = operands((2, 5, 64), 32, False)
    y = MATMULS[which](x, w, interpret=interpreter())
    assert_bits_equal(y, MATMULS[which](jnp.stack([x, x]), w, interpret=interpreter()))


@pytest.mark.tier("full")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("weights", ["normal", full_only("ones")])
def test_what_is_not_finite_comes_out_as_in_float32(weights: str) -> None:
    """Rows with infinities or nan; weights that are infinite too, and weights whose lower parts are zero."""
    x, w = (np.asarray(a).copy() for a in operands((8, 64), 64, False))
    w = np.ones_like(w) if weights == "ones" else w
    x[0, 5], x[1, 7], x[2, 9], x[3, 2:4], x[4, 5], x[5, 6] = np.inf, -np.inf, np.nan, (np.inf, -np.inf), 0.0, 3.4e38
    w[7, 0], w[5, 1], w[7, 3], w[6] = 0.0, np.inf, -np.inf, 0.25
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64) @ w.astype(np.float64)
    y = np.asarray(MATMULS["highest"](jnp.asarray(x), jnp.asarray(w), interpret=interpreter()))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    np.testing.assert_array_equal(y[np.isinf(exact)], exact[np.isinf(exact)])
    assert np.isfinite(y[np.isfinite(exact)]).all()


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
@pytest.mark.parametrize("which", MATMULS)
def test_empty_sums_are_the_bias(which: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    bias = jnp.arange(n, dtype=jnp.float32)
    y = MATMULS[which](jnp.ones((2, m, k)), jnp.ones((2, k, n)), bias=bias, out_dtype=jnp.bfloat16)
    assert_bits_equal(y, jnp.broadcast_to(bias.astype(jnp.bfloat16), (2, m, n)))


@pytest.mark.tier("full", fast=("(500, 4096, 14336)-tf32-False", "(13, 77, 21)-tf32-True", "(13, 77, 21)-highest-True"))
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("which", MATMULS)
@pytest.mark.parametrize("shape", [(1, 8192, 1280), (500, 4096, 14336), (13, 77, 21)])
def test_program_for_cuda_is_lowered_on_a_cpu(shape: tuple[int, int, int], which: str, transpose_w: bool) -> None:
    m, k, n = shape
    x = jax.ShapeDtypeStruct((m, k), jnp.float32)
    w = jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), jnp.float32)
    program = jax.jit(lambda x, w: MATMULS[which](x, w, transpose_w=transpose_w))
    text = program.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert not re.search(r"stablehlo\.dot", text)
    transposed_by_a_copy = which == "tf32" and not transpose_w and k == 77  # a small one
    assert ("stablehlo.transpose" in text) == transposed_by_a_copy


@pytest.mark.parametrize("m", [8, 64])
def test_results_of_16_bits_are_stored_in_whole_swizzles(m: int) -> None:
    x, w = jax.ShapeDtypeStruct((m, 4096), jnp.float32), jax.ShapeDtypeStruct((4096, 1032), jnp.float32)
    program = jax.jit(lambda x, w: MATMULS["tf32"](x, w, out_dtype=jnp.bfloat16))
    assert "mosaic_gpu" in program.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("k", [1, 63, 64, 576, 4096, 4097, 14336])
def test_shards_cover_k(k: int) -> None:
    contract = split_contract(k)
    assert 1 <= contract.splits(k) <= 16
    assert (contract.splits(k) - 1) * contract.k_split < k <= contract.splits(k) * contract.k_split


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": WgmmaContract()}, "expected a (Tf32|Split)Contract"),
        ({"x": ones((2, 3, 8))}, "equal leading dimensions"),
        ({"x": ones((2, 16))}, "equal contracted lengths"),
        ({"x": ones((2, 8), jnp.bfloat16)}, "expected x and w of one dtype, float32"),
        ({"bias": ones(7)}, "expected a bias"),
        ({"out_dtype": "float64"}, "expected out_dtype"),
    ],
)
@pytest.mark.parametrize("which", MATMULS)
def test_unsupported_operands_are_named(which: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        MATMULS[which](**{"x": jnp.ones((2, 8)), "w": jnp.ones((8, 8)), **change})


@pytest.mark.parametrize("which", MATMULS)
def test_schedules_that_do_not_fit_are_refused(which: str) -> None:
    tiles = dataclasses.replace(TILES, stages=60)
    schedule = Tf32Schedule(tiles) if which == "tf32" else SplitSchedule(tiles)
    with pytest.raises(UnsupportedError, match="shared memory"):
        MATMULS[which](jnp.ones((2, 8)), jnp.ones((8, 8)), schedule=schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": ChainSchedule(8, 8, 64, 60)}, "shared memory"),
        ({"schedule": ChainSchedule(8, 8, 512, 2)}, "a k_step of 128 to 1024 bytes"),
        (
            {"x": ones((2, 2, 8)), "w": ones((2, 8, 8)), "schedule": ChainSchedule(8, 8, 64, 2)},
            "for a stack of products",
        ),
    ],
)
def test_chain_schedules_that_do_not_suit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        MATMULS["tf32"](**{"x": jnp.ones((2, 8)), "w": jnp.ones((8, 8)), **change})


@pytest.mark.parametrize(
    ("shape", "transposers", "from_registers"),
    [
        ((8, 4096, 1024), 1, False),
        ((64, 4096, 4096), 2, False),
        ((8, 4096, 4096), 0, True),
        ((512, 4096, 4096), 0, True),
        ((512, 4096, 14336), 0, True),
        ((4096, 4096, 4096), 0, True),
    ],
)
def test_weights_are_read_the_fastest_way(shape: tuple[int, int, int], transposers: int, from_registers: bool) -> None:
    schedule = tf32_schedule(*shape)
    assert (schedule.transposers, schedule.from_registers) == (transposers, from_registers)


@pytest.mark.parametrize(
    ("tiles", "options", "message"),
    [
        (MatmulSchedule(True, 64, 256, 32, 4, 2), {"transposers": 1}, "tiles of at most 64 by 128"),
        (MatmulSchedule(True, 64, 64, 32, 4, 2), {"transposers": 2}, "1 or 2 transposers"),
        (MatmulSchedule(True, 64, 64, 32, 3), {"transposers": 2}, "multiple of the transposing warpgroups"),
        (MatmulSchedule(False, 64, 32, 32, 4), {"transposers": 1}, "whole squares"),
        (MatmulSchedule(False, 64, 64, 32, 4), {"from_registers": True}, "must have swap"),
    ],
)
def test_forms_that_the_kernel_cannot_run_are_refused(
    tiles: MatmulSchedule, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tf32Schedule(tiles, **options)


@pytest.mark.parametrize("which", MATMULS)
def test_other_gpus_are_refused(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(compute_capability="8.0", device_kind="another GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(UnsupportedError, match=r"Hopper GPU.*another GPU with 8\.0"):
        MATMULS[which](jnp.ones((2, 8)), jnp.ones((8, 8)))


def operands(shape: tuple[int, ...], n: int, transpose_w: bool) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(n)
    *lead, _, k = shape
    x, w = rng.standard_normal(shape), rng.standard_normal((*lead, *((n, k) if transpose_w else (k, n))))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
