"""Derivatives of the library's own operations."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import jax

from pallas_kernels.parts.xla.manual_axes import vary_alike

_FORWARD: Final = "forward-mode autodiff (jvp)"
_NO_FORWARD_MODE: Final = (
    "The operations of bijax have no forward mode (jax.jvp, jax.jacfwd, jax.linearize, jax.hessian). Differentiate"
    " JAX's own operation, made invariant: bijax.invariant(jnp.matmul) instead of bijax.matmul has both modes. Or use"
    " reverse mode: jax.grad, jax.vjp, jax.jacrev."
)


class Differentiable[R](Protocol):
    """A function with a custom derivative."""

    def __call__(self, *arguments: Any) -> R:
        """Calls the function."""
        ...

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """Sets both passes, as `jax.custom_vjp.defvjp` does."""


def custom_vjp[R](*, nondiff_argnums: Sequence[int] = ()) -> Callable[[Callable[..., R]], Differentiable[R]]:
    """Like `jax.custom_vjp`, also inside `jax.shard_map`, where the arguments are first cast to one type.

    Args:
        nondiff_argnums: As in `jax.custom_vjp`.
    """

    def decorate(function: Callable[..., R]) -> Differentiable[R]:
        rule = jax.custom_vjp(function, nondiff_argnums=tuple(nondiff_argnums))

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            same = iter(vary_alike([x for i, x in enumerate(arguments) if i not in nondiff_argnums]))
            try:
                return rule(*(x if i in nondiff_argnums else next(same) for i, x in enumerate(arguments)))
            except TypeError as error:
                if _FORWARD not in str(error):
                    raise
                raise TypeError(_NO_FORWARD_MODE) from error

        call.defvjp = rule.defvjp  # type: ignore[attr-defined]
        return cast(Differentiable[R], call)

    return decorate
