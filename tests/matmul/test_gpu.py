"""The Hopper matmul on a Hopper GPU: every schedule gives the bits of one reference schedule."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import WgmmaContract
from pallas_kernels.matmul.hopper.launch import matmul
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

pytestmark = pytest.mark.gpu

CONTRACT = WgmmaContract()
REFERENCE = MatmulSchedule(False, 64, 64, 64, 4)
THREADS = 12
DTYPES = ("bfloat16", "float16")

# (M, K, N), weights stored as (N, K): aligned, ragged in each dimension, fewer than 8 rows, padded.
SHAPES = {
    "aligned": ((256, 1024, 512), False),
    "aligned transposed": ((256, 1024, 512), True),
    "ragged": ((203, 1000, 528), False),
    "ragged transposed": ((203, 1000, 520), True),
    "one row": ((1, 4096, 1280), False),
    "few rows": ((13, 576, 1536), False),
    "few rows transposed": ((13, 72, 504), True),
    "unaligned": ((9, 77, 21), False),
    "unaligned transposed": ((9, 77, 21), True),
}


# What the candidates of few shapes hold: every split, tiles of odd widths, loops over all tiles.
OTHERS = {
    "three warpgroups": MatmulSchedule(False, 64, 64, 64, 3, 3),
    "16 columns": MatmulSchedule(False, 64, 16, 64, 3),
    "160 columns": MatmulSchedule(False, 128, 160, 64, 3, 2, out_buffers=1),
    "loops over all tiles": MatmulSchedule(False, 64, 64, 64, 3, blocks=1),
    "takes tiles in turn": MatmulSchedule(False, 64, 128, 64, 4, 2, "tiles", blocks=2),
    "weights, 152 columns": MatmulSchedule(True, 64, 152, 64, 3, 2, out_buffers=1),
    "weights, take tiles in turn": MatmulSchedule(True, 128, 88, 64, 4, 2, "tiles", blocks=3),
    "weights, K step of 192": MatmulSchedule(True, 64, 8, 192, 4, 2),
}

# Weights in registers, of few columns: of every width, with one set of rows and with several.
CHAINS = {
    "16 columns": ChainSchedule(16, 8, 512, 6),
    "32 columns": ChainSchedule(32, 16, 256, 8),
    "32 columns, short steps": ChainSchedule(32, 8, 64, 3),
    "64 columns": ChainSchedule(64, 32, 128, 4),
    "32 columns, 64 rows": ChainSchedule(32, 64, 256, 4),
}
# The same of weights stored as (N, K), also with wgmma's rows from shared memory.
TRANSPOSED_CHAINS = {
    **CHAINS,
    "8 columns": ChainSchedule(8, 8, 512, 6),
    "in memory": ChainSchedule(16, 16, 128, 6, "memory"),
    "64 columns in memory": ChainSchedule(64, 8, 128, 4, "memory"),
    "in both": ChainSchedule(32, 8, 256, 6, "both"),
    "16 columns in both": ChainSchedule(16, 32, 512, 4, "both", 2),
}


def schedules(name: str, out_itemsize: int, every: int) -> dict[str, MatmulSchedule | ChainSchedule]:
    """Every `every`th of the candidates for the rows of a shape and for many rows, and of what these leave out."""
    (m, k, n), transpose_w = SHAPES[name]
    found: dict[str, MatmulSchedule | ChainSchedule] = {}
    for rows in (m, 512):
        ranked = candidates(rows, k, n, transpose_w=transpose_w, out_itemsize=out_itemsize)
        found |= {f"{rows} rows: {label}": schedule for label, schedule in ranked.items()}
    found |= OTHERS
    chains = TRANSPOSED_CHAINS if transpose_w else CHAINS
    found |= {f"in registers: {label}": schedule for label, schedule in chains.items()}
    distinct = {schedule: label for label, schedule in found.items()}
    return {label: schedule for schedule, label in list(distinct.items())[::every]}


CASES = [
    ("ragged transposed", "bfloat16", "float32", 1),
    ("aligned", "bfloat16", "float32", 2),
    ("few rows", "bfloat16", "float32", 2),
    *((name, "bfloat16", "float32", 5) for name in SHAPES if name not in ("aligned", "ragged transposed", "few rows")),
    ("ragged", "bfloat16", "bfloat16", 2),
    ("few rows transposed", "bfloat16", "bfloat16", 5),
    ("aligned transposed", "float16", "float32", 5),
    ("ragged", "float16", "float16", 5),
]


@pytest.mark.parametrize(("name", "dtype", "out_dtype", "every"), CASES)
def test_schedules_give_the_reference_bits(name: str, dtype: str, out_dtype: str, every: int) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    data = [operands(kind, m, k, n, transpose_w, dtype) for kind in ("normal", "wide", "cancelling", "linspace", "inf")]
    expected = [compiled(REFERENCE, *data[0], transpose_w, out_dtype)(x, w) for x, w in data]
    found = schedules(name, jnp.dtype(out_dtype).itemsize, every)
    failures = []
    with ThreadPoolExecutor(THREADS) as pool:
        programs = [pool.submit(compiled, s, *data[0], transpose_w, out_dtype) for s in found.values()]
        for (label, schedule), program in zip(found.items(), programs, strict=True):
            try:
                for (x, w), y in zip(data, expected, strict=True):
                    assert_bits_equal(program.result()(x, w), y)
            except Exception as error:  # every schedule that fails is named, with what went wrong
                failures.append(f"{label}, {schedule}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join([f"{len(failures)} of {len(found)} schedules fail", *failures])


# (M, K, N), result, schedule: blocks of a tile that lie wholly outside of a result one or a few tiles wide.
OUTSIDE = {
    "one row, weights in turn": ((1, 512, 640), "float32", OTHERS["weights, take tiles in turn"]),
    "8 rows, weights in turn": ((8, 512, 640), "bfloat16", OTHERS["weights, take tiles in turn"]),
    "13 rows, weights in turn": ((13, 576, 1536), "float32", OTHERS["weights, take tiles in turn"]),
    "13 rows, in turn": ((13, 576, 1536), "float32", OTHERS["takes tiles in turn"]),
    "one row, in turn": ((1, 512, 640), "bfloat16", OTHERS["takes tiles in turn"]),
    "one row, weights, 152 columns": ((1, 512, 640), "float32", OTHERS["weights, 152 columns"]),
    "64 columns": ((8, 512, 64), "bfloat16", MatmulSchedule(True, 64, 8, 64, 4, 2)),
    "32 columns": ((256, 512, 32), "float32", MatmulSchedule(False, 64, 64, 64, 4)),
    "32 columns, chosen": ((4096, 4096, 32), "float32", None),
}


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_lies_outside_of_the_result_is_dropped(name: str, with_residual: bool) -> None:
    (m, k, n), out_dtype, schedule = OUTSIDE[name]
    x, w = operands("normal", m, k, n, False, "bfloat16")
    residual = jnp.asarray(hostile_rows(m, (m, n), out_dtype)["normal"]) if with_residual else None
    # The reference writes one block of columns inside of a result that is as wide as two.
    wide = jnp.pad(w, ((0, 0), (0, -n % 128)))
    total = compiled(REFERENCE, x, wide, False, "float32")(x, wide)[:, :n]
    expected = total if residual is None else total + residual.astype(jnp.float32)
    program = jax.jit(
        lambda x, w: matmul(x, w, contract=CONTRACT, residual=residual, out_dtype=out_dtype, schedule=schedule)
    )
    for _ in range(3):
        assert_bits_equal(program(x, w), expected.astype(out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_the_float32_result_gives_the_narrow_one(dtype: str) -> None:
    x, w = operands("normal", 100, 512, 256, False, dtype)
    wide = matmul(x, w, contract=CONTRACT, out_dtype="float32")
    assert_bits_equal(matmul(x, w, contract=CONTRACT), wide.astype(dtype))


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_bias_is_added_to_the_float32_sum(name: str, out_dtype: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    x, w = operands("normal", m, k, n, transpose_w, "bfloat16")
    bias = jnp.asarray(hostile_rows(n, (n,), "bfloat16")["normal"])
    total = matmul(x, w, contract=CONTRACT, transpose_w=transpose_w, out_dtype="float32") + bias.astype(jnp.float32)
    y = matmul(x, w, contract=CONTRACT, transpose_w=transpose_w, bias=bias, out_dtype=out_dtype)
    assert_bits_equal(y, total.astype(out_dtype))


@pytest.mark.parametrize("name", SHAPES)
def test_a_stack_gives_the_bits_of_its_products(name: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    data = [operands(kind, m, k, n, transpose_w, "bfloat16") for kind in ("normal", "wide", "inf", "cancelling")]
    x, w = (jnp.stack(arrays).reshape(2, 2, *arrays[0].shape) for arrays in zip(*data, strict=True))
    y = matmul(x, w, contract=CONTRACT, transpose_w=transpose_w, out_dtype="float32")
    for i, (one, weights) in enumerate(data):
        single = matmul(one, weights, contract=CONTRACT, transpose_w=transpose_w, out_dtype="float32")
        assert_bits_equal(y[i // 2, i % 2], single)


def test_numbers_of_rows_to_300() -> None:
    x, w = operands("wide", 300, 512, 256, False, "bfloat16")
    whole = np.asarray(matmul(x, w, contract=CONTRACT, out_dtype="float32"))
    rows = (*range(1, 34), 40, 48, 57, *range(60, 71), 96, *range(127, 131), 150, 192, 200, *range(255, 259), 300)
    with ThreadPoolExecutor(THREADS) as pool:
        programs = pool.map(lambda m: compiled(None, x[:m], w, False, "float32"), rows)
        for m, program in zip(rows, programs, strict=True):
            assert_bits_equal(program(x[:m], w), whole[:m], err_msg=f"{m} rows")


@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (8192, 1280), (576, 49152)])
def test_larger_numbers_of_rows(k: int, n: int) -> None:
    x, w = operands("normal", 8192, k, n, False, "bfloat16")
    program = jax.jit(lambda x, w: matmul(x, w, contract=CONTRACT))
    whole = np.asarray(program(x, w))
    for m in (1, 8, 33, 128, 257, 512, 1000, 1024, 2048, 4097):
        assert_bits_equal(program(x[-m:], w), whole[-m:], err_msg=f"{m} rows")


@pytest.mark.parametrize("transpose_w", [False, True])
def test_rows_at_every_position_among_any_neighbours(transpose_w: bool) -> None:
    x, w = operands("normal", 16, 256, 128, transpose_w, "bfloat16")
    assert_batch_invariant(
        lambda x, w: matmul(x, w, contract=CONTRACT, transpose_w=transpose_w, out_dtype="float32"),
        x,
        w,
        batch_axes=(0, None),
        batch_sizes=(2, 7, 8, 13, 64, 65, 129),
        modes=("jit",),
    )


def test_xla_is_not_invariant() -> None:
    """The control: the sweep above finds what XLA's dot does."""
    x, w = operands("normal", 16, 4096, 1024, False, "bfloat16")
    with pytest.raises(AssertionError):
        assert_batch_invariant(
            lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32),
            x,
            w,
            batch_axes=(0, None),
            batch_sizes=(2, 8, 64, 256),
            modes=("jit",),
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_against_float64(dtype: str) -> None:
    x, w = operands("normal", 128, 4096, 256, False, dtype)
    y = np.asarray(matmul(x, w, contract=CONTRACT, out_dtype="float32"), np.float64)
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    # A chain of K/16 additions into float32 that truncate: below 2**-23 of the sum of magnitudes for each.
    assert (np.abs(y - x @ w) <= 4096 / 16 * 2.0**-22 * (np.abs(x) @ np.abs(w))).all()


def compiled(
    schedule: MatmulSchedule | ChainSchedule | None, x: jax.Array, w: jax.Array, transpose_w: bool, out_dtype: str
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul(x, w, contract=CONTRACT, transpose_w=transpose_w, out_dtype=out_dtype, schedule=schedule)

    return jax.jit(multiply).lower(x, w).compile()


def operands(kind: str, m: int, k: int, n: int, transpose_w: bool, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Hostile activations; weights that are normal, or as wide as the activations."""
    x = hostile_rows(m + k, (m, k), dtype)[kind]
    w = hostile_rows(n + k, (n, k) if transpose_w else (k, n), dtype)["wide" if kind == "wide" else "normal"]
    return jnp.asarray(x), jnp.asarray(w)
