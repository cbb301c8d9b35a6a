"""The gated RMSNorm as one primitive: the norm and the product with silu of the gates in one kernel where there is one.

That kernel has the bits of the kernels that it stands for, which serve where there is none.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, define_kernel, fold_some
from bijax.dispatch.kernels import run_if_served, run_kernel
from pallas_kernels.registry import find
from pallas_kernels.target import Target


def times_silu(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns x times silu of the gate, in float32."""
    return x * jax.nn.silu(gate.astype(jnp.float32))


def _backend(target: Target, *arrays: jax.Array, names: tuple[str, ...], column: int, eps: float) -> Arrays:
    named: dict[str, Any] = dict(zip(names, arrays, strict=True))
    x, gate = named["x"], named["gate"]
    of_norm = {name: a for name, a in named.items() if name != "gate"} | {"eps": eps, "dtype": "float32"}
    contract = find("rms_norm", target, x.shape[1], **of_norm).contracts["contract"]
    found = run_if_served("gated_rms_norm", target, contract, like=_shapes, **named, column=column, eps=eps)
    if found is not None:
        return tuple(found)
    normal = run_kernel("rms_norm", target, x.shape[1], like=_norm_shapes, **of_norm)[0]
    gates = gate[:, column : column + x.size // gate.shape[0]].reshape(x.shape)
    (y,) = run_kernel("elementwise", target, None, normal, gates, program=_program, like=lambda x, *_, **__: (x,))
    return (y.astype(x.dtype),)


def _program(x: jax.Array, gate: jax.Array) -> Arrays:
    return (times_silu(x, gate),)


def _shapes(*, x: jax.Array, **_: Any) -> Arrays:
    return (x,)


def _norm_shapes(*, x: jax.Array, **_: Any) -> Arrays:
    return x.astype(jnp.float32), jnp.zeros((x.shape[0], 1), jnp.float32)


def _of_arrays(*arrays: jax.Array, names: tuple[str, ...], **_: Any) -> Arrays:
    return (dict(zip(names, arrays, strict=True))["x"],)


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
    shared = [name == "weight" for name in parameters["names"]]
    return fold_some(_kernel, size, arrays, axes, shared, parameters)


_kernel: Final = define_kernel("gated_rms_norm", _backend, _fold, _of_arrays)


def gated_rms_norm_kernel(arrays: dict[str, jax.Array | None], *, column: int, eps: float) -> Arrays:
    """Returns the gated norm of rows.

    Args:
        arrays: `x` (M, C), `gate` (N, D), where M is a multiple of N, and `weight` (C,) or None. Row r of `x` has the
            gates from column `column + r % (M / N) * C` on, of row r // (M / N).
        column: See above.
        eps: Added to the mean square.
    """
    given = {name: a for name, a in arrays.items() if a is not None}
    return _kernel(*given.values(), names=tuple(given), column=column, eps=eps)
