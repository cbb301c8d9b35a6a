"""Whether the processes of a program agree on what they compute, and with which weights."""

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_OP = "bijax.parallel.check_processes"
_BYTES = 32


def check_processes(**values: Any) -> None:
    """Checks that all processes of `jax.distributed` have the same values: contracts, weights, options.

    Call it in every process, before the first step, with what each has read or chosen by itself. Digests travel, the
    values do not. In a program of one process it only checks the types.

        jax.distributed.initialize(...)
        manifest = bijax.contracts(step, params, batch)
        parallel.check_processes(contracts=manifest.fingerprint, weights=params)

    Args:
        **values: Each a string, or a pytree of strings, numbers and arrays: NumPy's, or JAX's on devices of this
            process, such as weights before they are cut over all devices.

    Raises:
        TypeError: If a leaf is none of these.
        ValueError: In all processes, if one has other names, or other values than process 0. The message names the
            values and the processes.

    Guarantee: arrays are equal only with the same dtypes, shapes and bits; pytrees only with the same structure.

    Source: the project's design.

    Example:
        >>> check_processes(contracts="3f21", weights={"kernel": np.ones((2, 3))})
    """
    names = tuple(sorted(values))
    digests = [_digest(name, values[name]) for name in names]
    if jax.process_count() == 1:
        return
    (of_names,) = _gathered([hashlib.sha256("\n".join(names).encode()).digest()])
    if others := _others(of_names):
        raise ValueError(
            f"{_OP}: every process must pass the same names, got others in {_processes(others)} than in process 0;"
            f" process {jax.process_index()} passes {', '.join(names)}."
        )
    found = dict(zip(names, _gathered(digests), strict=True))
    wrong = {name: others for name, rows in found.items() if (others := _others(rows))}
    if wrong:
        what = "; ".join(
            f"{name} in {_processes(others)} (sha256 {', '.join(found[name][i].hex()[:12] for i in others)}, in process"
            f" 0 {found[name][0].hex()[:12]})"
            for name, others in wrong.items()
        )
        raise ValueError(
            f"{_OP}: expected the same values in all {jax.process_count()} processes, got other {what}; start each"
            " process with the same program, options and checkpoint."
        )


def _digest(name: str, tree: Any) -> bytes:
    """Returns the hash of a pytree."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    total = hashlib.sha256(str(structure).encode())
    for path, leaf in leaves:
        where = jax.tree_util.keystr(path)
        total.update(where.encode())
        if isinstance(leaf, str):
            total.update(b"str" + leaf.encode())
            continue
        array = _host_array(f"{name}{where}", leaf)
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.digest()


def _host_array(where: str, leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise TypeError(
            f"{_OP}: {where} must be on devices of this process, got {leaf.dtype}{list(leaf.shape)} with the sharding"
            f" {leaf.sharding}; pass weights before they are cut over the devices of all processes."
        )
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float)):
        raise TypeError(f"{_OP}: {where} must be a string, a number or an array, got {type(leaf).__name__}.")
    return np.asarray(leaf)


def _gathered(digests: Sequence[bytes]) -> list[list[bytes]]:
    """Returns each digest of all processes."""
    from jax.experimental import multihost_utils  # imports much that programs of one process do not need

    mine = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), _BYTES)
    everywhere = np.asarray(multihost_utils.process_allgather(mine))
    return [[everywhere[p, i].tobytes() for p in range(len(everywhere))] for i in range(len(digests))]


def _others(digests: Sequence[bytes]) -> list[int]:
    """Returns the processes that do not have what process 0 has."""
    return [process for process, digest in enumerate(digests) if digest != digests[0]]


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"
