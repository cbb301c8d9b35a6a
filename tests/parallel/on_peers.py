"""Checks of kernels that several GPUs run together, as programs that eight devices of a CPU lower for GPUs.

A program of its own, which `test_peers` starts. The bits are compared on GPUs by `test_peers_gpu`.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.testing import assert_bits_equal
from tests.parallel.on_devices import AXIS, array

SHAPE = 1024, 2048
WHOLE = P()
COLLECTIVE = re.compile(r"stablehlo\.(all_\w+|reduce_scatter)")


def on(first: int, devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + devices]), (AXIS,), axis_types=(AxisType.Auto,))


def lowered(function: Callable[..., Any], mesh: Mesh, *types: Any, out: P = WHOLE, architecture: str = "sm_90") -> str:
    program: Any = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=out))
    with bijax.lowering_for(architecture):
        text: str = program.trace(*types).lower(lowering_platforms=("cuda",)).as_text()
    return text


def total(x: jax.Array) -> jax.Array:
    return parallel.psum(x[0], AXIS, dtype="bfloat16")


def part(x: jax.Array) -> jax.Array:
    return parallel.psum_scatter(x[0], AXIS, dtype="bfloat16")


def of(devices: int, shape: tuple[int, ...] = SHAPE, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((devices, *shape), dtype)


def sums() -> None:
    """One kernel adds where GPUs reach each other's memory, and XLA's collectives move the terms elsewhere."""
    for function, out in ((total, WHOLE), (part, P(AXIS))):
        text = lowered(function, on(0, 2), of(2), out=out)
        assert "mosaic_gpu" in text
        assert not COLLECTIVE.findall(text)
    others = {
        "GPUs that are not the first": lowered(total, on(4, 2), of(2)),
        "a part of these": lowered(part, on(4, 2), of(2), out=P(AXIS)),
        "four GPUs": lowered(total, on(0, 4), of(4)),
        "another architecture": lowered(total, on(0, 2), of(2), architecture="sm_80"),
        "few elements": lowered(total, on(0, 2), of(2, (16, 2048))),
        "a part without whole blocks": lowered(total, on(0, 2), of(2, (2051, 1023))),
        "terms of 16 bits": lowered(total, on(0, 2), of(2, dtype=jnp.bfloat16)),
    }
    two = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    others["one of two axes"] = lowered(total, two, of(8), out=P("data"))
    for why, text in others.items():
        assert "mosaic_gpu" not in text, why
        assert COLLECTIVE.findall(text), why


def entries() -> None:
    """An axis of `jax.vmap` is no mesh axis; derivatives and the CPU take the other ways."""
    x = array(1, 2, *SHAPE)
    expected = jax.jit(lambda x: parallel.tree_sum(x, dtype="bfloat16"))(x)
    run = jax.jit(jax.shard_map(total, mesh=on(0, 2), in_specs=P(AXIS), out_specs=WHOLE))
    assert_bits_equal(run(x), expected)

    def mapped(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: parallel.psum(x, AXIS))(x[0])

    text = lowered(mapped, on(0, 2), of(2, (2, *SHAPE)))
    assert "mosaic_gpu" in text
    run = jax.jit(jax.shard_map(mapped, mesh=on(0, 2), in_specs=P(AXIS), out_specs=WHOLE))
    pairs = jnp.stack([x, x + 1], axis=1)
    assert_bits_equal(run(pairs), jax.jit(parallel.tree_sum)(pairs))

    def loss(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: parallel.psum(jnp.tanh(x[0]), AXIS).sum())(x)

    assert "mosaic_gpu" not in lowered(loss, on(0, 2), of(2), out=P(AXIS))  # the sum itself is not needed


def contracts() -> None:
    """The contract of a sum is that of the tree, however it is computed."""
    x = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)
    run = jax.shard_map(total, mesh=on(0, 2), in_specs=P(AXIS), out_specs=WHOLE)
    found = [bijax.contracts(run, x, platform=p, architecture=a).ids for p, a in (("cpu", None), ("cuda", "sm_90"))]
    assert found[0] == found[1], found
    assert "devices/v2/f32-tree" in found[0], found


def main() -> None:
    for check in (sums, entries, contracts):
        check()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
