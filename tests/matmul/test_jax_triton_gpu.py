"""The matmul through jax-triton on a Hopper GPU: the bits of the Mosaic kernels, and of chains in numpy."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import (
    ChunkContract,
    Float8Contract,
    MatmulContract,
    QuantContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
)
from pallas_kernels.matmul.schedule.jax_triton import CHAIN, SplitTile, Tile, candidates
from pallas_kernels.target import Target
from tests.matmul.reference import emulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
        reason="needs jax-triton and triton",
    ),
]
if importlib.util.find_spec("triton"):
    from pallas_kernels.matmul.jax_triton.groups import group_matmul, group_weight_gradient
    from pallas_kernels.matmul.jax_triton.launch import gated_matmul, matmul, weight_gradient
    from pallas_kernels.matmul.jax_triton.quantized import quantized_groups, quantized_product

HOPPER = Target.parse("sm_90")
KINDS = ("normal", "wide", "denormal", "cancelling", "linspace", "inf")
TILES = [
    c.tile for c in candidates(HOPPER.features) + tuple(c for c in candidates(frozenset({"mma"})) if c.tile.rows == 128)
]
FUSED = [c.tile for c in candidates(HOPPER.features, 2)]


def arrays(*shapes: tuple[int, ...], dtype: str) -> dict[str, list[jax.Array]]:
    found = {kind: [jnp.asarray(hostile_rows(i, s, dtype)[kind]) for i, s in enumerate(shapes)] for kind in KINDS}
    found["inf"][1:] = found["normal"][1:]  # a column of infinities would hide all rows
    return found


def check(function: Callable[[Tile | None], Any], reference: Any, data: dict[str, list[jax.Array]], tiles: Any) -> None:
    """Compares a function of arrays for every tile with a reference."""
    expected = {kind: jax.jit(reference)(*given) for kind, given in data.items()}
    for tile in (None, *tiles):
        program = jax.jit(function(tile))
        for kind, given in data.items():
            assert_bits_equal(program(*given), expected[kind])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(300, 576, 512), (13, 336, 200), (40, 77, 333)])
def test_products_have_the_bits_of_wgmma(m: int, k: int, n: int, transpose_w: bool, dtype: str) -> None:
    from pallas_kernels.matmul.hopper.launch import matmul as reference

    options: dict[str, Any] = {"contract": WgmmaContract(), "transpose_w": transpose_w, "out_dtype": "float32"}
    check(
        lambda tile: lambda x, w: matmul(x, w, target=HOPPER, tile=tile, **options),
        lambda x, w: reference(x, w, **options),
        arrays((m, k), (n, k) if transpose_w else (k, n), dtype=dtype),
        TILES if dtype == "bfloat16" else TILES[::4],
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_epilogues_have_the_bits_of_hopper(activation: str) -> None:
    from pallas_kernels.matmul.hopper import launch as hopper

    options: dict[str, Any] = {"contract": WgmmaContract(), "activation": activation, "out_dtype": "bfloat16"}
    data = arrays((200, 512), (512, 384), (384,), (200, 384), dtype="bfloat16")
    check(
        lambda tile: lambda x, w, b, r: matmul(x, w, bias=b, residual=r, target=HOPPER, tile=tile, **options),
        lambda x, w, b, r: hopper.matmul(x, w, bias=b, residual=r, **options),
        data,
        TILES[::5],
    )
    check(
        lambda tile: lambda x, w, u: gated_matmul(x, w, u, target=HOPPER, tile=tile, **options),
        lambda x, w, u: hopper.gated_matmul(x, w, u, **options),
        arrays((200, 512), (512, 384), (512, 384), dtype="bfloat16"),
        FUSED[::3],
    )


@pytest.mark.parametrize("transpose_w", [False, True])
def test_tf32_truncates_as_wgmma_does(transpose_w: bool) -> None:
    from pallas_kernels.matmul.hopper.tf32 import matmul as reference

    options: dict[str, Any] = {"contract": Tf32Contract(), "transpose_w": transpose_w, "out_dtype": "float32"}
    check(
        lambda tile: lambda x, w: matmul(x, w, target=HOPPER, tile=tile, **options),
        lambda x, w: reference(x, w, **options),
        arrays((300, 576), (512, 576) if transpose_w else (576, 512), dtype="float32"),
        [tile.fitted(4, HOPPER.shared_memory) for tile in TILES[::3]],
    )


@pytest.mark.parametrize("continued", [False, True])
def test_gradients_have_the_bits_of_wgmma(continued: bool) -> None:
    from pallas_kernels.matmul.hopper.launch import weight_gradient as reference

    data = arrays((300, 576), (300, 256), dtype="bfloat16")
    if continued:
        total = jnp.asarray(hostile_rows(5, (576, 256), "float32")["normal"])
        data = {kind: [*given, total] for kind, given in data.items()}
    options: dict[str, Any] = {"contract": WgmmaChunkContract(), "out_dtype": "float32"}
    check(
        lambda tile: (
            lambda x, g, *t: weight_gradient(x, g, accumulate=t[0] if t else None, target=HOPPER, tile=tile, **options)
        ),
        lambda x, g, *t: reference(x, g, accumulate=t[0] if t else None, **options),
        data,
        TILES[::4],
    )


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("block", [67, 128, 192])
@pytest.mark.parametrize("k", [40, 77, 333, 1100])
def test_chains_have_the_bits_of_the_contract(k: int, block: int, transpose_w: bool) -> None:
    x, w = (np.asarray(hostile_rows(i, s, "float32")["normal"]) for i, s in enumerate(((33, k), (k, 70))))
    expected = emulate(x, w, MatmulContract(block))
    options: dict[str, Any] = {"contract": MatmulContract(block), "transpose_w": transpose_w, "target": HOPPER}
    for tile in CHAIN:
        run = jax.jit(functools.partial(matmul, tile=tile, **options))
        assert_bits_equal(run(x, np.ascontiguousarray(w.T) if transpose_w else w), expected)


def test_gradients_in_chunks_have_the_bits_of_the_contract() -> None:
    x, g = (np.asarray(hostile_rows(i, s, "float32")["normal"]) for i, s in enumerate(((300, 20), (300, 70))))
    expected = emulate(np.ascontiguousarray(x.T), g, MatmulContract(128))
    for tile in CHAIN:
        run = functools.partial(weight_gradient, contract=ChunkContract(), target=HOPPER, tile=tile)
        assert_bits_equal(jax.jit(run)(x, g), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_chains_in_float64_keep_their_bits(kind: str) -> None:
    with jax.enable_x64(True):
        x, w = arrays((33, 200), (200, 70), dtype="float64")[kind]
        options: dict[str, Any] = {"contract": MatmulContract(128, dtype="float64"), "out_dtype": "float64"}
        multiply = jax.jit(functools.partial(matmul, target=HOPPER, **options))
        whole = multiply(x, w)
        for size in (1, 2, 7, 16, 17, 33):
            assert_bits_equal(multiply(x[:size], w), whole[:size])
        assert_bits_equal(multiply(x, w[:, :5]), whole[:, :5])


def test_a_short_last_block_is_added_as_the_contract_says() -> None:
    """The sums of the two blocks are added once: so are two products of the parts."""
    x, w = (jnp.asarray(hostile_rows(i, s, "float32")["normal"]) for i, s in enumerate(((33, 136), (136, 65))))
    whole = matmul(x, w, contract=MatmulContract(128), target=HOPPER)
    parts = [
        matmul(a, b, contract=MatmulContract(128), target=HOPPER)
        for a, b in ((x[:, :128], w[:128]), (x[:, 128:], w[128:]))
    ]
    assert_bits_equal(whole, parts[0] + parts[1])


def test_rows_do_not_depend_on_others() -> None:
    x, w = (jnp.asarray(hostile_rows(i, s, "bfloat16")["normal"]) for i, s in enumerate(((300, 576), (576, 512))))
    run = jax.jit(lambda x, w: matmul(x, w, contract=WgmmaContract(), target=HOPPER))
    whole = run(x, w)
    for rows in (1, 8, 33, 128):
        assert_bits_equal(run(x[:rows], w), whole[:rows])
    plain = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32))
    assert any((plain(x[:rows], w) != plain(x, w)[:rows]).any() for rows in (1, 8, 33, 128))  # the control


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("k", "n", "splits"), [(1024, 320, 4), (1000, 200, 4), (150, 77, 4), (520, 128, 2)])
def test_splits_of_k_have_the_bits_of_hopper(k: int, n: int, splits: int, transpose_w: bool) -> None:
    """With as many parts of K as splits and with fewer, by different warps and one after the other."""
    from pallas_kernels.matmul.hopper.launch import matmul as reference

    options: dict[str, Any] = {"contract": SplitWgmmaContract(splits), "transpose_w": transpose_w}
    options |= {"activation": "silu", "out_dtype": "bfloat16"}
    w = (n, k) if transpose_w else (k, n)
    for m in (5, 40, 300):
        tiles: list[Tile] = [Tile(64, 64, 64, 4, 3), Tile(16, 32, 64, 4, 3)]
        if -(-k // SplitWgmmaContract(splits).split_length(k)) == splits:
            tiles += [
                SplitTile(16, 16, 64, splits, 4),
                SplitTile(16, 64, 32, splits, 3),
                SplitTile(64, 32, 64, splits, 3),
            ]
        check(
            lambda tile: lambda x, w, b, r: matmul(x, w, bias=b, residual=r, target=HOPPER, tile=tile, **options),
            lambda x, w, b, r: reference(x, w, bias=b, residual=r, **options),
            arrays((m, k), w, (n,), (m, n), dtype="bfloat16"),
            tiles,
        )


GROUP_TILES = [TILES[0], *TILES[2::3]]
LOADS = {"uneven": (100, 0, 3, 180, 1), "one": (0, 0, 300, 0, 0), "some": (20, 30, 0, 0, 40), "none": (0,) * 5}
INVALID = {"negative": (-1, 0, 3, 20, 1), "too many": (100, 100, 100, 1, 0), "overflow": (2**31 - 1,) * 5}


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("k", "n"), [(512, 256), (77, 85)])
def test_groups_have_the_bits_of_hopper(k: int, n: int, transpose_w: bool) -> None:
    from pallas_kernels.matmul.hopper.groups import group_matmul as reference

    x, w = (
        jnp.asarray(hostile_rows(i, s, "bfloat16")["wide"])
        for i, s in enumerate(((300, k), (5, n, k) if transpose_w else (5, k, n)))
    )
    w = w.at[3].set(jnp.nan)  # a group whose weights must not reach the others
    options: dict[str, Any] = {"contract": WgmmaContract(), "transpose_w": transpose_w, "out_dtype": "float32"}
    expected = jax.jit(lambda *a: reference(*a, **options))
    for tile in (None, *GROUP_TILES):
        run = jax.jit(lambda *a, tile=tile: group_matmul(*a, target=HOPPER, tile=tile, **options))
        for load in (*LOADS.values(), *INVALID.values()):
            sizes = jnp.asarray(load, jnp.int32)
            assert_bits_equal(run(x, w, sizes), expected(x, w, sizes))


@pytest.mark.parametrize(("k", "n"), [(512, 256), (136, 85)])
def test_gradients_of_groups_have_the_bits_of_hopper(k: int, n: int) -> None:
    from pallas_kernels.matmul.hopper.groups import group_weight_gradient as reference

    x, g = (jnp.asarray(hostile_rows(i, s, "bfloat16")["wide"]) for i, s in enumerate(((300, k), (300, n))))
    options: dict[str, Any] = {"contract": WgmmaChunkContract(), "out_dtype": "float32"}
    expected = jax.jit(lambda *a: reference(*a, **options))
    for tile in (None, *GROUP_TILES):
        run = jax.jit(lambda *a, tile=tile: group_weight_gradient(*a, target=HOPPER, tile=tile, **options))
        for load in (*LOADS.values(), *INVALID.values()):
            sizes = jnp.asarray(load, jnp.int32)
            assert_bits_equal(run(x, g, sizes), expected(x, g, sizes))


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(300, 1008, 528), (5, 77, 21), (40, 512, 640)])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_8_bit_products_have_the_bits_of_hopper(dtype: str, m: int, k: int, n: int, transpose_w: bool) -> None:
    """float8 by wgmma alone: mma.sync adds other bits, so tiles have at least 64 rows."""
    from pallas_kernels.matmul.hopper.quantized import quantized_groups as reference_groups
    from pallas_kernels.matmul.hopper.quantized import quantized_product as reference

    x, w = (numbers(i, s, dtype) for i, s in enumerate(((m, k), (4, k, n))))
    row, column, bias = (jnp.asarray(hostile_rows(i, s, "float32")["wide"]) for i, s in enumerate(((m,), (4, n), (n,))))
    contract = QuantContract() if dtype == "int8" else Float8Contract("wgmma32")
    options: dict[str, Any] = {"contract": contract, "out_dtype": "float32"}
    one: dict[str, Any] = {"transposed": (False, transpose_w), "bias": bias, **options}
    stored = w.swapaxes(1, 2) if transpose_w else w
    expected = jax.jit(lambda *a: reference(*a, **one))(x, stored[0], row, column[0])
    sizes = jnp.asarray((m // 2, 0, m // 3, 1), jnp.int32)
    of_groups = jax.jit(lambda *a: reference_groups(*a, **options))(x, w, row, column, sizes)
    tiles = [replace(t, depth=128, stages=3) for t in TILES[1:] if t.rows >= 64 or dtype == "int8"]
    for tile in (None, *tiles[::2]):
        run = jax.jit(lambda *a, tile=tile: quantized_product(*a, target=HOPPER, tile=tile, **one))
        assert_bits_equal(run(x, stored[0], row, column[0]), expected)
        groups = jax.jit(
            lambda *a, tile=tile: quantized_groups(*a, target=HOPPER, tile=tile, transpose_w=transpose_w, **options)
        )
        assert_bits_equal(groups(x, stored, row, column, sizes), of_groups)


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    if dtype == "int8":
        return jax.random.randint(jax.random.key(seed), shape, -128, 128, jnp.int8)
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)
