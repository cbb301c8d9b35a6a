"""Every private part of JAX that the transform needs, with the reason for each.

`bijax.core.lowering_cache._jax_private` has those that the caches of lowered kernels need, and
`bijax.core._jax_private` those that programs for several devices need.

- `mlir.jaxpr_subcomp` lowers the equations of a program, one after another, by the rules of global tables. JAX has no
  public way to lower one program by other rules than another (`LoweringParameters.override_lowering_rules` holds for a
  whole module, only for `jax.export`, and does not see which equation it lowers). So a function of ours
  wraps it, which may pass it other equations, of our own primitives. A program without a request is passed on
  unchanged: JAX's tables, rules and caches are left alone.
- `mlir._get_lowering_rules` looks a rule up as JAX does, at the time when it is needed.
- `mlir._lowerings` and `mlir._platform_specific_lowerings` hold the names of all primitives that can be lowered.
- `mlir._uncacheable_primitives` lists the rules that must receive the operands themselves.
- `mlir.lower_per_platform` chooses among rules in a program for several platforms.
- `source_info_util` gives the line of the user's program that an equation comes from.
- `special.regularized_incomplete_beta_impl` is the program of the incomplete beta function; see `own_programs.py`.
- `numpy.einsum.opt_einsum` chooses the order in which `jax.numpy.einsum` contracts its operands, from the sizes of all
  axes. JAX has no setting for it, and its equations no longer tell which operands there were; see `einsum_paths.py`.
- `xla_metadata_lib.current_xla_metadata` has what `jax.experimental.xla_metadata` sets: the request of the rule of a
  gradient that is traced after the function has returned.
- `stages.Compiled.__call__` runs a program that was compiled earlier; see `watch.py`. (It is public. That a check can
  run before it is not.)
"""

import functools
import importlib
import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax._src import source_info_util, xla_metadata_lib
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import special as _special
from jax.extend.core import Primitive
from jax.interpreters import mlir

from bijax.core import _jax_private as _of_devices
from bijax.core.lowering_cache import _jax_private as _of_caches
from pallas_kernels.errors import UnsupportedError

SUPPORTED: Final = ">=0.11.2,<0.12.1"
"""Tested versions of JAX, as in `pyproject.toml`."""

Context = Any  # mlir.LoweringRuleContext, whose values are typed too abstractly for arrays
Rule = Callable[..., Sequence[Any]]
Hook = Callable[[Any, Any, Callable[[Any], Any]], Any]

_einsum: Final[Any] = importlib.import_module("jax._src.numpy.einsum")  # its package has the function under this name

_PARAMETERS: Final[dict[str, str]] = {
    "jaxpr_subcomp": "ctx jaxpr name_stack tokens consts_for_constvars args dim_var_values const_lowering"
    " outer_traceback",
    "_get_lowering_rules": "ctx primitive eqn_ctx",
    "lower_per_platform": "ctx description platform_rules default_rule effects rule_args rule_kwargs",
}
"""The functions above, with the names of their parameters."""

_FIELDS: Final = ("lowering_cache", "cached_primitive_lowerings", "platforms", "module")
"""What the context of a module must have."""

_lock = threading.Lock()
_installed = False


def check() -> None:
    """Checks that this version of JAX has what is used here.

    Raises:
        UnsupportedError: If it has not.
    """
    wrong = [
        f"mlir.{name} takes ({', '.join(found)}), not ({', '.join(wanted.split())})"
        if found
        else f"there is no mlir.{name}"
        for name, wanted in _PARAMETERS.items()
        if (found := _parameter_names(getattr(_mlir, name, None))) != wanted.split()
    ]
    fields = _parameter_names(_mlir.ModuleContext)
    wrong += [f"mlir.ModuleContext has no {name}" for name in _FIELDS if name not in fields]
    if not isinstance(getattr(_mlir, "_uncacheable_primitives", None), set):
        wrong.append("there is no set mlir._uncacheable_primitives")
    for name in ("_lowerings", "_platform_specific_lowerings"):
        if not isinstance(getattr(_mlir, name, None), dict):
            wrong.append(f"there is no dict mlir.{name}")
    if _parameter_names(getattr(_special, "regularized_incomplete_beta_impl", None)) != ["a", "b", "x", "dtype"]:
        wrong.append("there is no special.regularized_incomplete_beta_impl(a, b, x, *, dtype)")
    if not callable(getattr(getattr(_einsum, "opt_einsum", None), "contract_path", None)):
        wrong.append("there is no numpy.einsum.opt_einsum.contract_path")
    if not callable(getattr(xla_metadata_lib, "current_xla_metadata", None)):
        wrong.append("there is no xla_metadata_lib.current_xla_metadata")
    for name in ("current", "user_frames"):
        if not callable(getattr(source_info_util, name, None)):
            wrong.append(f"there is no source_info_util.{name}")
    wrong += _of_devices.missing() + _of_caches.missing()
    if wrong:
        raise UnsupportedError(
            f"bijax.invariant: expected JAX {SUPPORTED}, got {jax.__version__}, which lowers programs in another way:"
            f" {'; '.join(wrong)}. Install a supported version of JAX, or a version of bijax for this one."
        )


def _parameter_names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"] if callable(function) else []


def install(hook: Hook, path: Callable[[Any], Callable[..., Any]]) -> None:
    """Wraps JAX's lowering of a program's equations, and its choice of einsum's order; does nothing the second time.

    Args:
        hook: Takes the context of the module, the program, and a function that lowers a program with the same
            variables; returns that function's result. Several threads call it at once.
        path: Takes the module opt_einsum and returns what `jax.numpy.einsum` calls instead of its `contract_path`.

    Raises:
        UnsupportedError: If this version of JAX is not supported.
    """
    global _installed
    if _installed:
        return
    with _lock:
        if _installed:
            return
        check()
        stock = _mlir.jaxpr_subcomp

        @functools.wraps(stock)
        def jaxpr_subcomp(ctx: Any, jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
            return hook(ctx, jaxpr, lambda program: stock(ctx, program, *args, **kwargs))

        _mlir.jaxpr_subcomp = jaxpr_subcomp
        mlir.jaxpr_subcomp = jaxpr_subcomp  # the same function under its public name
        # A copy of the module: opt_einsum itself, which others use too, stays as it is.
        copy = types.ModuleType(_einsum.opt_einsum.__name__)
        copy.__dict__.update(vars(_einsum.opt_einsum), contract_path=path(_einsum.opt_einsum))
        _einsum.opt_einsum = copy
        _installed = True


def metadata_of_trace() -> dict[str, str] | None:
    """Returns the metadata that equations traced now, in this thread, get."""
    found: dict[str, str] | None = xla_metadata_lib.current_xla_metadata()
    return found


def rules_of(ctx: Any, primitive: Primitive, equation: Any) -> tuple[dict[str, Rule], Rule | None, bool]:
    """Returns JAX's current rules for a primitive.

    Args:
        ctx: Context of the module.
        primitive: The primitive.
        equation: Context of the equation.

    Returns:
        The rules for some platforms, the rule for the others, and whether calls of the rule are inlined.
    """
    return _mlir._get_lowering_rules(ctx, primitive, equation)


def incomplete_beta(a: jax.Array, b: jax.Array, x: jax.Array, *, dtype: Any) -> jax.Array:
    """JAX's regularised incomplete beta function of arrays of one dtype, written in other operations."""
    result: jax.Array = _special.regularized_incomplete_beta_impl(a, b, x, dtype=dtype)
    return result


def names_of_primitives() -> set[str]:
    """Returns the names of all primitives with a rule at present."""
    tables = (_mlir._lowerings, *_mlir._platform_specific_lowerings.values())
    return {primitive.name for table in tables for primitive in table}


def is_cached(primitive: Primitive) -> bool:
    """Returns whether JAX lowers equal equations of a primitive once."""
    return primitive not in _mlir._uncacheable_primitives


def with_caches_of(request: Any, module: Any) -> Any:
    """Returns the context of a module with separate caches for one request.

    JAX lowers a function once in a module, and may have cached another version of it.

    Args:
        request: The request, hashable.
        module: Context of the module.
    """
    caches = module.cached_primitive_lowerings.setdefault((__name__, request), ({}, {}))
    return module.replace(lowering_cache=caches[0], cached_primitive_lowerings=caches[1])


def lower_per_platform(
    ctx: Context, name: str, rules: Mapping[str, Rule], default: Rule | None, *operands: Any, **parameters: Any
) -> Sequence[Any]:
    """Lowers a primitive without effects by the rules of several platforms.

    Args:
        ctx: Context of the rule.
        name: Name of the primitive, for errors.
        rules: The rules for some platforms.
        default: The rule for the others, None if there is none.
        *operands: Operands of the primitive.
        **parameters: Its parameters.
    """
    ctx = ctx.replace(avals_out=list(ctx.avals_out))
    return _mlir.lower_per_platform(ctx, name, dict(rules), default, set(), *operands, **parameters)


def user_stack() -> list[tuple[str, int]]:
    """Returns the files and lines, innermost first, of the equation being lowered."""
    traceback = source_info_util.current().traceback
    return [(frame.file_name, frame.start_line) for frame in source_info_util.user_frames(traceback)]
