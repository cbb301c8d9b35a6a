"""What follows a product in its kernel, and K cut into shards, on a Hopper GPU: the same bits from every schedule."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import SplitWgmmaContract, WgmmaContract, add_as_tree
from pallas_kernels.matmul.mosaic_gpu import gated_matmul, matmul
from pallas_kernels.matmul.mosaic_gpu_epilogue import Epilogue
from pallas_kernels.matmul.mosaic_gpu_finish import finish
from pallas_kernels.schedule.hopper import SHARED_BYTES, MatmulSchedule
from pallas_kernels.schedule.hopper_fused import ShardSchedule, for_residual, shard_schedules
from pallas_kernels.schedule.hopper_matmul import candidates

pytestmark = pytest.mark.gpu

CONTRACT = WgmmaContract()
REFERENCE = MatmulSchedule(False, 64, 64, 64, 4)
KINDS = ("normal", "wide", "inf")

# (M, K, N), weights stored as (N, K).
SHAPES = {
    "aligned": ((256, 1024, 512), False),
    "ragged transposed": ((203, 1000, 520), True),
    "few rows": ((13, 576, 528), False),
    "unaligned": ((9, 333, 21), False),
}
SCHEDULES = {
    "rows": REFERENCE,
    "two warpgroups": MatmulSchedule(False, 64, 128, 64, 3, 2),
    "by columns": MatmulSchedule(False, 64, 64, 64, 3, 2, split="columns"),
    "wide": MatmulSchedule(False, 64, 256, 64, 2, 2),
    "walks all tiles": MatmulSchedule(False, 64, 128, 64, 3, clusters=1),
    "tiles in turn": MatmulSchedule(False, 64, 64, 64, 3, 2, split="tiles", clusters=3),
    "few columns": MatmulSchedule(False, 64, 32, 128, 3),
    "cluster": MatmulSchedule(False, 64, 64, 64, 3, cluster_rows=2),
    "weights": MatmulSchedule(True, 64, 16, 128, 3),
    "weights, wide": MatmulSchedule(True, 64, 64, 64, 3, 2),
}
PAIRS = {
    **{name: SCHEDULES[name] for name in ("rows", "two warpgroups", "walks all tiles", "tiles in turn", "wide")},
    "by columns": MatmulSchedule(False, 64, 128, 64, 3, 2, split="columns"),
    "weights": MatmulSchedule(True, 128, 16, 128, 3),
    "weights, wide": MatmulSchedule(True, 128, 64, 64, 3),
    "weights, two warpgroups": MatmulSchedule(True, 128, 64, 64, 3, 2),
}
# A shape and what is given behind the product: bias, activation, residual, dtype of the result.
EPILOGUES = [
    ("aligned", True, "gelu", False, "bfloat16"),
    ("aligned", True, "silu", True, "bfloat16"),
    ("aligned", False, None, True, "bfloat16"),
    ("ragged transposed", True, "silu", True, "bfloat16"),
    ("ragged transposed", False, "relu", True, "float32"),
    ("few rows", True, "gelu", True, "bfloat16"),
    ("few rows", False, "silu", False, "float32"),
    ("unaligned", True, "relu", True, "bfloat16"),
]


@pytest.mark.parametrize(("name", "with_bias", "activation", "with_residual", "out"), EPILOGUES)
def test_every_schedule_finishes_the_float32_product(
    name: str, with_bias: bool, activation: str | None, with_residual: bool, out: str
) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    bias = array("normal", (n,)) if with_bias else None
    residual = array("wide", (m, n), out) if with_residual else None
    operands = [(array(kind, (m, k)), weights(k, n, transpose_w)) for kind in KINDS]
    common: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w}
    expected = [
        finish(
            matmul(x, w, schedule=REFERENCE, out_dtype="float32", **common)[None],
            Epilogue(bias, activation, residual),
            out_dtype=jnp.dtype(out),
            interpret=False,
        )
        for x, w in operands
    ]

    def run(schedule: MatmulSchedule | None) -> Callable[..., jax.Array]:
        return lambda x, w: matmul(
            x,
            w,
            bias=bias,
            activation=activation,
            residual=residual,
            out_dtype=out,
            schedule=schedule,
            **common,
        )

    compare({**fitting(SCHEDULES, out, with_residual), "default": None}, run, operands, expected)


@pytest.mark.parametrize(
    ("name", "out"),
    [("aligned", "bfloat16"), ("ragged transposed", "bfloat16"), ("few rows", "float32"), ("unaligned", "bfloat16")],
)
def test_every_schedule_gates(name: str, out: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    operands = [
        (array(kind, (m, k)), weights(k, n, transpose_w), weights(k, n, transpose_w, "linspace")) for kind in KINDS
    ]
    common: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w}
    expected = []
    for x, gate, up in operands:
        first, second = (matmul(x, w, schedule=REFERENCE, out_dtype="float32", **common) for w in (gate, up))
        silu = finish(first[None], Epilogue(activation="silu"), out_dtype=jnp.dtype("float32"), interpret=False)
        expected.append((silu * second).astype(out))

    def run(schedule: MatmulSchedule | None) -> Callable[..., jax.Array]:
        return lambda x, gate, up: gated_matmul(x, gate, up, out_dtype=out, schedule=schedule, **common)

    found = {f"{rows}: {s}": s for rows in (8, 64, 512) for s in list(candidates(rows, k, n, gated=True).values())[:2]}
    compare({**fitting({**PAIRS, **found}, out), "default": None}, run, operands, expected)


@pytest.mark.parametrize(
    ("name", "shards"), [("aligned", 2), ("aligned", 4), ("aligned", 8), ("ragged transposed", 4), ("unaligned", 4)]
)
def test_both_ways_to_split_give_the_tree_of_the_shards(name: str, shards: int) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    contract = SplitWgmmaContract(shards)
    length = contract.shard_length(k)
    count = -(-k // length)
    bias, residual = array("normal", (n,)), array("wide", (m, n))
    operands = [(array(kind, (m, k)), weights(k, n, transpose_w)) for kind in KINDS]

    def shard(x: jax.Array, w: jax.Array, index: int) -> jax.Array:
        part = slice(index * length, (index + 1) * length)
        w = w[:, part] if transpose_w else w[part]
        return matmul(
            x[:, part], w, contract=CONTRACT, transpose_w=transpose_w, schedule=REFERENCE, out_dtype="float32"
        )

    expected = [
        finish(
            add_as_tree(lambda index, x=x, w=w: shard(x, w, index), count)[None],
            Epilogue(bias, "silu", residual),
            out_dtype=jnp.dtype("bfloat16"),
            interpret=False,
        )
        for x, w in operands
    ]
    found = {
        f"{rows} rows: {s}": s
        for rows in (8, 2048)
        for across in (True, False)
        for s in [
            s for s in shard_schedules(rows, k, n, shards=count, length=length, transpose_w=transpose_w)
            if s.across == across and (s.across or for_residual(s.tiles).shared_bytes(2, 2) <= SHARED_BYTES)
        ][:3]
    }  # fmt: skip
    assert {s.across for s in found.values()} == {True, False}

    def run(schedule: ShardSchedule | None) -> Callable[..., jax.Array]:
        return lambda x, w: matmul(
            x,
            w,
            contract=contract,
            transpose_w=transpose_w,
            bias=bias,
            activation="silu",
            residual=residual,
            schedule=schedule,
        )

    compare({**found, "default": None}, run, operands, expected)


def test_the_number_of_rows_moves_no_bit() -> None:
    k, n = 2048, 1280
    x, w, up = array("wide", (1030, k)), weights(k, n, False), weights(k, n, False, "linspace")
    bias, residual = array("normal", (n,)), array("normal", (1030, n))
    forms: dict[str, Callable[..., jax.Array]] = {
        "activation": lambda x, r: bijax.matmul(x, w, bias=bias, activation="gelu"),
        "residual": lambda x, r: bijax.matmul(x, w, activation="silu", residual=r),
        "gated": lambda x, r: bijax.gated_matmul(x, w, up),
        "split": lambda x, r: bijax.matmul(x, w, bias=bias, split_k="auto"),
        "split, all": lambda x, r: bijax.matmul(x, w, bias=bias, activation="gelu", residual=r, split_k=4),
    }
    for name, form in forms.items():
        whole = form(x, residual)
        for m in (1, 7, 8, 9, 64, 65, 130, 257, 512):
            part = form(x[-m:], residual[-m:])
            assert_bits_equal(part, whole[-m:], err_msg=f"{name}, {m} rows")


def test_activations_are_accurate() -> None:
    z = jnp.concatenate([jnp.linspace(-100, 100, 4093), jnp.array([0.0, 1e-6, -1e-6])]).astype(jnp.float32)
    eye = jnp.eye(64, dtype=jnp.bfloat16)
    x = z.reshape(64, 64).astype(jnp.bfloat16)
    exact = x.astype(jnp.float32)
    for name, function in {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}.items():
        y = matmul(x, eye, contract=CONTRACT, activation=name, out_dtype="float32")
        assert jnp.allclose(y, function(exact), rtol=4e-6, atol=1e-6), name


def compare(
    schedules: dict[str, Any],
    run: Callable[[Any], Callable[..., jax.Array]],
    operands: list[tuple[jax.Array, ...]],
    expected: Iterable[jax.Array],
) -> None:
    """Compiles a program for every schedule side by side and compares its results on all operands."""
    expected = list(expected)
    with ThreadPoolExecutor(8) as pool:
        programs = pool.map(lambda s: jax.jit(run(s)).lower(*operands[0]).compile(), schedules.values())
        for (label, schedule), program in zip(schedules.items(), programs, strict=True):
            for arrays, y in zip(operands, expected, strict=True):
                assert_bits_equal(program(*arrays), y, err_msg=f"{label}, {schedule}")


def fitting(schedules: dict[str, MatmulSchedule], out: str, residual: bool = False) -> dict[str, MatmulSchedule]:
    size = jnp.dtype(out).itemsize
    held = {name: for_residual(s) if residual else s for name, s in schedules.items()}
    return {name: schedules[name] for name, s in held.items() if s.shared_bytes(2, size) <= SHARED_BYTES}


def array(kind: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(hostile_rows(sum(shape), shape, dtype)[kind])


def weights(k: int, n: int, transpose_w: bool, kind: str = "normal") -> jax.Array:
    return array(kind, (n, k) if transpose_w else (k, n))
