"""Checks of kernels that several GPUs run together, as programs that eight devices of a CPU lower for GPUs.

A program of its own, which `test_peers` starts. The bits are compared on GPUs by `test_peers_gpu`.
"""

import re
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.dispatch import peers
from bijax.testing import assert_bits_equal
from pallas_kernels.devices import peer_access
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


def moves() -> None:
    """Results of experts are read where they are by one kernel, and copied and sent by XLA elsewhere."""
    tokens, width, experts, topk = 4096, 1024, 8, 4

    def block(x: jax.Array, selected: jax.Array, weights: jax.Array) -> jax.Array:
        sent = parallel.moe_dispatch(x, selected, AXIS, num_experts=experts, zero_unused=False)
        return parallel.moe_combine(sent.rows, sent, weights, AXIS)

    def types(tokens: int, width: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
        like = jax.ShapeDtypeStruct
        return [like((tokens, width), dtype), like((tokens, topk), jnp.int32), like((tokens, topk), jnp.float32)]

    for devices in (2, 4, 8):
        text = lowered(block, on(0, devices), *types(tokens, width, jnp.bfloat16), out=P(AXIS))
        assert "peer_rows" in text
        assert len(re.findall(r"stablehlo\.all_to_all", text)) == 1, "the numbers of the rows alone travel so"
        assert re.search(r"stablehlo\.all_to_all[^\n]*xi32>\n", text)
    others = {
        "GPUs that are not the first": lowered(block, on(4, 2), *types(tokens, width, jnp.bfloat16), out=P(AXIS)),
        "few rows": lowered(block, on(0, 2), *types(64, width, jnp.bfloat16), out=P(AXIS)),
        "narrow rows": lowered(block, on(0, 2), *types(tokens, 512 + 64, jnp.bfloat16), out=P(AXIS)),
        "rows of 32 bits": lowered(block, on(0, 2), *types(tokens, width, jnp.float32), out=P(AXIS)),
    }
    for why, text in others.items():
        assert "peer_rows" not in text, why
        assert re.findall(r"stablehlo\.all_to_all", text), why


def reach() -> None:
    """The driver says which GPUs reach each other; without its answer XLA's collectives serve."""

    class Gpu:
        platform = "gpu"

        def __init__(self, number: int | None) -> None:
            self.local_hardware_id = number

    class Driver:
        """A driver that knows three GPUs, of which the first two have NVLink and all have PCIe."""

        def __init__(self, failing: str = "") -> None:
            self.failing = failing

        def cuDeviceGet(self, handle: Any, number: Any) -> int:
            handle._obj.value = 7 + number.value  # a handle need not be the ordinal
            return 100 if self.failing == "cuDeviceGet" else 0

        def cuDeviceGetP2PAttribute(self, answer: Any, attribute: Any, device: Any, peer: Any) -> int:
            assert device.value != peer.value
            answer._obj.value = int(attribute.value == 2 or {device.value, peer.value} == {7, 8})
            return 1 if self.failing == "cuDeviceGetP2PAttribute" else 0

    def reaches(driver: Any, *numbers: int | None) -> bool:
        def library(name: str) -> Any:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("no such file")
            return driver

        peer_access._reaches.cache_clear()
        gpus: Any = [Gpu(number) for number in numbers]
        with unittest.mock.patch.object(peer_access.ctypes, "CDLL", library):
            return peer_access.reach_each_other(gpus)

    assert reaches(Driver(), 0, 1)
    assert not reaches(Driver(), 0, 2), "PCIe has no atomic additions"
    assert not reaches(Driver(), 0, 1, 2)
    assert not reaches(Driver(), 0, None)
    assert not reaches(Driver("cuDeviceGet"), 0, 1)
    assert not reaches(Driver("cuDeviceGetP2PAttribute"), 0, 1)
    assert not reaches(object(), 0, 1), "an old driver"
    assert not reaches(None, 0, 1)
    assert reaches(None, 0), "a single GPU has no other to reach"
    assert peer_access.reach_each_other(jax.devices()), "programs for other machines"
    with unittest.mock.patch.object(peers, "reach_each_other", lambda devices: len(devices) != 2):
        assert "mosaic_gpu" not in lowered(total, on(0, 2), of(2))


def contracts() -> None:
    """The contract of a sum is that of the tree, however it is computed."""
    x = jax.ShapeDtypeStruct((2, *SHAPE), jnp.float32)
    run = jax.shard_map(total, mesh=on(0, 2), in_specs=P(AXIS), out_specs=WHOLE)
    found = [bijax.contracts(run, x, platform=p, architecture=a).ids for p, a in (("cpu", None), ("cuda", "sm_90"))]
    assert found[0] == found[1], found
    assert "devices/v2/f32-tree" in found[0], found


def main() -> None:
    for check in (sums, entries, moves, reach, contracts):
        check()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
