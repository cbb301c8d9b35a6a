"""Tiers: which tests and cases `make test` runs, and which only `make test-all` does. One marker says it.

- No marker, or `@pytest.mark.tier("fast")`: `make test` runs it.
- `@pytest.mark.tier("full")`: only `make test-all` does (`pytest --exhaustive`). `full_only(...)` marks one case so.
- `@pytest.mark.tier("full", fast=IDS)`: of a parametrised test, all cases but those with these ids are "full". A
  property and its control name the same ids.
- `@pytest.mark.tier("fault")`: it reproduces a fault that was found. `make test` runs it, and it is an error to defer
  it by another marker. A sweep names such cases as `tier("full", fault=IDS)`.

An id that no case has is an error, so a case that is renamed is not dropped. Doctests cannot carry a marker: those that
are "full" are listed at the end.
"""

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any, Final

import pytest

TIERS: Final = ("fast", "full", "fault")


def full_only(*values: Any) -> Any:
    """Returns a case of a parametrised test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.tier("full"))


def tiered[T](cases: Iterable[T], fast: Collection[T]) -> list[Any]:
    """Returns all cases of one parameter, those that are not among the fast ones as "full"."""
    cases = list(cases)
    unknown = [case for case in fast if case not in cases]
    if unknown:
        raise ValueError(f"expected fast cases to be among {cases}, got {unknown}")
    return [case if case in fast else full_only(case) for case in cases]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests of the tier full too")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Checks all cases of a test together: a run may select some of them."""
    found = yield
    if isinstance(found, list):
        check([item for item in found if isinstance(item, pytest.Function)])
    return found


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests of the tier "full" out, unless `--exhaustive` asks for them."""
    full = set() if config.getoption("--exhaustive") else {item.nodeid for item in items if tier_of(item) == "full"}
    if full:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in full])
        items[:] = [item for item in items if item.nodeid not in full]


def tier_of(item: pytest.Item) -> str:
    """Returns the tier of a test, of "fast", "full" and "fault".

    Raises:
        ValueError: If a marker is not understood, or if a case that reproduces a fault or that is named as a fast one
            is marked "full" too.
    """
    if isinstance(item, pytest.DoctestItem):
        return "full" if item.name in FULL_DOCTESTS else "fast"
    case = case_of(item)
    named, found = set(), set()
    for mark in item.iter_markers("tier"):
        tier, fast, fault = _read(mark)
        if case in (*fast, *fault):
            named.add("fault" if case in fault else "fast")
        else:
            found.add(tier)
    if "full" in found and ("fault" in found | named or "fast" in named):
        raise ValueError(f"expected one tier for {case!r}, got {', '.join(sorted(found | named))}")
    return next((tier for tier in ("fault", "full") if tier in found | named), "fast")


def case_of(item: pytest.Item) -> str:
    """Returns the id of a case of a parametrised test, or ""."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def is_numbered(item: pytest.Item) -> bool:
    """Returns whether the id of a case holds the place of a parameter in its list, which another case may take."""
    indices = item.callspec.indices.items() if hasattr(item, "callspec") else ()
    return any(f"{name}{i}" in case_of(item).split("-") for name, i in indices)


def check(items: Sequence[pytest.Item]) -> None:
    """Checks the markers of all cases of a test.

    Raises:
        pytest.Collector.CollectError: If `tier_of` does not take one, or if a case that they name is not there.
    """
    cases = {case_of(item) for item in items}
    try:
        for item in items:
            tier_of(item)
        for mark in items[0].iter_markers("tier") if items else ():
            _, fast, fault = _read(mark)
            numbered = [case_of(item) for item in items if is_numbered(item) and case_of(item) in {*fast, *fault}]
            if numbered:
                raise ValueError(f"expected cases that are named by ids, got {numbered}, which pytest numbered")
            if unknown := {*fast, *fault} - cases:
                raise ValueError(f"expected the cases to be among {sorted(cases)}, got {sorted(unknown)}")
    except ValueError as error:
        raise pytest.Collector.CollectError(f"{items[0].nodeid.partition('[')[0]}: {error}") from error


def _read(mark: pytest.Mark) -> tuple[str, Collection[str], Collection[str]]:
    known = len(mark.args) == 1 and mark.args[0] in TIERS and mark.kwargs.keys() <= {"fast", "fault"}
    names = [mark.kwargs.get(kind, ()) for kind in ("fast", "fault")]
    if not known or any(isinstance(n, str) for n in names) or (mark.args[0] != "full" and any(names)):
        raise ValueError(
            f"expected tier(one of {TIERS}), or tier('full', fast=IDS, fault=IDS), got tier{mark.args} {mark.kwargs}"
        )
    return mark.args[0], names[0], names[1]


FULL_DOCTESTS: Final = frozenset(
    {
        "bijax.lax.conv.conv_general_dilated",
        "bijax.lax.cumulative.cumlogsumexp",
        "bijax.lax.cumulative.cumprod",
        "bijax.lax.cumulative.cumsum",
        "bijax.lax.dot_general.dot_general",
        "bijax.lax.extremes.clamp",
        "bijax.lax.ragged_dot.ragged_dot_general",
        "bijax.lax.reduce.reduce_max",
        "bijax.lax.reduce.reduce_min",
        "bijax.lax.reduce.reduce_prod",
        "bijax.lax.reduce.reduce_sum",
        "bijax.lax.reduce_program.reduce",
        "bijax.lax.scatter_chosen.scatter_max",
        "bijax.lax.windows.reduce_window_min",
        "bijax.ops.attention.dot_product.dot_product_attention",
        "bijax.ops.attention.flash.flash_attention",
        "bijax.ops.attention.flash.flash_decoding",
        "bijax.ops.attention.flash_paged.flash_attention_decode",
        "bijax.ops.attention.flash_paged.flash_attention_prefill",
        "bijax.ops.attention.latent.latent_attention",
        "bijax.ops.attention.latent.paged_latent_attention",
        "bijax.ops.attention.paged.paged_attention",
        "bijax.ops.delta_rule.causal_conv.causal_conv1d_extend",
        "bijax.ops.delta_rule.rule.gated_delta_rule",
        "bijax.ops.delta_rule.rule.gated_delta_rule_extend",
        "bijax.ops.elementwise.swiglu.moe_swiglu_dynamic_quant",
        "bijax.ops.kv_cache.latent.store_latent_cache",
        "bijax.ops.kv_cache.latent.store_paged_latent_cache",
        "bijax.ops.kv_cache.store.store_kv_cache",
        "bijax.ops.kv_cache.store.store_paged_kv_cache",
        "bijax.ops.matmul.product.matmul",
        "bijax.ops.matmul.product.weight_gradient",
        "bijax.ops.moe.gather.moe_gather",
        "bijax.ops.moe.products.group_matmul",
        "bijax.ops.moe.products.moe_quant_group_gemm",
        "bijax.ops.moe.routing.moe_softmax_topk",
        "bijax.ops.moe.scatter.moe_scatter",
        "bijax.ops.moe.scatter.moe_scatter_dynamic_quant",
        "bijax.ops.quantized.dynamic.add_rms_norm_dynamic_quant",
        "bijax.ops.rotary.embedding.rotary_embedding",
        "bijax.ops.rotary.heads.rotate_and_store",
        "bijax.ops.rows.linear_cross_entropy.linear_cross_entropy",
        "bijax.parallel._experts.moe_combine",
        "bijax.parallel._experts.moe_dispatch",
        "bijax.parallel._gradients.accumulate_gradients",
        "bijax.parallel._products.row_parallel",
        "bijax.parallel._sums.tree_sum",
        "bijax.parallel._vocabulary.vocab_parallel_sample",
        "bijax.sampling._multinomial.multinomial_with_seed",
        "bijax.sampling._sample.sample",
        "bijax.serving.async_engine.AsyncEngine",
        "bijax.serving.disaggregated.DisaggregatedEngine",
        "bijax.serving.engine.Engine",
        "bijax.testing._sweep.assert_batch_invariant",
        "bijax.transform.accumulate.accumulate_gradients",
        "bijax.transform.invariant.invariant",
        "flax_layers.checkpoint.load.load_checkpoint",
        "flax_layers.checkpoint.tokenizer.Tokenizer",
        "flax_layers.checkpoint.tokenizer.Tokenizer.token_bytes",
        "flax_layers.conversion.convert.convert",
        "flax_layers.conversion.quantize_linen.quantize_variables",
        "flax_layers.conversion.report.Conversion",
        "flax_layers.linen._drop_in.invariant_layer",
        "flax_layers.linen.attention.MultiHeadAttention",
        "flax_layers.linen.attention.MultiHeadDotProductAttention",
        "flax_layers.linen.linear.Conv",
        "flax_layers.linen.linear.ConvLocal",
        "flax_layers.linen.linear.ConvTranspose",
        "flax_layers.linen.linear.Dense",
        "flax_layers.linen.linear.DenseGeneral",
        "flax_layers.linen.linear.Embed",
        "flax_layers.linen.moe.MoE",
        "flax_layers.linen.normalization.GroupNorm",
        "flax_layers.linen.normalization.InstanceNorm",
        "flax_layers.linen.normalization.LayerNorm",
        "flax_layers.linen.normalization.RMSNorm",
        "flax_layers.linen.normalization.SpectralNorm",
        "flax_layers.linen.quantized.QuantDense",
        "flax_layers.linen.quantized.QuantMoE",
        "flax_layers.linen.recurrent.Bidirectional",
        "flax_layers.linen.recurrent.ConvLSTMCell",
        "flax_layers.linen.recurrent.GRUCell",
        "flax_layers.linen.recurrent.OptimizedLSTMCell",
        "flax_layers.linen.recurrent.RNN",
        "flax_layers.linen.stochastic.Dropout",
        "flax_layers.models.generate.generate",
        "flax_layers.models.layers.attention.Attention",
        "flax_layers.models.layers.cache.LayerCache",
        "flax_layers.models.layers.embed.Embed",
        "flax_layers.models.layers.gated_delta_net.GatedDeltaNet",
        "flax_layers.models.layers.latent_attention.LatentAttention",
        "flax_layers.models.layers.linear.Linear",
        "flax_layers.models.layers.mlp.MLP",
        "flax_layers.models.layers.moe.MoE",
        "flax_layers.models.layers.quant_linear.QuantLinear",
        "flax_layers.models.layers.quant_moe.QuantMoE",
        "flax_layers.models.llama.Llama",
        "flax_layers.models.partition.partition",
        "flax_layers.models.score.score",
        "flax_layers.models.served_partitioned.ServedPartitionedLlama",
        "flax_layers.nnx.attention.MultiHeadAttention",
        "flax_layers.nnx.attention.RoPE",
        "flax_layers.nnx.linear.Conv",
        "flax_layers.nnx.linear.ConvTranspose",
        "flax_layers.nnx.linear.Einsum",
        "flax_layers.nnx.linear.Embed",
        "flax_layers.nnx.linear.LinearGeneral",
        "flax_layers.nnx.linear.LoRA",
        "flax_layers.nnx.linear.LoRALinear",
        "flax_layers.nnx.normalization.GroupNorm",
        "flax_layers.nnx.normalization.SpectralNorm",
        "flax_layers.nnx.recurrent.Bidirectional",
        "flax_layers.nnx.recurrent.GRUCell",
        "flax_layers.nnx.recurrent.LSTMCell",
        "flax_layers.nnx.recurrent.OptimizedLSTMCell",
        "flax_layers.nnx.recurrent.RNN",
        "flax_layers.nnx.recurrent.SimpleCell",
        "flax_layers.nnx.stochastic.Dropout",
        "flax_layers.ops.invariant.Ops",
        "pallas_kernels.attention.cpu.launch.attention",
        "pallas_kernels.attention.portable.attention",
        "pallas_kernels.cumulative.portable.scan_axis",
        "pallas_kernels.embedding.portable.table_gradient",
        "pallas_kernels.embedding.rounds.table_gradient",
        "pallas_kernels.expert_rows.portable.sort_by_expert",
        "pallas_kernels.matmul.cpu.launch.matmul",
        "pallas_kernels.matmul.cpu.stacked.matmul",
        "pallas_kernels.matmul.hopper.bf16x6.matmul",
        "pallas_kernels.matmul.hopper.bf16x6.weight_gradient",
        "pallas_kernels.matmul.hopper.groups.group_matmul",
        "pallas_kernels.matmul.hopper.groups.group_weight_gradient",
        "pallas_kernels.matmul.hopper.int8.quant_matmul",
        "pallas_kernels.matmul.hopper.launch.gated_matmul",
        "pallas_kernels.matmul.hopper.launch.matmul",
        "pallas_kernels.matmul.hopper.launch.weight_gradient",
        "pallas_kernels.matmul.hopper.parts.matmul",
        "pallas_kernels.matmul.hopper.parts.weight_gradient",
        "pallas_kernels.matmul.hopper.tf32.matmul",
        "pallas_kernels.norm.portable.layer_norm",
        "pallas_kernels.norm.portable.rms_norm",
        "pallas_kernels.norm.portable.weight_gradient",
        "pallas_kernels.quantize.portable.quantize",
        "pallas_kernels.ragged_dot.portable.multiply_groups",
        "pallas_kernels.rotary.portable.rotate_and_store",
        "pallas_kernels.rows.fold.choose_axes",
        "pallas_kernels.rows.fold.choose_axis",
        "pallas_kernels.rows.portable.sum_axis",
        "pallas_kernels.rows.portable.sum_rows",
        "pallas_kernels.scatter.chosen.extreme_windows",
        "pallas_kernels.scatter.rounds.scatter_rounds",
        "pallas_kernels.topk.portable.largest",
    }
)
"""Examples of docstrings that compile for more than half a second, and that do what other tests do too."""
