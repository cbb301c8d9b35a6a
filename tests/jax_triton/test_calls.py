"""The kernels that route tokens, rotate and draw, without a GPU: results in the interpreter, and machine code."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import pytest

from pallas_kernels.contract import online_row_contract, row_contract
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton

if importlib.util.find_spec("triton"):
    from pallas_kernels.delta_rule.jax_triton.invalid import nan_if_invalid
    from pallas_kernels.expert_rows.jax_triton import launch as expert_rows
    from pallas_kernels.pick.jax_triton.launch import pick_rows
    from pallas_kernels.rotary.jax_triton.launch import rotate_and_store
    from pallas_kernels.routing.jax_triton.launch import select_experts
    from pallas_kernels.sampling.jax_triton.launch import draw
    from pallas_kernels.topk.jax_triton.launch import largest

COMPARED = {"largest": 2, "select": 9, "experts": 17, "invalid": 6, "pick": 12, "rotate": 12, "draw": 4}


@needs_triton
@pytest.mark.tier("full", fast=("largest", "select"))
@pytest.mark.parametrize("name", COMPARED)
def test_results_in_the_interpreter(name: str) -> None:
    output = run_interpreted("-m", "tests.jax_triton.interpreted_calls", name)
    assert int(output.split()[-1]) == COMPARED[name]


def _shapes(*described: tuple[tuple[int, ...], str]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in described)


def _rotated(tokens: int, heads: int, key_heads: int, width: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    cache, table = ((64, key_heads, width), dtype), ((tokens, width // 2), "float32")
    whole = (tokens, heads + 2 * key_heads, width), dtype
    return _shapes(whole, table, table, ((tokens,), "int32"), cache, cache)


def _sums(target: Target, experts: int) -> dict[str, Any]:
    return {"sums": row_contract(), "target": target, "experts": experts}


# What is launched: a function of a target, and its arrays.
CALLS: dict[str, tuple[Callable[[Target], Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "largest": (lambda t: lambda x: largest(x, number=8, target=t), _shapes(((700, 256), "bfloat16"))),
    "largest of 4096": (lambda t: lambda x: largest(x, number=64, target=t), _shapes(((7, 4096), "float32"))),
    "select": (
        lambda t: lambda x: select_experts(x, number=10, contract=online_row_contract(512), **_sums(t, 512)),
        _shapes(((8, 512), "float32")),
    ),
    "select in the order of rows": (
        lambda t: lambda x: select_experts(x, number=8, contract=row_contract(), **_sums(t, 997)),
        _shapes(((700, 1000), "float32")),
    ),
    "sort": (
        lambda t: lambda x: expert_rows.sort_by_expert(x, first=0, end=256, allocated=4096, target=t),
        _shapes(((4096,), "int32")),
    ),
    "spread": (
        lambda t: lambda x, e: expert_rows.spread_to_experts(x, e, experts=512, topk=10, target=t),
        _shapes(((8, 2048), "bfloat16"), ((80,), "int32")),
    ),
    "count": (lambda t: lambda x: expert_rows.rows_by_count(x, rows=4096, target=t), _shapes(((1024,), "int32"))),
    "place": (lambda t: lambda x: expert_rows.rows_of_tokens(x, places=4096, target=t), _shapes(((4096,), "int32"))),
    "add searched rows": (
        lambda t: lambda *x: expert_rows.add_expert_rows(*x, dtype="bfloat16", target=t),
        _shapes(((512, 7168), "bfloat16"), ((512,), "int32"), ((64, 8), "int32"), ((64, 8), "float32")),
    ),
    "add found rows": (
        lambda t: lambda *x: expert_rows.add_expert_rows(*x, dtype="float32", target=t),
        _shapes(((4096, 768), "float16"), ((4096,), "int32"), ((512, 8), "int32"), ((512, 8), "float16")),
    ),
    "invalid": (
        lambda t: lambda y, i: nan_if_invalid(y, i, target=t),
        _shapes(((4, 2048, 32, 128), "bfloat16"), ((4,), "bool")),
    ),
    "pick": (
        lambda t: lambda x, p: pick_rows(x, p, target=t),
        _shapes(((64, 7168), "bfloat16"), ((9, 1), "int32")),
    ),
    "pick in order, float32": (
        lambda t: lambda x, p: pick_rows(x, p, p, target=t),
        _shapes(((64, 28672), "float32"), ((9, 1), "int32")),
    ),
    "pick int8": (lambda t: lambda x, p: pick_rows(x, p, target=t), _shapes(((64, 64), "int8"), ((9, 1), "int32"))),
    "rotate": (lambda t: lambda *x: rotate_and_store(*x, target=t), _rotated(8, 32, 8, 128, "bfloat16")),
    "rotate heads of 80": (lambda t: lambda *x: rotate_and_store(*x, target=t), _rotated(8, 3, 1, 80, "float16")),
    "rotate 64 heads of 256": (
        lambda t: lambda *x: rotate_and_store(*x, target=t),
        _rotated(8, 64, 64, 256, "float32"),
    ),
    "draw": (
        lambda t: lambda *x: draw(*x, target=t),
        _shapes(((64, 128256), "float32"), ((64,), "float32"), ((64, 2), "uint32"), ((64,), "uint32")),
    ),
    "draw one": (
        lambda t: lambda *x: draw(*x, target=t),
        _shapes(((1, 32000), "float32"), ((1,), "float32"), ((1, 2), "uint32"), ((1,), "uint32")),
    ),
}


@needs_triton
@pytest.mark.tier("full", fast=("rotate-sm_80",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CALLS)
def test_machine_code(name: str, target: str) -> None:
    gpu = Target.parse(target)
    function, arrays = CALLS[name]
    launches = launches_of(function(gpu), *arrays)
    assert len(launches) == (2 if name.startswith("draw") else 1)
    for launch in launches:
        assert not launch.fuses
        code = compiled(launch)
        check_resources(code, gpu)
        assert code.count(r"\b(RED|ATOM[GS]?)\b") == 0  # programs add nothing up together (REDUX is in a warp)
        # Only drawing and exponentials fuse products and sums, where they say so.
        fused = launch.name in ("draw_kernel", "select_experts_kernel")
        assert bool(code.count(r"\bFFMA\b")) == fused
        assert "div.full" not in code.ptx
        if name == "rotate":
            assert code.count(r"\bLDG\.E\.128") >= 6  # heads are read by whole vectors


@needs_triton
def test_what_is_served() -> None:
    x, places = _shapes(((4, 37), "float32"), ((9, 1), "int32"))
    assert largest.serves(x, number=9)
    assert not largest.serves(x, number=65)
    assert not largest.serves(jax.ShapeDtypeStruct((4, 4097), "float32"), number=9)
    assert not pick_rows.serves(jax.ShapeDtypeStruct((5, 31), "float32"), places)
    assert not pick_rows.serves(jax.ShapeDtypeStruct((5, 32), "float64"), places)
    (many,) = _shapes(((1 << 13,), "int32"))
    assert not expert_rows.sort_by_expert.serves(many, first=0, end=8, allocated=1 << 13)
    assert not expert_rows.rows_of_tokens.serves(many, places=1 << 13)
    assert not expert_rows.rows_by_count.serves(many, rows=9)
