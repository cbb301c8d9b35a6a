"""bijax as a guest in JAX's process: what was there before the first use is there after it, in every thread."""

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas  # noqa: F401  registers rules of its own, which are compared too
from jax.extend.core import Primitive
from jax.interpreters import mlir

import bijax
from bijax.testing import assert_bits_equal
from bijax.transform.hook import _jax_private
from tests.transform.host_programs import W, X, texts, use_everything

ROOT = Path(__file__).parents[2]


_FIRST_USE = """
from tests.transform import host_programs as guests

(rules, specific, uncacheable), call, texts = guests.tables(), guests.jax.stages.Compiled.__call__, []
for turn in range(2):
    texts.append(guests.texts(debug_info=True))
    if turn == 0:
        guests.use_everything()
for name, text in texts[0].items():
    assert texts[1][name] == text, name
now = guests.tables()
for old, new in ((rules, now[0]), *((specific[p], now[1][p]) for p in specific)):
    changed = [p for p in old if p not in new or new[p] is not old[p]]
    assert not changed, changed
    assert all(new[p].rule.func.__module__.startswith("bijax") for p in set(new) - set(old) if p.name in map(str, old))
assert uncacheable <= now[2] and guests.lax.dot_general_p not in now[2]
assert guests.jax.stages.Compiled.__call__ is call
"""


def test_plain_programs_lower_as_before_the_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_USE],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.returncode == 0, done.stderr


def test_plain_programs_lower_as_ever_while_other_threads_use_it() -> None:
    expected, wrong, failed = texts(), [], []
    end = threading.Event()

    def use() -> None:
        try:
            while not end.is_set():
                jax.jit(bijax.invariant(lambda x: jnp.tanh(x @ W).sum(1))).lower(X)
                with bijax.set_batch_invariant_mode():
                    jax.jit(lambda x: jnp.exp(x @ W)).lower(X)
        except Exception as error:
            failed.append(error)

    def compare() -> None:
        try:
            found = texts()
            wrong.extend(name for name in expected if found[name] != expected[name])
        except Exception as error:
            failed.append(error)

    users = [threading.Thread(target=use) for _ in range(2)]
    others = [threading.Thread(target=compare) for _ in range(2)]
    for thread in (*users, *others):
        thread.start()
    for thread in others:
        thread.join()
    end.set()
    for thread in users:
        thread.join()
    assert not failed
    assert not wrong


def counted(fn: Callable[[], Any]) -> int:
    """How often JAX calls the rule of a primitive, which it caches, while `fn` runs."""
    calls = []

    def rule(ctx: Any, x: Any) -> Any:
        calls.append(ctx)
        return [x]

    with registered(rule):
        fn()
    return len(calls)


_twice_p = Primitive("guests_twice")
_twice_p.def_abstract_eval(lambda x: x)


class registered:
    def __init__(self, rule: Callable[..., Any]) -> None:
        mlir.register_lowering(_twice_p, rule)

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.tier("full")
def test_equal_equations_are_lowered_once_as_before() -> None:
    use_everything()
    program = jax.jit(lambda x: _twice_p.bind(_twice_p.bind(x) + _twice_p.bind(x)))
    assert counted(lambda: program.lower(X)) == 1
    # A lowered program is not lowered again, nor a compiled one compiled.
    assert counted(lambda: program.lower(X)) == 0
    dots = jax.jit(lambda x: (x @ W) + (x @ W)).lower(X).as_text()
    assert dots.count("dot_general") == 2
    jitted = jax.jit(lambda x: jnp.sin(x @ W))
    jitted(X)
    bijax.invariant(jitted)(X)
    before = jitted._cache_size()
    jitted(X)
    assert jitted._cache_size() == before


def test_a_rule_that_is_registered_again_is_seen() -> None:
    from jax._src.interpreters import mlir as private

    use_everything()
    calls = []
    stock = private._lowerings[lax.neg_p].rule, private._lowerings[lax.dot_general_p].rule

    def spy(rule: Callable[..., Any]) -> Callable[..., Any]:
        def seen(ctx: Any, *operands: Any, **parameters: Any) -> Any:
            calls.append(ctx.primitive)
            return rule(ctx, *operands, **parameters)

        return seen

    # The first is kept as it is, the second is fenced around its own rule, and the third is made stable.
    for primitive in (lax.neg_p, lax.mul_p, lax.sort_p):
        entry = private._lowerings[primitive]
        try:
            mlir.register_lowering(primitive, spy(entry.rule))
            calls.clear()
            bijax.invariant(jax.jit(lambda x: lax.sort(-x * x)))(X + len(calls))
            jax.jit(bijax.invariant(lambda x: lax.sort(-x * x))).lower(X)
            assert primitive.name in {p.name for p in calls}, primitive
        finally:
            mlir.register_lowering(primitive, entry.rule, inline=entry.inline)
    assert stock == (private._lowerings[lax.neg_p].rule, private._lowerings[lax.dot_general_p].rule)


def test_compiled_programs_are_watched_only_while_something_is_requested() -> None:
    stock = jax.stages.Compiled.__call__
    compiled = jax.jit(lambda x: x + 1).lower(X).compile()
    with bijax.set_batch_invariant_mode():
        assert jax.stages.Compiled.__call__ is not stock
        with bijax.set_batch_invariant_mode():
            pass
        assert jax.stages.Compiled.__call__ is not stock
        # Another thread, in which nothing is requested, calls what it likes.
        results: list[jax.Array] = []
        plain = jax.jit(lambda x: x @ W)
        with bijax.set_batch_invariant_mode(False):
            program = plain.lower(X).compile()
        thread = threading.Thread(target=lambda: results.append(program(X)))
        thread.start()
        thread.join()
        assert len(results) == 1
        with pytest.raises(bijax.NotInvariantError, match="call_compiled"):
            program(X)
    assert jax.stages.Compiled.__call__ is stock
    assert_bits_equal(compiled(X), X + 1)


def test_a_thread_that_ends_in_the_mode_ends_its_watch() -> None:
    stock = jax.stages.Compiled.__call__
    seen = []

    def enable() -> None:
        bijax.enable_batch_invariant_mode()
        seen.append(jax.stages.Compiled.__call__ is not stock)

    thread = threading.Thread(target=enable)
    thread.start()
    thread.join()
    assert seen == [True]
    assert jax.stages.Compiled.__call__ is stock


def test_what_others_put_around_a_call_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = jax.stages.Compiled.__call__
    seen = []
    with bijax.set_batch_invariant_mode():
        ours = jax.stages.Compiled.__call__

        def theirs(self: Any, *args: Any) -> Any:
            seen.append(args)
            return ours(self, *args)

        monkeypatch.setattr(jax.stages.Compiled, "__call__", theirs)
    assert jax.stages.Compiled.__call__ is theirs
    assert_bits_equal(jax.jit(lambda x: x + 1).lower(X).compile()(X), X + 1)
    assert len(seen) == 1
    monkeypatch.setattr(jax.stages.Compiled, "__call__", stock)


def test_a_function_lowered_for_a_plain_part_is_not_used_in_an_invariant_one() -> None:
    w = jnp.asarray(np.random.default_rng(1).standard_normal((300, 77)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((33, 300)), jnp.float32)

    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum(-1)

    traced = jax.make_jaxpr(jax.jit(f))(x)  # its equations carry no tag

    def run(x: jax.Array) -> jax.Array:
        (y,) = jax.core.eval_jaxpr(traced, traced.consts, x)
        return y

    plain, invariant = jax.jit(lambda x: (run(x), bijax.invariant(run)(x)))(x)
    assert_bits_equal(plain, jax.jit(f)(x))
    assert_bits_equal(invariant, jax.jit(bijax.invariant(f))(x))
    assert (np.asarray(plain) != np.asarray(invariant)).any()


@pytest.fixture
def _unsupported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_jax_private, "_installed", False)
    return


@pytest.mark.usefixtures("_unsupported")
@pytest.mark.parametrize(
    ("name", "replacement", "expected"),
    [
        ("jaxpr_subcomp", lambda ctx, jaxpr: None, r"jaxpr_subcomp takes \(ctx, jaxpr\), not \(ctx, jaxpr, name_stack"),
        ("_get_lowering_rules", None, "there is no mlir._get_lowering_rules"),
        ("_uncacheable_primitives", [], "there is no set mlir._uncacheable_primitives"),
    ],
)
def test_another_jax_is_refused_at_the_first_use(
    name: str, replacement: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_jax_private._mlir, name, replacement)
    for use in (lambda: bijax.invariant(jnp.sin), bijax.enable_batch_invariant_mode):
        with pytest.raises(bijax.UnsupportedError, match=expected) as caught:
            use()
        assert _jax_private.SUPPORTED in str(caught.value)
        assert jax.__version__ in str(caught.value)


def test_the_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"jax{_jax_private.SUPPORTED}" in project["dependencies"]
    assert re.search(r"^jax==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_private_uses_of_jax_are_in_one_file_of_a_package() -> None:
    found = sorted(
        path.relative_to(ROOT).as_posix()
        for package in ("bijax", "pallas_kernels", "flax_layers")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"\bjax\._src\b|\b_mlir_libs\b", path.read_text())
    )
    assert found == [f"bijax/{p}/_jax_private.py" for p in ("core", "core/lowering_cache", "transform/hook")]


_IMPORT = """
import logging, os, sys, time
start = time.process_time()
import jax
between = time.process_time()
def state():
    return dict(os.environ), dict(jax.config.values), logging.root.handlers[:], logging.getLogger("jax").level
before, begin = state(), time.process_time()
import bijax
end = time.process_time()
assert state() == before
print(between - start, end - begin)
if sys.argv[1:] == ["again"]:
    sys.exit()
bijax.invariant(jax.jit(lambda x: jax.numpy.tanh(x @ x)))(jax.numpy.ones((4, 4)))
bijax.softmax(jax.numpy.ones((4, 4)))
assert dict(os.environ) == before[0]
assert "jax.experimental.mosaic" not in sys.modules
"""


def test_importing_is_quick_and_changes_no_setting_of_jax_nor_the_environment() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)
    times = []
    for again in ((), ("again",)):  # the first one may compile the sources
        done = subprocess.run([sys.executable, "-c", _IMPORT, *again], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        times.append([float(t) for t in done.stdout.split()])
    jax_s, ours_s = (min(t) for t in zip(*times, strict=True))
    # On a slow machine the import of JAX says how slow it is: 0.8 s where ours may take 0.2 s.
    assert ours_s < max(0.2, jax_s / 4)


def test_a_program_for_cuda_names_its_architecture() -> None:
    def text(architecture: str) -> str:
        x = jax.ShapeDtypeStruct((8, 4096), "bfloat16")
        with bijax.lowering_for(architecture):
            return jitted.trace(x).lower(lowering_platforms=("cuda",)).as_text()

    jitted = jax.jit(bijax.softmax)
    assert "mosaic_gpu" in text("sm_90")
    assert "mosaic_gpu" not in text("sm_80")
    assert "mosaic_gpu" in text("sm_90")  # nothing lowered for another one is used
    for wrong in ("hopper", "90", None):
        with pytest.raises(ValueError, match="'sm_90'"):
            bijax.lowering_for(wrong)  # type: ignore[arg-type]


@pytest.mark.skipif("cuda" in {d.platform for d in jax.devices()}, reason="a GPU names its architecture itself")
def test_no_architecture_is_assumed() -> None:
    x = jnp.ones((8, 4096), jnp.bfloat16)
    for fn in (bijax.softmax, bijax.invariant(lambda x: x @ x.T), lambda x: bijax.rms_norm(x)):
        with pytest.raises(bijax.UnsupportedError, match="lowering_for"):
            jax.jit(fn).trace(x).lower(lowering_platforms=("cuda",))
