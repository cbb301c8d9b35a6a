"""What follows a product in its kernel, and K cut into splits, on a Hopper GPU: the same bits from every schedule."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import SplitWgmmaContract, WgmmaContract, add_as_tree
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.matmul.hopper.finish import finish
from pallas_kernels.matmul.hopper.launch import gated_matmul, matmul
from pallas_kernels.matmul.schedule.hopper.fused_matmul import SplitKSchedule, for_residual, split_k_schedules
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES, MatmulSchedule

pytestmark = pytest.mark.gpu

Program = Callable[..., jax.Array]

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
    "wide": MatmulSchedule(False, 64, 256, 64, 2, 2),
    "loops over all tiles": MatmulSchedule(False, 64, 128, 64, 3, blocks=1),
    "tiles in turn": MatmulSchedule(False, 64, 64, 64, 3, 2, split="tiles", blocks=3),
    "few columns": MatmulSchedule(False, 64, 32, 128, 3),
    "weights": MatmulSchedule(True, 64, 16, 128, 3),
    "weights, wide": MatmulSchedule(True, 64, 64, 64, 3, 2),
}
PAIRS = {
    **{name: SCHEDULES[name] for name in ("rows", "two warpgroups", "loops over all tiles", "tiles in turn", "wide")},
    "weights": MatmulSchedule(True, 128, 16, 128, 3),
    "weights, wide": MatmulSchedule(True, 128, 64, 64, 3),
    "weights, two warpgroups": MatmulSchedule(True, 128, 64, 64, 3, 2),
}
# A shape and what is given after the product: bias, activation, residual, dtype of the result.
EPILOGUES = [
    ("aligned", True, "gelu", False, "bfloat16"),
    ("aligned", True, "silu", True, "bfloat16"),
    ("aligned", False, None, True, "bfloat16"),
    ("ragged transposed", True, "silu", True, "bfloat16"),
    ("ragged transposed", False, "relu", True, "float32"),
    ("few rows", True, "gelu", True, "bfloat16"),
    ("few rows", False, "silu", False, "float32"),
    ("unaligned", True, "relu", True, "bfloat16"),
    ("ragged transposed", True, "silu", True, "bfloat16"),
]
GATED = [
    ("aligned", "silu", "bfloat16"),
    ("ragged transposed", "gelu", "bfloat16"),
    ("few rows", "silu", "float32"),
    ("unaligned", "silu", "bfloat16"),
]


@pytest.mark.parametrize("case", range(len(EPILOGUES)))
def test_every_schedule_finishes_the_float32_product(case: int) -> None:
    name, with_bias, activation, with_residual, out = EPILOGUES[case]
    (m, k, n), transpose_w = SHAPES[name]
    bias = array("normal", (n,)) if with_bias else None
    residual = array("wide", (m, n), out) if with_residual else None
    common: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w}

    def reference(x: jax.Array, w: jax.Array) -> jax.Array:
        product = matmul(x, w, schedule=REFERENCE, out_dtype="float32", **common)
        epilogue = Epilogue(bias, activation, residual)
        return finish(product[None], epilogue, out_dtype=jnp.dtype(out), interpret=False)

    def run(schedule: MatmulSchedule | None) -> Program:
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

    found = fitting(some(SCHEDULES, case, 3), out, (m, k, n) if with_residual else None)
    operands = [(array(kind, (m, k)), weights(k, n, transpose_w)) for kind in KINDS]
    compare(reference, {f"{label}, {s}": run(s) for label, s in {**found, "default": None}.items()}, operands)


@pytest.mark.parametrize("case", range(len(GATED)))
def test_every_schedule_gates(case: int) -> None:
    name, activation, out = GATED[case]
    (m, k, n), transpose_w = SHAPES[name]
    common: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w}

    def reference(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        first, second = (matmul(x, w, schedule=REFERENCE, out_dtype="float32", **common) for w in (gate, up))
        epilogue = Epilogue(activation=activation)
        return (finish(first[None], epilogue, out_dtype=jnp.dtype("float32"), interpret=False) * second).astype(out)

    def run(schedule: MatmulSchedule | None) -> Program:
        return lambda x, gate, up: gated_matmul(
            x, gate, up, activation=activation, out_dtype=out, schedule=schedule, **common
        )

    ranked = {f"{rows} rows": next(iter(candidates(rows, k, n, gated=True).values())) for rows in (8, 512)}
    found = fitting({**some(PAIRS, case, 2), **ranked}, out)
    operands = [
        (array(kind, (m, k)), weights(k, n, transpose_w), weights(k, n, transpose_w, "linspace")) for kind in KINDS
    ]
    compare(reference, {f"{label}, {s}": run(s) for label, s in {**found, "default": None}.items()}, operands)


@pytest.mark.parametrize("with_residual", [True, False])  # without one, sums wait in the result's shared memory
@pytest.mark.parametrize(
    ("name", "splits"), [("aligned", 2), ("aligned", 8), ("ragged transposed", 4), ("unaligned", 4)]
)
def test_all_ways_to_split_give_the_tree_of_the_shards(name: str, splits: int, with_residual: bool) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    contract = SplitWgmmaContract(splits)
    length = contract.split_length(k)
    count = -(-k // length)
    bias, residual = array("normal", (n,)), array("wide", (m, n)) if with_residual else None

    def reference(x: jax.Array, w: jax.Array) -> jax.Array:
        def k_split(index: int) -> jax.Array:
            part = slice(index * length, (index + 1) * length)
            columns = w[:, part] if transpose_w else w[part]
            return matmul(
                x[:, part],
                columns,
                contract=CONTRACT,
                transpose_w=transpose_w,
                schedule=REFERENCE,
                out_dtype="float32",
            )

        epilogue = Epilogue(bias, "silu", residual)
        total = add_as_tree(k_split, count)
        return finish(total[None], epilogue, out_dtype=jnp.dtype("bfloat16"), interpret=False)

    def run(schedule: SplitKSchedule | None) -> Program:
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

    found: dict[str, SplitKSchedule | None] = {"default": None}
    for rows in (8, 2048):
        options: dict[str, Any] = {"splits": count, "length": length, "transpose_w": transpose_w}
        for s in split_k_schedules(rows, k, n, residual=with_residual, **options):
            found.setdefault(f"{rows} rows, {s.parts=}, {s.tiles.tile_columns=}", s)
    assert {1, count} <= {s.parts for s in found.values() if s is not None}
    operands = [(array(kind, (m, k)), weights(k, n, transpose_w)) for kind in KINDS]
    compare(reference, {f"{label}, {s}": run(s) for label, s in found.items()}, operands)


def test_the_number_of_rows_moves_no_bit() -> None:
    k, n = 2048, 1280
    x, residual = array("wide", (1030, k)), array("normal", (1030, n))
    others = weights(k, n, False), weights(k, n, False, "linspace"), array("normal", (n,))
    forms: dict[str, Callable[..., jax.Array]] = {
        "activation": lambda x, r, w, up, bias: bijax.matmul(x, w, bias=bias, activation="gelu"),
        "residual": lambda x, r, w, up, bias: bijax.matmul(x, w, activation="silu", residual=r),
        "gated": lambda x, r, w, up, bias: bijax.gated_matmul(x, w, up),
        "split": lambda x, r, w, up, bias: bijax.matmul(x, w, bias=bias, split_k="auto"),
        "split, all": lambda x, r, w, up, bias: bijax.matmul(x, w, bias=bias, activation="gelu", residual=r, split_k=4),
    }
    whole = {(name, 1030): (form, x, residual, *others) for name, form in forms.items()}
    parts = {(name, m): (forms[name], x[-m:], residual[-m:], *others) for name in forms for m in (1, 9, 130)}
    results = dict(zip([*whole, *parts], evaluate([*whole.values(), *parts.values()]), strict=True))
    for name, m in parts:
        assert_bits_equal(results[name, m], results[name, 1030][-m:], err_msg=f"{name}, {m} rows")


def test_activations_are_accurate() -> None:
    z = jnp.concatenate([jnp.linspace(-100, 100, 4093), jnp.array([0.0, 1e-6, -1e-6])]).astype(jnp.float32)
    eye = jnp.eye(64, dtype=jnp.bfloat16)
    x = z.reshape(64, 64).astype(jnp.bfloat16)
    exact = x.astype(jnp.float32)
    for name, function in {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}.items():
        y = matmul(x, eye, contract=CONTRACT, activation=name, out_dtype="float32")
        assert jnp.allclose(y, function(exact), rtol=4e-6, atol=1e-6), name


def compare(reference: Program, programs: dict[str, Program], operands: Sequence[tuple[jax.Array, ...]]) -> None:
    """Compares the programs' results on all operands with the reference's."""
    labels = ["reference", *programs]
    compiled = compile_all([(program, *operands[0]) for program in (reference, *programs.values())])
    for arrays in operands:
        expected, *results = (program(*arrays) for program in compiled)
        for label, result in zip(labels[1:], results, strict=True):
            assert_bits_equal(result, expected, err_msg=label)


def evaluate(calls: list[tuple[Any, ...]]) -> list[jax.Array]:
    return [program(*call[1:]) for program, call in zip(compile_all(calls), calls, strict=True)]


def compile_all(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Compiles functions for their arguments side by side."""
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda call: jax.jit(call[0]).lower(*call[1:]).compile(), calls))


def some(schedules: dict[str, MatmulSchedule], case: int, of: int) -> dict[str, MatmulSchedule]:
    """Returns every `of`-th schedule: the cases take them in turn."""
    return {name: schedules[name] for name in list(schedules)[case % of :: of]}


def fitting(
    schedules: dict[str, MatmulSchedule], out: str, residual: tuple[int, int, int] | None = None
) -> dict[str, MatmulSchedule]:
    """The schedules that fit, with a residual for a product of this shape."""
    size = jnp.dtype(out).itemsize
    held = {name: s if residual is None else for_residual(s, *residual, size == 2) for name, s in schedules.items()}
    return {name: schedules[name] for name, s in held.items() if s.shared_bytes(2, size) <= SHARED_BYTES}


def array(kind: str, shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(hostile_rows(sum(shape), shape, dtype)[kind])


def weights(k: int, n: int, transpose_w: bool, kind: str = "normal") -> jax.Array:
    return array(kind, (n, k) if transpose_w else (k, n))
