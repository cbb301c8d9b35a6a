"""Comparisons of forms are remembered between processes: for one machine and question, and only if requested."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

import pallas_kernels
from pallas_kernels.runtime import disk_cache as _remembered
from pallas_kernels.runtime.disk_cache import remembered


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """JAX's compilation cache in a folder of its own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        yield tmp_path / "jax" / "bijax"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def question(requested: list[int]) -> Callable[[int], bool]:
    """A comparison as another process would define it, which notes each time that it is made."""

    @remembered
    def is_even(number: int) -> bool:
        requested.append(number)
        return number % 2 == 0

    return is_even


def test_the_next_process_does_not_compare_again(cache: Path) -> None:
    requested: list[int] = []
    assert [question(requested)(n) for n in (4, 5, 4, 5)] == [True, False, True, False]
    assert requested == [4, 5]
    assert len(list(cache.iterdir())) == 2


def test_another_machine_compares_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []
    question(requested)(4)
    monkeypatch.setattr(_remembered, "_machine", lambda: "another processor")
    question(requested)(4)
    assert requested == [4, 4]


def test_a_damaged_entry_is_compared_again(cache: Path) -> None:
    requested: list[int] = []
    question(requested)(4)
    (entry,) = cache.iterdir()
    for damaged in (b"", entry.read_bytes()[:-3], b"\xff", entry.read_bytes().replace(b"4", b"6", 1)):
        entry.write_bytes(damaged)
        assert question(requested)(4)
    assert requested == [4] * 5


def test_a_folder_that_cannot_be_written_is_no_failure(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the folder")
    assert question([])(4)


def test_nothing_is_kept_without_a_folder_or_a_known_processor(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _remembered._folder() == cache
    monkeypatch.setattr(_remembered, "_PROCESSOR", cache / "nowhere")
    _remembered._machine.cache_clear()
    assert _remembered._folder() is None
    monkeypatch.undo()
    _remembered._machine.cache_clear()
    assert _remembered._folder() == cache
    for other in (None, "gs://a-bucket/jax"):
        jax.config.update("jax_compilation_cache_dir", other)
        assert _remembered._folder() is None


def test_other_machine_code_is_compared_anew(cache: Path) -> None:
    requested: list[int] = []
    for wanted, comparisons in ((False, 1), (True, 2), (True, 2), (False, 2)):
        jax.config.update("jax_disable_most_optimizations", wanted)
        try:
            assert question(requested)(4)
        finally:
            jax.config.update("jax_disable_most_optimizations", False)
        assert len(requested) == comparisons


def test_what_is_remembered_depends_on_the_sources_of_the_kernels_alone() -> None:
    """Not on those of the folder around the package, which may be that of all packages that are installed."""
    assert Path(pallas_kernels.__file__).parent == _remembered._PACKAGE
