"""Groups, 8-bit products and split K through jax-triton without a GPU: machine code and numbers."""

import importlib.util
import json
from typing import Any

import jax
import pytest

from pallas_kernels.contract import (
    Float8Contract,
    MmaChunkContract,
    MmaContract,
    QuantContract,
    SplitMmaContract,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton

if importlib.util.find_spec("triton"):
    from pallas_kernels.matmul.jax_triton.groups import group_matmul, group_weight_gradient
    from pallas_kernels.matmul.jax_triton.launch import matmul
    from pallas_kernels.matmul.jax_triton.quantized import quantized_groups, quantized_product

HOPPER = Target.parse("sm_90")
Shapes = tuple[tuple[tuple[int, ...], str], ...]

SIZES = ((64,), "int32")
SCALES = (((300,), "float32"), ((64, 768), "bfloat16"))


def float8_contract(target: Target) -> Float8Contract:
    return Float8Contract("wgmma32" if "wgmma" in target.features else "mma32")


def product(dtype: str, transpose_w: bool) -> Any:
    def of(target: Target) -> Any:
        contract = QuantContract() if dtype == "int8" else float8_contract(target)
        options: dict[str, Any] = {"transposed": (False, transpose_w), "bias": None, "out_dtype": "bfloat16"}
        return lambda *arrays: quantized_product(*arrays, contract=contract, target=target, **options)

    return of


def groups(dtype: str) -> Any:
    def of(target: Target) -> Any:
        contract = QuantContract() if dtype == "int8" else float8_contract(target)
        return lambda *arrays: quantized_groups(*arrays, contract=contract, target=target, out_dtype="bfloat16")

    return of


def split(splits: int) -> Any:
    contract = SplitMmaContract(splits)
    return lambda t: (
        lambda x, w, b: matmul(x, w, bias=b, contract=contract, target=t, activation="silu", out_dtype="bfloat16")
    )


def in_8_bits(dtype: str, m: int, transpose_w: bool) -> tuple[Any, Shapes]:
    w = (768, 1024) if transpose_w else (1024, 768)
    return product(dtype, transpose_w), (((m, 1024), dtype), (w, dtype), ((m,), "float32"), ((768,), "float32"))


def split_case(m: int, splits: int) -> tuple[Any, Shapes]:
    return split(splits), (((m, 1024), "bfloat16"), ((1024, 320), "bfloat16"), ((320,), "bfloat16"))


CASES: dict[str, tuple[Any, Shapes]] = {
    "split, few rows": split_case(5, 4),
    "split in two": split_case(5, 2),
    "split, many rows": split_case(1000, 4),
    "groups": (
        lambda t: lambda x, w, s: group_matmul(x, w, s, contract=MmaContract(), target=t),
        (((300, 512), "bfloat16"), ((64, 512, 768), "bfloat16"), SIZES),
    ),
    "groups of many rows": (
        lambda t: lambda x, w, s: group_matmul(x, w, s, contract=MmaContract(), target=t, transpose_w=True),
        (((65536, 512), "float16"), ((64, 768, 512), "float16"), SIZES),
    ),
    "gradient of groups": (
        lambda t: lambda x, g, s: group_weight_gradient(x, g, s, contract=MmaChunkContract(), target=t),
        (((300, 512), "bfloat16"), ((300, 768), "bfloat16"), SIZES),
    ),
    **{
        f"{dtype}, {m} rows, {'(N, K)' if along_k else '(K, N)'}": in_8_bits(dtype, m, along_k)
        for dtype in ("int8", "float8_e4m3fn")
        for m in (5, 4096)
        for along_k in (False, True)
    },
    **{
        f"groups, {dtype}": (groups(dtype), (((300, 512), dtype), ((64, 512, 768), dtype), *SCALES, SIZES))
        for dtype in ("int8", "float8_e4m3fn")
    },
}


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_machine_code_keeps_the_contract(name: str, target: str) -> None:
    gpu, (function, shapes) = Target.parse(target), CASES[name]
    if "float8" in name and not {"wgmma", "mma_float8"} & gpu.features:
        with pytest.raises(UnsupportedError, match=r"mma\.sync on float8"):
            launches_of(function(gpu), *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))
        return
    (launch,) = launches_of(function(gpu), *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))
    code = compiled(launch)
    check_resources(code, gpu)
    assert code.count(r"\b(RED|REDG|ATOM|ATOMG|ATOMS)\b") == 0  # sums of several programs in one element
    assert code.count(r"\bFFMA\b") == (0 if "split" not in name else code.count(r"\bFFMA\b"))
    assert "tcgen05.mma" not in code.ptx
    wide = "wgmma.mma_async" in code.ptx
    if "int8" in name:
        assert wide or "m16n8k32.row.col.satfinite.s32.s8.s8.s32" in code.ptx
    elif "float8" in name:
        # One instruction for all tiles: two would add differently.
        assert wide == ("wgmma" in gpu.features) != ("mma.sync" in code.ptx)
        assert wide or "m16n8k32.row.col.f32.e4m3.e4m3.f32" in code.ptx
    else:
        assert wide or "m16n8k16" in code.ptx
        assert (code.count(r"\bFADD\b") > 0) == ("split" in name)


@needs_triton
@pytest.mark.tier("full")
def test_products_of_groups_do_not_wait_for_each_other() -> None:
    """The compiler makes each wgmma wait for the one before it if the accumulator is used in ways it cannot follow."""
    for name in ("groups of many rows", "gradient of groups"):
        function, shapes = CASES[name]
        (launch,) = launches_of(function(HOPPER), *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))
        code = compiled(launch)
        assert code.count(r"\bWARPGROUP\.ARRIVE\b") < code.count(r"\bHGMMA\b"), name


_NUMBERS = """
import json
import jax, jax.numpy as jnp, numpy as np
from tests.jax_triton.interpreted import interpret_launches
from pallas_kernels.contract import *
from pallas_kernels.matmul.jax_triton.groups import group_matmul, group_weight_gradient
from pallas_kernels.matmul.jax_triton.launch import matmul
from pallas_kernels.matmul.jax_triton.quantized import quantized_groups, quantized_product
from pallas_kernels.matmul.schedule.jax_triton import SplitTile, Tile
from pallas_kernels.target import Target

interpret_launches()
ampere, ada, errors, exact = Target.parse("sm_80"), Target.parse("sm_89"), {}, {}

def random(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)

def integers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(-128, 128, shape), jnp.int8)

def wide(a):
    return np.asarray(a, np.float64)

def note(name, y, expected):
    assert y.shape == expected.shape, name
    errors[name] = float(np.max(np.abs(wide(y) - expected)) / max(1, np.max(np.abs(expected))))

x, w, b = random(0, 19, 500, dtype="float16"), random(1, 500, 41, dtype="float16"), random(2, 41, dtype="float16")
for splits in (2, 4):
    tiles = None, Tile(16, 32, 64, 4, 3), SplitTile(16, 32, 64, splits, 3)
    for i, tile in enumerate(tiles):
        contract = SplitMmaContract(splits)
        y = matmul(x, w.T if i else w, contract=contract, target=ampere, transpose_w=i > 0, bias=b, tile=tile)
        note(f"{splits} splits {i}", y, wide(x) @ wide(w) + wide(b))
y = matmul(x[:, :150], w[:150], contract=SplitMmaContract(4), target=ampere)
note("three splits", y, wide(x[:, :150]) @ wide(w[:150]))

x, w, g = random(0, 50, 40, dtype="float16"), random(1, 5, 40, 24, dtype="float16"), random(2, 50, 24, dtype="float16")
for sizes in ([7, 0, 20, 3, 10], [0, 50, 0, 0, 0], [0] * 5):
    expected, sums = np.zeros((50, 24)), np.zeros((5, 40, 24))
    for row, group in enumerate(np.repeat(np.arange(5), sizes)):
        expected[row] = wide(x[row]) @ wide(w[group])
        sums[group] += np.outer(wide(x[row]), wide(g[row]))
    given = jnp.asarray(sizes, jnp.int32)
    options = {"contract": MmaContract(), "target": ampere, "out_dtype": "float32"}
    note(f"groups {sizes}", group_matmul(x, w, given, **options), expected)
    y = group_matmul(x, w.swapaxes(1, 2), given, transpose_w=True, **options)
    note(f"groups, (N, K) {sizes}", y, expected)
    y = group_weight_gradient(x, g, given, contract=MmaChunkContract(), target=ampere)
    note(f"gradient {sizes}", y, sums)
for name, sizes in (("too many", [7, 0, 20, 3, 21]), ("negative", [-1, 5, 5, 5, 5]), ("overflow", [2**31 - 1] * 5)):
    given = jnp.asarray(sizes, jnp.int32)
    y = group_matmul(x, w, given, contract=MmaContract(), target=ampere)
    sums = group_weight_gradient(x, g, given, contract=MmaChunkContract(), target=ampere)
    exact[name] = bool(jnp.isnan(y).all() and jnp.isnan(sums).all())

x, w = integers(0, 19, 100), integers(1, 3, 100, 41)
row, column, bias = random(2, 19).at[17:].set(jnp.nan), random(3, 3, 41, dtype="bfloat16"), random(4, 41)
def scaled(x, w, row, column, bias=0):
    sums = (np.asarray(x, np.int32) @ np.asarray(w, np.int32)).astype(np.float32)
    return sums * np.asarray(row)[:, None] * np.asarray(column, np.float32) + np.asarray(bias)
for along_k in (False, True):
    options = {"contract": QuantContract(), "target": ampere, "bias": bias, "out_dtype": "float32"}
    stored = w[0].T if along_k else w[0]
    y = quantized_product(x, stored, row, column[0], transposed=(False, along_k), **options)
    expected = scaled(x, w[0], row, column[0], bias)
    exact[f"int8 {along_k}"] = np.array_equal(y, expected, equal_nan=True)
sizes = jnp.asarray([3, 0, 12], jnp.int32)
y = quantized_groups(x, w, row, column, sizes, contract=QuantContract(), target=ampere, out_dtype="float32")
parts = scaled(x[:3], w[0], row[:3], column[0]), scaled(x[3:15], w[2], row[3:15], column[2]), np.zeros((4, 41))
exact["int8 groups"] = np.array_equal(y, np.concatenate(parts))
x, w = (a.astype(jnp.float8_e4m3fn) for a in (random(0, 19, 300), random(1, 300, 41)))
contract = Float8Contract("mma32")
y = quantized_product(
    x, w, jnp.ones(19), jnp.ones(41), contract=contract, target=ada, transposed=(False, False), bias=None,
    out_dtype="float32",
)
note("float8", y, wide(x) @ wide(w))
print(json.dumps([errors, exact]))
"""


@needs_triton
@pytest.mark.tier("full")
def test_numbers_in_the_interpreter() -> None:
    output = run_interpreted("-c", _NUMBERS)
    errors, exact = json.loads(output.splitlines()[-1])
    assert len(errors) == 17
    assert len(exact) == 6
    assert {name: error for name, error in errors.items() if error > 2e-6} == {}
    assert all(exact.values()), exact
