"""The matmul through jax-triton without a GPU: machine code of each tile for each GPU, numbers, and what it refuses."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from pallas_kernels.contract import (
    ChunkContract,
    MatmulContract,
    MmaChunkContract,
    MmaContract,
    MmaTf32Contract,
    SplitContract,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.schedule.jax_triton import Tile, candidates, chain_tile, tensor_core_tile
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, MachineCode, check_resources, compiled, launches_of, needs_triton
from tests.jax_triton.packages import needs_jax_triton

if importlib.util.find_spec("triton"):
    from pallas_kernels.matmul.jax_triton.launch import gated_matmul, matmul, weight_gradient

AMPERE = Target.parse("sm_80")
ROWS = (1, 17, 40, 100, 300, 4096)

# What is multiplied: a function of a target, and its arrays.
PRODUCTS: dict[str, tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]] = {
    "bfloat16": (
        lambda t: lambda x, w: matmul(x, w, contract=MmaContract(), target=t, out_dtype="bfloat16"),
        (((4096, 1024), "bfloat16"), ((1024, 2048), "bfloat16")),
    ),
    "few rows, (N, K)": (
        lambda t: lambda x, w: matmul(x, w, contract=MmaContract(), target=t, transpose_w=True),
        (((3, 1024), "float16"), ((2048, 1024), "float16")),
    ),
    "ragged, with an epilogue": (
        lambda t: (
            lambda x, w, b, r: matmul(
                x, w, contract=MmaContract(), target=t, bias=b, activation="silu", residual=r, out_dtype="bfloat16"
            )
        ),
        (((33, 77), "bfloat16"), ((77, 65), "bfloat16"), ((65,), "bfloat16"), ((33, 65), "bfloat16")),
    ),
    "gated": (
        lambda t: lambda x, w, u: gated_matmul(x, w, u, contract=MmaContract(), target=t),
        (((4096, 1024), "bfloat16"), ((1024, 2048), "bfloat16"), ((1024, 2048), "bfloat16")),
    ),
    "a stack": (
        lambda t: lambda x, w: matmul(x, w, contract=MmaContract(), target=t),
        (((3, 100, 512), "bfloat16"), ((3, 512, 256), "bfloat16")),
    ),
    "gradient": (
        lambda t: lambda x, g, s: weight_gradient(x, g, contract=MmaChunkContract(), target=t, accumulate=s),
        (((300, 1024), "bfloat16"), ((300, 512), "bfloat16"), ((1024, 512), "float32")),
    ),
    "TF32": (
        lambda t: lambda x, w: matmul(x, w, contract=MmaTf32Contract(), target=t),
        (((512, 1024), "float32"), ((1024, 2048), "float32")),
    ),
    "float32": (
        lambda t: lambda x, w: matmul(x, w, contract=MatmulContract(512), target=t),
        (((100, 1024), "float32"), ((1024, 2048), "float32")),
    ),
    "float32 gradient": (
        lambda t: lambda x, g: weight_gradient(x, g, contract=ChunkContract(), target=t),
        (((300, 96), "float32"), ((300, 64), "float32")),
    ),
    "float64": (
        lambda t: (
            lambda x, w: matmul(x, w, contract=MatmulContract(128, dtype="float64"), target=t, out_dtype="float64")
        ),
        (((100, 1024), "float64"), ((1024, 2048), "float64")),
    ),
}
FAST = ("ragged, with an epilogue-sm_80",)


def code_of(name: str, target: Target) -> MachineCode:
    function, shapes = PRODUCTS[name]
    with jax.enable_x64(name == "float64"):
        (launch,) = launches_of(function(target), *(jax.ShapeDtypeStruct(s, d) for s, d in shapes))
    return compiled(launch)


@needs_triton
@pytest.mark.tier("full", fast=FAST)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_machine_code_keeps_the_contract(name: str, target: str) -> None:
    gpu = Target.parse(target)
    code = code_of(name, gpu)
    check_resources(code, gpu)
    assert code.count(r"\b(RED|ATOM)") == 0  # sums of several programs in one element
    assert "tcgen05.mma" not in code.ptx
    chains = name in ("float32", "float32 gradient", "float64")
    if chains:
        assert "mma.sync" not in code.ptx or name == "float64"
        assert code.count(r"\b(FFMA|DFMA|DMMA)\b") > 0
        return
    # One accumulator, without additions of several: those of the epilogue are bias, residual and silu's 1.
    allowed = {"ragged, with an epilogue", "gated"}
    assert (code.count(r"\bFADD\b") > 0) == (name in allowed)
    assert code.count(r"\bFFMA\b") == 0  # nothing is fused in the epilogue
    instruction = "m16n8k8.row.col.f32.tf32" if name == "TF32" else "m16n8k16"
    assert instruction in code.ptx or "wgmma.mma_async" in code.ptx
    assert "cvt.rna.tf32" not in code.ptx  # operands are truncated


@needs_triton
@pytest.mark.parametrize(
    ("shapes", "dtype", "transpose_w"),
    [
        (((3, 1, 32), (3, 32, 16)), "bfloat16", False),
        (((3, 2, 1), (3, 1, 16)), "float32", False),
        (((3, 1, 32), (3, 16, 32)), "float32", True),
        (((2, 1, 32), (2, 32, 16)), "float64", False),
    ],
)
def test_sizes_of_one(shapes: Any, dtype: str, transpose_w: bool) -> None:
    """Triton makes an argument that is 1 a constant, which has no methods."""
    contracts = {
        "bfloat16": MmaContract(),
        "float32": MatmulContract(128),
        "float64": MatmulContract(128, dtype="float64"),
    }

    def product(x: Any, w: Any) -> Any:
        return matmul(x, w, contract=contracts[dtype], target=AMPERE, transpose_w=transpose_w, out_dtype=x.dtype.name)

    with jax.enable_x64(dtype == "float64"):
        (launch,) = launches_of(product, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    assert 1 in launch.arguments
    check_resources(compiled(launch), AMPERE)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("products", [1, 2])
def test_every_tile_fits(target: str, products: int) -> None:
    gpu = Target.parse(target)
    x, w = jax.ShapeDtypeStruct((512, 1024), "bfloat16"), jax.ShapeDtypeStruct((1024, 512), "bfloat16")
    for candidate in candidates(gpu.features, products):
        if "tcgen05" in gpu.features and candidate.tile.rows > 32:
            continue
        tile = candidate.tile.fitted(2, gpu.shared_memory, products)

        def product(x: Any, w: Any, tile: Tile = tile) -> Any:
            if products == 2:
                return gated_matmul(x, w, w, contract=MmaContract(), target=gpu, tile=tile)
            return matmul(x, w, contract=MmaContract(), target=gpu, tile=tile)

        (launch,) = launches_of(product, x, w)
        code = compiled(launch)
        check_resources(code, gpu)
        assert "tcgen05.mma" not in code.ptx


def test_tiles_do_not_exceed_any_gpu() -> None:
    for target in map(Target.parse, TARGETS):
        for m in ROWS:
            for n in (16, 77, 1024, 128256):
                for itemsize, products in ((2, 1), (2, 2), (4, 1)):
                    tile = tensor_core_tile(
                        m,
                        n,
                        depth=576,
                        itemsize=itemsize,
                        shared_memory=target.shared_memory,
                        features=target.features,
                        products=products,
                    )
                    assert tile.shared_bytes(itemsize, products) <= target.shared_memory
                    assert tile.rows <= 32 or "tcgen05" not in target.features
    assert {chain_tile(m).depth for m in ROWS} == {16}
    with pytest.raises(ValueError, match="rows must be a power of two and at least 16, got 8"):
        Tile(8, 16, 16, 4, 3)
    with pytest.raises(ValueError, match="fits into 1000 bytes"):
        Tile(128, 256, 64, 8, 3).fitted(2, 1000)


_NUMBERS = """
import json
import jax, jax.numpy as jnp, numpy as np
from tests.jax_triton.interpreted import interpret_launches
from pallas_kernels.contract import *
from pallas_kernels.matmul.jax_triton.launch import gated_matmul, matmul, weight_gradient
from pallas_kernels.matmul.schedule.jax_triton import Tile
from pallas_kernels.target import Target

interpret_launches()
target, tile, errors = Target.parse("sm_80"), Tile(16, 32, 32, 4, 3), {}

def random(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)

def note(name, y, expected):
    y, expected = np.asarray(y, np.float64), np.asarray(expected, np.float64)
    errors[name] = float(np.max(np.abs(y - expected)) / np.max(np.abs(expected))) if y.shape == expected.shape else 1e9

def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]

for name, contract, dtype in (("half", MmaContract(), "float16"), ("chain", MatmulContract(48), "float32")):
    x, w, b = random(0, 19, 100, dtype=dtype), random(1, 100, 41, dtype=dtype), random(2, 41, dtype=dtype)
    expected = np.matmul(*wide(x, w))
    for transpose_w in (False, True):
        stored = w.T if transpose_w else w
        y = matmul(x, stored, contract=contract, target=target, transpose_w=transpose_w, bias=b)
        note(f"{name} {transpose_w}", y, expected + wide(b)[0])
    xs, ws = random(3, 2, 5, 40, dtype=dtype), random(4, 2, 40, 24, dtype=dtype)
    note(f"{name} stack", matmul(xs, ws, contract=contract, target=target), np.matmul(*wide(xs, ws)))
    y = matmul(xs[0], ws, contract=contract, target=target)
    note(f"{name} shared rows", y, np.matmul(*wide(xs[0], ws)))
    y = matmul(xs[:, :, :1], ws[:, :1], contract=contract, target=target)
    note(f"{name} K of 1", y, np.matmul(*wide(xs[:, :, :1], ws[:, :1])))
x, w, r = random(0, 19, 100, dtype="float16"), random(1, 100, 41, dtype="float16"), random(2, 19, 41, dtype="float16")
y = matmul(x, w, contract=MmaContract(), target=target, activation="relu", residual=r, out_dtype="float16", tile=tile)
note("relu and residual", y, np.maximum(np.matmul(*wide(x, w)), 0) + wide(r)[0])
y = gated_matmul(x, w, w[:, ::-1], contract=MmaContract(), target=target, activation="relu")
note("gated", y, np.maximum(np.matmul(*wide(x, w)), 0) * np.matmul(*wide(x, w[:, ::-1])))
for name, contract, dtype in (("half", MmaChunkContract(), "float16"), ("chunks", ChunkContract(), "float32")):
    x, g = random(0, 2, 150, 20, dtype=dtype), random(1, 2, 150, 33, dtype=dtype)
    total = random(2, 2, 20, 33)
    expected = np.einsum("gmk,gmn->gkn", *wide(x, g))
    note(f"gradient {name}", weight_gradient(x, g, contract=contract, target=target), expected)
    y = weight_gradient(x, g, contract=contract, target=target, accumulate=total)
    note(f"gradient {name}, continued", y, expected + wide(total)[0])
    y = weight_gradient(x[0], g, contract=contract, target=target)
    note(f"gradient {name}, shared rows", y, np.einsum("mk,gmn->gkn", *wide(x[0], g)))
with jax.enable_x64(True):
    x, w = random(0, 7, 300, dtype="float64"), random(1, 300, 21, dtype="float64")
    contract = MatmulContract(128, dtype="float64")
    y = matmul(x, w, contract=contract, target=target, out_dtype="float64")
    note("float64", y, np.matmul(x, w))
print(json.dumps(errors))
"""


@pytest.mark.tier("full")
@needs_triton
def test_numbers_in_the_interpreter() -> None:
    output = run_interpreted("-c", _NUMBERS)
    errors = json.loads(output.splitlines()[-1])
    assert len(errors) == 19
    bounds = {"float64": 1e-14, "relu and residual": 1e-3, "gated": 1e-3}  # the last two round to float16
    assert {name: e for name, e in errors.items() if e > bounds.get(name, 2e-6)} == {}


X, W = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((64, 32), "bfloat16")


@needs_triton
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: matmul(x, w[:3], contract=MmaContract(), target=AMPERE), r"expected x \(..., M, K\) and w"),
        (lambda x, w: matmul(x, w, contract=MmaTf32Contract(), target=AMPERE), "operands of one dtype"),
        (lambda x, w: matmul(x, w, contract=SplitContract(64), target=AMPERE), "chain on tensor cores"),
        (lambda x, w: matmul(x, w, contract=MmaChunkContract(), target=AMPERE), "chain on tensor cores"),
        (lambda x, w: matmul(x, w, contract=MmaContract(), target=AMPERE, activation="tanh"), "got 'tanh'"),
        (lambda x, w: matmul(x, w, contract=MmaContract(), target=AMPERE, bias=x[0]), r"expected a bias \[32\]"),
        (lambda x, w: matmul(x, w, contract=MmaContract(), target=AMPERE, residual=x), r"a residual \[8, 32\]"),
        (
            lambda x, w: matmul(x, w, contract=MatmulContract(64), target=AMPERE, activation="relu"),
            "neither activation nor residual",
        ),
        (lambda x, w: gated_matmul(x, w, w[:, :3], contract=MmaContract(), target=AMPERE), "two weights of one shape"),
        (lambda x, w: weight_gradient(x, w, contract=MmaChunkContract(), target=AMPERE), "as many rows"),
        (lambda x, w: weight_gradient(x, x, contract=MmaContract(), target=AMPERE), "expected a ChunkContract or"),
        (
            lambda x, w: weight_gradient(x, x, contract=MmaChunkContract(), target=AMPERE, accumulate=x),
            r"accumulate float32\[64, 64\]",
        ),
    ],
    ids=lambda value: None if callable(value) else value[:20],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(call, X, W)


@needs_triton
def test_empty_products() -> None:
    x, w = jnp.zeros((3, 0), jnp.bfloat16), jnp.zeros((0, 4), jnp.bfloat16)
    y = matmul(x, w, contract=MmaContract(), target=AMPERE, bias=jnp.ones(4, jnp.bfloat16))
    assert y.tolist() == [[1.0] * 4] * 3
    total = jnp.ones((0, 4))
    assert weight_gradient(x, jnp.ones((3, 4), x.dtype), contract=MmaChunkContract(), target=AMPERE).shape == (0, 4)
    assert weight_gradient(w.T[:0], w.T[:0, :0], contract=MmaChunkContract(), target=AMPERE).shape == (0, 0)
    assert total.shape == (0, 4)


def served(function: Any, *arrays: jax.ShapeDtypeStruct, architecture: str, backend: str | None = None) -> set[str]:
    """Returns the contracts of a program."""
    if backend is None:
        return set(bijax.contracts(function, *arrays, platform="cuda", architecture=architecture).ids)
    with bijax.prefer_backend(backend):
        return set(bijax.contracts(function, *arrays, platform="cuda", architecture=architecture).ids)


@needs_jax_triton
def test_the_registry_takes_these_kernels_where_there_are_no_others() -> None:
    x, w = X, W
    assert served(bijax.matmul, x, w, architecture="sm_86") == {MmaContract().id}
    assert served(bijax.matmul, x, w, architecture="sm_90") == {"matmul/v1/f32-wgmma16-chain"}
    assert served(bijax.matmul, x, w, architecture="sm_90", backend="jax_triton") == {"matmul/v1/f32-wgmma16-chain"}
    rounded = "matmul/v1/f32-rounded-chain128-fold"
    assert served(bijax.matmul, x, w, architecture="sm_80", backend="portable") == {rounded}
    assert served(bijax.matmul, x, w, architecture="sm_75") == {rounded}
    x, w = (jax.ShapeDtypeStruct(a.shape, "float32") for a in (x, w))
    assert served(bijax.matmul, x, w, architecture="sm_120") == {MmaTf32Contract().id}
    with jax.enable_x64(True):
        wide = (jax.ShapeDtypeStruct(a.shape, "float64") for a in (x, w))
        product = bijax.invariant(jnp.matmul)
        assert served(product, *wide, architecture="sm_90") == {"matmul/v1/f64-chain128-fold"}
    with pytest.raises(ValueError, match="expected one of cpu, hopper, jax_triton, portable, got 'cub'"):
        bijax.prefer_backend("cub")
