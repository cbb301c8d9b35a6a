"""Convolution: forward and both gradients, for all parameters of the primitive."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.lax.conv import conv_general_dilated
from bijax.lax.dot_general import dot_general
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.cpu.exact import fused_chains
from tests.arrays import on_device
from tests.lax.primitive_cases import equations, lowers_for_cuda, normal, substitute
from tests.tiers import full_only, tiered

RULES = {"conv_general_dilated": conv_general_dilated}
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")

Shape = tuple[int, ...]


def conv(layout: Any = NHWC, strides: Shape = (1, 1), padding: Any = "SAME", **parameters: Any) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout, **parameters)


CASES: dict[str, tuple[Callable[..., Any], Shape, Shape]] = {
    "same": (conv(), (2, 8, 9, 3), (3, 3, 3, 5)),
    "strides": (conv(strides=(2, 3), padding="VALID"), (2, 8, 9, 3), (3, 2, 3, 5)),
    "holes": (
        conv(padding=((1, 2), (-1, 3)), rhs_dilation=(2, 1), lhs_dilation=(1, 2)),
        (2, 8, 9, 3),
        (3, 2, 3, 5),
    ),
    "features first": (conv(NCHW, strides=(2, 2)), (2, 3, 8, 9), (5, 3, 3, 3)),
    "batch last": (conv(("HWCN", "HWIO", "HWNC")), (6, 7, 3, 2), (3, 3, 3, 4)),
    "groups": (conv(feature_group_count=3), (2, 8, 9, 6), (3, 3, 2, 9)),
    "depthwise": (conv(feature_group_count=6), (2, 8, 9, 6), (3, 3, 1, 12)),
    "groups of examples": (conv(batch_group_count=2), (4, 8, 9, 6), (3, 3, 6, 8)),
    "many features": (conv(padding="VALID"), (1, 4, 5, 300), (3, 3, 300, 4)),
    "long filter": (conv(("NWC", "WIO", "NWC"), (1,)), (2, 60, 1), (40, 1, 2)),
    "volume": (conv(("NDHWC", "DHWIO", "NDHWC"), (2, 1, 1)), (2, 5, 4, 6, 3), (2, 3, 2, 3, 5)),
    "no space": (conv(("NC", "IO", "NC"), ()), (4, 6), (6, 3)),
    "vmap of both": (jax.vmap(conv()), (3, 2, 5, 6, 3), (3, 3, 3, 3, 4)),
    "nobody": (conv(), (0, 8, 9, 3), (3, 3, 3, 5)),
}


def everything(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result and both gradients, for a cotangent that belongs to each example."""

    def run(x: jax.Array, w: jax.Array) -> Any:
        y, pull = jax.vjp(function, x, w)
        return y, pull(0.5 * y)

    return run


@pytest.mark.tier("full", fast=("groups of examples",))
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_lax(name: str) -> None:
    function, *shapes = CASES[name]
    for equation in equations(everything(function), *(jnp.zeros(s) for s in shapes), name="conv_general_dilated"):
        args = [normal(i, *v.aval.shape) for i, v in enumerate(equation.invars)]
        wide = [np.asarray(a, np.float64) for a in args]
        with jax.enable_x64(True):
            parameters = dict(equation.params, preferred_element_type=None)
            exact, size = (equation.primitive.bind(*map(f, wide), **parameters) for f in (np.asarray, np.abs))
        ours = jax.jit(lambda x, w, e=equation: conv_general_dilated(x, w, **e.params))(*args)
        assert ours.shape == exact.shape
        # The longest sum has 2700 terms; a product and an addition round once each.
        assert (np.abs(np.asarray(ours, np.float64) - exact) <= 2700 * 2.0**-24 * np.asarray(size) + 1e-30).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("out", [None, jnp.float32])
def test_narrow_results_are_rounded_once(out: Any, dtype: str) -> None:
    x, w = normal(1, 2, 8, 9, 3, dtype=dtype), normal(2, 3, 3, 3, 5, dtype=dtype)
    (equation,) = equations(conv(preferred_element_type=out), x, w, name="conv_general_dilated")
    ours = conv_general_dilated(x, w, **equation.params)
    wide = conv_general_dilated(x.astype("float32"), w.astype("float32"), **equation.params)
    assert_bits_equal(ours, wide.astype(out or dtype))


@pytest.mark.tier("full", fast=("strides",))
@pytest.mark.parametrize(
    "name",
    ["strides", "features first", "depthwise", "many features"],
)
def test_examples_keep_their_bits(name: str) -> None:
    function, shape, kernel = CASES[name]
    size = int(np.prod(shape[1:]))
    x = on_device(np.concatenate([*hostile_rows(3, (2, size), "float32").values()])).reshape(-1, *shape[1:])
    run = substitute(everything(function), RULES)
    assert_batch_invariant(
        lambda x, w: (lambda y, gradients: (y, gradients[0]))(*run(x, w)),
        x,
        normal(4, *kernel),
        batch_axes=(0, None),
        batch_sizes=(9,),
        neighbours=("given", "inf", "nan"),
        modes=("jit",),
    )


def test_stock_examples_do_not() -> None:
    """The control."""
    report = batch_variance_report(
        conv(),
        normal(5, 8, 14, 14, 32),
        normal(6, 3, 3, 32, 24),
        batch_axes=(0, None),
        batch_sizes=(2, 9, 17),
        neighbours=("given",),
        modes=("jit",),
    )
    gradient = jax.jit(lambda x, w: jax.vjp(lambda w: conv()(x, w), w)[1](x[..., :5])[0])
    x, w = normal(7, 5, 8, 9, 6), normal(8, 3, 3, 6, 5)
    padded = gradient(jnp.pad(x, ((0, 3), (0, 0), (0, 0), (0, 0))), w)
    differing = (np.asarray(padded).view(np.uint32) != np.asarray(gradient(x, w)).view(np.uint32)).sum()
    assert report.differing_elements or differing


@pytest.mark.tier("full", fast=("features first",))
@pytest.mark.parametrize("name", ["strides", "features first", "groups", "depthwise"])
def test_gradients_of_kernels_do_not_see_examples_of_zeros(name: str) -> None:
    function, shape, kernel = CASES[name]
    w = normal(9, *kernel)
    gradient = jax.jit(substitute(lambda x, g: jax.vjp(lambda w: function(x, w), w)[1](g)[0], RULES))
    x = normal(10, 5, *shape[1:])
    g = normal(11, *jax.eval_shape(function, x, w).shape)
    whole = gradient(x, g)
    for more in (8,):
        padded = (jnp.concatenate([a, jnp.zeros((more, *a.shape[1:]))]) for a in (x, g))
        assert_bits_equal(gradient(*padded), whole, err_msg=str(more))


@pytest.mark.tier("full", fast=("depthwise",))
@pytest.mark.parametrize("name", ["same", "groups", "depthwise"])
def test_places_and_features_keep_their_bits(name: str) -> None:
    """A crop of the image has the bits of the whole, and a feature those it has among fewer features."""
    function, shape, kernel = CASES[name]
    x, w = normal(12, *shape), normal(13, *kernel)
    run = jax.jit(substitute(function, RULES))
    assert_bits_equal(run(x[:, :6], w)[:, :5], run(x, w)[:, :5])
    if name == "same":
        assert_bits_equal(run(x, w[..., 2:4]), run(x, w)[..., 2:4])


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", tiered(["strides", "depthwise"], fast=["depthwise"]))
def test_vmap_keeps_the_bits(name: str) -> None:
    function, shape, kernel = CASES[name]
    x, w = normal(14, 3, *shape), normal(15, 3, *kernel)
    one = jax.jit(substitute(everything(function), RULES))
    for axes in ((0, 0), (0, None)) if name == "depthwise" else ((0, 0), (None, 0)):
        args = [a if d == 0 else a[0] for a, d in zip((x, w), axes, strict=True)]
        mapped = jax.jit(substitute(jax.vmap(everything(function), axes), RULES))(*args)
        expected = one(*(a[2] if d == 0 else a for a, d in zip(args, axes, strict=True)))
        assert_bits_equal(jax.tree.map(lambda a: a[2], mapped), expected, err_msg=str(axes))


@pytest.mark.tier("full")
def test_sums_are_those_of_a_product() -> None:
    """Few terms are one product of patches and weights, more are groups of positions, added upwards."""
    for features, groups in ((3, 1), (300, 9)):
        x, w = normal(18, 2, 6, 5, features), normal(19, 3, 3, features, 4)
        patches = jnp.concatenate([x[:, i : i + 4, j : j + 3] for i in range(3) for j in range(3)], -1)
        rows, columns = patches.reshape(2 * 4 * 3, 9 * features), w.reshape(9 * features, 4).T
        numbers = (((1,), (1,)), ((), ()))
        parts = [
            dot_general(a, b, dimension_numbers=numbers)
            for a, b in zip(jnp.split(rows, groups, 1), jnp.split(columns, groups, 1), strict=True)
        ]
        expected = functools.reduce(lax.add, parts).reshape(2, 4, 3, 4)
        assert_bits_equal(jax.jit(substitute(conv(padding="VALID"), RULES))(x, w), expected, err_msg=str(features))


@pytest.mark.parametrize("groups", [1, full_only(2)])
def test_phases_that_share_a_product_have_the_bits_of_each_alone(groups: int) -> None:
    """A transposed convolution whose windows do not overlap: each place meets one position of the kernel."""
    x, w = normal(20, 3, 5, 4, 16 * groups), normal(21, 2, 2, 16, 6 * groups)
    up = conv(padding=((1, 1), (1, 1)), lhs_dilation=(2, 2), feature_group_count=groups)
    alone = conv(feature_group_count=groups)
    whole = jax.jit(substitute(up, RULES))(x, w)
    run = jax.jit(substitute(alone, RULES))
    for p, q in np.ndindex(2, 2):
        phase = whole[:, p::2, q::2]
        assert_bits_equal(phase, run(x, w[1 - p, 1 - q][None, None]), err_msg=f"{p} {q}")


def test_positions_of_a_dilated_input_are_those_that_meet_its_elements() -> None:
    """Groups of all positions, with holes as zeros, would be another order; a strided convolution has it."""
    x, w = (np.asarray(a) for a in (normal(22, 2, 7, 130), normal(23, 9, 130, 3)))
    spread = np.zeros((2, 13, 130), np.float32)
    spread[:, ::2] = x
    up, strided = (
        np.asarray(
            jax.jit(substitute(conv(("NWC", "WIO", "NWC"), (stride,), ((0, 0),), lhs_dilation=(2,)), RULES))(x, w)
        )
        for stride in (1, 4)
    )

    def chains(place: int, groups: list[list[int]]) -> np.ndarray:
        parts = (
            (np.concatenate([spread[:, place + k] for k in group], -1), np.concatenate([w[k] for k in group]))
            for group in groups
        )
        total: np.ndarray = functools.reduce(np.add, (fused_chains(rows, columns, 512) for rows, columns in parts))
        return total

    everywhere = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for place in range(5):
        groups = [[1, 3], [5, 7]] if place % 2 else [[0, 2, 4], [6, 8]]
        assert_bits_equal(up[:, place], chains(place, groups), err_msg=str(place))
        assert (up[:, place] != chains(place, everywhere)).any()
    for index, place in enumerate((0, 4)):
        assert_bits_equal(strided[:, index], chains(place, everywhere), err_msg=f"strided {place}")


def test_tiles_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    function, shape, kernel = CASES["strides"]
    x, w = normal(16, 7, *shape[1:]), normal(17, *kernel)
    run = substitute(function, RULES)
    whole = jax.jit(lambda x, w: run(x, w))(x, w)
    for elements in (18 * 9 * 3, 18 * 4):
        monkeypatch.setattr("pallas_kernels.conv.portable._TILE_ELEMENTS", elements)
        assert_bits_equal(jax.jit(lambda x, w: run(x, w))(x, w), whole, err_msg=str(elements))


def test_depthwise_examples_keep_their_bits_in_loops() -> None:
    # A small loop becomes one LLVM function, which knows every constant.
    w, x = normal(0, 3, 1, 2), normal(1, 5, 8, 2)
    rows = conv(("NHC", "HIO", "NHC"), (1,), "VALID", feature_group_count=2)
    run = jax.jit(bijax.invariant(lambda x: lax.map(lambda e: rows(e[None], w)[0], x)))
    assert_bits_equal(run(x[:1])[0], run(x)[0])
    assert_bits_equal(jax.jit(bijax.invariant(jax.vmap(lambda e: rows(e[None], w)[0])))(x), run(x))


def test_tiles_do_not_mix_dtypes_of_integers_in_x64() -> None:
    x, w = normal(20, 48, 540, 8), normal(21, 3, 8, 5)
    run = substitute(conv(("NWC", "WIO", "NWC"), (1,), rhs_dilation=(2,)), RULES)
    narrow = jax.jit(lambda x, w: run(x, w))(x, w)
    with jax.enable_x64(True):
        assert_bits_equal(jax.jit(lambda x, w: run(x, w))(x, w), narrow)


def test_errors_and_other_platforms() -> None:
    (equation,) = equations(conv(), jnp.zeros((2, 8, 9, 3)), jnp.zeros((3, 3, 3, 5)), name="conv_general_dilated")
    complex_args = jnp.zeros((2, 8, 9, 3), jnp.complex64), jnp.zeros((3, 3, 3, 5), jnp.complex64)
    with pytest.raises(UnsupportedError, match="conv_general_dilated: a batch-invariant order is defined for"):
        conv_general_dilated(*complex_args, **equation.params)
    for name in ("strides", "depthwise"):
        function, *shapes = CASES[name]
        assert lowers_for_cuda(substitute(everything(function), RULES), *(jnp.ones(s, jnp.bfloat16) for s in shapes))
