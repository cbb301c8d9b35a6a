"""Programs of which it is known whether rows meet, with what a report must say."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import PartitionSpec

import bijax
from tests.arrays import ones, zeros

APART, SUMS, MIXES = "rows apart", "sums rows", "mixes rows"
KEY = jax.random.key(0)
X, W = ones((4, 6)), ones((6, 5))
LABELS = zeros(4, int)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program with a known verdict.

    Attributes:
        name: Its name.
        function: The function.
        arguments: Its arguments.
        verdict: What becomes of the rows.
        where: Names of primitives that must be among those that are reported with the verdict.
        axes: The batch axes.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    verdict: str
    where: tuple[str, ...] = ()
    axes: Any = 0


def _loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def _contrastive(x: Any) -> Any:
    return -jax.nn.log_softmax(x @ x.T)[jnp.arange(4), jnp.arange(4)].mean()


def _accumulated(x: Any, w: Any) -> Any:
    def add(total: Any, rows: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(lambda w: ((rows @ w) ** 2).sum())(w)), None

    return lax.scan(add, jnp.zeros_like(w), x.reshape(2, 2, 6))[0]


def _layers(x: Any, w: Any) -> Any:
    return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, w)[0]


def _solved(y: Any) -> Any:
    return odeint(lambda y, t: -y, y, jnp.linspace(0.0, 1.0, 3))[-1]


def _dense_experts(x: Any, router: Any, experts: Any) -> Any:
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    mask = jnp.zeros((4, 3)).at[jnp.arange(4)[:, None], chosen].set(weights)
    return jnp.einsum("be,bd,edf->bf", mask, x, experts)


def _experts_with_capacity(x: Any, router: Any, experts: Any) -> Any:
    chosen = jax.nn.one_hot((x @ router).argmax(-1), 3)
    place = jnp.cumsum(chosen, 0) * chosen
    return jnp.einsum("be,bd,edf->bf", chosen * (place <= 2), x, experts)


def _sorted_experts(x: Any, router: Any, experts: Any) -> Any:
    chosen = (x @ router).argmax(-1)
    order = jnp.argsort(chosen)
    found = lax.ragged_dot(x[order], experts, jnp.bincount(chosen, length=3))
    return jnp.zeros_like(found).at[order].set(found)


def _noise_of_rows(x: Any, ids: Any) -> Any:
    return x + jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(KEY, i), (6,)))(ids)


def _on_devices(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))


_IMAGE, _FILTERS = ones((4, 3, 5, 5)), ones((2, 3, 3, 3))
_HEADS = ones((4, 7, 2, 8))
_EXPERTS = (X, ones((6, 3)), ones((3, 6, 6)))
_WEIGHTS, _NO_ROWS = (0, None), (None, 0)


def _convolved(x: Any, w: Any) -> Any:
    return lax.conv(x, w, (1, 1), "SAME")


_PRODUCTS = (
    Program("layer", lambda x, w: jax.nn.softmax(x @ w), (X, W), APART, axes=_WEIGHTS),
    Program("columns are rows", lambda x: jax.nn.softmax(x, 0), (X.T,), APART, axes=1),
    Program("merged with time", lambda x, w: (x.reshape(8, 3) @ w[:3]).reshape(4, -1), (X, W), APART, axes=_WEIGHTS),
    Program("rows cut apart", lambda x: x.reshape(6, 4).sum(1), (X,), MIXES, ("reshape",)),
    Program("products of rows", lambda x: jnp.einsum("bij,bkj->bik", x, x), (ones((4, 3, 2)),), APART),
    Program("all pairs", lambda x: jnp.einsum("bij,ckj->bcik", x, x), (ones((4, 3, 2)),), MIXES, ("dot_general",)),
    Program("convolution", _convolved, (_IMAGE, _FILTERS), APART, axes=_WEIGHTS),
    Program(
        "gradient of filters",
        lambda x, w: jax.grad(lambda w: _convolved(x, w).sum())(w),
        (_IMAGE, _FILTERS),
        SUMS,
        ("conv_general_dilated",),
        _WEIGHTS,
    ),
    Program(
        "filters of rows",
        jax.vmap(lambda x, w: _convolved(x[None], w)[0]),
        (_IMAGE, ones((4, 2, 3, 3, 3))),
        APART,
    ),
    Program("attention", lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True), (_HEADS,), APART),
    Program("attention over rows", lambda q: jax.nn.dot_product_attention(q, q, q), (_HEADS,), MIXES, axes=1),
    Program("dense experts", _dense_experts, _EXPERTS, APART, axes=(0, None, None)),
    Program("experts with a capacity", _experts_with_capacity, _EXPERTS, MIXES, ("cumsum",), (0, None, None)),
    Program("experts by sorting", _sorted_experts, _EXPERTS, MIXES, ("sort",), (0, None, None)),
)

_STATISTICS = (
    Program("mean of the batch", lambda x: x - x.mean(0), (X,), MIXES, ("reduce_sum",)),
    Program("scale of the batch", lambda x: x / x.max(), (X,), MIXES, ("reduce_max",)),
    Program("loss", lambda x, w: _loss(w, x), (X, W), SUMS, ("reduce_sum",), _WEIGHTS),
    Program("gradient of weights", jax.grad(_loss), (W, X), SUMS, ("dot_general",), _NO_ROWS),
    Program("gradients of both", jax.grad(_loss, (0, 1)), (W, X), SUMS, ("dot_general",), _NO_ROWS),
    Program(
        "mean over tokens that count",
        lambda x, m, w: jax.grad(lambda w: (((x @ w) ** 2).sum(-1) * m).sum() / m.sum())(w),
        (X, ones(4), W),
        SUMS,
        ("reduce_sum",),
        (0, 0, None),
    ),
    Program("contrastive loss", _contrastive, (X,), MIXES, ("dot_general",)),
    Program("its gradient", jax.grad(_contrastive), (X,), MIXES, ("dot_general",)),
    Program("gradients of examples", jax.vmap(jax.grad(_loss), _NO_ROWS), (W, X), APART, axes=_NO_ROWS),
    Program("micro-batches", _accumulated, (X, W), SUMS, ("dot_general",), _WEIGHTS),
    Program(
        "gradient of layers", jax.grad(lambda w, x: _layers(x, w).sum()), (jnp.ones((3, 6, 6)), X), SUMS, (), (None, 0)
    ),
    Program("layers", _layers, (X, ones((3, 6, 6))), APART, axes=_WEIGHTS),
)


def _two_keys(row: Any, number: Any) -> Any:
    first, second = jax.random.split(jax.random.fold_in(KEY, number))
    return row + jax.random.normal(first, (6,)) + jax.random.beta(second, 2.0, 3.0)


_POSITIONS = (
    Program("noise from one key", lambda x: x + jax.random.normal(KEY, x.shape), (X,), MIXES, ("random_bits",)),
    Program(
        "dropout from one key",
        lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0),
        (X,),
        MIXES,
        ("random_bits",),
    ),
    Program(
        "keys by position",
        lambda x: x + jax.vmap(lambda k: jax.random.normal(k, (6,)))(jax.random.split(KEY, 4)),
        (X,),
        MIXES,
        ("random_bits",),
    ),
    Program("keys of rows", _noise_of_rows, (X, jnp.arange(4)), APART),
    Program("two keys of each row", lambda x, i: jax.vmap(_two_keys)(x, i), (X, jnp.arange(4)), APART),
    Program("noise that rows share", lambda x: x + jax.random.normal(KEY, (6,)), (X,), APART),
    Program("number of the row", lambda x: x + jnp.arange(4.0)[:, None], (X,), MIXES, ("add",)),
    Program("place in the row", lambda x: x + jnp.arange(6.0), (X,), APART),
    Program("an array without rows", lambda x, b: x + b, (X, jnp.ones((4, 6))), MIXES, ("add",), _WEIGHTS),
    Program("constants that are equal", lambda x: x + jnp.zeros((4, 6)), (X,), APART),
    Program("the first row", lambda x: x - x[:1], (X,), MIXES, ("sub",)),
    Program("another row", lambda x: jnp.roll(x, 1, 0), (X,), MIXES, ("concatenate",)),
    Program("reversed twice", lambda x: (x[::-1] * 2)[::-1] + x, (X,), APART),
    Program("beside the reverse", lambda x: x - x[::-1], (X,), MIXES, ("sub",)),
)

_MOVES = (
    Program("some rows", lambda x: x[:2], (X,), APART),
    Program("padded", lambda x: jnp.pad(x, ((0, 2), (0, 0)))[:4] * 2, (X,), APART),
    Program("labels", lambda x, i: x[jnp.arange(4), i], (X, LABELS), APART),
    Program("along an axis", lambda x, i: jnp.take_along_axis(x, i[:, None], 1), (X, LABELS), APART),
    Program("embedding", lambda i, e: e[i], (LABELS, X), APART, axes=_WEIGHTS),
    Program(
        "gradient of an embedding",
        lambda i, e: jax.grad(lambda e: (e[i] ** 2).sum())(e),
        (LABELS, X),
        SUMS,
        ("scatter-add",),
        _WEIGHTS,
    ),
    Program("columns one by one", lambda x: sum(column for column in x.T), (X,), APART),
    Program("rows one by one", lambda x: list(x), (X,), APART),
    Program("a sum of rows one by one", lambda x: sum(row for row in x), (X,), MIXES, ("add",)),
    Program("written by row", lambda x: x.at[jnp.arange(4), 2].set(0), (X,), APART),
    Program("other rows", lambda x: x[jnp.array([1, 0, 3, 2])], (X,), MIXES, ("gather",)),
    Program("order of rows", lambda x: x[jnp.argsort(x[:, 0])], (X,), MIXES, ("sort",)),
    Program("sorted rows", lambda x: jnp.sort(x, 1), (X,), APART),
    Program("prefixes of rows", lambda x: jnp.cumsum(x, 1), (X,), APART),
    Program(
        "two of each", lambda x, w: (lambda y: y[:4] - y[4:])(jnp.concatenate([x, x]) @ w), (X, W), APART, (), (0, None)
    ),
    Program(
        "stores of rows",
        jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x[None], (i, 0))),
        (ones((4, 9, 6)), X, LABELS),
        APART,
    ),
    Program("matrices of rows", lambda a: jnp.linalg.svd(a)[1], (ones((4, 3, 3)),), APART),
    Program("a matrix of rows", lambda a: jnp.linalg.svd(a)[1], (X,), MIXES, ("svd",)),
    Program("Fourier transforms of rows", lambda x: jnp.fft.fft(x).real, (X,), APART),
    Program("windows in rows", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"), (X,), APART),
    Program("windows over rows", lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID"), (X,), MIXES),
    Program("unknown", lambda x: jax.pure_callback(lambda x: x, x, x), (X,), MIXES, ("pure_callback",)),
)


def _until_all(x: Any) -> Any:
    return lax.while_loop(lambda c: (c < 9).any(), lambda c: c + 1, x)


def _counted(x: Any, begin: Any = 0) -> Any:
    """Returns how often a row is added until its sum is reached: nothing that is carried has rows at first."""
    return lax.while_loop(lambda c: (c[0] < x.sum()) & (c[1] < 9), lambda c: (c[0] + x.max(), c[1] + 1), (0.0, begin))


_LOOPS = (
    Program("row by row", lambda x: lax.map(lambda r: r * 2, x), (X,), APART),
    Program("in uneven pieces", lambda x: lax.map(jax.nn.softmax, x, batch_size=3), (X,), APART),
    Program("a sum row by row", lambda x: lax.scan(lambda c, r: (c + r.sum(), r * 2), 0.0, x), (X,), SUMS),
    Program("from row to row", lambda x: lax.scan(lambda c, r: (c + r.sum(), r * c), 0.0, x), (X,), MIXES),
    Program("counted", lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2 + i, x), (X,), APART),
    Program("until all rows end", _until_all, (X,), MIXES, ("while", "reduce_or")),
    Program("until each row ends", jax.vmap(_until_all), (X,), APART),
    Program("counted until each row ends", jax.vmap(_counted), (X,), APART),
    Program("counted from the position", lambda x: jax.vmap(_counted)(x, jnp.arange(4)), (X,), MIXES, ("while",)),
    Program("branch of all rows", lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: -x), (X,), MIXES, ("cond",)),
    Program("branch of a number", lambda x, s: lax.cond(s > 0, lambda: x, lambda: -x), (X, 1.0), APART, (), (0, None)),
    Program("branch of each row", jax.vmap(lambda x: lax.cond(x.sum() > 0, lambda x: x, lambda x: -x, x)), (X,), APART),
    Program("adaptive solver", _solved, (X,), MIXES, ("while",)),
    Program("adaptive solver of rows", jax.vmap(_solved), (X,), APART),
    Program("shards", _on_devices(lambda x: x * 2), (X,), APART),
    Program("sum of shards", _on_devices(lambda x: lax.psum(x.sum(), "d") + x), (X,), MIXES),
)

_OWN = (
    Program("invariant", bijax.invariant(lambda x, w: jax.nn.softmax(x @ w)), (X, W), APART, axes=_WEIGHTS),
    Program(
        "operations",
        lambda x, w, g: bijax.softmax(bijax.rms_norm(bijax.matmul(x, w), g)),
        (X, W, ones(5)),
        APART,
        axes=(0, None, None),
    ),
    Program(
        "gradients of operations",
        jax.grad(lambda x, w, g: bijax.softmax(bijax.rms_norm(bijax.matmul(x, w), g)).sum(), (0, 1, 2)),
        (X, W, ones(5)),
        SUMS,
        ("bijax_weight_gradient", "bijax_rms_norm_gradients"),
        (0, None, None),
    ),
    Program("own attention", lambda q: bijax.dot_product_attention(q, q, q), (_HEADS,), APART),
    Program("its gradient", jax.grad(lambda q: bijax.dot_product_attention(q, q, q).sum()), (_HEADS,), APART),
    Program("own attention over rows", lambda q: bijax.dot_product_attention(q, q, q), (_HEADS,), MIXES, axes=1),
    Program("cross entropy", bijax.softmax_cross_entropy, (X, LABELS), APART),
)

PROGRAMS = (
    *_PRODUCTS,
    *_STATISTICS,
    *_POSITIONS,
    *_MOVES,
    *_LOOPS,
    *(dataclasses.replace(p, name=f"bijax: {p.name}") for p in _OWN),
)
