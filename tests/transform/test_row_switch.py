"""Row programs can be turned off, contracts show it, and functions with other bits than XLA's are refused."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import bijax
from bijax.transform.fusion import _probe, _programs
from pallas_kernels.contract import row_contract
from pallas_kernels.registry import Kernel, registered
from pallas_kernels.row_program import hopper

X = jax.ShapeDtypeStruct((16, 512), "bfloat16")
CPU = jax.devices("cpu")[0]


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(jnp.bfloat16)


def has_row_program(fn: Callable[..., Any]) -> bool:
    with bijax.lowering_for("sm_90"):
        text = jax.jit(fn).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    return "mosaic_gpu" in text


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_probe, "_known", {})
    yield
    jax.clear_caches()


def test_each_way_to_turn_row_programs_off() -> None:
    def in_a_block(x: jax.Array) -> jax.Array:
        with bijax.set_batch_invariant_mode(fuse_rows=False):
            return softmax(x)

    assert has_row_program(bijax.invariant(softmax))
    pieces = bijax.invariant(softmax, fuse_rows=False)
    assert not has_row_program(pieces)
    assert not has_row_program(bijax.invariant(jax.jit(softmax), fuse_rows=False))
    assert not has_row_program(in_a_block)
    bijax.enable_batch_invariant_mode(fuse_rows=False)
    try:
        assert not has_row_program(lambda x: softmax(x))
    finally:
        bijax.disable_batch_invariant_mode()
    with pytest.raises(TypeError, match="fuse_rows"):
        bijax.invariant(softmax, fuse_rows="no")  # type: ignore[arg-type]


def test_contracts_show_it_and_the_fingerprint_does_not() -> None:
    one, other = (
        bijax.contracts(bijax.invariant(softmax, fuse_rows=on), X, platform="cuda", architecture="sm_90")
        for on in (True, False)
    )
    assert (one.row_programs, other.row_programs) == (True, False)
    assert one.fingerprint == other.fingerprint
    assert "row programs" in str(one)
    assert "row programs" not in str(other)
    assert not bijax.contracts(bijax.invariant(softmax), X, platform="cpu").row_programs
    assert not bijax.contracts(bijax.invariant(softmax), X, platform="cuda", architecture="sm_80").row_programs


def test_no_comparison_where_programs_are_only_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "both", lambda device: pytest.fail("there is no GPU to compare on"))
    assert has_row_program(bijax.invariant(softmax))


def test_other_bits_are_refused_once_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((2, 4), np.float32)
    nan, other_nan = (np.full_like(x, np.uint32(n).view(np.float32)) for n in (0x7FC00000, 0xFFC00001))
    found, requested = ((x, x, nan), (x, x, other_nan)), []

    def both(device: Any) -> Any:
        requested.append(device)
        return found

    monkeypatch.setattr(_programs, "cuda_device", lambda: CPU)
    monkeypatch.setattr(_probe, "both", both)
    assert has_row_program(bijax.invariant(softmax))  # the bits of a nan are not promised
    jax.clear_caches()
    assert has_row_program(bijax.invariant(softmax))
    assert len(requested) == 1
    monkeypatch.setattr(_probe, "_known", {})
    found = (x, x, -x * 0), (np.nextafter(x, 2), x, x * 0)
    jax.clear_caches()
    for _ in range(2):
        with pytest.raises(bijax.UnsupportedError, match=r"exp: 8, div: 0, rsqrt: 8.*fuse_rows=False"):
            has_row_program(bijax.invariant(softmax))
    assert len(requested) == 2
    assert not has_row_program(bijax.invariant(softmax, fuse_rows=False))


def test_the_comparison_is_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, with the same numbers, whatever the settings are under which a program is lowered."""
    interpreted = functools.partial(hopper.run_program, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(_probe, "numbers", lambda: (np.ones((2, 1024), np.float32), np.full((2, 1024), np.nan, "f")))
    here = Kernel("row_program", "sm_999", interpreted, row_contract())
    with registered(here), bijax.lowering_for("sm_999"):
        wanted = _probe.both(CPU)
    for name, bits in zip(_probe.FUNCTIONS, zip(*wanted, strict=True), strict=True):
        assert len(bits) == 2, name
        assert np.isnan(bits[0]).all() == (name != "exp"), name
    with (
        jax.enable_x64(True),
        jax.debug_nans(True),
        jax.numpy_dtype_promotion("strict"),
        jax.default_matmul_precision("highest"),
        jax.set_mesh(jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Explicit,))),
        bijax.set_batch_invariant_mode(),
        registered(here),
        bijax.lowering_for("sm_999"),
    ):
        found = _probe.both(CPU)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert (a.view(np.uint32) == b.view(np.uint32)).all()
