"""Operations without a gradient: differentiating them raises an error, where rounding would have a zero gradient."""

from collections.abc import Callable
from typing import Any

from bijax.core.derivative import custom_vjp
from pallas_kernels.errors import UnsupportedError


def forward_only(op: str, compute: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `compute(*arrays)`, which cannot be differentiated.

    Args:
        op: Name of the operation, for the message.
        compute: A function of arrays.
        *arrays: Its arguments; None for an omitted one.

    Raises:
        UnsupportedError: In reverse-mode differentiation.
    """

    def no_gradient(*_: Any) -> Any:
        raise UnsupportedError(
            f"{op} has no gradient: expected inference. Put jax.lax.stop_gradient around its arguments, or"
            " differentiate the operations in float32, bfloat16 or float16 that it stands for."
        )

    apply = custom_vjp()(compute)
    apply.defvjp(no_gradient, no_gradient)
    return apply(*arrays)
