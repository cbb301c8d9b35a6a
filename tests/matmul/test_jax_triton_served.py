"""Groups, 8-bit products and split K through jax-triton: tiles, what is refused, and what the registry takes."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from pallas_kernels.contract import (
    Float8Contract,
    MmaChunkContract,
    MmaContract,
    QuantContract,
    SplitMmaContract,
    WgmmaContract,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.schedule.jax_triton import SplitTile, Tile, float8_tile, group_gradient_tile, split_tile
from pallas_kernels.target import Target
from tests.jax_triton.machine_code import TARGETS, needs_triton
from tests.jax_triton.packages import needs_jax_triton

if importlib.util.find_spec("triton"):
    from pallas_kernels.matmul.jax_triton.groups import group_matmul, group_weight_gradient
    from pallas_kernels.matmul.jax_triton.launch import matmul
    from pallas_kernels.matmul.jax_triton.quantized import quantized_product

AMPERE, ADA, HOPPER = (Target.parse(name) for name in ("sm_80", "sm_89", "sm_90"))


def test_tiles() -> None:
    ampere: dict[str, Any] = {"shared_memory": AMPERE.shared_memory, "features": AMPERE.features}
    hopper: dict[str, Any] = {"shared_memory": HOPPER.shared_memory, "features": HOPPER.features}
    assert isinstance(split_tile(16, 1280, 4, 2048, **ampere), SplitTile)
    assert not isinstance(split_tile(17, 1280, 4, 2048, **ampere), SplitTile)
    assert split_tile(1, 1280, 2, 320, **ampere).depth == 64  # divides a part of K
    for target in map(Target.parse, TARGETS):
        options: dict[str, Any] = {"shared_memory": target.shared_memory, "features": target.features}
        for m in (1, 40, 300, 4096):
            tile = float8_tile(m, 1024, 128, **options)
            assert tile.depth == 128
            assert tile.shared_bytes(1) <= target.shared_memory
            assert tile.rows >= 64 or "wgmma" not in target.features
            assert group_gradient_tile(m, 1024, depth=64, **options).shared_bytes(2) <= target.shared_memory
    assert group_gradient_tile(2048, 768, depth=64, **hopper).columns == 128


X, W = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((3, 64, 32), "bfloat16")
COUNTS = jax.ShapeDtypeStruct((3,), "int32")


@needs_triton
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, s: group_matmul(x, w[:, :5], s, contract=MmaContract(), target=AMPERE), r"x \(M, K\) and w \(G"),
        (lambda x, w, s: group_matmul(x, w, s[:2], contract=MmaContract(), target=AMPERE), r"sizes int32\[3\]"),
        (lambda x, w, s: group_matmul(x, w, s, contract=MmaChunkContract(), target=AMPERE), "an MmaContract or"),
        (
            lambda x, w, s: group_matmul(x.astype("float32"), w, s, contract=MmaContract(), target=AMPERE),
            "bfloat16 or float16",
        ),
        (
            lambda x, w, s: group_weight_gradient(x, w[0], s, contract=MmaChunkContract(), target=AMPERE),
            r"x \(M, K\) and g",
        ),
        (
            lambda x, w, s: group_weight_gradient(x, x, s, contract=WgmmaContract(), target=AMPERE),
            "an MmaChunkContract or",
        ),
        (
            lambda x, w, s: matmul(
                jnp.tile(x, 10),
                jnp.tile(w[0], (10, 1)),
                contract=SplitMmaContract(2),
                target=AMPERE,
                tile=SplitTile(16, 16, 128, 2, 2),
            ),
            "a depth that divides",
        ),
    ],
    ids=["weights", "sizes", "contract", "dtype", "rows", "contract of sums", "split tile"],
)
def test_errors(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(call, X, W, COUNTS)


@needs_triton
def test_errors_of_8_bit_products() -> None:
    def call(target: Target, dtype: str, *, column: int = 32, **options: Any) -> Any:
        x, w = jax.ShapeDtypeStruct((8, 64), dtype), jax.ShapeDtypeStruct((64, 32), dtype)
        scales = jax.ShapeDtypeStruct((8,), "float32"), jax.ShapeDtypeStruct((column,), "float32")
        options = {"transposed": (False, False), "bias": None, "out_dtype": "float32", **options}
        run = lambda *arrays: quantized_product(*arrays, target=target, **options)  # noqa: E731
        return jax.eval_shape(run, x, w, *scales)

    float8 = Float8Contract("wgmma32")
    for arguments, options, message in (
        ((AMPERE, "float8_e4m3fn"), {"contract": Float8Contract("mma32")}, "on float8"),
        ((ADA, "float8_e4m3fn"), {"contract": float8}, "mma32"),
        ((HOPPER, "float8_e4m3fn"), {"contract": float8, "tile": Tile(16, 16, 128, 4, 3)}, "64 rows or more"),
        ((HOPPER, "float8_e4m3fn"), {"contract": float8, "tile": Tile(64, 16, 64, 4, 3)}, "depth is a block"),
        ((AMPERE, "int8"), {"contract": QuantContract(), "column": 31}, r"column_scale and bias \[32\]"),
        ((AMPERE, "int8"), {"contract": QuantContract(), "transposed": (False, True)}, r"x \(M, K\) and w \(K, N\)"),
        ((AMPERE, "int16"), {"contract": QuantContract()}, "int8 or float8_e4m3fn"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call(*arguments, **options)


def served(function: Any, *arrays: jax.ShapeDtypeStruct, architecture: str, backend: str | None = None) -> set[str]:
    """Returns the contracts of a program."""
    if backend is None:
        return set(bijax.contracts(function, *arrays, platform="cuda", architecture=architecture).ids)
    with bijax.prefer_backend(backend):
        return set(bijax.contracts(function, *arrays, platform="cuda", architecture=architecture).ids)


@needs_jax_triton
def test_the_registry_takes_these_kernels_where_there_are_no_others() -> None:
    def float8(x: Any, w: Any) -> Any:
        return bijax.quant_matmul(x, w, jnp.ones(8), jnp.ones(32))

    x, w = (jax.ShapeDtypeStruct(s, "float8_e4m3fn") for s in ((8, 64), (64, 32)))
    assert Float8Contract("mma32").id in served(float8, x, w, architecture="sm_89")
    for architecture in ("sm_80", "sm_100"):
        assert Float8Contract("float32").id in served(float8, x, w, architecture=architecture)
    assert Float8Contract("wgmma32").id in served(float8, x, w, architecture="sm_90", backend="jax_triton")
    assert served(bijax.group_matmul, X, W, COUNTS, architecture="sm_86") == {MmaContract().id}
    wgmma = served(bijax.group_matmul, X, W, COUNTS, architecture="sm_90")
    assert served(bijax.group_matmul, X, W, COUNTS, architecture="sm_90", backend="jax_triton") == wgmma

    def split(x: Any, w: Any) -> Any:
        return bijax.matmul(x, w, split_k=2)

    a, b = jax.ShapeDtypeStruct((8, 640), "bfloat16"), jax.ShapeDtypeStruct((640, 32), "bfloat16")
    assert served(split, a, b, architecture="sm_80") == {SplitMmaContract(2).id}
