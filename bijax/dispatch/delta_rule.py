"""The gated delta rule as primitives: the kernel of the target, with the target's products of matrices.

To find the kernels: `git grep '"gated_delta_rule' pallas_kernels/backends`. A mapped axis becomes more sequences.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_found
from bijax.dispatch.matmul import Product, multiply
from pallas_kernels.contract import DeltaRuleContract
from pallas_kernels.registry import find
from pallas_kernels.target import Target

CHUNK: Final = DeltaRuleContract().chunk
_WITHOUT_SLOTS: Final = 13
"""Arrays of `gated_delta_rule_extend` without slots, the most of all forms."""


def _define(operation: str, shapes: Kernel) -> Kernel:
    def backend(target: Target, *arrays: jax.Array, **parameters: Any) -> Arrays:
        def product(x: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
            precision = "highest" if x.dtype == jnp.float32 else "default"
            return multiply(target, x, w, product=Product("float32", transpose_w, precision))[0]

        key, value = arrays[1:3]
        sizes = value.dtype.name, key.shape[-1], value.shape[-1]
        served = find(operation, target, sizes, *arrays, **parameters)
        _, _, contracts = served
        if isinstance(contracts["contract"], DeltaRuleContract):  # other contracts have products of their own
            # The cores of a CPU have enough to do with the heads of one sequence.
            parameters |= {"product": product, "together": target.platform != "cpu"}
        return run_found(served, arrays, parameters)

    def fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
        if len(arrays) > _WITHOUT_SLOTS:
            return None  # slots are counted in each entry
        return unfold_rows(size, kernel(*fold_rows(size, arrays, axes), **parameters))

    kernel = define_kernel(operation, backend, fold, shapes)
    return kernel


def _whole(*arrays: jax.Array, keep_edges: bool, **_: Any) -> Arrays:
    value, state = arrays[2], arrays[5]
    chunks = -(-value.shape[1] // CHUNK)
    edges = jnp.zeros((state.shape[0], chunks, *state.shape[1:]), jnp.float32)
    return (value, state, edges) if keep_edges else (value, state)


def _gradients(*arrays: jax.Array, **_: Any) -> Arrays:
    return *arrays[:5], arrays[8]


delta_rule_kernel: Final[Callable[..., Arrays]] = _define("gated_delta_rule", _whole)
"""Arguments and results of `pallas_kernels.delta_rule.portable.gated_delta_rule`."""

delta_rule_extend_kernel: Final[Callable[..., Arrays]] = _define(
    "gated_delta_rule_extend", lambda *arrays, **_: (arrays[2], *arrays[5:11])
)
"""Arguments and results of `pallas_kernels.delta_rule.portable.gated_delta_rule_extend`."""

delta_rule_gradients_kernel: Final[Callable[..., Arrays]] = _define("gated_delta_rule_gradients", _gradients)
"""Arguments and results of `pallas_kernels.delta_rule.gradients.gated_delta_rule_gradients`."""
