"""Programs that are compiled in a thread: what they compute, and the errors of their compilation."""

import threading

import jax
import numpy as np
import pytest

from pallas_kernels.runtime.ahead_of_time import ahead_of_time


def test_compiled_in_a_thread_while_another_program_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_it, threads = jax.stages.Lowered.compile, []

    def noted(self: jax.stages.Lowered) -> jax.stages.Compiled:
        threads.append(threading.current_thread())
        return compile_it(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)

    def program(x: jax.Array) -> jax.Array:
        twice = ahead_of_time(lambda y: y + y, np.float32(1))
        return x * np.asarray(twice(np.float32(3)))

    assert jax.make_jaxpr(program)(np.float32(1)).jaxpr.eqns[0].primitive.name == "mul"
    assert threads
    assert threading.current_thread() not in threads


def test_the_error_of_a_compilation_comes_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refused)
    run = ahead_of_time(lambda x: x + 1, np.float32(1))
    with pytest.raises(RuntimeError, match="no compiler"):
        run(np.float32(1))
