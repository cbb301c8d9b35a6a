"""The Hopper matmul on a CPU: the kernel under Mosaic's interpreter, the program that a GPU would get, bad input."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MatmulContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.hopper.launch import matmul
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule
from tests.arrays import on_device, ones
from tests.matmul.operands import operands
from tests.mosaic import Races, interpreter

pytestmark = pytest.mark.usefixtures("hopper")

CONTRACT = WgmmaContract()
NARROW = MatmulSchedule(True, 64, 8, 128, 3)
WIDE = MatmulSchedule(False, 64, 64, 64, 3, 2)

# (..., M, K, N), weights stored as (N, K), result, schedule: every form, every kind of edge.
INTERPRETED = {
    "narrow": ((5, 256, 128), False, "bfloat16", NARROW),
    "narrow ragged": ((13, 136, 72), True, "float32", NARROW),
    "narrow two warpgroups": ((16, 128, 128), True, "bfloat16", dataclasses.replace(NARROW, warpgroups=2)),
    "narrow stack": ((3, 13, 136, 80), False, "float32", NARROW),
    "few rows": ((13, 256, 64), False, "float32", MatmulSchedule(False, 64, 32, 128, 3)),
    "wide persistent": ((130, 128, 136), True, "bfloat16", dataclasses.replace(WIDE, blocks=2, group=1)),
    "wide persistent stack": ((2, 70, 64, 72), True, "bfloat16", dataclasses.replace(WIDE, warpgroups=1, blocks=3)),
    "in turn": ((130, 128, 136), True, "bfloat16", MatmulSchedule(False, 64, 64, 64, 3, 2, "tiles", blocks=2)),
    "narrow, in turn": ((13, 128, 320), False, "float32", MatmulSchedule(True, 64, 8, 64, 3, 2, "tiles", blocks=2)),
    "result in pieces": ((88, 64, 128), True, "float32", MatmulSchedule(True, 128, 88, 64, 2, out_buffers=1)),
    "columns in registers": ((5, 264, 80), False, "bfloat16", ChainSchedule(32, 8, 128, 2)),
    "columns in registers, ragged": ((20, 136, 48), False, "float32", ChainSchedule(16, 16, 64, 3)),
    "columns in registers, padded": ((9, 77, 21), False, "float32", ChainSchedule(64, 8, 128, 2)),
    "columns in registers, transposed": ((5, 264, 80), True, "bfloat16", ChainSchedule(8, 8, 128, 2)),
    "columns in memory": ((5, 256, 80), True, "float32", ChainSchedule(16, 8, 128, 3, "memory")),
    "columns in both": ((13, 384, 72), True, "float32", ChainSchedule(32, 8, 128, 2, "both", 2)),
    "columns in both, ragged": ((9, 264, 20), True, "bfloat16", ChainSchedule(16, 8, 128, 3, "both", 2)),
    "padded": ((9, 77, 21), False, "float32", None),
    "padded, transposed": ((9, 77, 21), True, "float32", None),
}


@pytest.mark.tier("full", fast=("padded-False", "padded, transposed-True"))
@pytest.mark.parametrize(
    ("name", "with_bias"),
    [
        *((name, i % 2 == 1) for i, name in enumerate(INTERPRETED)),
        *((name, i % 2 == 0) for i, name in enumerate(INTERPRETED)),
    ],
)
def test_interpreted_kernel_multiplies(name: str, with_bias: bool, races: Races) -> None:
    (*lead, m, k, n), transpose_w, out, schedule = INTERPRETED[name]
    x, w = operands((*lead, m, k), n, transpose_w, "bfloat16")
    bias = on_device(np.random.default_rng(n).standard_normal(n), "bfloat16") if with_bias else None
    y = matmul(
        x,
        w,
        contract=CONTRACT,
        transpose_w=transpose_w,
        bias=bias,
        out_dtype=out,
        schedule=schedule,
        interpret=interpreter(),
    )
    assert y.shape == (*lead, m, n)
    assert y.dtype == out
    left, right = np.asarray(x, np.float64), np.asarray(w, np.float64)
    right = right.swapaxes(-1, -2) if transpose_w else right
    added = np.asarray(bias, np.float64) if with_bias else np.zeros(n)
    exact, scale = left @ right + added, np.abs(left) @ np.abs(right) + np.abs(added)
    # float32 sums of exact products, then one rounding to the result's dtype.
    bound = (k + 1) * 2.0**-23 * scale + (np.abs(exact) * 2.0**-8 if out == "bfloat16" else 0)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()
    assert not races()


def test_the_interpreter_finds_a_missing_wait(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the wait for a buffer to leave, the next tile writes over it."""
    wait = plgpu.wait_smem_to_gmem
    only_at_the_end = lambda n, wait_read_only=False: None if wait_read_only else wait(n)  # noqa: E731
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", only_at_the_end)
    x, w = operands((64, 64), 256, False, "bfloat16")
    schedule = MatmulSchedule(False, 64, 64, 64, 2, blocks=1)
    matmul(x, w, contract=CONTRACT, schedule=schedule, interpret=interpreter())
    assert races()


@pytest.mark.tier("full")
def test_a_row_of_nan_stays_in_its_row() -> None:
    x, w = operands((13, 128), 64, False, "bfloat16")
    alone = matmul(x, w, contract=CONTRACT, schedule=NARROW, interpret=interpreter())
    with_nan = matmul(x.at[5].set(jnp.nan), w, contract=CONTRACT, schedule=NARROW, interpret=interpreter())
    rows = [i for i in range(13) if i != 5]
    assert_bits_equal(with_nan[jnp.asarray(rows)], alone[jnp.asarray(rows)])


def test_empty_sums_are_the_bias() -> None:
    bias = jnp.asarray([1.5, -2.0], jnp.float16)
    y = matmul(jnp.ones((3, 0), jnp.float16), jnp.ones((0, 2), jnp.float16), contract=CONTRACT, bias=bias)
    assert_bits_equal(y, jnp.broadcast_to(bias, (3, 2)))


@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
@pytest.mark.parametrize("lead", [(), (2,), (0,)])
def test_empty_operands_give_zeros(lead: tuple[int, ...], m: int, k: int, n: int) -> None:
    y = matmul(jnp.ones((*lead, m, k), jnp.float16), jnp.ones((*lead, k, n), jnp.float16), contract=CONTRACT)
    assert y.shape == (*lead, m, n)
    assert not y.any()


@pytest.mark.tier(
    "full",
    fast=(
        "(1, 8192, 1280)-bfloat16-True",
        "(13, 576, 49152)-bfloat16-True",
        "(13, 576, 49152)-float16-True",
        "(300, 4096, 4096)-float16-False",
        "(4097, 1000, 496)-bfloat16-True",
    ),
)
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 8192, 1280), (13, 576, 49152), (300, 4096, 4096), (4097, 1000, 496)])
def test_program_for_cuda_is_lowered_on_a_cpu(shape: tuple[int, int, int], dtype: str, transpose_w: bool) -> None:
    m, k, n = shape
    x = jax.ShapeDtypeStruct((m, k), dtype)
    w = jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), dtype)
    program = jax.jit(lambda x, w: matmul(x, w, contract=CONTRACT, transpose_w=transpose_w))
    text = program.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert not re.search(r"stablehlo\.(dot|pad|transpose|slice)", text)


def test_unaligned_operands_are_padded() -> None:
    x, w = jax.ShapeDtypeStruct((9, 77), "bfloat16"), jax.ShapeDtypeStruct((77, 21), "bfloat16")
    program = jax.jit(lambda x, w: matmul(x, w, contract=CONTRACT))
    assert program.trace(x, w).lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.pad") == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contract": MatmulContract(512)}, "expected a WgmmaContract"),
        ({"x": ones((2, 3, 8), jnp.bfloat16)}, "equal leading dimensions"),
        ({"bias": ones(7, jnp.bfloat16)}, "expected a bias"),
        ({"bias": ones(8, jnp.float16)}, "expected a bias"),
        ({"x": ones((2, 16), jnp.bfloat16)}, "expected equal contracted lengths"),
        ({"x": ones((2, 8), jnp.float16)}, "one dtype"),
        ({"x": ones((2, 8)), "w": ones((8, 8))}, "bfloat16 or float16"),
        ({"out_dtype": "float64"}, "expected out_dtype"),
        ({"schedule": dataclasses.replace(WIDE, stages=60)}, "shared memory"),
        ({"schedule": ChainSchedule(32, 8, 256, 60)}, "shared memory"),
        ({"schedule": ChainSchedule(8, 8, 256, 3)}, r"rows of \(K, N\) weights of at least 32 bytes"),
        ({"schedule": ChainSchedule(32, 8, 256, 3, "memory")}, r"with \(N, K\) weights for others"),
        ({"schedule": ChainSchedule(32, 8, 256, 3), "residual": ones((2, 8), jnp.bfloat16)}, "or a residual"),
    ],
)
def test_unsupported_operands_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"x": jnp.ones((2, 8), jnp.bfloat16), "w": jnp.ones((8, 8), jnp.bfloat16), "contract": CONTRACT}
    with pytest.raises(UnsupportedError, match=message):
        matmul(**{**arguments, **change})


@pytest.mark.parametrize("capability", ["8.0", "10.0"])
def test_other_gpus_are_refused(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(compute_capability=capability, device_kind="another GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(UnsupportedError, match=f"Hopper GPU.*another GPU with {capability}"):
        matmul(*operands((8, 64), 64, False, "bfloat16"), contract=CONTRACT)
