"""The library's operations inside of `jax.shard_map`: their types there, and the bits of rows and of gradients."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import bijax
from bijax.inspect.kernel_table import CASES, Case

MESH = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDED = {"all arguments": lambda i, n: True, "the first": lambda i, n: i == 0, "the last": lambda i, n: i == n - 1}


def names(case: Case) -> str:
    return f"{case.operation} {case.case}"


@pytest.mark.parametrize("which", SHARDED)
@pytest.mark.parametrize("case", [c for c in CASES if c.operation != "psum" and c.dtypes[0] != "float64"], ids=names)
def test_types(case: Case, which: str) -> None:
    """Arguments that differ from device to device meet arguments that do not, and every result differs."""
    arguments = case.arrays(case.dtypes[0])
    sharded = [bool(a.shape) and SHARDED[which](i, len(arguments)) for i, a in enumerate(arguments)]
    if not any(sharded):
        pytest.skip("that argument has no rows")
    given = [
        jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]), a.dtype) if s else a
        for a, s in zip(arguments, sharded, strict=True)
    ]

    def run(*arrays: jax.Array) -> Any:
        results = [x for x in jax.tree.leaves(case.function(*arrays)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return [jnp.sum(x.astype(jnp.float32))[None] for x in results]

    specs = tuple(P("d") if s else P() for s in sharded)
    jax.eval_shape(jax.shard_map(run, mesh=MESH, in_specs=specs, out_specs=P("d")), *given)


def test_what_differs_is_not_taken_for_replicated() -> None:
    def product(multiply: Any) -> Any:
        sharded = jax.shard_map(lambda x: multiply(x, x.T), mesh=MESH, in_specs=P("d"), out_specs=P())
        return jax.eval_shape(sharded, jnp.ones((8, 3)))

    for multiply in (jnp.matmul, bijax.matmul):
        with pytest.raises(ValueError, match="replicat"):
            product(multiply)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import bijax
from bijax.ops.rotary.heads import rotate_heads
from bijax.sampling import sample
from bijax.testing import assert_bits_equal

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
array = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)

def heads(x): return x.reshape(x.shape[0], 4, 3, 8)
def attention(x): return bijax.dot_product_attention(heads(x), heads(x), heads(x), is_causal=True).reshape(x.shape)
def turned(x): return rotate_heads(heads(x), jnp.ones((1, 4, 4)), jnp.full((1, 4, 4), 0.5)).reshape(x.shape)

def layer(w, x):
    x = bijax.rms_norm(attention(x) + turned(x), w["norm"])
    x = bijax.gated_matmul(x, w["gate"], w["up"]) + bijax.matmul(bijax.softmax(x), w["down"])
    return bijax.layer_norm(x, w["scale"], w["shift"])

def rows(w, x): return bijax.softmax_cross_entropy(bijax.matmul(layer(w, x), w["out"]), labels[: x.shape[0]])
def loss(w, x):
    losses = rows(w, x)
    return bijax.sum(losses, axis=0), losses

matrices = {name: (96, 48) for name in ("gate", "up", "down")}
shapes = matrices | {"norm": (96,), "scale": (48,), "shift": (48,), "out": (48, 33)}
w = {name: array(*shape) for name, shape in shapes.items()}
x, labels = array(6, 96), jnp.asarray(rng.integers(0, 33, 3))
specs = (P(), P("d"))

# The gradient of replicated weights is the sum of those of the devices.
gradient = jax.grad(loss, (0, 1), has_aux=True)
(dw, dx), losses = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=((P(), P("d")), P("d"))))(w, x)
alone = jax.jit(gradient)
((dw_0, dx_0), losses_0), ((dw_1, dx_1), losses_1) = alone(w, x[:3]), alone(w, x[3:])
assert_bits_equal(losses, jnp.concatenate([losses_0, losses_1]))
assert_bits_equal(dx, jnp.concatenate([dx_0, dx_1]))
assert_bits_equal(dw, jax.tree.map(jnp.add, dw_0, dw_1))

# From outside, and without JAX's types.
for checked in (True, False):
    gates = lambda w, x: bijax.swiglu(x) * w
    sharded = jax.shard_map(gates, mesh=mesh, in_specs=specs, out_specs=P("d"), check_vma=checked)
    ours, wanted = (jax.jit(jax.grad(lambda w, x: f(w, x).sum(), 1))(w["scale"], x) for f in (sharded, gates))
    assert_bits_equal(ours, wanted)

accumulated = bijax.accumulate_gradients(lambda w, x: (x @ w).sum(), unit=3, reduction="sum")
total = jax.shard_map(lambda w, x: accumulated(w, x)[1], mesh=mesh, in_specs=specs, out_specs=P())
parts = [accumulated(w["down"], part)[1] for part in (x[:3], x[3:])]
assert_bits_equal(jax.jit(total)(w["down"], x), parts[0] + parts[1])

seeds = jnp.arange(6, dtype=jnp.uint32)
draw = lambda x, seeds: sample(x, seeds=seeds, positions=seeds, temperature=0.8, top_k=9, top_p=0.9).tokens
sharded = jax.shard_map(draw, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
assert_bits_equal(jax.jit(sharded)(x, seeds), jax.jit(draw)(x, seeds))

# On a GPU each device runs the kernels for Hopper.
product = lambda w, x: bijax.sum(bijax.matmul(x, w).astype(jnp.float32), axis=(0, 1))
sharded = jax.shard_map(jax.grad(product), mesh=mesh, in_specs=specs, out_specs=P())
given = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 2
with bijax.lowering_for("sm_90"):
    text = jax.jit(sharded).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
assert "mosaic_gpu" in text
"""


@pytest.mark.tier("full")
def test_bits_on_two_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
