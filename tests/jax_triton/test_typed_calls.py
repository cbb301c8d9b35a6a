"""Launches of jax-triton 0.3 become typed calls, which XLA's command buffers take; other calls stay as they are."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.parts.jax_triton import typed_calls


def lowered(name: str, version: int, config: bytes | None, **attributes: object) -> str:
    """Returns a program with a custom call, whose results went through `make_typed`."""
    primitive = Primitive("call_of_a_test")
    primitive.def_abstract_eval(lambda x: x)
    options = {} if config is None else {"backend_config": config}
    rule = jax.ffi.ffi_lowering(name, api_version=version, operand_output_aliases={0: 0}, **options)

    def lower(ctx: mlir.LoweringRuleContext, x: object) -> object:
        results = rule(ctx, x, **attributes)
        typed_calls.make_typed(results)
        return results

    mlir.register_lowering(primitive, lower, platform="cuda")
    program = jax.jit(lambda x: primitive.bind(x + 1) * 2).trace(jnp.ones(3))
    return str(program.lower(lowering_platforms=("cuda",)).as_text())


def test_old_calls_become_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_calls, "_has_handler", lambda: True)
    text = lowered("triton_kernel_call", 2, b"a description")
    assert "@triton_kernel_call_ffi(" in text
    assert 'backend_config = {opaque = "a description"}' in text
    assert "api_version = 4" in text
    assert "output_operand_alias" in text


def test_other_calls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_calls, "_has_handler", lambda: True)
    assert "@another(" in lowered("another", 2, b"a description")
    assert "@triton_kernel_call_ffi(" in lowered("triton_kernel_call_ffi", 4, None)


def test_calls_that_are_typed_become_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_calls, "_has_handler", lambda: True)
    monkeypatch.setattr(typed_calls, "shortened", lambda description: description[:5])
    assert 'opaque = "a des"' in lowered("triton_kernel_call", 2, b"a description")
    text = lowered("triton_kernel_call_ffi", 4, None, opaque=b"a description", other="a name")
    assert 'opaque = "a des"' in text
    assert 'other = "a name"' in text


def test_without_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_calls, "_has_handler", lambda: False)
    assert "@triton_kernel_call(" in lowered("triton_kernel_call", 2, b"a description")
