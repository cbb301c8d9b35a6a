"""A kernel is lowered once for equal calls, and anew where anything differs that its lowered form depends on."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

import bijax
from bijax.core.lowering_cache import lowered_forms
from bijax.core.primitive import KERNELS, define_kernel
from bijax.testing import assert_bits_equal
from pallas_kernels.target import Target
from tests.arrays import on_device

X = on_device(np.random.default_rng(0).standard_normal((3, 40)), jnp.float32)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The forms that are made from now on."""
    forms: list[bytes] = []
    make: Any = lowered_forms._form

    def noted(*arguments: Any) -> bytes:
        forms.append(make(*arguments))
        return forms[-1]

    jax.clear_caches()
    monkeypatch.setattr(lowered_forms, "_form", noted)
    yield forms
    jax.clear_caches()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """JAX's compilation cache in a folder of its own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        yield tmp_path / "bijax"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def program() -> Callable[[jax.Array], jax.Array]:
    """A function that JAX has not seen, of a primitive that is replaced and a kernel of the library."""
    return bijax.invariant(lambda x: jnp.cumsum(x, 1) + bijax.softmax(x))


def lowered(x: Any = X) -> str:
    return str(jax.jit(program()).lower(x).as_text())


def inside(context: Any) -> str:
    with context:
        return lowered()


def test_equal_calls_share_a_form_and_others_do_not(made: list[bytes]) -> None:
    text = lowered()
    forms = len(made)
    assert forms >= 2
    assert lowered() == text
    assert len(made) == forms
    changes: dict[str, Callable[[], Any]] = {
        "another shape": lambda: lowered(X[:2]),
        "another dtype": lambda: lowered(X.astype(jnp.bfloat16)),
        "metadata": lambda: inside(set_xla_metadata(name="value")),
        "a setting": lambda: inside(jax.threefry_partitionable(False)),
        "forgotten": lambda: (jax.clear_caches(), lowered()),
    }
    for change, run in changes.items():
        forms = len(made)
        run()
        assert len(made) > forms, change
    # These are the library's own, whatever the caller's are.
    forms = len(made)
    for setting in (jax.default_matmul_precision("highest"), jax.enable_x64(True), jax.numpy_rank_promotion("raise")):
        assert inside(setting)
        assert len(made) == forms


def test_a_kernel_has_one_form_in_all_programs(made: list[bytes]) -> None:
    def function(x: jax.Array) -> jax.Array:
        return bijax.softmax(x)

    jax.jit(lambda x: function(x)).lower(X)
    forms = len(made)
    jax.jit(bijax.invariant(function, allow=["tan"])).lower(X)
    assert len(made) == forms > 0


def test_calls_of_records_share_a_form_if_all_is_equal(made: list[bytes]) -> None:
    """A record's arrays are operands; which of them are present, and its options, tell forms apart."""
    x, one = X[None, :, None, :32], jnp.ones(1)

    def forms_of(**options: Any) -> int:
        before = len(made)
        with bijax.lowering_for("sm_80"):
            program = jax.jit(lambda x, one: bijax.dot_product_attention(x, x, x, **options))
            program.trace(x, one).lower(lowering_platforms=("cuda",))
        return len(made) - before

    assert [forms_of(), forms_of()] == [1, 0]
    assert [forms_of(is_causal=True), forms_of(sinks=one), forms_of(alibi_slopes=one)] == [1, 1, 1]
    assert forms_of(sinks=2 * one) == 0


def test_threads_wait_for_a_form_that_another_makes(made: list[bytes]) -> None:
    lowered()
    forms = len(made)
    jax.clear_caches()
    with ThreadPoolExecutor(4) as pool:
        texts = {*pool.map(lambda _: lowered(), range(4))}
    assert len(texts) == 1
    assert len(made) == 2 * forms


def test_the_results_are_those_of_a_form_that_is_made_anew(made: list[bytes]) -> None:
    first = jax.jit(program())(X)
    forms = len(made)
    again = jax.jit(program())(X)
    assert len(made) == forms > 0
    assert_bits_equal(first, again)


def test_the_next_process_makes_no_form(made: list[bytes], folder: Path) -> None:
    text = lowered()
    forms = len(made)
    assert len(list(folder.iterdir())) >= forms
    jax.clear_caches()  # all that another process does not have
    assert lowered() == text
    assert len(made) == forms
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    jax.clear_caches()
    assert lowered() == text
    assert len(made) == 2 * forms


ANOTHER_PROCESS = """
import sys, jax, bijax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
x = jax.ShapeDtypeStruct((8, 4096), "bfloat16")
with bijax.lowering_for("sm_90"):
    text = jax.jit(bijax.softmax).trace(x).lower(lowering_platforms=("cuda",)).as_text()
assert "mosaic_gpu" in text
print("jax.experimental.pallas" in sys.modules, "jax.experimental.mosaic.gpu" in sys.modules)
"""


@pytest.mark.tier("full")
def test_another_process_can_compile_the_gpu_s_kernels(folder: Path) -> None:
    # The import of Mosaic names the library that launches its kernels: without it XLA compiles none.
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", ANOTHER_PROCESS, str(folder.parent)]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert found == [["True", "True"], ["False", "True"]]  # made, then read


def test_scatters_are_told_apart_by_their_names(made: list[bytes]) -> None:
    def scattered(combine: str) -> str:
        function = bijax.invariant(lambda x: getattr(x.at[jnp.array([1, 0, 1])], combine)(x))
        return str(jax.jit(function).lower(X).as_text())

    texts, forms = {combine: scattered(combine) for combine in ("add", "max", "min")}, len(made)
    assert forms >= len(set(texts.values())) == 3
    assert {combine: scattered(combine) for combine in texts} == texts
    assert len(made) == forms


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Takes kernels of a test out of the list of all kernels, of which other tests make a table."""
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_from_elsewhere_is_lowered_each_time(made: list[bytes]) -> None:
    traced = []

    def double(target: Target, x: jax.Array) -> tuple[jax.Array]:
        assert target == Target("cpu")
        traced.append(x)
        return (x + x,)

    kernel = define_kernel("double_of_a_test", double, shapes=lambda x: (x,))
    for count in (1, 2):
        jax.jit(lambda x: kernel(x)[0]).lower(X)
        assert len(traced) == count
    assert not made


def test_calls_that_no_text_tells_apart_are_lowered_each_time(made: list[bytes]) -> None:
    for function in (jnp.sin, jnp.cos):
        run = bijax.elementwise(function)
        assert_bits_equal(jax.jit(lambda x, run=run: run(x))(X), run(X))
    with bijax.lowering_for("sm_90"):
        jax.jit(lambda x: bijax.softmax(x)).trace(X).lower(lowering_platforms=("cpu", "cuda"))
    exported = jax.export.export(jax.jit(bijax.softmax), platforms=("cpu",))(X)
    assert not made
    assert_bits_equal(exported.call(X), jax.jit(bijax.softmax)(X))


def test_a_form_keeps_nothing_of_the_program_that_it_was_made_for(made: list[bytes]) -> None:
    def one(x: jax.Array) -> jax.Array:
        with jax.named_scope("first_name"):
            return bijax.softmax(x)

    def other(x: jax.Array) -> jax.Array:
        with jax.named_scope("second_name"):
            return bijax.softmax(x)

    texts = [str(jax.jit(f).lower(X).as_text(debug_info=True)) for f in (one, other)]
    assert len(made) == 1
    assert "first_name" in texts[0]
    assert "second_name" in texts[1]
    assert "first_name" not in texts[1]
    assert all(Path(__file__).name in text for text in texts)


def test_a_gpu_form_is_one_architecture_s(made: list[bytes]) -> None:
    x = jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)

    def lower(architecture: str) -> str:
        with bijax.lowering_for(architecture):
            return str(jax.jit(lambda x: bijax.softmax(x)).trace(x).lower(lowering_platforms=("cuda",)).as_text())

    hopper = lower("sm_90")
    assert lower("sm_90") == hopper
    assert len(made) == 1
    assert lower("sm_80") != hopper
    assert len(made) == 2


@pytest.mark.parametrize(("name", "value"), [("multiprocessors", 114), ("driver_version", (12, 4))])
def test_a_gpu_form_is_that_of_such_a_gpu_and_driver(
    name: str, value: object, made: list[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form has the grid of a GPU and the PTX of a driver, and machines may share a folder."""

    def lower() -> int:
        jax.clear_caches()
        before = len(made)
        with bijax.lowering_for("sm_90"):
            jax.jit(lambda x: bijax.softmax(x)).trace(X).lower(lowering_platforms=("cuda",))
        return len(made) - before

    assert lower() > 0
    assert lower() == 0
    monkeypatch.setattr(lowered_forms, name, lambda: value)
    assert lower() > 0


def test_the_switch(made: list[bytes], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIJAX_LOWERING_CACHE", "off")
    without = jax.jit(program())(X)
    assert not made
    assert not folder.exists()
    monkeypatch.setenv("BIJAX_LOWERING_CACHE", "on")
    assert_bits_equal(jax.jit(program())(X), without)
    assert made
    assert folder.exists()
    monkeypatch.setenv("BIJAX_LOWERING_CACHE", "no")
    with pytest.raises(ValueError, match="BIJAX_LOWERING_CACHE to be on or off, got 'no'"):
        lowered()
