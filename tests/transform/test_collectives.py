"""Sums over devices: a fixed tree, any shape; in a process of its own, which has four CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
import bijax

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rng = np.random.default_rng(0)

def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])

def summed(axes, how):
    def shard(x):
        return lax.psum(x[0], axes) if how == "psum" else lax.psum_scatter(x[0], axes, scatter_dimension=0, tiled=True)
    out = P() if how == "psum" else P(axes)
    return jax.jit(bijax.invariant(jax.shard_map(
        shard, mesh=mesh, in_specs=P(("a", "b")), out_specs=out, axis_names={"a", "b"},
        check_vma=set(axes) == {"a", "b"})))

@jax.jit
def added(x):
    a, b, c, d = (jax.lax.optimization_barrier(s.astype(jnp.float32)) for s in x)
    return ((a + b) + (c + d)).astype(x.dtype), (((a + b) + c) + d).astype(x.dtype)

for dtype, shape in ((jnp.float32, (4,)), (jnp.float32, (300, 77)), (jnp.bfloat16, (300, 77))):
    x = jnp.asarray(rng.standard_normal((4, *shape)) * 2.0 ** rng.integers(-20, 20, (4, *shape)), dtype)
    as_tree, upwards = added(x)
    assert len(shape) == 1 or (bits(as_tree) != bits(upwards)).any()
    for how in ("psum", "psum_scatter"):
        program = summed(("a", "b"), how).lower(x)
        assert "all_reduce" not in program.as_text(), how
        assert "reduce_scatter" not in program.as_text(), how
        assert (bits(program.compile()(x)) == bits(as_tree)).all(), (how, dtype, shape)

z = jnp.asarray(rng.standard_normal((4, 300, 77)) + 1j * rng.standard_normal((4, 300, 77)), jnp.complex64)
for how in ("psum", "psum_scatter"):  # complex numbers, by parts
    total, both = summed(("a", "b"), how)(z), [added(part)[0] for part in (z.real, z.imag)]
    assert all((bits(x) == bits(y)).all() for x, y in zip((total.real, total.imag), both, strict=True)), how

x = jnp.asarray(rng.standard_normal((4, 6)), jnp.float32)
over_b = jax.jit(bijax.invariant(jax.shard_map(
    lambda x: lax.psum(x, "b"), mesh=mesh, in_specs=P(("a", "b")), out_specs=P("a"))))
assert (bits(over_b(x)) == bits(jnp.stack([x[0] + x[1], x[2] + x[3]]))).all()

grouped = jax.jit(bijax.invariant(jax.shard_map(
    lambda x: lax.psum(x, ("a", "b"), axis_index_groups=[[0, 2], [1, 3]]),
    mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)))
assert (bits(grouped(x)) == bits(jnp.stack([x[0] + x[2], x[1] + x[3]] * 2))).all()

assert jax.jit(bijax.invariant(jax.shard_map(
    lambda n: lax.psum(n, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())))(jnp.arange(4)).tolist() == [2, 4]

three = jax.make_mesh((3,), ("a",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
for reduce in (lax.psum, lambda x, axis: lax.psum_scatter(x, axis, tiled=True)):
    program = jax.jit(bijax.invariant(jax.shard_map(
        lambda x: reduce(x, "a"), mesh=three, in_specs=P("a"), out_specs=P("a"), check_vma=False)))
    try:
        program.lower(jnp.ones(9))
    except bijax.NotInvariantError as error:
        assert "must be a power of two, got 3; use a mesh" in str(error), error
    else:
        raise AssertionError("a sum over three devices was lowered")

# A sum rounded to bfloat16 stays rounded, whatever is computed next.
x = jnp.asarray(rng.standard_normal((4, 512)), jnp.bfloat16)
program = jax.jit(bijax.invariant(jax.shard_map(
    lambda x: lax.psum(x, ("a", "b")).astype(jnp.float32), mesh=mesh, in_specs=P(("a", "b")), out_specs=P())))
assert (bits(program(x)) == bits(program(x).astype(jnp.bfloat16).astype(jnp.float32))).all()

w = jnp.asarray(rng.standard_normal((512, 48)), jnp.float32)
def loss(w, x):
    parts = jax.shard_map(lambda x, w: lax.psum(x @ w, "a"), mesh=mesh,
        in_specs=(P("b", "a"), P("a", None)), out_specs=P("b"))(x, w)
    return (parts ** 2).sum(-1)
rows = jnp.asarray(rng.standard_normal((32, 512)), jnp.float32)
for transform in (lambda f: f, lambda f: jax.grad(lambda x, w: f(w, x).sum())):
    program = jax.jit(bijax.invariant(loss if transform(loss) is loss else transform(loss)))
    call = (lambda x: program(w, x)) if transform(loss) is loss else (lambda x: program(x, w))
    whole = bits(call(rows))
    for m in (2, 16):
        assert (bits(call(rows[:m])) == whole[:m]).all(), m
print("held")
"""


def test_sums_over_devices() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "held\n"
