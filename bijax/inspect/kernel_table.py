"""The kernel and contract that serve each case, found by tracing one call of each kind."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax import ops
from bijax.core.architecture import lowering_for
from bijax.dispatch.trees import tree_kernel
from bijax.lax.scatter import scatter_add
from bijax.ops.matmul.joined import joined_matmul
from bijax.ops.moe.select_experts import select_experts
from bijax.ops.rotary.heads import rotate_and_store
from bijax.parallel import row_parallel
from bijax.sampling import sample
from bijax.transform.invariant import invariant
from bijax.transform.rules.equations import equations
from bijax.transform.rules.uses import kernels_of
from pallas_kernels.target import Target

TARGETS: Final = tuple(map(Target.parse, ("cpu", "sm_90", "sm_80")))
"""The last one represents every GPU without dedicated kernels."""

_FLOATS: Final = ("float32", "bfloat16", "float16")
_LABELS: Final = "int32"
_INT8: Final = "int8"
_FLOAT8: Final = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        operation: Name of the operation, as users call it.
        case: What distinguishes it from other calls.
        function: The call.
        shapes: Shapes of its arrays; one that ends in a dtype's name has that dtype.
        dtypes: Dtypes of the other arrays.
    """

    operation: str
    case: str
    function: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...]
    dtypes: tuple[str, ...] = _FLOATS

    def arrays(self, dtype: str) -> list[jax.ShapeDtypeStruct]:
        """Returns the arguments."""
        given = [(s[:-1], s[-1]) if s and isinstance(s[-1], str) else (s, dtype) for s in self.shapes]
        return [jax.ShapeDtypeStruct(shape, d) for shape, d in given]


def _gradient(function: Callable[..., Any], *arguments: int) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: jax.tree.leaves(function(*arrays))[0].astype(jnp.float32).sum(), arguments)


def _invariant(function: Callable[..., Any]) -> Callable[..., Any]:
    return invariant(function)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return ops.softmax_cross_entropy(logits, labels)


def _attention(query: jax.Array, key: jax.Array) -> jax.Array:
    return ops.dot_product_attention(query, key, key, is_causal=True)


def _with_bias(query: jax.Array, key: jax.Array, bias: jax.Array) -> jax.Array:
    return ops.dot_product_attention(query, key, key, bias)


def _with_options(query: jax.Array, key: jax.Array, heads: jax.Array) -> jax.Array:
    return ops.dot_product_attention(query, key, key, logits_soft_cap=30.0, sinks=heads, alibi_slopes=heads)


def _quantised(query: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
    return ops.dot_product_attention(query, key, key, key_scale=scale, value_scale=scale)


def _packed(query: jax.Array, key: jax.Array, sums: jax.Array) -> jax.Array:
    return ops.dot_product_attention(query, key, key, is_causal=True, cu_query_seq_lengths=sums)


def _paged_quantised(query: jax.Array, pages: jax.Array, table: jax.Array, scale: jax.Array) -> Any:
    lengths = jnp.ones(query.shape[0], jnp.int32)
    return ops.paged_attention(query, pages, pages, table, lengths, key_scale=scale, value_scale=scale)


def _norm_quantised(x: jax.Array, weight: jax.Array) -> Any:
    return ops.add_rms_norm_dynamic_quant(x, weight, weight, residual=x)


def _scattered(x: jax.Array, experts: jax.Array) -> Any:
    return ops.moe_scatter_dynamic_quant(x, experts, expert_end_idx=4)


def _swiglu_quantised(x: jax.Array, counts: jax.Array) -> Any:
    return ops.moe_swiglu_dynamic_quant(x, None, counts)


def _rotated(qkv: jax.Array, table: jax.Array) -> jax.Array:
    return ops.rotary_embedding(qkv, table, table, q_head_num=2, kv_head_num=1)


def _stored(heads: jax.Array, table: jax.Array, cache: jax.Array) -> Any:
    return rotate_and_store(heads, table, table, jnp.arange(8), cache, cache)


def _mixed_product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _by_columns(x: jax.Array, g: jax.Array) -> jax.Array:
    return lax.dot_general(x, g, (((0,), (0,)), ((), ())))


def _mixed(x: jax.Array, y: jax.Array) -> jax.Array:
    return x * 0.5 + y


def _delta_rule(query: jax.Array, value: jax.Array, g: jax.Array) -> jax.Array:
    return ops.gated_delta_rule(query, query, value, g, g)[0]


def _delta_rule_extend(query: jax.Array, value: jax.Array, g: jax.Array) -> jax.Array:
    b, _, heads, size = value.shape
    sizes = {"key_heads": query.shape[2], "value_heads": heads, "key_size": query.shape[3], "value_size": size}
    state = ops.DeltaRuleState.zeros(b, **sizes, dtype=value.dtype)
    return ops.gated_delta_rule_extend(query, query, value, g, g, state=state)[0]


def _conv_extend(x: jax.Array, weight: jax.Array, state: jax.Array) -> jax.Array:
    return ops.causal_conv1d_extend(x, weight, state=state, start=jnp.zeros(x.shape[0], jnp.int32))[0]


def _paged(query: jax.Array, pages: jax.Array, table: jax.Array) -> Any:
    return ops.paged_attention(query, pages, pages, table, jnp.ones(query.shape[0], jnp.int32))


def _latent(query: jax.Array, latents: jax.Array) -> Any:
    return ops.latent_attention(query, latents, value_size=512, scale=0.1)


def _paged_latent(query: jax.Array, pages: jax.Array, table: jax.Array) -> Any:
    lengths = jnp.ones(query.shape[0], jnp.int32)
    return ops.paged_latent_attention(query, pages, table, lengths, value_size=512, scale=0.1)


_X, _W, _WIDE_W, _HEADS, _PAGES = (8, 1024), (1024, 512), (512, 1024), (1, 256, 4, 64), (9, 16, 4, 64)
_RULE = ((1, 9, 2, 64), (1, 9, 4, 64), (1, 9, 4))
_WIDE, _INT8_X = (1, 256, 4, 192), (*_X, _INT8)

_silu = functools.partial(ops.matmul, activation="silu")
_highest = functools.partial(ops.matmul, precision="highest")
_split = functools.partial(ops.matmul, split_k=4)


def _sample(logits: jax.Array, seeds: jax.Array) -> jax.Array:
    return sample(logits, seeds=seeds, positions=seeds, need_logprobs=False).tokens


def _scatter_add(x: jax.Array, i: jax.Array) -> jax.Array:
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    updates = jnp.ones((i.size, x.shape[1]), x.dtype)
    return scatter_add(x, i.reshape(-1, 1), updates, dimension_numbers=numbers, mode="drop")


CASES: Final[tuple[Case, ...]] = (
    Case("matmul", "weights (K, N)", ops.matmul, (_X, _W)),
    Case("matmul", "weights (K, N), short K", ops.matmul, ((8, 576), (576, 512))),
    Case("matmul", "weights (N, K)", lambda x, w: ops.matmul(x, w.T), (_X, _WIDE_W)),
    Case("matmul", 'precision="highest"', _highest, (_X, _W), ("float32",)),
    Case("matmul", "split_k=4", _split, (_X, _W)),
    Case("matmul", 'activation="silu"', _silu, (_X, _W)),
    Case("matmul", "float32 with bfloat16", _invariant(_mixed_product), (_X, (*_W, "bfloat16")), ("float32",)),
    Case(
        "matmul",
        "float32 with bfloat16, gradient",
        _invariant(_gradient(_mixed_product, 1)),
        (_X, (*_W, "bfloat16")),
        ("float32",),
    ),
    Case("matmul", "a stack", jax.vmap(ops.matmul), ((2, *_X), (2, *_W))),
    Case("matmul", "gradients", _gradient(ops.matmul, 0, 1), (_X, _W)),
    Case("matmul", "gradients of a stack", _gradient(jax.vmap(ops.matmul), 0, 1), ((2, *_X), (2, *_W))),
    Case("gated_matmul", "", lambda x, w: ops.gated_matmul(x, w, w), (_X, _W)),
    Case("dot_general", "float64", _invariant(jnp.matmul), (_X, _W), ("float64",)),
    Case("dot_general", "both stored by columns", _invariant(_by_columns), (_X, _X)),
    Case("ragged_dot", "", _invariant(lax.ragged_dot), (_X, (2, *_W), (2, _LABELS))),
    Case("ragged_dot", "gradients", _invariant(_gradient(lax.ragged_dot, 1)), (_X, (2, *_W), (2, _LABELS))),
    Case("group_matmul", "", ops.group_matmul, (_X, (2, *_W), (2, _LABELS))),
    Case("group_matmul", "gradients", _gradient(ops.group_matmul, 0, 1), (_X, (2, *_W), (2, _LABELS))),
    Case("quant_matmul", "", ops.quant_matmul, (_INT8_X, (*_W, _INT8), (8,), (512,)), ("float32",)),
    Case("quant_matmul", "float8", ops.quant_matmul, ((*_X, _FLOAT8), (*_W, _FLOAT8), (8,), (512,)), ("float32",)),
    Case("scale_dynamic_quant", "", ops.scale_dynamic_quant, (_X, (1024,))),
    Case("add_rms_norm_dynamic_quant", "", _norm_quantised, (_X, (1024,))),
    Case("tree_sum", "", lambda terms: tree_kernel(terms, out_dtype=terms.dtype.name), ((4, 8, 128),)),
    Case("joined_matmul", "", joined_matmul, ((8, 256), (256, 8), (256, 1))),
    Case("select_experts", "", lambda logits: select_experts(logits, 8), ((8, 256),), ("float32",)),
    Case("moe_scatter_dynamic_quant", "", _scattered, (_X, (8, 2, _LABELS))),
    Case("moe_swiglu_dynamic_quant", "", _swiglu_quantised, (_X, (4, _LABELS))),
    Case("moe_gather", "", ops.moe_gather, ((16, 1024), (16, _LABELS), (8, 2))),
    Case("rotary_embedding", "", _rotated, ((1, 8, 4, 64), (8, 64))),
    Case("rotary_embedding", "with a cache", _stored, ((1, 8, 4, 64), (1, 8, 32, "float32"), (1, 9, 1, 64))),
    Case(
        "moe_quant_group_gemm",
        "",
        ops.moe_quant_group_gemm,
        (_INT8_X, (8,), (2, *_W, _INT8), (2, 512), (2, _LABELS)),
        ("float32",),
    ),
    Case("conv", "", _invariant(lambda x, w: lax.conv(x, w, (1, 1), "SAME")), ((1, 64, 8, 8), (8, 64, 3, 3))),
    Case("conv", "one feature", _invariant(lambda x, w: lax.conv(x, w, (1, 1), "SAME")), ((1, 1, 8, 8), (8, 1, 3, 3))),
    Case(
        "conv",
        "gradient of weights",
        _invariant(_gradient(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), 1)),
        ((9, 64, 8, 8), (8, 64, 3, 3)),
    ),
    Case("attention", "heads of 64", _attention, (_HEADS, _HEADS)),
    Case("attention", "heads of 80", _attention, ((1, 256, 4, 80), (1, 256, 4, 80))),
    Case("attention", "gradients", _gradient(_attention, 0, 1), (_HEADS, _HEADS)),
    Case("attention", "packed sequences", _packed, (_HEADS[1:], _HEADS[1:], (3, _LABELS))),
    Case("attention", "heads of 192, values of 128", ops.dot_product_attention, (_WIDE, _WIDE, (1, 256, 4, 128))),
    Case("attention", "a bias or a mask", _with_bias, (_HEADS, _HEADS, (1, 4, 256, 256))),
    Case("attention", "gradient of a bias", _gradient(_with_bias, 2), (_HEADS, _HEADS, (1, 4, 256, 256))),
    Case("attention", "soft cap, sinks, slopes", _with_options, (_HEADS, _HEADS, (4,))),
    Case("attention", "keys of int8", _quantised, (_HEADS, (*_HEADS, "int8"), (4, 64, "float32"))),
    Case("attention", "keys of fp8", _quantised, (_HEADS, (*_HEADS, "float8_e4m3fn"), (4, "float32"))),
    Case("paged_attention", "heads of 64", _paged, ((1, 1, 4, 64), _PAGES, (1, 8, _LABELS))),
    Case(
        "paged_attention",
        "pages of int8",
        _paged_quantised,
        ((1, 1, 4, 64), (*_PAGES, "int8"), (1, 8, _LABELS), (4, 64, "float32")),
    ),
    Case("latent_attention", "", _latent, ((1, 256, 4, 576), (1, 256, 576))),
    Case("latent_attention", "gradients", _gradient(_latent, 0, 1), ((1, 256, 4, 576), (1, 256, 576))),
    Case("paged_latent_attention", "", _paged_latent, ((1, 1, 4, 576), (9, 16, 576), (1, 8, _LABELS))),
    Case("gated_delta_rule", "", _delta_rule, _RULE),
    Case("gated_delta_rule", "gradients", _gradient(_delta_rule, 0, 1, 2), _RULE),
    Case("gated_delta_rule_extend", "", _delta_rule_extend, _RULE),
    Case("causal_conv1d", "", ops.causal_conv1d, ((1, 9, 64), (64, 4))),
    Case("causal_conv1d_extend", "", _conv_extend, ((1, 9, 64), (64, 4), (1, 7, 64))),
    Case("gated_rms_norm", "", ops.gated_rms_norm, (_X, _X)),
    Case("l2_norm", "", ops.l2_norm, (_X,)),
    *(
        Case(name, f"rows of {columns}", function, ((8, columns), *more))
        for name, function, more in (
            ("softmax", ops.softmax, ()),
            ("softmax, gradients", _gradient(ops.softmax, 0), ()),
            ("log_softmax", ops.log_softmax, ()),
            ("log_softmax, gradients", _gradient(ops.log_softmax, 0), ()),
            ("logsumexp", ops.logsumexp, ()),
            ("logsumexp, gradients", _gradient(ops.logsumexp, 0), ()),
            ("softmax_cross_entropy", _cross_entropy, ((8, _LABELS),)),
            ("softmax_cross_entropy, gradients", _gradient(_cross_entropy, 0), ((8, _LABELS),)),
        )
        for columns in (4096, 77, *(() if "gradients" in name else (50_000,)))
    ),
    Case("rms_norm", "", ops.rms_norm, (_X, (1024,))),
    Case("rms_norm", "gradients", _gradient(ops.rms_norm, 0, 1), (_X, (1024,))),
    Case("rms_norm", "gradients without weights", _gradient(ops.rms_norm, 0), (_X,)),
    Case("layer_norm", "", ops.layer_norm, (_X, (1024,), (1024,))),
    Case("layer_norm", "gradients", _gradient(ops.layer_norm, 0, 1, 2), (_X, (1024,), (1024,))),
    Case("sum, mean", "", lambda x: ops.mean(x, axis=1), (_X,)),
    Case("var, std", "", lambda x: ops.var(x, axis=1), (_X,)),
    Case("var, std", "gradients", _gradient(lambda x: ops.var(x, axis=1), 0), (_X,)),
    Case("embed", "gradients", _gradient(ops.embed, 0), ((99, 64), (8, _LABELS))),
    Case("elementwise", "", ops.elementwise(jnp.tanh), (_X,)),
    Case("exp, log, tanh, ...", "", _invariant(jnp.exp), (_X,)),
    Case("reduce_sum, reduce_prod", "", _invariant(lambda x: (x.sum(0), x.prod(0))), (_X,)),
    Case("reduce", "a function of one's own", _invariant(lambda x: lax.reduce(x, x[0, 0], _mixed, (1,))), (_X,)),
    Case(
        "reduce_window_sum",
        "",
        _invariant(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID")),
        (_X,),
    ),
    Case(
        "select_and_scatter_add",
        "",
        _invariant(_gradient(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), 0)),
        (_X,),
        ("float32",),
    ),
    Case("cumsum, cumprod", "", _invariant(lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 1))), (_X,)),
    Case("cumlogsumexp", "", _invariant(lambda x: lax.cumlogsumexp(x, 1)), (_X,)),
    Case("scatter_add, scatter_mul", "", _invariant(lambda x, i: x.at[i].add(1)), (_X, (3, _LABELS))),
    Case("scatter_add, scatter_mul", "as a call", _scatter_add, (_X, (3, _LABELS))),
    Case("sample", "", _sample, (_X, (8, _LABELS)), ("float32",)),
    Case("parallel.row_parallel", "", lambda x, w: row_parallel(x, w, None), (_X, _W)),
    Case("psum", "", _invariant(lambda x: jax.vmap(lambda row: lax.psum(row, "rows"), axis_name="rows")(x)), (_X,)),
)
"""Calls of every kind; a test checks that they reach every kernel."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The kernels that serve a case on one target.

    Attributes:
        case: The case.
        target: "cpu", or the architecture of a GPU.
        dtypes: The dtypes for which this holds.
        contracts: Ids of the contracts.
        kernels: Names of the functions that receive them.
        primitives: Names of the primitives that contain them.
    """

    case: Case
    target: str
    dtypes: tuple[str, ...]
    contracts: tuple[str, ...]
    kernels: tuple[str, ...]
    primitives: tuple[str, ...]


def rows(targets: Sequence[Target] = TARGETS, operation: str | None = None) -> Iterator[Row]:
    """Yields the rows of every case on each target, grouping dtypes with the same kernels.

    Args:
        targets: The targets.
        operation: Only the cases of this operation.
    """
    for case in CASES:
        if operation not in (None, case.operation):
            continue
        traced = {dtype: _traced(case, dtype) for dtype in case.dtypes}
        for target in targets:
            served: dict[tuple[tuple[str, ...], ...], list[str]] = {}
            for dtype, program in traced.items():
                served.setdefault(_served(program, target), []).append(dtype)
            for found, dtypes in served.items():
                yield Row(case, str(target), tuple(dtypes), *found)


def _traced(case: Case, dtype: str) -> Any:
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        return jax.make_jaxpr(lambda *arrays: case.function(*arrays))(*case.arrays(dtype))


def _served(program: Any, target: Target) -> tuple[tuple[str, ...], ...]:
    platform = target.platform
    with lowering_for(target.architecture) if target.architecture else contextlib.nullcontext():
        found = [(use, e.name) for e in equations(program, platform) for use in kernels_of(e, platform)]
    contracts = {use.contract for use, _ in found}
    kernels = {use.kernel for use, _ in found if use.kernel}
    primitives = {name for _, name in found}
    return tuple(sorted(contracts)), tuple(sorted(kernels)), tuple(sorted(primitives))
