"""The kernels of the gated delta rule in Triton: machine code for every GPU, numbers by Triton's interpreter."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends.jax_triton import KERNELS
from pallas_kernels.contract import DeltaRuleContract, MmaDeltaRuleContract
from pallas_kernels.delta_rule.extend import gated_delta_rule_extend
from pallas_kernels.delta_rule.whole import gated_delta_rule
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.jax_triton.launch import Launch
from pallas_kernels.target import Target
from tests.delta_rule.machine_code import check
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, compiled, launches_of, needs_triton

FORMS: Final = ("gated_delta_rule", "gated_delta_rule_extend")
KINDS: Final[dict[str, dict[str, Any]]] = {
    "prefill": {"batch": 4, "keep_edges": True},
    "decode": {"continued": True, "tokens": 1, "batch": 64},
    "prefill in float16, heads of 64": {"dtype": "float16", "size": 64},
    "part of a prompt": {"continued": True, "batch": 4},
    "short part of a prompt": {"continued": True, "tokens": 40},
    "part of a prompt in float16, heads of 64": {"continued": True, "dtype": "float16", "size": 64},
    "8 tokens": {"continued": True, "tokens": 8},
    "decode in slots": {"continued": True, "tokens": 1, "batch": 64, "slots": True},
    "part of a prompt in slots": {"continued": True, "slots": True},
    "8 tokens in slots": {"continued": True, "tokens": 8, "slots": True},
    "decode in float16, in slots": {"continued": True, "tokens": 1, "batch": 64, "slots": True, "dtype": "float16"},
    "8 tokens in float16": {"continued": True, "tokens": 8, "dtype": "float16"},
}
COMPILED: Final = (
    *((target, kind) for target in TARGETS for kind in ("prefill", "decode")),
    *(("sm_90", kind) for kind in tuple(KINDS)[2:]),
    *((target, "part of a prompt") for target in ("sm_80", "sm_100")),
)


def launches(
    target: Target,
    *,
    batch: int = 1,
    tokens: int = 256,
    dtype: str = "bfloat16",
    size: int = 128,
    continued: bool = False,
    keep_edges: bool = False,
    slots: bool = False,
) -> list[Launch]:
    """The launches of a call with 16 key heads and 32 value heads."""
    shape = jax.ShapeDtypeStruct
    heads, line = shape((batch, tokens, 16, size), dtype), shape((batch, tokens, 32), "float32")
    x = [heads, heads, shape((batch, tokens, 32, size), dtype), line, line, shape((batch, 32, size, size), "float32")]
    lengths = shape((batch,), "int32")
    where = dataclasses.replace(target, backend="jax_triton" if slots else "")
    options: dict[str, Any] = {"scale": 0.1, "contract": MmaDeltaRuleContract(), "target": where}
    if not continued:
        return launches_of(functools.partial(gated_delta_rule, keep_edges=keep_edges, **options), *x, lengths)
    kept = [shape((batch, 16, 64, size), dtype), shape((batch, 32, 64, size), dtype)]
    kept += [shape((batch, 32, *((32, 65) if slots else (64, 64))), "float32"), shape((batch, 32, 64), "float32")]
    return launches_of(functools.partial(gated_delta_rule_extend, **options), *x, *kept, *[lengths] * (3 + slots))


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize(("target", "kind"), COMPILED)
def test_the_kernels_compile(target: str, kind: str) -> None:
    where = Target.parse(target)
    found = launches(where, **KINDS[kind])
    few = KINDS[kind].get("tokens", 256) <= 8
    names = ["rows_kernel", "columns_kernel", "edges_kernel"] if KINDS[kind].get("batch", 1) > 16 else ["decode_kernel"]
    if few and target == "sm_90" and "float16" not in kind:
        names = []  # a Mosaic kernel serves
    if not few:
        # On Hopper Mosaic kernels compute prompts.
        names = ["chunk_kernel", "scan_kernel", "careful_scan_kernel"]
        if target == "sm_90" and "float16" not in kind:
            names = ["careful_scan_kernel" if kind == "prefill" else "finish_parts_kernel"]
    assert [launch.name.replace("extend_", "") for launch in found] == names
    for launch in found:
        # Atomic operations count programs, and no number is computed by them.
        check(compiled(launch), where, atomic=launch.name == "edges_kernel")


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "case", ["whole", "parts", "edges of arrays", "nan", "slots", "nan on Hopper", "slots on Hopper"]
)
def test_numbers_by_the_interpreter(case: str) -> None:
    """Numbers against float64; an address outside the arrays of a launch is an error."""
    output = run_interpreted("-m", "tests.delta_rule.interpreted_calls", case)
    assert output.split()[-1] == "compared"


def test_both_forms_have_the_same_contract_everywhere() -> None:
    """A sequence could not be continued with its bits if one form were served by another kernel."""
    kernels = {form: [k for k in KERNELS if k.operation == form] for form in FORMS}
    assert {form: len(found) for form, found in kernels.items()} == dict.fromkeys(FORMS, 1)
    (whole,), (extend,) = kernels.values()
    assert not whole.by_name
    assert (whole.patterns, whole.by_name, whole.contract) == (extend.patterns, extend.by_name, extend.contract)
    assert not any(hasattr(k.function(), "serves") for k in (whole, extend))
    ours = {"contract": MmaDeltaRuleContract()}
    for dtype, size, value_size in (("bfloat16", 128, 128), ("float16", 64, 128), ("bfloat16", 128, 64)):
        assert whole.contracts((dtype, size, value_size)) == ours
    for sizes in (("float32", 128, 128), ("bfloat16", 16, 8), ("bfloat16", 96, 128), ("float16", 128, 256)):
        assert whole.contracts(sizes) is None


@needs_triton
def test_contracts_that_it_refuses() -> None:
    x = jnp.zeros((1, 3, 1, 64), jnp.bfloat16)
    line, lengths = jnp.zeros((1, 3, 1)), jnp.zeros(1, jnp.int32)
    options: dict[str, Any] = {"scale": 1.0, "contract": DeltaRuleContract(), "target": Target.parse("sm_80")}
    with pytest.raises(
        UnsupportedError, match="expected the contract gated-delta-rule/v1/mma16-chunk64-rows, got 'gat"
    ):
        gated_delta_rule(x, x, x, line, line, jnp.zeros((1, 1, 64, 64)), lengths, keep_edges=False, **options)
