"""The attention kernels written in Triton: machine code for every GPU, numbers by Triton's interpreter, refusals."""

import functools
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import jax_triton
from pallas_kernels.attention.call import OF_SCORES, AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.schedule.jax_triton import Tile
from pallas_kernels.contract import MmaAttentionContract, mma_attention_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, MachineCode, compiled, launches_of, needs_triton
from tests.jax_triton.packages import needs_jax_triton

SPILLED: Final = {False: 800, True: 1300}
"""Bytes of registers that a thread keeps in local memory at most: for merges of splits, and with a bias and a mask; and
for latents of 576, whose sums take half of the registers."""

KINDS: Final[dict[str, dict[str, Any]]] = {
    "prefill": {},
    "heads of 64": {"size": 64},
    "decode": {"queries": 1, "dtype": "float16", "size": 64},
    "decode, splits apart": {"queries": 1, "keys": 16384},
    "64 queries, splits apart": {"queries": 64, "keys": 2048},
    "64 queries, heads of 256, splits apart": {"queries": 64, "keys": 2048, "size": 256, "dtype": "float16"},
    "64 queries, float32, heads of 256, splits apart": {"queries": 64, "keys": 2048, "size": 256, "dtype": "float32"},
    "7 queries, latents of 576, splits apart": {"queries": 7, "keys": 2048, "size": 576, "values": 512, "page": 64},
    "decode, columns apart": {"queries": 1, "keys": 4096},
    "decode, columns apart, float32": {"queries": 1, "keys": 4096, "dtype": "float32"},
    "decode, columns apart, heads of 256": {"queries": 1, "keys": 4096, "size": 256},
    "decode of 4, columns apart, int8": {"queries": 4, "keys": 4096, "stored": "int8"},
    "decode from pages": {"queries": 1, "page": 64},
    "decode from int8": {"queries": 1, "stored": "int8", "size": 64, "page": 16},
    "float8_e4m3fn": {"stored": "float8_e4m3fn", "size": 80},
    "heads of 256": {"size": 256},
    "heads of 192, several splits": {"size": 192, "queries": 2048, "keys": 2048},
    "heads of 512": {"size": 512},
    "latents of 576": {"queries": 1, "size": 576, "values": 512, "page": 64},
    "latents of 576, several splits": {"queries": 4096, "keys": 4096, "size": 576, "values": 512},
    "latents of 576 in int8": {"queries": 1, "size": 576, "values": 512, "stored": "int8"},
    "80 queries, latents of 576 in float8, splits apart": {
        "queries": 80,
        "keys": 2048,
        "size": 576,
        "values": 512,
        "stored": "float8_e4m3fn",
        "page": 64,
    },
    "float32": {"dtype": "float32"},
    "float32, heads of 256": {"dtype": "float32", "size": 256},
    "cap, sinks, slopes, bias and mask": {"size": 64, "options": True},
}
OF_BACKWARD: Final = ("prefill", "heads of 64", "float32", "cap, sinks, slopes, bias and mask")


def call_of(
    *,
    queries: int = 256,
    keys: int = 512,
    dtype: str = "bfloat16",
    size: int = 128,
    page: int | None = None,
    stored: str | None = None,
    options: bool = False,
    values: int | None = None,
) -> AttentionCall:
    """A call of two sequences, of shapes alone; with `values`, these are so many columns of the keys."""
    shape = functools.partial(jax.ShapeDtypeStruct)
    cache = shape((2, keys, 2, size) if page is None else (3 * keys // page, page, 2, size), stored or dtype)
    found: dict[str, Any] = {}
    if page:
        found["page_table"] = shape((2, keys // page), "int32")
    if stored:
        found |= {"key_scale": shape((1, 2, size), "float32"), "value_scale": shape((1, 2, values or size), "float32")}
    if options:
        heads, pairs = shape((1, 8), "float32"), (2, 8, queries, keys)
        found |= {"alibi_slopes": heads, "sinks": heads, "bias": shape(pairs, dtype), "mask": shape(pairs, "bool")}
    of_call = AttentionOptions(
        0.1,
        causal=True,
        window=(100, 0) if options else None,
        soft_cap=5.0 if options else None,
        latent_value_size=values,
    )
    query, value = shape((2, queries, 8, size), dtype), cache if values is None else None
    return AttentionCall(query, cache, value, shape((2, 3), "int32"), of_call, **found)


def contract_of(call: AttentionCall) -> MmaAttentionContract:
    return mma_attention_contract(call.query.dtype.name, call.query.shape[3])


def check(code: MachineCode, target: Target, wide: bool = False) -> None:
    """Checks what a program occupies, and that its chains add as the contract says."""
    assert code.shared <= target.shared_memory, f"{code.shared} bytes of shared memory on {target}"
    assert code.local <= SPILLED[wide], f"{code.local} bytes of local memory on {target}"
    assert "tcgen05.mma" not in code.ptx, "products of 64 rows and of fewer would be of two instruction families"
    assert not code.count(r"\b(RED|ATOM|ATOMG|ATOMS)\b")
    # Operands that hold more elements in 32 bits hand them to mma.sync in another order.
    assert "kWidth = 2" in code.ttgir or "mma.sync" not in code.ptx
    assert "kWidth = 4" not in code.ttgir


@needs_triton
@pytest.mark.tier("full", fast=("sm_80-decode",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_forward_kernel_compiles(target: str, kind: str) -> None:
    call, where = call_of(**KINDS[kind]), Target.parse(target)
    launches = launches_of(functools.partial(jax_triton.attention, contract=contract_of(call), target=where), call)
    assert len(launches) == (3 if "columns" in kind else 2 if "splits apart" in kind else 1)
    for launch in launches:
        check(compiled(launch), where, wide=call.query.shape[3] > 512)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_products_of_several_splits_do_not_wait_for_each_other(size: int) -> None:
    """On Hopper, where ptxas may wait for each product of the tensor cores if a branch merges splits between them."""
    call, where = call_of(queries=2048, keys=2048, size=size), Target.parse("sm_90")
    attend = functools.partial(jax_triton.attention, contract=contract_of(call), target=where)
    (launch,) = launches_of(attend, call)
    code = compiled(launch)
    assert code.count(r"WARPGROUP\.DEPBAR") < code.count("HGMMA") / 4


@needs_triton
@pytest.mark.parametrize("size", [192, 256])
def test_sums_are_read_by_the_threads_that_set_them_aside(size: int) -> None:
    """Nothing between them would wait for another thread's store: all loads and stores of a shape have one layout."""
    call, where = call_of(queries=2048, keys=2048, size=size), Target.parse("sm_90")
    attend = functools.partial(jax_triton.attention, contract=contract_of(call), target=where)
    (launch,) = launches_of(attend, call)
    found: dict[str, set[str]] = {}
    kinds = set()
    for line in compiled(launch).ttgir.splitlines():
        if accessed := re.search(r"inline_asm .*\b(ld|st)\.global\.f32", line):
            kinds.add(accessed[1])
            for shape, layout in re.findall(r"tensor<(\d+x\d+)x\w+, (#\w+)>", line):
                found.setdefault(shape, set()).add(layout)
    assert kinds == {"ld", "st"}
    assert all(len(layouts) == 1 for layouts in found.values()), found


@needs_jax_triton
def test_a_schedule_that_does_not_fit_is_refused_when_compiled() -> None:
    """Not by the first launch: a GPU is not needed."""
    call, where = call_of(queries=1), Target.parse("sm_86")
    attend = functools.partial(jax_triton.attention, contract=contract_of(call), target=where, tile=Tile(16, 2, 6))
    with pytest.raises(UnsupportedError, match=r"at most 101376 bytes of shared memory on sm_86, got .* 169984;"):
        jax.jit(attend).trace(call).lower(lowering_platforms=("cuda",))


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", OF_BACKWARD)
@pytest.mark.parametrize("target", TARGETS)
def test_the_backward_kernels_compile(target: str, kind: str) -> None:
    call, where = call_of(**KINDS[kind]).only(*OF_SCORES), Target.parse(target)
    results = AttentionResults(call.query, jax.ShapeDtypeStruct(call.query.shape[:3], "float32"), call.query)
    options: dict[str, Any] = {"contract": contract_of(call), "target": where}
    for function, count in ((jax_triton.gradients, 2), (jax_triton.score_gradients, 1)):
        launches = launches_of(functools.partial(function, **options), call, results)
        assert len(launches) == count
        for launch in launches:
            check(compiled(launch), where)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("case", ["pages", "apart", "options", "8 bits", "gradients", "not finite", "latents"])
def test_numbers_by_the_interpreter(case: str) -> None:
    output = run_interpreted("-m", "tests.attention.interpreted_calls", case)
    assert output.split()[-1] == "compared"


def test_contracts_and_widths_that_it_refuses() -> None:
    call, target = call_of(), Target.parse("sm_80")
    with pytest.raises(UnsupportedError, match=r"expected an MmaAttentionContract of version 3, got .*version=1"):
        jax_triton.attention(call, contract=MmaAttentionContract(version=1), target=target)
    wide = call_of(size=577)
    with pytest.raises(UnsupportedError, match="at most 576 elements, got 577"):
        jax_triton.attention(wide, contract=MmaAttentionContract(), target=target)


def test_empty_arrays() -> None:
    call = call_of()
    empty = AttentionCall(
        jnp.zeros((0, 20, 4, 8)), jnp.zeros((0, 9, 2, 8)), jnp.zeros((0, 9, 2, 6)), call.limits, call.options
    )
    target, contract = Target.parse("sm_80"), MmaAttentionContract()
    out, lse = jax_triton.attention(empty, contract=contract, target=target)
    assert (out.shape, lse.shape) == ((0, 20, 4, 6), (0, 20, 4))
    results = AttentionResults(out, lse, out)
    dq, dk, dv = jax_triton.gradients(empty, results, contract=contract, target=target)
    assert (dq.shape, dk.shape, dv.shape) == ((0, 20, 4, 8), (0, 9, 2, 8), (0, 9, 2, 6))
    assert jax_triton.score_gradients(empty, results, contract=contract, target=target).shape == (0, 4, 20, 9)
