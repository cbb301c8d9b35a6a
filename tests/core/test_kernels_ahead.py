"""Kernels of a program are compiled from when they are lowered, each once, where the GPU is the one lowered for."""

import hashlib
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.backend import backends

import bijax
from bijax.core import architecture
from bijax.core.lowering_cache import _jax_private, kernels_ahead

X = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
W = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)

NUMBERED = jax.__version_info__ < (0, 12)
"""Whether JAX numbers the kernels of a process in their code, so that equal kernels are compiled more than once."""


def code(attributes: dict[str, Any]) -> bytes:
    """Returns the code of a kernel without its number."""
    return re.sub(rb"(matmul)_\d+", rb"\1", attributes["module"])


class AtOnce:
    """A pool that runs a task before it returns from `submit`."""

    def submit(self, run: Any, *arguments: Any) -> None:
        run(*arguments)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The kernels that are compiled ahead from now on, for a GPU that stands for the one of the process."""
    found: list[tuple[str, dict[str, Any]]] = []
    jax.clear_caches()
    monkeypatch.setattr(kernels_ahead, "_pool", AtOnce)
    monkeypatch.setattr(kernels_ahead, "cuda_device", lambda: jax.devices()[0])
    monkeypatch.setattr(kernels_ahead, "_begun", set())
    monkeypatch.setattr(kernels_ahead, "_compile", lambda target, attributes, _: found.append((target, attributes)))
    yield found
    jax.clear_caches()


def lowered(run: Any) -> str:
    with bijax.lowering_for("sm_90"):
        return str(jax.jit(run).trace(X, W).lower(lowering_platforms=("cuda",)).as_text())


def test_a_kernel_is_compiled_once_whatever_programs_have_it(compiled: list[tuple[str, dict[str, Any]]]) -> None:
    text = lowered(bijax.matmul)
    ((target, attributes),) = compiled
    alone = kernels_ahead._alone(target, attributes, jax.devices()[0]).lower().as_text()
    for program in (text, alone):
        assert f"@{target}" in program
    name = 'kernel_hash = "'
    assert len({p.partition(name)[2].partition('"')[0] for p in (text, alone)}) == 1
    name = 'module = "'
    assert len({p.partition(name)[2].partition('"')[0] for p in (text, alone)}) == 1
    before = len(compiled)
    lowered(lambda x, w: bijax.matmul(x, w) + 1)
    jax.clear_caches()  # lowered anew
    lowered(bijax.matmul)
    assert len({code(attributes) for _, attributes in compiled}) == 1
    assert len(compiled) == before or NUMBERED
    lowered(lambda x, w: bijax.matmul(x[:, :256], w[:256]))
    assert len({code(attributes) for _, attributes in compiled}) == 2


def test_kernels_of_a_program_on_a_mesh_too(compiled: list[tuple[str, dict[str, Any]]]) -> None:
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("rows"), jax.P()

    def on_mesh(x: jax.Array, w: jax.Array) -> jax.Array:
        product = jax.shard_map(bijax.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows, check_vma=False)
        return product(x, w) + 1

    lowered(on_mesh)
    ((_, attributes),) = compiled
    lowered(bijax.matmul)
    assert len({code(attributes) for _, attributes in compiled}) == 1  # the same kernel
    assert len(compiled) == 1 or NUMBERED
    assert hashlib.sha256(attributes["module"]).digest() == attributes["kernel_hash"]


def test_nothing_is_compiled_for_a_gpu_that_is_not_there(
    compiled: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_ahead, "cuda_device", architecture.cuda_device)
    if "cuda" in backends():
        monkeypatch.setattr(architecture, "_architecture", lambda device: "sm_80")
    lowered(bijax.matmul)
    assert not compiled


def test_a_kernel_is_lowered_alone_where_all_threads_are_batch_invariant() -> None:
    kernel = "mosaic_gpu_v2", {"kernel_hash": b"one", "module": b"two"}, jax.devices()[0]
    bijax.enable_batch_invariant_mode(all_threads=True)
    try:
        with ThreadPoolExecutor(1) as pool:
            text = pool.submit(lambda: kernels_ahead._alone(*kernel).lower().as_text()).result()
    finally:
        bijax.disable_batch_invariant_mode(all_threads=True)
    assert 'kernel_hash = "one"' in text


def test_what_is_compiled_ahead_is_cached_however_short_it_took(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()  # a process settles on a folder when it first compiles
    try:
        jax.jit(lambda x: x * 3).lower(1.0).compile()
        outside = len(list(tmp_path.iterdir()))
        with _jax_private.every_compilation_cached():
            jax.jit(lambda x: x * 5).lower(1.0).compile()
        assert len(list(tmp_path.iterdir())) > outside
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
