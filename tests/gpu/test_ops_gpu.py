"""`bijax.matmul`, its derivative and the transform's products on a Hopper GPU: the same bits in every call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops import weight_gradient
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import WgmmaChunkContract, WgmmaContract
from pallas_kernels.matmul import hopper
from pallas_kernels.matmul.schedule.hopper.matmul import candidates
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

pytestmark = pytest.mark.gpu

SIZES = (2, 7, 8, 13, 64, 129)
CHUNKS = WgmmaChunkContract()
REFERENCE = MatmulSchedule(False, 64, 64, 64, 4)


def kernel(x: jax.Array, w: jax.Array, **options: object) -> jax.Array:
    return hopper.matmul(x, w, contract=WgmmaContract(), **options)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_public_function_gives_the_kernels_bits(dtype: str, transpose_w: bool) -> None:
    x, w = data("wide", 45, 200, dtype), weights(200, 96, dtype)
    bias = weights(1, 96, dtype)[0]
    stored = w.T if transpose_w else w
    wide = kernel(x, stored, transpose_w=transpose_w, out_dtype="float32")
    y = bijax.matmul(x, stored, transpose_w=transpose_w, preferred_element_type="float32")
    assert_bits_equal(y, wide)
    assert_bits_equal(bijax.matmul(x, stored, transpose_w=transpose_w), wide.astype(dtype))
    y = bijax.matmul(x, stored, transpose_w=transpose_w, bias=bias)
    assert_bits_equal(y, (wide + bias.astype(jnp.float32)).astype(dtype))


def test_jit_eager_scan_and_vmap_agree() -> None:
    x, w = data("normal", 24, 256, "bfloat16"), weights(256, 256, "bfloat16")
    whole = bijax.matmul(x, w)
    assert_bits_equal(jax.jit(bijax.matmul)(x, w), whole)
    assert_bits_equal(jax.vmap(bijax.matmul, (0, None))(x, w), whole)
    assert_bits_equal(jax.vmap(bijax.matmul, (0, None))(x.reshape(4, 6, 256), w).reshape(24, 256), whole)
    assert_bits_equal(jax.lax.scan(lambda c, row: (c, bijax.matmul(row, w)), 0, x)[1], whole)
    assert_bits_equal(bijax.matmul(x.reshape(2, 3, 4, 256), w).reshape(24, 256), whole)


def test_stacks_and_vmap_over_weights_give_the_bits_of_single_products() -> None:
    xs = jnp.stack([data(kind, 21, 136, "bfloat16") for kind in ("normal", "wide", "inf")])
    ws = jnp.stack([weights(136, 80, "bfloat16", seed) for seed in range(3)])
    g = data("normal", 21, 80, "bfloat16")
    singles = jnp.stack([bijax.matmul(x, w) for x, w in zip(xs, ws, strict=True)])
    assert_bits_equal(bijax.matmul(xs, ws), singles)
    assert_bits_equal(jax.vmap(bijax.matmul)(xs, ws), singles)
    one = jnp.stack([bijax.matmul(xs[0], w) for w in ws])
    assert_bits_equal(jax.vmap(bijax.matmul, (None, 0))(xs[0], ws), one)
    gradients = jnp.stack([weight_gradient(x, g) for x in xs])
    assert_bits_equal(jax.vmap(weight_gradient, (0, None))(xs, g), gradients)
    continued = jax.vmap(lambda x, total: weight_gradient(x, g, accumulate=total))(xs, gradients)
    assert_bits_equal(continued[1], weight_gradient(xs[1], g, accumulate=gradients[1]))


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_rows_keep_their_bits(out: str) -> None:
    x, w, bias = data("normal", 16, 576, "bfloat16"), weights(576, 192, "bfloat16"), weights(1, 192, "bfloat16")[0]
    assert_batch_invariant(
        lambda x, w: bijax.matmul(x, w, bias=bias, preferred_element_type=out),
        x,
        w,
        batch_axes=(0, None),
        batch_sizes=SIZES,
        modes=("jit",),
    )


def test_the_gradient_of_rows_keeps_its_bits() -> None:
    w, g = weights(128, 520, "bfloat16"), data("normal", 16, 520, "bfloat16")
    assert_batch_invariant(
        lambda g, w: jax.vjp(lambda x: bijax.matmul(x, w), jnp.zeros((len(g), 128), g.dtype))[1](g)[0],
        g,
        w,
        batch_axes=(0, None),
        batch_sizes=SIZES,
        modes=("jit",),
    )


def test_products_under_the_transform_keep_their_bits() -> None:
    x, first, last = data("normal", 16, 256, "bfloat16"), weights(256, 96, "bfloat16"), weights(96, 64, "bfloat16")
    layers = bijax.invariant(lambda x, first, last: jnp.maximum(x @ first, 0) @ last)
    assert_bits_equal(layers(x, first, last), bijax.matmul(jnp.maximum(bijax.matmul(x, first), 0), last))
    assert_batch_invariant(layers, x, first, last, batch_axes=(0, None, None), batch_sizes=SIZES, modes=("jit",))


def test_xla_is_not_invariant() -> None:
    """The control: the sweep finds what XLA's dot does."""
    x, w = data("normal", 16, 4096, "bfloat16"), weights(4096, 1024, "bfloat16")
    with pytest.raises(AssertionError):
        assert_batch_invariant(
            lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.float32),
            x,
            w,
            batch_axes=(0, None),
            batch_sizes=(2, 8, 64, 256),
            modes=("jit",),
        )


# (rows, K, N) of the operands: aligned, padded.
GRADIENTS = {"aligned": (512, 192, 320), "padded": (333, 100, 77)}


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_schedule_of_the_gradient_gives_the_reference_bits(name: str, continued: bool) -> None:
    m, k, n = GRADIENTS[name]
    total = jnp.asarray(hostile_rows(3, (k, n), "float32")["normal"]) if continued else None
    sets = [columns(kind, m, k, n) for kind in ("normal", "wide", "cancelling", "linspace", "inf")]
    found = {
        key: s
        for rows in (8, 200, 4096)
        for key, s in candidates(rows, m, n, transpose_w=False, out_itemsize=4).items()
        if not s.swap
    }
    found["walks all tiles"] = MatmulSchedule(False, 64, 64, 64, 3, blocks=1)

    def program(schedule: MatmulSchedule) -> Callable[..., jax.Array]:
        def gradient(x: jax.Array, g: jax.Array, total: jax.Array | None) -> jax.Array:
            return hopper.weight_gradient(x, g, contract=CHUNKS, accumulate=total, schedule=schedule)

        return jax.jit(gradient).lower(*sets[0], total).compile()

    with ThreadPoolExecutor(8) as pool:
        reference, *programs = pool.map(program, [REFERENCE, *found.values()])
    for x, g in sets:
        expected = reference(x, g, total)
        for key, other in zip(found, programs, strict=True):
            assert_bits_equal(other(x, g, total), expected, err_msg=key)


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
def test_the_gradient_is_the_product_of_the_transposed_rows(kind: str) -> None:
    """Both contracts take 16 elements at a time, upwards, so a gradient has the bits of that product."""
    x, g = columns(kind, 520, 128, 64)
    assert_bits_equal(weight_gradient(x, g), kernel(x.T.copy(), g, out_dtype="float32"))
    assert_bits_equal(weight_gradient(x, g, transpose_w=True), kernel(g.T.copy(), x, out_dtype="float32"))


@pytest.mark.parametrize("n", [21, 32, 64])
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_the_gradient_of_some_columns_is_part_of_the_gradient_of_all(out: str, n: int) -> None:
    """Also where these columns are one swizzled row and a tile is wider: what lies outside of the result is dropped."""
    x, g = columns("normal", 520, 96, 256)
    whole, part = (hopper.weight_gradient(x, a, contract=CHUNKS, out_dtype=out) for a in (g, g[:, :n]))
    assert_bits_equal(part, whole[:, :n])


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling", "zeros", "denormal", "inf"])
def test_micro_batches_continue_the_chain(kind: str, transpose_w: bool) -> None:
    x, g = columns(kind, 512, 96, 200)
    whole = weight_gradient(x, g, transpose_w=transpose_w)
    for size in (256, 128):
        total = None
        for start in range(0, 512, size):
            rows = slice(start, start + size)
            total = weight_gradient(x[rows], g[rows], transpose_w=transpose_w, accumulate=total)
        assert_bits_equal(total, whole, err_msg=f"{size} rows at a time")
    ragged = weight_gradient(x[:203], g[:203], transpose_w=transpose_w)
    padded = [jnp.pad(a[:203], ((0, 85), (0, 0))) for a in (x, g)]
    assert_bits_equal(weight_gradient(*padded, transpose_w=transpose_w), ragged)


def test_the_gradient_of_weights_rounds_the_float32_sum_once() -> None:
    x, g = columns("normal", 300, 96, 64)
    for transpose_w in (False, True):
        w = weights(96, 64, "bfloat16")
        w = w.T if transpose_w else w
        dw = jax.vjp(lambda w, t=transpose_w: bijax.matmul(x, w, transpose_w=t), w)[1](g)[0]
        assert_bits_equal(dw, weight_gradient(x, g, transpose_w=transpose_w).astype("bfloat16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accuracy_against_float64(dtype: str) -> None:
    x, w = data("normal", 64, 4096, dtype), weights(4096, 128, dtype)
    g = data("normal", 64, 128, dtype)
    close(bijax.matmul(x, w, preferred_element_type="float32"), wide(x), wide(w))
    close(weight_gradient(x, g), wide(x).T, wide(g))
    total = weight_gradient(x, g)
    for _ in range(3):
        total = weight_gradient(x, g, accumulate=total)
    close(total, np.tile(wide(x).T, 4), np.tile(wide(g), (4, 1)))


def test_an_older_gpu_gets_a_correct_result() -> None:
    x, w = data("normal", 11, 250, "bfloat16"), weights(250, 30, "bfloat16")
    with bijax.lowering_for("sm_80"):
        y = bijax.matmul(x, w, preferred_element_type="float32")
    close(y, wide(x), wide(w))


def data(kind: str, m: int, k: int, dtype: str) -> jax.Array:
    return jnp.asarray(hostile_rows(m + k, (m, k), dtype)[kind])


def weights(k: int, n: int, dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(hostile_rows(seed + k + n, (k, n), dtype)["normal"])


def columns(kind: str, m: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    """Rows of two operands whose columns are hostile: a sum over the rows meets what a kind is about."""
    x, g = hostile_rows(m, (k, m), "bfloat16")[kind], hostile_rows(m + 1, (n, m), "bfloat16")
    return jnp.asarray(x.T.copy()), jnp.asarray(g["wide" if kind == "wide" else "normal"].T.copy())


def wide(a: jax.Array) -> np.ndarray:
    return np.asarray(a, np.float64)


def close(y: jax.Array, left: np.ndarray, right: np.ndarray) -> None:
    """Compares with float64: a chain of additions into float32 that truncate, one for 16 products."""
    steps = left.shape[1] / 16 + 4
    assert (np.abs(wide(y) - left @ right) <= steps * 2.0**-22 * (np.abs(left) @ np.abs(right))).all()
