"""Constants of every dtype that enter a program which an operation holds, on a CPU.

There a constant may meet another in a choice or a sum, whose result goes into a function; then all that the result is
computed of is hidden from XLA, whatever its dtype.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.fuzz.guests import FOREIGN

Array = jax.Array
Inner = Callable[[Any, Array, Array], Array]

# fmt: off
DTYPES: Final = (
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64", "complex128", "key",
)
FEW: Final = ("int4",)
# fmt: on


@jax.custom_jvp
def with_own_rule(flag: Any, c: Array, x: Array) -> Array:
    return inner(flag, c, x)


with_own_rule.defjvp(lambda primals, tangents: (with_own_rule(*primals), tangents[2]))


def inner(flag: Any, c: Array, x: Array) -> Array:
    if jnp.issubdtype(flag.dtype, jax.dtypes.prng_key):
        chosen = jax.vmap(lambda key: jax.random.uniform(key))(flag)
    else:
        number = flag.real.astype(jnp.float32)
        chosen = jnp.where(number > 0, c, 1e-39) + number
    return x + jnp.exp(jnp.where(chosen > 0, c, chosen))


def repeated(flag: Any, c: Array, x: Array) -> Array:
    last: Array = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, *s[1:3], inner(*s[1:])), (0, flag, c, x))[3]
    return last


HOLDERS: Final[dict[str, Callable[[Any, Array, Array], Array]]] = {
    "jit": lambda k, c, x: jax.jit(inner)(k, c, x),
    "jit in jit": lambda k, c, x: jax.jit(lambda *a: jax.jit(inner)(*a))(k, c, x),
    "remat": lambda k, c, x: jax.checkpoint(inner)(k, c, x),
    "custom_jvp": with_own_rule,
    "scan, constant": lambda k, c, x: lax.scan(lambda s, _: (inner(k, c, s), None), x, None, length=2)[0],
    "scan, carry": lambda k, c, x: lax.scan(lambda s, _: ((*s[:2], inner(*s)), None), (k, c, x), None, length=2)[0][2],
    "scan, sequence": lambda k, c, x: lax.scan(lambda s, a: (s, inner(*(v[None] for v in a))[0]), 0, (k, c, x))[1],
    "while": repeated,
    "cond": lambda k, c, x: lax.cond(x[0] > -9, inner, lambda k, c, x: x, k, c, x),
    "switch": lambda k, c, x: lax.switch(jnp.int32(1), [lambda k, c, x: x, inner], k, c, x),
    "map": lambda k, c, x: lax.map(lambda a: inner(*(v[None] for v in a))[0], (k, c, x)),
    "another library's": lambda k, c, x: FOREIGN.bind(k, c, x, function=inner),
}


def constant(dtype: str, length: int, ones: bool) -> Array:
    if dtype == "key":
        keys: Array = jax.random.split(jax.random.key(3), 1)[jnp.zeros(length, int)]
        return keys
    return jnp.full(length, int(ones), dtype)


@pytest.mark.tier("full", fault=("bool",), fast=FEW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_of_constants_are_lowered_and_invariant(dtype: str) -> None:
    """One program with all kinds of holders, for the sake of compile time."""
    with jax.enable_x64(dtype.endswith(("64", "128"))):

        def program(x: Array) -> list[Array]:
            found = []
            for ones in (False, True):
                # Whole arrays and repeated scalars: of one row XLA takes the latter for the former.
                c = jnp.zeros(x.shape, jnp.float32)
                found += [holder(constant(dtype, len(x), ones), c, x) for holder in HOLDERS.values()]
            return found

        x = on_device(np.random.default_rng(0).standard_normal(8), jnp.float32)
        run = jax.jit(bijax.invariant(program))
        whole = run(x)
        for size in (1, 3):
            assert_bits_equal(run(x[:size]), [rows[:size] for rows in whole], err_msg=str(size))
        for rows, plain in zip(whole, jax.jit(program)(x), strict=True):
            np.testing.assert_allclose(rows, plain, rtol=1e-5)


@pytest.mark.tier("fault")
def test_arrays_of_different_numbers_of_every_dtype_are_lowered_and_invariant() -> None:
    """Arrays of the program's owner, whose numbers the lowering reads or not; all dtypes in one program."""
    kinds = [dtype for dtype in DTYPES if dtype != "key"]
    with jax.enable_x64(True):
        arrays = [np.arange(8).astype(jnp.dtype(dtype)) for dtype in kinds]

        def program(x: Array) -> list[Array]:
            c = jnp.zeros(x.shape, jnp.float32)
            return [HOLDERS["jit"](jnp.asarray(a)[: len(x)], c, x) for a in arrays] + [
                lax.map(lambda r, a=a: (jnp.where(r > 0, a, a + a) * r).real, x[:, None].astype(a.dtype).real)
                for a in (np.array([1, 1j, 0, 2], "complex64"), np.array([1, 1j, 0, 2], "complex128"))
            ]

        x = on_device(np.random.default_rng(0).standard_normal(8), jnp.float32)
        run = jax.jit(bijax.invariant(program))
        whole = run(x)
        for size in (1, 3):
            assert_bits_equal(run(x[:size]), [rows[:size] for rows in whole], err_msg=str(size))


@pytest.mark.tier("fault")
def test_flags_in_the_carry_of_a_policy() -> None:
    """A recurrent policy whose state starts from constants, and whose flags end episodes."""
    weights = jnp.full((5, 5), 0.1)

    def policy(xs: Array) -> Array:
        def step(carry: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
            h, done = carry
            h = jnp.tanh(jnp.where(done[:, None], 0.0, h) @ weights + x)
            return (h, h[:, 0] > 0.5), h

        n = xs.shape[1]
        return jnp.moveaxis(lax.scan(step, (jnp.zeros((n, 5)), jnp.zeros(n, bool)), xs)[1], 1, 0)

    xs = on_device(np.random.default_rng(1).standard_normal((7, 8, 5)), jnp.float32)
    run = jax.jit(bijax.invariant(policy))
    whole = run(xs)
    for size in (1, 3):
        assert_bits_equal(run(xs[:, :size]), whole[:size], err_msg=str(size))


def test_plain_jax_follows_the_batch_where_constants_meet() -> None:
    """The control: subnormal numbers are kept where XLA computes them, and are zeros where the processor does."""
    small = jnp.bfloat16(1e-39)
    chosen = jax.jit(lambda flag, c: jnp.where(flag, c, 0) + small)

    def program(x: Array) -> Array:
        sums: Array = chosen(jnp.ones(x.shape, bool), jnp.full_like(x, 1e-39, jnp.bfloat16))
        return sums

    one, several = (np.asarray(jax.jit(program)(jnp.zeros((n, 13)))) for n in (1, 3))
    assert (one[0] != several[0]).any()
