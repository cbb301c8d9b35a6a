"""What is hashed: one call of every operation, in each of its kinds, on fixed data.

The data of a case never change. To cover more, add cases.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from bijax.ops import weight_gradient
from tests.transform.vector_functions import FUNCTIONS

SIXTEEN: Final = ("bfloat16", "float16")
FLOATS: Final = ("float32", *SIXTEEN)


class Case(NamedTuple):
    """A function of arrays, all of whose results are hashed; it is run under `bijax.invariant`."""

    function: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    wide: bool = False  # with 64 bits


def array(seed: int, shape: tuple[int, ...], dtype: Any = "bfloat16") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def with_gradients(function: Callable[..., Any], *, among: int) -> Callable[..., Any]:
    """Returns the results and the gradients of the first arrays for a cotangent, which is the array after them."""

    def call(*arrays: Any) -> Any:
        y, pull = jax.vjp(lambda *own: function(*own, *arrays[among + 1 :]), *arrays[:among])
        return y, pull(arrays[among].astype(y.dtype))

    return call


def cases() -> dict[str, Case]:
    """Returns all cases by their names."""
    found: dict[str, Case] = {}
    for part in (products, fused_products, rows, attentions, primitives, engine, hybrids, functions):
        for name, case in part():
            if name in found:
                raise ValueError(f"two golden cases have the name {name!r}")
            found[name] = case
    return found


def products() -> Iterator[tuple[str, Case]]:
    wide = functools.partial(bijax.matmul, preferred_element_type="float32")
    for dtype in FLOATS:
        x, w, g, bias = (array(i, s, dtype) for i, s in enumerate(((77, 1000), (1000, 144), (77, 144), (144,))))
        yield f"matmul {dtype}", Case(wide, (x, w))
        yield f"matmul {dtype} (N, K)", Case(functools.partial(bijax.matmul, transpose_w=True), (x, w.T.copy()))
        yield f"matmul {dtype} bias", Case(lambda x, w, b: bijax.matmul(x, w, bias=b), (x, w, bias))
        yield f"matmul {dtype} stack", Case(wide, (array(4, (3, 40, 264), dtype), array(5, (3, 264, 80), dtype)))
        yield f"matmul {dtype} gradients", Case(with_gradients(bijax.matmul, among=2), (x, w, g))
        yield f"gradient of x {dtype}", Case(lambda x, w, g: jax.vjp(bijax.matmul, x, w)[1](g)[0], (x, w, g))
        yield f"gradient of w {dtype}", Case(weight_gradient, (x, g))
    yield "matmul float16 second", Case(wide, (array(6, (77, 1000), "float16"), array(7, (1000, 144), "float16")))
    x, w, g = (array(i, s, "float32") for i, s in enumerate(((77, 1000), (1000, 144), (77, 144))))
    for precision in ("high", "highest"):
        product = functools.partial(bijax.matmul, precision=precision)
        yield f"matmul float32 {precision}", Case(product, (x, w))
        yield f"matmul float32 {precision} gradients", Case(with_gradients(product, among=2), (x, w, g))


def fused_products() -> Iterator[tuple[str, Case]]:
    for dtype in FLOATS:
        x, w, g, up = (array(20 + i, s, dtype) for i, s in enumerate(((40, 1024), (1024, 96), (40, 96), (1024, 96))))
        for activation in ("relu", "gelu", "silu"):
            act = functools.partial(bijax.matmul, activation=activation)
            yield f"matmul {dtype} {activation}", Case(act, (x, w))
        yield f"matmul {dtype} silu gradients", Case(with_gradients(act, among=2), (x, w, g))
        yield f"matmul {dtype} residual", Case(lambda x, w, r: bijax.matmul(x, w, residual=r), (x, w, g))
        yield f"gated_matmul {dtype} gradients", Case(with_gradients(bijax.gated_matmul, among=3), (x, w, up, g))
        for splits in (2, 4):
            split = functools.partial(bijax.matmul, split_k=splits)
            yield f"matmul {dtype} split_k={splits}", Case(split, (x, w))
        yield f"matmul {dtype} split_k=4 gradients", Case(with_gradients(split, among=2), (x, w, g))


def rows() -> Iterator[tuple[str, Case]]:
    for dtype in FLOATS:
        for columns in (576, 2500, 5120):
            x, g = (array(seed, (5, columns), dtype) for seed in (7, 8))
            w = g[0]
            kind = f"{dtype} {columns}"
            for op in (bijax.sum, bijax.mean, bijax.var, bijax.logsumexp):
                yield (
                    f"{op.__name__} {kind} gradients",
                    Case(with_gradients(functools.partial(op, axis=-1), among=1), (x, g[:, 0])),
                )
            for op in (bijax.softmax, bijax.log_softmax):
                yield f"{op.__name__} {kind} gradients", Case(with_gradients(op, among=1), (x, g))
            yield f"rms_norm {kind} gradients", Case(with_gradients(bijax.rms_norm, among=2), (x, w, g))
            yield f"layer_norm {kind} gradients", Case(with_gradients(bijax.layer_norm, among=3), (x, w, g[1], g))
            labels = np.array([3, 0, columns - 1, -1, 17], np.int32)
            loss = with_gradients(bijax.softmax_cross_entropy, among=1)
            yield f"softmax_cross_entropy {kind} gradients", Case(loss, (x, g[:, 0], labels))


def attentions() -> Iterator[tuple[str, Case]]:
    causal = functools.partial(bijax.dot_product_attention, is_causal=True)
    for dtype in FLOATS:
        for size in (64, 96, 128, 192, 256):
            q, k, v, g = (array(8 + i, (1, 1100, n, size), dtype) for i, n in enumerate((4, 2, 2, 4)))
            if dtype == "float32":
                q, k, v, g = (a[:, :200] for a in (q, k, v, g))
            yield f"attention {dtype} {size}", Case(attention_and_sums, (q, k, v))
            if size in (64, 128) or dtype != "float32":
                yield f"attention {dtype} {size} gradients", Case(with_gradients(causal, among=3), (q, k, v, g))
        window = functools.partial(causal, local_window_size=(300, 0))
        q, k, v = (array(8 + i, (1, 700, n, 64), dtype) for i, n in enumerate((4, 2, 2)))
        yield f"attention {dtype} window", Case(window, (q, k, v))
        token, pages = array(30, (2, 1, 4, 64), dtype), [array(31 + i, (40, 16, 2, 64), dtype) for i in range(2)]
        table = np.random.default_rng(33).permutation(40).reshape(2, 20).astype(np.int32)
        lengths = np.array([317, 5], np.int32)
        yield f"paged_attention {dtype}", Case(bijax.paged_attention, (token, *pages, table, lengths))
        shapes = ((1, 150, 4, 48), (1, 150, 2, 48), (1, 150, 2, 32), (4,), (1, 150, 150), (1, 150, 4, 32))
        given = tuple(array(34 + i, s, dtype) for i, s in enumerate(shapes))
        yield f"attention with options {dtype}", Case(with_gradients(attention_with_options, among=5), given)
        shapes = ((1, 150, 4, 192), (1, 150, 2, 192), (1, 150, 2, 128), (4,), (1, 150, 4, 128))
        given = tuple(array(44 + i, s, dtype) for i, s in enumerate(shapes))
        yield f"attention with a cap, sinks, slopes {dtype}", Case(with_gradients(attention_of_heads, among=4), given)
    q = array(8, (1, 150, 4, 64), "bfloat16")
    k, v, bias = (
        array(50 + i, s, "bfloat16") for i, s in enumerate(((1, 150, 2, 64), (1, 150, 2, 64), (1, 4, 150, 150)))
    )
    yield "attention with a bias and a mask", Case(masked_attention, (q, k, v, bias))
    for dtype in ("int8", "float8_e4m3fn"):
        k, v = ((40 * array(9 + i, (1, 150, 2, 64), "float32")).astype(jnp.dtype(dtype)) for i in range(2))
        scales = [np.abs(array(11 + i, (2, 64) if dtype == "int8" else (2,), "float32")) / 20 for i in range(2)]
        yield f"attention with options {dtype}", Case(quantised_attention, (q, k, v, *scales))


def attention_with_options(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> jax.Array:
    """Everything that may be added to the scores, with a bias for all heads."""
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    more = {"logits_soft_cap": 5.0, "alibi_slopes": slopes, "is_causal": True}
    return bijax.dot_product_attention(q, k, v, bias, sinks=sinks, **more)


def masked_attention(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
    """A bias of each head, and a mask that hides what has a large one."""
    return bijax.dot_product_attention(q, k, v, bias, jnp.asarray(bias) < 1, is_causal=True)


def attention_of_heads(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
    """What belongs to heads, and values of another width."""
    return attention_with_options(q, k, v, sinks, None)


def quantised_attention(q: Any, k: Any, v: Any, key_scale: Any, value_scale: Any) -> jax.Array:
    return bijax.dot_product_attention(q, k, v, key_scale=key_scale, value_scale=value_scale, is_causal=True)


def attention_and_sums(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The log-sum-exp tells of the scores, the outputs of everything."""
    out, lse = bijax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    return jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)


def primitives() -> Iterator[tuple[str, Case]]:
    image, kernel = array(40, (2, 9, 9, 8), "float32"), array(41, (3, 3, 8, 12), "float32")
    x, ids = array(42, (9, 300), "float32"), np.array([3, 1, 3, 0, 7, 3, 2, 2, 1], np.int32)
    sizes = np.array([4, 0, 5], np.int32)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def pool(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    stacks = np.random.default_rng(11)
    a, b = stacks.standard_normal((3, 5, 576)), stacks.standard_normal((3, 576, 64))
    for spec, left, right in (
        ("bik,bkj->bij", a, b),
        ("bik,bjk->bij", a, b.swapaxes(1, 2)),
        ("bki,bkj->bij", a.swapaxes(1, 2), b),
    ):
        arrays = left.astype(np.float32), right.astype(np.float32)
        yield f"einsum {spec}", Case(functools.partial(jnp.einsum, spec), arrays)
    yield "einsum float64", Case(functools.partial(jnp.einsum, "bik,bkj->bij"), (a, b), wide=True)
    yield "conv gradients", Case(with_gradients(conv, among=2), (image, kernel, array(43, (2, 9, 9, 12), "float32")))
    yield "reduce_window", Case(pool, (image,))
    yield "cumsum", Case(lambda x: jnp.cumsum(x, axis=1), (x,))
    yield "prod", Case(lambda x: jnp.prod(x, axis=1), (x,))
    yield "scatter-add", Case(lambda x, i, u: x.at[i].add(u), (x, ids, x[::-1].copy()))
    yield "ragged_dot", Case(lax.ragged_dot, (x[:, :64].copy(), array(44, (3, 64, 48), "float32"), sizes))
    yield "embed gradients", Case(with_gradients(lambda w: bijax.embed(w, ids), among=1), (x, x[::-1].copy()))


def engine() -> Iterator[tuple[str, Case]]:
    for dtype in SIXTEEN:
        x, w = array(50, (6, 256), dtype), array(51, (256,), dtype)
        yield f"add_rms_norm_dynamic_quant {dtype}", Case(quantised_norm, (x, w, x[::-1].copy()))
        yield f"swiglu {dtype}", Case(bijax.swiglu, (x,))


def quantised_norm(x: jax.Array, w: jax.Array, residual: jax.Array) -> Any:
    return bijax.add_rms_norm_dynamic_quant(x, w, jnp.ones(x.shape[1], jnp.float32), residual=residual)


def hybrids() -> Iterator[tuple[str, Case]]:
    """The operations of linear attention."""
    for dtype in ("float32", "bfloat16"):
        q, k, v, gate = (array(60 + i, (1, 70, n, 32), dtype) for i, n in enumerate((2, 2, 4, 4)))
        g, beta = -np.abs(array(64, (1, 70, 4), "float32")), np.abs(array(65, (1, 70, 4), "float32")) / 2
        yield f"gated_delta_rule {dtype} gradients", Case(with_gradients(delta_rule, among=5), (q, k, v, g, beta, gate))
        x, w = array(66, (2, 9, 24), dtype), array(67, (24, 4), dtype)
        conv = functools.partial(bijax.causal_conv1d, activation="silu")
        yield f"causal_conv1d {dtype} gradients", Case(with_gradients(conv, among=2), (x, w, x[:, ::-1].copy()))
        norm = with_gradients(bijax.gated_rms_norm, among=3)
        yield f"gated_rms_norm {dtype} gradients", Case(norm, (v, gate, array(68, (32,), dtype), v[:, ::-1].copy()))


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any) -> jax.Array:
    return bijax.gated_delta_rule(bijax.l2_norm(q), bijax.l2_norm(k), v, g, beta)[0]


def functions() -> Iterator[tuple[str, Case]]:
    """The element-wise functions, whose bits are those of a version of XLA."""
    x, y = (array(seed, (64, 100), "float32") * np.float32(3) for seed in (8, 9))
    every = {**FUNCTIONS, "div": lax.div, "sqrt": lambda x, y: lax.sqrt(jnp.abs(x)), "rem": lax.rem}
    for name, function in every.items():
        for dtype in ("float32", "bfloat16"):
            yield f"{name} {dtype}", Case(function, (x.astype(jnp.dtype(dtype)), y.astype(jnp.dtype(dtype))))
