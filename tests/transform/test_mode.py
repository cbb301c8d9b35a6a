"""When the mode holds and when it does not: blocks, threads, caches, ahead-of-time programs, errors."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.transform.compositions import normal
from tests.transform.lowered import unmarked_in, unmarked_sums

W = normal(1, 300, 77)
X = normal(2, 33, 300)
SUMS = 3
"""How many sums of floats there are in `f`."""


def f(x: jax.Array) -> jax.Array:
    y = jnp.exp(jnp.tanh(x @ W))
    return (y / y.sum(-1, keepdims=True)) @ W.T


def unmarked(fn: Callable[..., Any] = f) -> int:
    """How many sums of a function are left to the compiler, if it is traced and lowered now."""
    return len(unmarked_sums(jax.jit(lambda x: fn(x)), X))


@pytest.fixture(autouse=True)
def _off_before_and_after() -> Iterator[None]:
    assert not bijax.is_batch_invariant_mode_enabled()
    yield
    assert not bijax.is_batch_invariant_mode_enabled()
    assert unmarked() == SUMS


def test_blocks_nest_and_restore() -> None:
    seen = []

    def look() -> None:
        seen.append((bijax.is_batch_invariant_mode_enabled(), unmarked()))

    with bijax.set_batch_invariant_mode():
        look()
        with bijax.set_batch_invariant_mode(False):
            look()
            with bijax.set_batch_invariant_mode(True):
                look()
            look()
        look()
    look()
    on, off = (True, 0), (False, SUMS)
    assert seen == [on, off, on, off, on, off]


def test_an_exception_restores() -> None:
    with pytest.raises(ZeroDivisionError), bijax.set_batch_invariant_mode(), bijax.set_batch_invariant_mode(False):
        _ = 1 / 0


def test_decorator() -> None:
    @bijax.set_batch_invariant_mode()
    def decorated(x: jax.Array) -> jax.Array:
        assert bijax.is_batch_invariant_mode_enabled()
        return f(x)

    for _ in range(2):
        assert unmarked(decorated) == 0
        assert not bijax.is_batch_invariant_mode_enabled()


def test_enable_and_disable() -> None:
    bijax.enable_batch_invariant_mode()
    bijax.enable_batch_invariant_mode()
    assert unmarked() == 0
    bijax.disable_batch_invariant_mode()
    assert not bijax.is_batch_invariant_mode_enabled()
    assert unmarked() == SUMS
    bijax.disable_batch_invariant_mode()


def test_enabled_in_a_block_ends_with_the_block() -> None:
    with bijax.set_batch_invariant_mode(False):
        bijax.enable_batch_invariant_mode()
        assert unmarked() == 0
    assert not bijax.is_batch_invariant_mode_enabled()


def test_disabled_in_a_block_until_the_block_ends() -> None:
    with bijax.set_batch_invariant_mode():
        with bijax.set_batch_invariant_mode():
            bijax.disable_batch_invariant_mode()
            assert not bijax.is_batch_invariant_mode_enabled()
            assert unmarked() == SUMS
            bijax.enable_batch_invariant_mode()
            assert unmarked() == 0
            bijax.disable_batch_invariant_mode()
        assert bijax.is_batch_invariant_mode_enabled()
        assert unmarked() == 0


def test_disabled_inside_an_invariant_function() -> None:
    def disables(x: jax.Array) -> jax.Array:
        bijax.disable_batch_invariant_mode()
        return f(x)

    assert unmarked(bijax.invariant(disables)) == SUMS
    assert unmarked(bijax.invariant(f)) == 0


def test_threads_have_their_own() -> None:
    seen: list[tuple[bool, int]] = []

    def look() -> None:
        seen.append((bijax.is_batch_invariant_mode_enabled(), unmarked()))

    def enable_and_look() -> None:
        bijax.enable_batch_invariant_mode()
        look()

    for target in (look, enable_and_look, look):
        with bijax.set_batch_invariant_mode(target is look):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [(False, SUMS), (True, 0), (False, SUMS)]


def test_all_threads() -> None:
    """Threads that were there before and new ones; blocks and threads with a mode of their own keep it."""
    jitted = jax.jit(f)
    plain, inside = np.asarray(jitted(X)), np.asarray(bijax.invariant(jitted)(X))
    assert (bits(plain) != bits(inside)).any()

    def look() -> tuple[bool, bool]:
        """Whether the mode is on, and whether bits are invariant ones."""
        return bijax.is_batch_invariant_mode_enabled(), np.array_equal(bits(jitted(X)), bits(inside))

    def look_in_a_plain_block() -> tuple[bool, bool]:
        with bijax.set_batch_invariant_mode(False):
            return look()

    with ThreadPoolExecutor(1) as old, ThreadPoolExecutor(2) as own:
        assert old.submit(look).result() == (False, False)
        own.submit(bijax.disable_batch_invariant_mode).result()
        bijax.enable_batch_invariant_mode(all_threads=True)
        try:
            with ThreadPoolExecutor(3) as new:
                found = [pool.submit(look) for pool in (old, new, new, new)]
                assert [future.result() for future in found] == [(True, True)] * 4
                assert look() == (True, True)
                assert new.submit(look_in_a_plain_block).result() == look_in_a_plain_block() == (False, False)
                bijax.disable_batch_invariant_mode()  # in this thread alone
                assert (look(), new.submit(look).result()) == ((False, False), (True, True))
                bijax.enable_batch_invariant_mode(all_threads=True)  # and again
                assert look() == new.submit(look).result() == (True, True)
        finally:
            old.submit(bijax.disable_batch_invariant_mode, all_threads=True).result()
        assert old.submit(look).result() == (False, False)
    bijax.disable_batch_invariant_mode()
    assert look() == (False, False)
    with pytest.raises(TypeError, match="all_threads must be True or False, got 'yes'"):
        bijax.enable_batch_invariant_mode(all_threads="yes")  # type: ignore[arg-type]


def test_a_compiled_program_is_checked_in_all_threads() -> None:
    compiled = jax.jit(f).lower(X).compile()
    call = jax.stages.Compiled.__call__
    bijax.enable_batch_invariant_mode(all_threads=True)
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(bijax.NotInvariantError):
            pool.submit(compiled, X).result()
    finally:
        bijax.disable_batch_invariant_mode(all_threads=True)
    assert jax.stages.Compiled.__call__ is call
    compiled(X)


def test_caches_are_not_shared() -> None:
    jitted = jax.jit(f)
    outside = np.asarray(jitted(X))
    with bijax.set_batch_invariant_mode():
        inside = np.asarray(jitted(X))
        assert_bits_equal(jitted(X[:1]), inside[:1])
    assert (bits(inside) != bits(outside)).any()
    assert_bits_equal(jitted(X), outside)
    assert_bits_equal(bijax.invariant(jitted)(X), inside)
    assert_bits_equal(jax.jit(bijax.invariant(f))(X), inside)

    first_inside = jax.jit(lambda x: f(x))
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(first_inside(X), inside)
    assert_bits_equal(first_inside(X), outside)
    with bijax.set_batch_invariant_mode():
        assert_bits_equal(first_inside(X), inside)


def test_eager_operations() -> None:
    outside = f(X)
    with bijax.set_batch_invariant_mode():
        inside = f(X)
        assert_bits_equal(f(X[:5]), inside[:5])
    assert (bits(inside) != bits(outside)).any()
    assert_bits_equal(f(X), outside)


def test_tracing_inside() -> None:
    with bijax.set_batch_invariant_mode():
        assert jax.eval_shape(f, X) == jax.ShapeDtypeStruct((33, 300), jnp.float32)
        assert unmarked(jax.vmap(f)) == 0
        assert unmarked(jax.grad(lambda x: (f(x) ** 2).sum())) == 0
        assert unmarked(lambda x: jax.linearize(f, x)[1](x)) == 0


def with_block(x: jax.Array) -> jax.Array:
    with bijax.set_batch_invariant_mode():
        return f(x)


def test_block_inside_a_traced_function() -> None:
    assert unmarked(with_block) == 0
    assert unmarked(jax.vmap(with_block)) == 0
    assert unmarked(jax.grad(lambda x: with_block(x)[0, 0] * x[0, 0])) == 0
    assert unmarked(lambda x: (with_block(x), f(x))) == SUMS
    assert unmarked(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: with_block(c), x)) == 0


def test_part_that_stays_as_it_is() -> None:
    def part(x: jax.Array) -> jax.Array:
        x = f(x)
        with bijax.set_batch_invariant_mode(False):
            return x @ W

    assert unmarked(bijax.invariant(part)) == 1
    assert unmarked(jax.grad(lambda x: bijax.invariant(part)(x)[0, 0])) == 1


def test_ahead_of_time() -> None:
    with bijax.set_batch_invariant_mode():
        traced_inside = jax.jit(f).trace(X)
    assert unmarked_in(traced_inside.lower()) == []
    traced_outside = jax.jit(f).trace(X)
    with bijax.set_batch_invariant_mode():
        assert unmarked_in(traced_outside.lower()) == []
    assert len(unmarked_in(traced_outside.lower())) == SUMS
    assert unmarked_in(bijax.invariant(jax.jit(f)).lower(X)) == []
    compiled = bijax.invariant(jax.jit(f)).lower(X).compile()
    assert_bits_equal(compiled(X), bijax.invariant(f)(X))


def test_export() -> None:
    expected = jax.jit(bijax.invariant(f))(X)
    exported = jax.export.export(jax.jit(bijax.invariant(f)))(X)
    assert_bits_equal(exported.call(X), expected)
    # A finished program cannot be made invariant, nor is it known whether it is.
    with bijax.set_batch_invariant_mode(), pytest.raises(bijax.NotInvariantError, match="call_exported"):
        exported.call(X)
    with bijax.set_batch_invariant_mode(allow=("call_exported",)):
        assert_bits_equal(exported.call(X), expected)


def test_export_of_any_batch_is_refused() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    with pytest.raises(bijax.NotInvariantError, match="export one program for each batch size"):
        jax.export.export(jax.jit(bijax.invariant(f)))(jax.ShapeDtypeStruct((batch, 300), jnp.float32))


@pytest.mark.parametrize(
    ("primitive", "fn"),
    [
        ("schur", lambda x: jax.lax.linalg.schur(x @ x.T)[0]),
        ("eig", lambda x: jnp.linalg.eigvals(x @ x.T).real),
        ("hessenberg", lambda x: jax.lax.linalg.hessenberg(x @ x.T)[0]),
    ],
)
def test_operations_without_an_invariant_form(primitive: str, fn: Callable[..., Any]) -> None:
    with pytest.raises(bijax.NotInvariantError) as caught:
        jax.jit(bijax.invariant(lambda x: fn(x) + 1)).lower(X)
    assert caught.value.primitive == primitive
    assert "test_mode.py:" in caught.value.line
    assert primitive in str(caught.value)
    assert caught.value.line in str(caught.value)
    jax.jit(bijax.invariant(fn, allow=(primitive,))).lower(X)
    jax.jit(fn).lower(X)


def test_allow() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.linalg.schur(x @ x.T)[0]

    with bijax.set_batch_invariant_mode(allow=["schur"]):
        assert unmarked(fn) == 0
        with bijax.set_batch_invariant_mode(), pytest.raises(bijax.NotInvariantError):
            unmarked(fn)
    bijax.enable_batch_invariant_mode(allow=["schur"])
    try:
        assert unmarked(fn) == 0
    finally:
        bijax.disable_batch_invariant_mode()


def generator(x: jax.Array) -> Iterator[jax.Array]:
    yield f(x)


async def coroutine(x: jax.Array) -> jax.Array:
    return f(x)


async def async_generator(x: jax.Array) -> AsyncIterator[jax.Array]:
    yield f(x)


class CallableCoroutine:
    async def __call__(self, x: jax.Array) -> jax.Array:
        return f(x)


@pytest.mark.parametrize("fn", [generator, coroutine, async_generator, CallableCoroutine()])
def test_functions_whose_body_runs_later_are_refused(fn: Any) -> None:
    with pytest.raises(TypeError, match="after the call"):
        bijax.invariant(fn)


def test_what_is_no_function_is_refused() -> None:
    lowered = jax.jit(f).lower(X)
    for program in (lowered, lowered.compile(), jax.jit(f).trace(X)):
        with pytest.raises(TypeError, match="already built"):
            bijax.invariant(program)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="already built"):
            bijax.audit(program, X)
    with pytest.raises(TypeError, match="expected a function"):
        bijax.invariant(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="put @staticmethod above"):
        bijax.invariant(staticmethod(f))  # it would become a method


def test_attributes_of_a_function_stay() -> None:
    """Libraries mark functions by them: Flax's `compact` and `nowrap`, pytest's marks."""

    def marked(x: jax.Array) -> jax.Array:
        return f(x)

    marked.compact = True  # type: ignore[attr-defined]
    assert bijax.invariant(marked).compact  # type: ignore[attr-defined]


def test_wrong_arguments_are_refused() -> None:
    for wrong in ("fft", [3], ["a b"]):
        with pytest.raises(TypeError, match="allow must"):
            bijax.invariant(f, allow=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="allow must"):
            bijax.enable_batch_invariant_mode(allow=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True or False"):
        bijax.set_batch_invariant_mode("on")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"@set_batch_invariant_mode\(\) with parentheses"):

        @bijax.set_batch_invariant_mode  # type: ignore[arg-type]
        def _(x: jax.Array) -> jax.Array:
            return x


def test_names_that_no_primitive_has_are_refused() -> None:
    with pytest.raises(ValueError, match="'choleski', which no primitive has; did you mean 'cholesky'"):
        bijax.invariant(f, allow=("choleski",))
    with pytest.raises(ValueError, match="'zzz', which no primitive has"):
        bijax.set_batch_invariant_mode(allow=("zzz",))
    own = Primitive("users_own_primitive")
    with pytest.raises(ValueError, match="users_own_primitive"):
        bijax.invariant(f, allow=("users_own_primitive",))
    mlir.register_lowering(own, lambda ctx, x: [x])
    bijax.invariant(f, allow=("users_own_primitive", "call_compiled", "psum", "pallas_call"))


def test_the_function_keeps_its_name_and_stages() -> None:
    wrapped = bijax.invariant(f)
    assert wrapped.__name__ == "f"
    assert not hasattr(wrapped, "lower")
    assert unmarked_in(bijax.invariant(jax.jit(f)).lower(X)) == []
    assert bijax.invariant(jax.jit(f)).eval_shape(X).shape == (33, 300)  # type: ignore[attr-defined]
