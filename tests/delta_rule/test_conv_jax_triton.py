"""The causal convolution and the gated norm in Triton: machine code for every GPU, numbers by Triton's interpreter."""

import functools
from typing import Any, Final

import jax
import pytest

from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.causal_conv.jax_triton.launch import causal_conv, causal_conv_extend
from pallas_kernels.contract import XLA_FUNCTIONS, row_contract
from pallas_kernels.gated_norm.jax_triton.launch import gated_rms_norm
from pallas_kernels.parts.jax_triton.launch import Launch
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton

HEADS: Final = Heads(keys=16, values=32, width=128, value_width=128, eps=1e-6)
SHAPE: Final = jax.ShapeDtypeStruct
COLUMNS: Final = HEADS.channels + 32 * 128


def launch_of(kind: str, target: Target, batch: int = 8) -> Launch:
    """The launch of a call with the sizes of Qwen3-Next."""
    functions: dict[str, Any] = {"functions": XLA_FUNCTIONS, "contract": row_contract(), "target": target}
    number, weight = SHAPE((batch,), "int32"), SHAPE((HEADS.channels, 4), "bfloat16")
    if kind == "gated":
        rows, gates = SHAPE((batch * 128, 128), "bfloat16"), SHAPE((batch * 4, COLUMNS), "bfloat16")

        def gated(x: Any, gate: Any, weight: Any) -> Any:
            return gated_rms_norm(x=x, gate=gate, weight=weight, column=HEADS.channels, eps=1e-6, **functions)

        (found,) = launches_of(gated, rows, gates, SHAPE((128,), "float32"))
        return found
    tokens = {"whole": 300, "decode": 1, "drafts": 5, "part": 256}[kind]
    x, of_heads = SHAPE((batch, tokens, COLUMNS), "bfloat16"), {"activation": "silu", "heads": HEADS, **functions}
    if kind == "whole":
        (found,) = launches_of(functools.partial(causal_conv, **of_heads), x, weight)
        return found

    def extend(x: Any, weight: Any, state: Any, slot: Any, first: Any, count: Any) -> Any:
        return causal_conv_extend(x, weight, state=state, first=first, count=count, slot=slot, **of_heads)

    (found,) = launches_of(extend, x, weight, SHAPE((99, 12, HEADS.channels), "bfloat16"), *[number] * 3)
    return found


@needs_triton
@pytest.mark.tier("full", fast=("gated",))
@pytest.mark.parametrize("kind", ["gated", "whole", "decode", "drafts", "part"])
def test_one_kernel_in_all_gpus(kind: str) -> None:
    for target in map(Target.parse, TARGETS):
        code = compiled(launch_of(kind, target))
        check_resources(code, target)
        assert kind == "decode" or code.count(r"LDG\.E\.(?:64|128)")


@needs_triton
@pytest.mark.tier("full", fast=("few",))
@pytest.mark.parametrize("case", ["whole", "extend", "few", "gated"])
def test_bits_by_the_interpreter(case: str) -> None:
    """Bits against numpy in the order of the contract; an address outside the arrays of a launch is an error."""
    assert run_interpreted("-m", "tests.delta_rule.interpreted_conv", case).split()[-1] == "equal"
