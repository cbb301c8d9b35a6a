"""Golden hashes of norms and sums, which are those of every backend."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import hostile_rows
from pallas_kernels.contract import chunk_contract, row_contract
from tests.arrays import on_device

# Correctly rounded steps in a fixed order: the hash on every machine, CPU or GPU.
GOLDEN = {
    "rms_norm": "ac66feb54b0c5839",
    "rms_norm_gradient": "b46b1759e8626f53",
    "layer_norm": "57cc0c2b9e9c2548",
    "layer_norm_gradient": "513ef18ddec344fa",
    "weight_gradient": "ff3de98d9ee71bf3",
    "sum_axis": "b76158dfab279f6d",
    "sum_rows": "66bf2d1d0fa5a046",
}


def golden_hash(name: str, kernel: Callable[..., Any]) -> str:
    """Returns a hash of the bits of a kernel on fixed data."""
    x, g = (on_device(hostile_rows(seed, (200, 576), "float32")["normal"]) for seed in (0, 1))
    w, factor = x[0], jnp.abs(g[:, :1])
    calls: dict[str, Callable[..., Any]] = {
        "rms_norm": lambda f: f(x, w, eps=1e-6, contract=row_contract()),
        "rms_norm_gradient": lambda f: f(x, factor, g, w, contract=row_contract()),
        "layer_norm": lambda f: f(x, w, w, eps=1e-6, contract=row_contract()),
        "layer_norm_gradient": lambda f: f(x, factor, factor, g, w, contract=row_contract()),
        "weight_gradient": lambda f: f(x, factor, g, contract=chunk_contract()),
        "sum_axis": lambda f: f(x[:, :, None], contract=row_contract()),
        "sum_rows": lambda f: f(x, contract=chunk_contract()),
    }
    results = jax.tree.leaves(calls[name](kernel))
    return hashlib.sha256(b"".join(np.asarray(r).tobytes() for r in results)).hexdigest()[:16]
