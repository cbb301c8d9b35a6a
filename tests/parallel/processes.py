"""Checks on two processes with two devices of a CPU each; `test_processes` starts both, each as a program of its own.

python -m tests.parallel.processes PORT PROCESSES PROCESS
"""

import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.testing import assert_bits_equal

AXIS = "cut"


def array(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on_all(function: Callable[..., Any], in_specs: tuple[P, ...], *given: np.ndarray[Any, Any]) -> Any:
    """Runs a function over the devices of all processes; returns its results, which all have whole."""
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    specs = [NamedSharding(mesh, spec) for spec in in_specs]
    arrays = [
        jax.make_array_from_callback(x.shape, s, lambda index, x=x: x[index]) for x, s in zip(given, specs, strict=True)
    ]
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P())
    return jax.device_get(jax.jit(mapped)(*arrays))


def block(axis: str | None, x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
    """Two products that are cut over all devices, and the gradient of the rows."""

    def forward(x: jax.Array) -> jax.Array:
        inner = bijax.elementwise(jnp.tanh)(parallel.column_parallel(x, up, axis))
        return parallel.row_parallel(inner, down, axis)

    y, pull = jax.vjp(forward, x)
    return y, *pull(y)


def plain(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.lax.psum(jnp.tanh(x @ up) @ down, AXIS)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def invariant(x: jax.Array) -> jax.Array:
    return bijax.invariant(lambda x: jax.lax.psum((x * x).sum(0), AXIS))(x)


def digests() -> list[str]:
    """Returns what is printed of the results, which are those of one device."""
    x, up, down = array(1, 4, 64), array(2, 64, 512), array(3, 512, 40)
    cut = (P(), P(None, AXIS), P(AXIS))
    gradient = parallel.accumulate_gradients(loss, unit=1, axis=AXIS)
    results = {
        "products": on_all(functools.partial(block, AXIS), cut, x, up, down),
        "gradients": on_all(lambda w, x: gradient(w, x), (P(), P(AXIS)), up, array(4, 16, 64)),
        "sums": on_all(invariant, (P(AXIS),), array(5, 8, 33)),
    }
    whole = jnp.tanh(jnp.asarray(x) @ up) @ down
    assert (on_all(plain, cut, x, up, down) != np.asarray(whole)).any(), "plain JAX has the bits of one device"
    one = jax.jit(lambda *given: block(None, *given))(x, up, down)
    assert_bits_equal(results["products"], jax.device_get(one))

    def digest(tree: Any) -> str:
        return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))).hexdigest()

    return [f"{name} {digest(result)}" for name, result in results.items()]


def disagreements(process: int) -> None:
    """What differs in a process is refused in all of them, by name."""
    weights = {"kernel": array(1, 3, 4), "scale": jnp.ones(3, jnp.bfloat16)}
    parallel.check_processes(contracts="3f21", weights=weights, options={"leaves": 8, "names": ["a"]})

    def message(**values: Any) -> str:
        with pytest.raises(ValueError, match=r"bijax\.parallel\.check_processes") as error:
            parallel.check_processes(**values)
        return str(error.value)

    said = message(contracts=f"3f2{process}", weights=weights)
    assert "got other contracts in process 1 (sha256 " in said
    assert "weights in" not in said
    changed = {**weights, "kernel": weights["kernel"] * np.where(process, -1, 1).astype(np.float32)}
    assert "got other weights in process 1 (sha256 " in message(contracts="3f21", weights=changed)
    zero = {"kernel": np.float32(-0.0 if process else 0.0)}
    assert "got other weights in process 1 (sha256 " in message(weights=zero)
    said = message(**{"contracts" if process else "weights": "3f21"})
    assert "the same names, got others in process 1 than in process 0" in said
    whole = NamedSharding(Mesh(np.array(jax.devices()), (AXIS,)), P(AXIS))
    cut = jax.make_array_from_callback((4,), whole, lambda index: np.zeros(4)[index])
    with pytest.raises(TypeError, match=r"weights\['kernel'\] must be on devices of this process"):
        parallel.check_processes(weights={"kernel": cut})


def main() -> None:
    port, processes, process = map(int, sys.argv[1:])
    if processes > 1:
        jax.distributed.initialize(f"localhost:{port}", processes, process)
        disagreements(process)
    assert (jax.process_count(), len(jax.devices())) == (processes, 4)
    for line in digests():
        print(line, flush=True)
    if processes > 1:
        multihost_utils.sync_global_devices("end")


if __name__ == "__main__":
    main()
