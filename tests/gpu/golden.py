"""Golden hashes of the GPU's kernels: the bits of each contract on an architecture, on fixed data.

On a GPU, this prints the entries that are missing or differ:

    PYTHONPATH=. python -m tests.gpu.golden

They change by decision only: raise the contract's version, then put the new entries here.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from bijax.ops import weight_gradient
from bijax.ops._architecture import cuda_architecture
from pallas_kernels.contract import SplitAttentionContract, WgmmaChunkContract, WgmmaContract
from tests.transform.test_vectors import FUNCTIONS

GOLDEN: Final[dict[str, str]] = {
    "matmul bfloat16 | matmul/v1/f32-wgmma16-chain | sm_90": "04589be765fd205f",
    "matmul float16 | matmul/v1/f32-wgmma16-chain | sm_90": "19347011bb2dbb59",
    "matmul bfloat16 (N, K) | matmul/v1/f32-wgmma16-chain | sm_90": "73cbec7265154e15",
    "matmul bfloat16 bias | matmul/v1/f32-wgmma16-chain | sm_90": "280afcb6c1bfcbf9",
    "matmul bfloat16 stack | matmul/v1/f32-wgmma16-chain | sm_90": "81a5b206cf99a494",
    "gradient of x bfloat16 | matmul/v1/f32-wgmma16-chain | sm_90": "4190fed7a1fbd14b",
    "gradient of w bfloat16 | chunks/v1/f32-wgmma16-chain | sm_90": "3ae9cf3718b28a30",
}
"""'operation | contract | architecture' to the first 16 digits of the SHA-256 of the result."""


def cases() -> dict[str, Callable[[], jax.Array]]:
    """Returns what is hashed, by its key in `GOLDEN`."""
    rows, chunks = WgmmaContract().id, WgmmaChunkContract().id
    x, w, g, bias = (array(seed, shape) for seed, shape in enumerate(((77, 1000), (1000, 144), (77, 144), (144,))))
    xs, ws = array(4, (3, 40, 264)), array(5, (3, 264, 80))
    half = [array(6, (77, 1000), np.float16), array(7, (1000, 144), np.float16)]
    found: dict[str, tuple[str, Callable[[], Any]]] = {
        "matmul bfloat16": (rows, lambda: bijax.matmul(x, w, preferred_element_type="float32")),
        "matmul float16": (rows, lambda: bijax.matmul(*half, preferred_element_type="float32")),
        "matmul bfloat16 (N, K)": (rows, lambda: bijax.matmul(x, w.T.copy(), transpose_w=True)),
        "matmul bfloat16 bias": (rows, lambda: bijax.matmul(x, w, bias=bias)),
        "matmul bfloat16 stack": (rows, lambda: bijax.matmul(xs, ws, preferred_element_type="float32")),
        "gradient of x bfloat16": (rows, lambda: jax.vjp(bijax.matmul, x, w)[1](jnp.asarray(g))[0]),
        "gradient of w bfloat16": (chunks, lambda: weight_gradient(x, g)),
        "attention bfloat16": (SplitAttentionContract().id, lambda: attention(128, jnp.bfloat16)),
        "attention float16": (SplitAttentionContract().id, lambda: attention(64, np.float16)),
    }
    architecture = cuda_architecture()
    return {f"{name} | {contract} | {architecture}": call for name, (contract, call) in found.items()} | functions()


def functions() -> dict[str, Callable[[], jax.Array]]:
    """Returns the element-wise functions under `bijax.invariant`, whose bits are those of a version of XLA."""
    x, y = (jnp.asarray(array(seed, (64, 100), np.float32)) * 3 for seed in (8, 9))
    where = f"jaxlib {jax.lib.__version__} | {cuda_architecture()}"

    def call(function: Callable[[jax.Array, jax.Array], jax.Array], dtype: str) -> Callable[[], jax.Array]:
        return lambda: jax.jit(bijax.invariant(function))(x.astype(dtype), y.astype(dtype))

    every = {**FUNCTIONS, "div": lax.div, "sqrt": lambda x, y: lax.sqrt(jnp.abs(x)), "rem": lax.rem}
    return {f"{name} {d} | {where}": call(f, d) for name, f in every.items() for d in ("float32", "bfloat16")}


def attention(size: int, dtype: Any) -> jax.Array:
    """The log-sum-exp tells of the scores, the outputs of everything."""
    q, k, v = (array(8 + i, (1, 1100, heads, size), dtype) for i, heads in enumerate((4, 2, 2)))
    out, lse = bijax.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    return jnp.concatenate([out.astype(jnp.float32), lse[..., None]], axis=-1)


def array(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def digest(y: jax.Array) -> str:
    return hashlib.sha256(np.asarray(y).tobytes()).hexdigest()[:16]


def main() -> None:
    for key, call in cases().items():
        found = digest(call())
        if GOLDEN.get(key) != found:
            print(f'    "{key}": "{found}",')


if __name__ == "__main__":
    main()
