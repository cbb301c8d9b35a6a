"""The gradients of the gated delta rule in Triton: machine code for every GPU, numbers by Triton's interpreter."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.backends.jax_triton import KERNELS
from pallas_kernels.contract import MmaDeltaRuleContract, MmaDeltaRuleGradientContract
from pallas_kernels.delta_rule.jax_triton.gradients import gated_delta_rule_gradients
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.jax_triton.launch import Launch
from pallas_kernels.target import Target
from tests.delta_rule.machine_code import check
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, compiled, launches_of, needs_triton

KINDS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"batch": 4},
    "float16, heads of 64": {"dtype": "float16", "sizes": (64, 64)},
    "keys of 64": {"sizes": (64, 128), "heads": (4, 4)},
    "values of 64": {"sizes": (128, 64), "tokens": 70},
}
COMPILED: Final = (*((target, "bfloat16") for target in TARGETS), *(("sm_90", kind) for kind in tuple(KINDS)[1:]))


def launches(
    target: Target,
    *,
    batch: int = 1,
    tokens: int = 256,
    dtype: str = "bfloat16",
    sizes: tuple[int, int] = (128, 128),
    heads: tuple[int, int] = (16, 32),
) -> list[Launch]:
    """The launches of a call."""
    shape, (j, h), (d, v) = jax.ShapeDtypeStruct, heads, sizes
    keys, values = shape((batch, tokens, j, d), dtype), shape((batch, tokens, h, v), dtype)
    line, lengths = shape((batch, tokens, h), "float32"), shape((batch,), "int32")
    edges, last = (shape((batch, *chunks, h, d, v), "float32") for chunks in ((-(-tokens // 64),), ()))
    options: dict[str, Any] = {"scale": 0.1, "contract": MmaDeltaRuleGradientContract(), "target": target}
    function = functools.partial(gated_delta_rule_gradients, **options)
    return launches_of(function, keys, keys, values, line, line, edges, lengths, values, last)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize(("target", "kind"), COMPILED)
def test_the_kernels_compile(target: str, kind: str) -> None:
    where = Target.parse(target)
    found = launches(where, **KINDS[kind])
    mosaic = (target, kind) == ("sm_90", "bfloat16")  # on Hopper a Mosaic kernel computes T and P
    names = ["walk_kernel", "inner_kernel", "outer_kernel", "gates_kernel"]
    assert [launch.name for launch in found] == ([] if mosaic else ["chunk_kernel"]) + names
    for launch in found:
        check(compiled(launch), where, atomic=False)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("case", ["numbers", "sizes", "nan"])
def test_numbers_by_the_interpreter(case: str) -> None:
    """Numbers against float64, and bits; an address outside the arrays of a launch is an error."""
    output = run_interpreted("-m", "tests.delta_rule.interpreted_gradients", case)
    assert output.split()[-1] == "compared"


def test_gradients_are_served_where_the_forward_pass_is() -> None:
    whole, gradients = (
        [k for k in KERNELS if k.operation == operation]
        for operation in ("gated_delta_rule", "gated_delta_rule_gradients")
    )
    (forward,), (backward,) = whole, gradients
    assert (forward.patterns, forward.by_name) == (backward.patterns, backward.by_name)
    for sizes in (("bfloat16", 128, 128), ("float16", 64, 128), ("float32", 128, 128), ("bfloat16", 16, 8)):
        served = forward.contracts(sizes) is not None
        assert backward.contracts(sizes) == ({"contract": MmaDeltaRuleGradientContract()} if served else None)


@needs_triton
def test_contracts_that_it_refuses() -> None:
    x, line = jnp.zeros((1, 3, 1, 64), jnp.bfloat16), jnp.zeros((1, 3, 1))
    edges, lengths = jnp.zeros((1, 1, 1, 64, 64)), jnp.zeros(1, jnp.int32)
    options: dict[str, Any] = {"scale": 1.0, "contract": MmaDeltaRuleContract(), "target": Target.parse("sm_80")}
    with pytest.raises(UnsupportedError, match="expected the contract gated-delta-rule-gradients/v1/mma16-chunk64, go"):
        gated_delta_rule_gradients(x, x, x, line, line, edges, lengths, x, edges[:, 0], **options)
