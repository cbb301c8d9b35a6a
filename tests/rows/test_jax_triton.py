"""Norms, sums and the softmax family through jax-triton without a GPU: bits in the interpreter, and machine code."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.contract import RowContract, row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton

if importlib.util.find_spec("triton"):
    from pallas_kernels.norm.jax_triton import launch as norm
    from pallas_kernels.rows.jax_triton import launch as rows
    from pallas_kernels.softmax.jax_triton import launch as softmax

ROOT = Path(__file__).parents[2]
CONTRACT = row_contract()

_BITS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from tests.jax_triton.interpreted import interpret_launches
from bijax.testing import hostile_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.norm import portable as norm
from pallas_kernels.norm.jax_triton import launch as norm_triton
from pallas_kernels.rows import portable as rows
from pallas_kernels.rows.jax_triton import launch as rows_triton
from pallas_kernels.target import Target

interpret_launches()
contract, target, different, plain = row_contract(), Target.parse("sm_80"), [], 0
FEW = 1100  # columns for which only a norm and sums are compared

def compare(name, found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)):
            different.append(name)

for columns in json.loads(sys.argv[1]):
    for kind in sys.argv[2:]:
        def random(i):
            return jnp.asarray(hostile_rows(i, (3, columns), "float32")[kind if i == 0 else "normal"])

        x, g, r = map(random, range(3))
        w, b = (jnp.asarray(hostile_rows(i, (columns,), "float32")["normal"]) for i in (4, 5))
        for n, (a, k, options) in enumerate([
            (norm_triton.rms_norm, norm.rms_norm, {"residual": r, "weight": w, "eps": 1e-6}),
            (norm_triton.rms_norm, norm.rms_norm, {"eps": 1e-6}),
            (norm_triton.layer_norm, norm.layer_norm, {"weight": w, "bias": b, "eps": 1e-6}),
        ][: 1 if columns == FEW else None]):
            compare(f"norm {n} {columns} {kind}", a(x, **options, contract=contract, target=target),
                    k(x, **options, contract=contract))
        for divided in (False, True):
            total = rows.sum_axis(x[:, :, None], contract=contract, mean=divided)
            compare(f"sum {columns} {kind}",
                    rows_triton.sum_axis(x[:, :, None], contract=contract, mean=divided, target=target), total)
        ordered = rows.sum_axis(x[:, :, None], contract=contract)
        plain += int((np.asarray(jnp.cumsum(x, 1)[:, -1:]) != np.asarray(ordered)).sum())
        if columns == FEW:
            continue
        h, factor, total = norm.rms_norm(x, w, r, eps=1e-6, contract=contract)
        compare(f"rms gradient {columns} {kind}",
                norm_triton.rms_norm_gradient(total, factor, g, w, r, contract=contract, target=target),
                norm.rms_norm_gradient(total, factor, g, w, r, contract=contract))
        _, mean, factor = norm.layer_norm(x, w, b, eps=1e-6, contract=contract)
        compare(f"layer gradient {columns} {kind}",
                norm_triton.layer_norm_gradient(x, mean, factor, g, w, contract=contract, target=target),
                norm.layer_norm_gradient(x, mean, factor, g, w, contract=contract))
print(json.dumps([different, plain]))
"""


@needs_triton
@pytest.mark.tier("full", fast=("1100-wide",))
@pytest.mark.parametrize(
    ("columns", "kinds"), [("1100", "wide"), ("1, 77, 128, 576, 1024, 4096, 5000", "normal wide cancelling")]
)
def test_the_bits_are_those_of_the_portable_programs(columns: str, kinds: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _BITS, f"[{columns}]", *kinds.split()]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    different, plain = json.loads(run.stdout.splitlines()[-1])
    assert different == []
    assert plain > 0  # the control: another order of the sum


def calls(target: Target, columns: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]:
    x, w = jax.ShapeDtypeStruct((8, columns), "bfloat16"), jax.ShapeDtypeStruct((columns,), "bfloat16")
    n = jax.ShapeDtypeStruct((8, 1), "float32")
    both: dict[str, Any] = {"contract": CONTRACT, "target": target}
    return {
        "rms_norm": (lambda x, w: norm.rms_norm(x, w, x, eps=1e-6, **both), (x, w)),
        "rms_norm_gradient": (lambda x, n, w: norm.rms_norm_gradient(x, n, x, w, x, **both), (x, n, w)),
        "layer_norm": (lambda x, w: norm.layer_norm(x, w, w, eps=1e-6, **both), (x, w)),
        "layer_norm_gradient": (lambda x, n, w: norm.layer_norm_gradient(x, n, n, x, w, **both), (x, n, w)),
        "sum_axis": (lambda x: rows.sum_axis(x[:, :, None], mean=True, **both), (x,)),
        "softmax": (lambda x: softmax.softmax(x, **both), (x,)),
        "softmax_gradient": (lambda x: softmax.softmax_gradient(x, x, **both), (x,)),
        "log_softmax": (lambda x: softmax.log_softmax(x, **both), (x,)),
        "log_softmax_gradient": (lambda x, n: softmax.log_softmax_gradient(x, n, n, x, **both), (x, n)),
        "logsumexp": (lambda x: softmax.logsumexp(x, **both), (x,)),
        "logsumexp_gradient": (lambda x, n: softmax.logsumexp_gradient(x, n, n, n, target=target), (x, n)),
    }


NAMES = tuple(calls(Target.parse("sm_80"), 8))


@needs_triton
@pytest.mark.tier("full", fast=("4096-softmax-sm_80",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [77, 4096, 128256])
def test_machine_code(columns: int, name: str, target: str) -> None:
    gpu = Target.parse(target)
    function, arrays = calls(gpu, columns)[name]
    (launch,) = launches_of(function, *arrays)
    assert not launch.fuses
    code = compiled(launch)
    check_resources(code, gpu)
    assert code.count(r"\b(RED|ATOM)") == 0  # no sums of several programs
    assert "div.full" not in code.ptx  # quotients and roots are rounded correctly
    assert "sqrt.approx" not in code.ptx
    # Products and sums are fused in the functions' own sequences alone.
    fused = code.ptx.count("fma.rn.f32")
    assert (fused > 0) == any(part in name for part in ("softmax", "logsumexp")) or name == "softmax_gradient"


@needs_triton
def test_what_is_refused() -> None:
    gpu = Target.parse("sm_80")
    x, wide = jax.ShapeDtypeStruct((2, 8), "float32"), jax.ShapeDtypeStruct((2, 8), "float64")
    with pytest.raises(UnsupportedError, match="expected the contract rows/v2"):
        jax.eval_shape(lambda x: softmax.softmax(x, contract=RowContract(most_lanes=256), target=gpu), x)
    assert not softmax.softmax.serves(wide)
    assert not norm.rms_norm.serves(jax.ShapeDtypeStruct((2, 200_000), "float32"))
    assert not rows.sum_axis.serves(jax.ShapeDtypeStruct((2, 8, 3), "float32"))
    empty = jax.eval_shape(
        lambda x: norm.layer_norm(x, eps=1e-6, contract=CONTRACT, target=gpu), jax.ShapeDtypeStruct((0, 8), "float32")
    )
    assert [a.shape for a in empty] == [(0, 8), (0, 1), (0, 1)]
