"""Running a traced program with some of JAX's primitives replaced, and finding such primitives in programs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

import bijax
from tests.arrays import on_device

Rules = dict[str, Callable[..., jax.Array]]

FLOATS = ("float32", "bfloat16", "float16")


def substitute(function: Callable[..., Any], rules: Rules) -> Callable[..., Any]:
    """Returns the function with the primitives that `rules` names computed by the rules."""

    def run(*args: Any) -> Any:
        traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(traced, jax.tree.leaves(args), rules)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def equations(function: Callable[..., Any], *args: Any, name: str) -> list[Any]:
    """Returns the different equations of one primitive in a program, those of the functions it calls included."""
    found = [e for e in _walk(jax.make_jaxpr(function)(*args).jaxpr) if e.primitive.name == name]
    return list({(str(e.params), *(str(v.aval) for v in e.invars)): e for e in found}.values())


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    """Returns normal numbers."""
    return on_device(np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(jnp.dtype(dtype)))


def compared(equation: Any, rule: Callable[..., jax.Array], *, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Returns what an equation of two floating operands and its replacement compute on normal numbers."""
    args = [normal(seed + i, *v.aval.shape, dtype=v.aval.dtype.name) for i, v in enumerate(equation.invars)]
    stock = jax.jit(lambda *args: equation.primitive.bind(*args, **equation.params))(*args)
    return stock, jax.jit(lambda *args: rule(*args, **equation.params))(*args)


def lowers_for_cuda(function: Callable[..., Any], *args: Any) -> bool:
    """Lowers a function for an NVIDIA GPU, which must not raise."""
    with bijax.lowering_for("sm_90"):
        return bool(jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text())


def _walk(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from _walk(value.jaxpr)


def _evaluate(closed: Any, args: list[Any], rules: Rules) -> list[Any]:
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(v) for v in equation.invars]
        primitive, parameters = equation.primitive, equation.params
        if primitive.name in rules:
            results = [rules[primitive.name](*values, **parameters)]
        elif primitive.name in ("jit", "pjit", "closed_call"):
            results = _evaluate(parameters.get("jaxpr", parameters.get("call_jaxpr")), values, rules)
        else:
            bound = primitive.get_bind_params(parameters)
            functions, parameters = bound if isinstance(bound, tuple) else ((), bound)  # JAX 0.11 gives both
            results = primitive.bind(*functions, *values, **parameters)
            results = results if primitive.multiple_results else [results]
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]
