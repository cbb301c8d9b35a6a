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
    for devices in (2, 4):
        for function, out in ((total, WHOLE), (part, P(AXIS))):
            text = lowered(function, on(0, devices), of(devices), out=out)
            assert "mosaic_gpu" in text
            assert not COLLECTIVE.findall(text)
    others = {
        "GPUs that are not the first": lowered(total, on(4, 4), of(4)),
        "a part of the first": lowered(part, on(4, 2), of(2), out=P(AXIS)),
        "eight GPUs": lowered(total, on(0, 8), of(8)),
        "another architecture": lowered(total, on(0, 4), of(4), architecture="sm_80"),
        "few elements": lowered(total, on(0, 4), of(4, (16, 2048))),
        "a part without whole blocks": lowered(total, on(0, 4), of(4, (1027, 1023))),
        "terms of 16 bits": lowered(total, on(0, 4), of(4, dtype=jnp.bfloat16)),
    }
    two = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    others["one of two axes"] = lowered(total, two, of(8), out=P("data"))
    for why, text in others.items():
        assert "mosaic_gpu" not in text, why
        assert COLLECTIVE.findall(text), why


def entries() -> None:
    """An axis of `jax.vmap` is no mesh axis; derivatives and the CPU take the other ways."""
    x = array(1, 4, *SHAPE)
    expected = jax.jit(lambda x: parallel.tree_sum(x, dtype="bfloat16"))(x)
    run = jax.jit(jax.shard_map(total, mesh=on(0, 4), in_specs=P(AXIS), out_specs=WHOLE))
    assert_bits_equal(run(x), expected)

    def mapped(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: parallel.psum(x, AXIS))(x[0])

    text = lowered(mapped, on(0, 4), of(4, (2, *SHAPE)))
    assert "mosaic_gpu" in text
    run = jax.jit(jax.shard_map(mapped, mesh=on(0, 4), in_specs=P(AXIS), out_specs=WHOLE))
    pairs = jnp.stack([x, x + 1], axis=1)
    assert_bits_equal(run(pairs), jax.jit(parallel.tree_sum)(pairs))

    def loss(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: parallel.psum(jnp.tanh(x[0]), AXIS).sum())(x)

    assert "mosaic_gpu" not in lowered(loss, on(0, 4), of(4), out=P(AXIS))  # the sum itself is not needed


def contracts() -> None:
    """The contract of a sum is that of the tree, however it is computed."""
    x = jax.ShapeDtypeStruct((4, *SHAPE), jnp.float32)
    run = jax.shard_map(total, mesh=on(0, 4), in_specs=P(AXIS), out_specs=WHOLE)
    found = [bijax.contracts(run, x, platform=p, architecture=a).ids for p, a in (("cpu", None), ("cuda", "sm_90"))]
    assert found[0] == found[1], found
    assert "devices/v2/f32-tree" in found[0], found


def experts() -> None:
    """Used rows alone travel back where GPUs reach each other's memory; gradients go the other way."""
    rows, topk, width = 4096, 2, 2048

    def block(x: jax.Array, selected: jax.Array, weights: jax.Array) -> jax.Array:
        sent = parallel.moe_dispatch(x, selected, AXIS, num_experts=8, zero_unused=False)
        return parallel.moe_combine(sent.rows, sent, weights, AXIS)

    types = [
        jax.ShapeDtypeStruct((rows, n), dtype)
        for n, dtype in ((width, jnp.bfloat16), (topk, jnp.int32), (topk, jnp.float32))
    ]
    assert "all_to_all" not in lowered(block, on(0, 4), *types, out=P(AXIS))
    assert "all_to_all" in lowered(block, on(4, 4), *types, out=P(AXIS))

    def gradient(x: jax.Array, selected: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.grad(lambda x: block(x, selected, weights).astype(jnp.float32).sum())(x)

    assert "all_to_all" in lowered(gradient, on(0, 4), *types, out=P(AXIS))


def main() -> None:
    for check in (sums, entries, contracts, experts):
        check()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
