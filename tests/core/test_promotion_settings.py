"""JAX's settings that forbid implicit promotion: the library works under them wherever plain JAX does."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.transform.rules._elementwise import FENCED, VECTORS
from bijax.transform.rules._ordered import COLLECTIVES, ORDERED, PRODUCTS, RACING
from bijax.transform.rules.regions import TAKEN_OUT
from tests.transform import vector_functions

pytestmark = pytest.mark.usefixtures("hopper")

Function = Callable[..., Any]

DTYPES = ("float32", "bfloat16")
PLACES = jnp.array([0, 2, 2], jnp.int32)
WINDOW = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": "VALID"}


@contextlib.contextmanager
def no_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def ones(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.ones(shape, dtype) for shape in shapes]


# A function, and the shapes of its arguments of the dtype under test.
OPERATIONS: dict[str, list[tuple[Function, list[tuple[int, ...]]]]] = {
    "matmul": [
        (bijax.matmul, [(4, 6), (6, 5)]),
        (bijax.matmul, [(3, 4, 6), (3, 6, 5)]),
        (lambda x, w, b: bijax.matmul(x, w, bias=b), [(2, 4, 6), (6, 5), (5,)]),
        (
            lambda x, w, b, r: bijax.matmul(x, w, bias=b, activation="silu", residual=r),
            [(4, 6), (6, 5), (5,), (4, 5)],
        ),
    ],
    "gated_matmul": [(bijax.gated_matmul, [(4, 6), (6, 5), (6, 5)])],
    **{
        name: [
            (getattr(bijax, name), [(4, 6)]),
            (functools.partial(getattr(bijax, name), axis=0), [(2, 4, 6)]),
        ]
        for name in ("softmax", "log_softmax", "logsumexp", "sum", "mean", "var", "std")
    },
    "softmax_cross_entropy": [
        (lambda x: bijax.softmax_cross_entropy(x, PLACES), [(3, 6)]),
        (lambda x: bijax.softmax_cross_entropy(x, PLACES, z_loss=1e-4, ignore_index=0), [(3, 6)]),
    ],
    "linear_cross_entropy": [
        (lambda x, w: bijax.linear_cross_entropy(x, w, PLACES, z_loss=1e-4, ignore_index=0), [(3, 6), (6, 7)]),
    ],
    "rms_norm": [
        (bijax.rms_norm, [(4, 6)]),
        (bijax.rms_norm, [(4, 6), (6,)]),
        (lambda x, w: bijax.rms_norm(x, w, weight_offset=1.0), [(2, 4, 6), (6,)]),
    ],
    "gated_rms_norm": [(bijax.gated_rms_norm, [(4, 6), (4, 6), (6,)])],
    "l2_norm": [(bijax.l2_norm, [(4, 6)])],
    "causal_conv1d": [(bijax.causal_conv1d, [(2, 4, 6), (6, 3), (6,)])],
    "gated_delta_rule": [(bijax.gated_delta_rule, [(2, 4, 1, 8), (2, 4, 1, 8), (2, 4, 2, 8), (2, 4, 2), (2, 4, 2)])],
    "head_rms_norm": [(lambda x, w: bijax.head_rms_norm(x, w, head_offset=1, head_num=2), [(4, 3, 6), (6,)])],
    "layer_norm": [(bijax.layer_norm, [(4, 6)]), (bijax.layer_norm, [(2, 4, 6), (6,), (6,)])],
    "dot_product_attention": [
        (bijax.dot_product_attention, [(2, 4, 2, 8)] * 3),
        (functools.partial(bijax.dot_product_attention, is_causal=True), [(2, 4, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)]),
    ],
    "latent_attention": [
        (functools.partial(bijax.latent_attention, value_size=6, scale=0.3), [(2, 4, 2, 8), (2, 4, 8)]),
    ],
    "embed": [(lambda table: bijax.embed(table, PLACES), [(4, 6)])],
    "elementwise": [
        (bijax.elementwise(lambda gate, up: jax.nn.silu(gate) * up), [(4, 6), (4, 6)]),
        (bijax.elementwise(lambda x: x * 2 + 1), [(4, 6)]),
    ],
}
WITHOUT_GRADIENT = {
    "causal_conv1d_extend": (
        lambda x, w: bijax.causal_conv1d_extend(x, w, state=x, start=PLACES[:2])[0],
        [(2, 4, 6), (6, 3)],
    ),
    "gated_delta_rule_extend": (
        lambda q, k, v, g, beta: bijax.gated_delta_rule_extend(
            q,
            k,
            v,
            g,
            beta,
            state=bijax.DeltaRuleState.zeros(2, key_heads=1, value_heads=2, key_size=8, value_size=8, dtype=v.dtype),
        ),
        [(2, 4, 1, 8), (2, 4, 1, 8), (2, 4, 2, 8), (2, 4, 2), (2, 4, 2)],
    ),
    "paged_attention": (
        lambda q, k, v: bijax.paged_attention(q, k, v, jnp.array([[0, 1]], jnp.int32), jnp.array([5], jnp.int32)),
        [(1, 1, 4, 8), (3, 16, 2, 8), (3, 16, 2, 8)],
    ),
    "paged_latent_attention": (
        lambda q, c: bijax.paged_latent_attention(
            q, c, jnp.array([[0, 1]], jnp.int32), jnp.array([5], jnp.int32), value_size=6, scale=0.3
        ),
        [(1, 1, 4, 8), (3, 16, 8)],
    ),
    "accumulate_gradients": (
        lambda w, x: bijax.accumulate_gradients(lambda w, x: jnp.mean(jnp.tanh(x @ w)), unit=2)(w, x),
        [(6, 5), (4, 6)],
    ),
}
NO_OPERATIONS = {
    *("AttentionBlockSize", "get_batch_invariant_attention_block_size"),
    *("lowering_for", "prefer_backend", "contracts", "Manifest", "DeltaRuleState"),
    *("Audit", "GradientSum", "NoContractError", "NotInvariantError", "UnsupportedError", "audit", "invariant"),
    *("disable_batch_invariant_mode", "enable_batch_invariant_mode", "is_batch_invariant_mode_enabled"),
    "set_batch_invariant_mode",
}
# Operators of engines take several dtypes at once; their tests in tests/quantize and tests/moe run them under
# both settings.
OF_ENGINES = {
    *("add_rms_norm_dynamic_quant", "group_matmul", "moe_gather", "moe_gating_gemm", "moe_quant_group_gemm"),
    *("flash_attention", "flash_attention_decode", "flash_attention_prefill", "flash_decoding"),
    *("moe_quant_matmul", "moe_scatter", "moe_scatter_dynamic_quant", "moe_softmax_topk", "moe_swiglu_dynamic_quant"),
    *("quant_matmul", "rotary_embedding", "scale_dynamic_quant", "store_kv_cache", "store_paged_kv_cache", "swiglu"),
    *("store_latent_cache", "store_paged_latent_cache"),
}


def row_and_places(how: str, **options: Any) -> Function:
    return lambda x, y: getattr(x.at[PLACES], how)(y[:3], **options)


def summed(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(lambda x: lax.psum(x, "d"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def scattered(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    return jax.shard_map(lambda x: lax.psum_scatter(x, "d", tiled=True), mesh=mesh, in_specs=spec, out_specs=spec)(x)


def combined(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * y + x


PRIMITIVES: dict[str, Function] = {
    **vector_functions.FUNCTIONS,
    "mul": lambda x, y: x * y,
    "square": lambda x, y: lax.square(x),
    "sqrt": lambda x, y: lax.sqrt(abs(x)),
    "integer_pow": lambda x, y: lax.integer_pow(x, 3),
    "div": lambda x, y: x / y + x / jnp.ones((4, 1), x.dtype),
    "one_minus_square": lambda x, y: jax.grad(lambda x: lax.tanh(x).sum())(x),
    "dot_general": lambda x, y: x @ y.T,
    "ragged_dot_general": lambda x, y: lax.ragged_dot(x, jnp.ones((2, 6, 5), x.dtype), jnp.array([1, 3], jnp.int32)),
    "conv_general_dilated": lambda x, y: lax.conv(x[None, None], y[None, None, :2, :2], (1, 1), "SAME"),
    **{
        f"reduce_{f.__name__}": lambda x, y, f=f: f(x, axis=0) + f(y, axis=(0, 1), keepdims=True)[0]
        for f in (jnp.sum, jnp.prod, jnp.max, jnp.min)
    },
    "reduce_window_sum": lambda x, y: lax.reduce_window(x, np.zeros((), x.dtype), lax.add, **WINDOW),
    "reduce_window_max": lambda x, y: lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, **WINDOW),
    "reduce_window_min": lambda x, y: lax.reduce_window(x, np.array(np.inf, x.dtype), lax.min, **WINDOW),
    "select_and_scatter_add": lambda x, y: jax.grad(lambda x: PRIMITIVES["reduce_window_max"](x, y).sum())(x),
    "select_and_gather_add": lambda x, y: jax.jvp(lambda x: PRIMITIVES["reduce_window_max"](x, y), (x,), (y,)),
    **{
        f.__name__: lambda x, y, f=f: (f(x, axis=0), f(x, axis=1, reverse=True))
        for f in (lax.cumsum, lax.cumprod, lax.cumlogsumexp)
    },
    "scatter-add": row_and_places("add"),
    "scatter-sub": row_and_places("subtract"),
    "scatter-mul": lambda x, y: x.at[jnp.array([0, 2], jnp.int32)].multiply(y[:2], unique_indices=True),
    "scatter": row_and_places("set"),
    "scatter-max": row_and_places("max"),
    "scatter-min": row_and_places("min"),
    "scatter_apply": lambda x, y: x.at[PLACES].apply(lax.tanh),
    "reduce": lambda x, y: lax.reduce(x, np.zeros((), x.dtype), combined, (1,)),
    "reduce_window": lambda x, y: lax.reduce_window(x, np.zeros((), x.dtype), combined, **WINDOW),
    "sort": lambda x, y: lax.sort((x, y), num_keys=1),
    "psum": lambda x, y: jax.vmap(lambda r: lax.psum(r, "rows"), axis_name="rows")(x) + summed(y),
    "psum_invariant": lambda x, y: jax.grad(lambda x: summed(x).sum())(x),
    "reduce_scatter": lambda x, y: scattered(x),
}


def test_every_operation_and_every_replaced_primitive_is_here() -> None:
    public = {name for name in dir(bijax) if not name.startswith("_") and callable(getattr(bijax, name))}
    assert {*OPERATIONS, *WITHOUT_GRADIENT, *OF_ENGINES} == public - NO_OPERATIONS
    replaced = {*FENCED, *VECTORS, *ORDERED, *COLLECTIVES, PRODUCTS, *RACING, "sort", *TAKEN_OUT}
    of_cudnn = {name for name in replaced if name.startswith("dot_product_attention_")}  # for GPUs alone
    assert set(PRIMITIVES) == replaced - vector_functions.WITHOUT_TEST - of_cudnn


@pytest.mark.tier(
    "full",
    fast=(
        "sum-float32",
        "softmax_cross_entropy-bfloat16",
        "embed-float32",
        "elementwise-bfloat16",
    ),
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str, dtype: str) -> None:
    for operation, shapes in OPERATIONS[name]:
        args = ones(dtype, *shapes)

        def gradients(*args: jax.Array, operation: Function = operation) -> Any:
            results, pull = jax.vjp(operation, *args)
            return pull(jax.tree.map(jnp.ones_like, results))

        with no_promotion():
            jax.jit(gradients).lower(*args)
            jax.jit(jax.vmap(operation)).lower(*(a[None] for a in args))
            if dtype == "bfloat16":  # without jit there is code that is not traced
                jax.block_until_ready(operation(*args))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_operations_without_gradients(name: str, dtype: str) -> None:
    operation, shapes = WITHOUT_GRADIENT[name]
    with no_promotion():
        jax.block_until_ready(operation(*ones(dtype, *shapes)))


@pytest.mark.tier(
    "full",
    fast=(
        "acos",
        "atanh",
        "cbrt",
        "erf_inv",
        "erfc",
        "exp2",
        "expm1",
        "igamma_grad_a",
        "log1p",
        "sin",
        "dot_general",
        "reduce_prod",
        "reduce_max",
        "select_and_scatter_add",
        "select_and_gather_add",
        "scatter-add",
        "scatter",
        "scatter_apply",
        "reduce_window",
        "psum",
    ),
)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives(name: str) -> None:
    for dtype in DTYPES:
        args = [x * 0.5 for x in ones(dtype, (4, 6), (4, 6))]
        with no_promotion():
            jax.jit(PRIMITIVES[name]).lower(*args)
            traced = jax.jit(bijax.invariant(PRIMITIVES[name])).trace(*args)
            for platform in ("cpu", "cuda"):
                traced.lower(lowering_platforms=(platform,))


def test_what_the_caller_promotes_is_still_an_error() -> None:
    x, row = ones("float32", (4, 6), (6,))
    run = bijax.invariant(lambda x, row: x + row)
    fused = bijax.elementwise(lambda x: x + jnp.ones((), jnp.bfloat16))
    with no_promotion():
        with pytest.raises(ValueError, match="rank_promotion"):
            run(x, row)
        with pytest.raises(jax.dtypes.TypePromotionError):
            fused(x)
