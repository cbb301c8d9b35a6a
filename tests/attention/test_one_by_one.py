"""Programs whose operations run one after the other: the reference of attention's tiles."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.cpu import launch
from pallas_kernels.attention.schedule.cpu import GRADIENT_REFERENCE, REFERENCE, Tile
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.runtime.one_by_one import one_by_one
from tests.tiers import full_only

SHAPES = [ProgramShape(2, 2, 8, 8), *(full_only(ProgramShape(*s)) for s in ((3, 3, 64, 64, True), (1, 2, 256, 192)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_of_attention_is_its_operations_one_after_the_other(shape: ProgramShape) -> None:
    for keys in (64, 256):
        program, given = launch._probe_program(REFERENCE, shape.capped), launch._probe(shape, keys)
        assert_bits_equal(list(one_by_one(program, *given)), list(launch._compile_and_run(program, *given)))


@pytest.mark.parametrize("shape", SHAPES)
def test_so_is_that_of_its_gradients(shape: ProgramShape, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def both(program: Any, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if program is launch.gradient_program(GRADIENT_REFERENCE, shape.capped):
            found.append((one_by_one(program, *arrays), launch._compile_and_run(program, *arrays)))
        return one_by_one(program, *arrays)

    monkeypatch.setattr(launch, "one_by_one", both)
    launch.honours_gradients.__wrapped__.__wrapped__(Tile(1, 64, one_block=True), shape)
    ((one, compiled),) = found
    assert_bits_equal(list(one), list(compiled))


def test_a_reference_that_differs_is_not_used_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(program: Any, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.nextafter(x, np.float32(1)) for x in one_by_one(program, *arrays))

    monkeypatch.setattr(launch, "one_by_one", other)
    launch._reference_of_probe.cache_clear()
    assert not launch.honours_contract.__wrapped__.__wrapped__(Tile(3, 1), SHAPES[0])
    with pytest.raises(UnsupportedError, match="joins operations"):
        launch.honours_contract.__wrapped__.__wrapped__(REFERENCE, SHAPES[0])
    launch._reference_of_probe.cache_clear()


def test_operations_are_not_joined() -> None:
    rng = np.random.default_rng(0)
    x, y, z = rng.standard_normal((3, 4, 128)).astype(np.float32)

    def program(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array]:
        return (x * y + z,)

    (found,) = one_by_one(program, x, y, z)
    assert_bits_equal(found, (x * y) + z)
    # The control: XLA joins them to one fused multiply-add.
    assert (np.asarray(jax.jit(program)(x, y, z)[0]).view(np.uint32) != found.view(np.uint32)).any()


def test_operations_mean_what_they_mean_to_xla() -> None:
    """On what is exact or correctly rounded, or compiled: the results of a jitted program, subnormal numbers too."""

    def program(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        def body(i: jax.Array, a: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(a, a[:1] * 2.0, (i, 0))

        moved = jax.lax.fori_loop(0, n[0], body, x)
        small = jax.lax.optimization_barrier(x * jnp.float32(1e-38))
        late = jax.lax.dynamic_slice(x, (n[1], 1), (2, 3))
        chosen = jax.lax.cond(n[0] > 2, lambda: x / (x - 9), lambda: x - 1)
        most = jnp.maximum(x, 0.5), jnp.max(x, axis=1), jnp.cumsum(x, axis=1)
        whole = -n // 2, n % 3, jnp.sign(n), jnp.pad(x, 1), jnp.concatenate([x, x]), jax.lax.iota(jnp.int32, 4)
        product = jnp.round(x.T) @ jnp.round(x)  # exact: compilers add its terms in different orders
        return moved, small, small * jnp.float32(1e20), late, chosen, *most, *whole, jnp.exp(x), product, x[::2, 1:]

    x = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    for n in (np.array([3, 7], np.int32), np.array([1, -9], np.int32)):
        assert_bits_equal(list(one_by_one(program, x, n)), [np.asarray(y) for y in jax.jit(program)(x, n)])


def test_it_runs_while_another_program_is_traced() -> None:
    x = np.arange(4, dtype=np.float32)

    def traced(y: jax.Array) -> jax.Array:
        (known,) = one_by_one(lambda x: (jnp.exp(x),), x)
        return y + known

    assert functools.partial(jax.jit, traced)()(jnp.zeros(4)).shape == (4,)
