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
from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.ops import weight_gradient
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
    "attention bfloat16 | attention/v1/f32-wgmma16-keys128-split1024-online | sm_90": "2c6725616a242921",
    "attention float16 | attention/v1/f32-wgmma16-keys128-split1024-online | sm_90": "8dca60e7ce7d44c0",
    "attention bfloat16 96 | attention/v1/f32-wgmma16-keys128-split1024-online | sm_90": "3e48e8fdd25646ba",
    "attention bfloat16 192 | attention/v1/f32-wgmma16-keys64-split1024-online | sm_90": "eeb85d6020b7b077",
    "attention bfloat16 256 | attention/v1/f32-wgmma16-keys64-split1024-online | sm_90": "e868ef7d8d1a57b8",
    "acos float32 | jaxlib 0.11.2 | sm_90": "b99b488334901d1b",
    "acos bfloat16 | jaxlib 0.11.2 | sm_90": "8e2f183427995ec6",
    "acosh float32 | jaxlib 0.11.2 | sm_90": "9da5f66d36d5d5fe",
    "acosh bfloat16 | jaxlib 0.11.2 | sm_90": "9c0f7296c2ddc046",
    "asin float32 | jaxlib 0.11.2 | sm_90": "cfbe082179ecafa0",
    "asin bfloat16 | jaxlib 0.11.2 | sm_90": "903647ecd813a84f",
    "asinh float32 | jaxlib 0.11.2 | sm_90": "0ac83ee69d433ea1",
    "asinh bfloat16 | jaxlib 0.11.2 | sm_90": "d7f2007dbe467e97",
    "atan float32 | jaxlib 0.11.2 | sm_90": "7faacb571cbbb82f",
    "atan bfloat16 | jaxlib 0.11.2 | sm_90": "6a61a7d1d4e89a94",
    "atan2 float32 | jaxlib 0.11.2 | sm_90": "2604236015c98c67",
    "atan2 bfloat16 | jaxlib 0.11.2 | sm_90": "12c8c1cf9ae241b4",
    "atanh float32 | jaxlib 0.11.2 | sm_90": "17dac63e172b8027",
    "atanh bfloat16 | jaxlib 0.11.2 | sm_90": "ab24cf604789d7df",
    "bessel_i0e float32 | jaxlib 0.11.2 | sm_90": "3a91c534fcef66e7",
    "bessel_i0e bfloat16 | jaxlib 0.11.2 | sm_90": "2f0e309fb8483590",
    "bessel_i1e float32 | jaxlib 0.11.2 | sm_90": "ef711d74180307b5",
    "bessel_i1e bfloat16 | jaxlib 0.11.2 | sm_90": "1d77ef77f13efb2a",
    "cbrt float32 | jaxlib 0.11.2 | sm_90": "6e9cedffb8f83f6d",
    "cbrt bfloat16 | jaxlib 0.11.2 | sm_90": "6174dd68c4e09a7b",
    "cos float32 | jaxlib 0.11.2 | sm_90": "9277dff68e9345e5",
    "cos bfloat16 | jaxlib 0.11.2 | sm_90": "f47dedce7cf467ee",
    "cosh float32 | jaxlib 0.11.2 | sm_90": "2b62dca30909cd94",
    "cosh bfloat16 | jaxlib 0.11.2 | sm_90": "0029cb6ebab39e9a",
    "digamma float32 | jaxlib 0.11.2 | sm_90": "d51875ca825293c9",
    "digamma bfloat16 | jaxlib 0.11.2 | sm_90": "9cf9142dccab666e",
    "erf float32 | jaxlib 0.11.2 | sm_90": "90bfa7999d8ac1ca",
    "erf bfloat16 | jaxlib 0.11.2 | sm_90": "6576b10b892f40c4",
    "erf_inv float32 | jaxlib 0.11.2 | sm_90": "b04568f5648f356e",
    "erf_inv bfloat16 | jaxlib 0.11.2 | sm_90": "505940db8a0cd47a",
    "erfc float32 | jaxlib 0.11.2 | sm_90": "3ac272c256d269b2",
    "erfc bfloat16 | jaxlib 0.11.2 | sm_90": "831877dfae284c82",
    "exp float32 | jaxlib 0.11.2 | sm_90": "9a5aab66d9f5ace2",
    "exp bfloat16 | jaxlib 0.11.2 | sm_90": "80ad621b2d7becdd",
    "exp2 float32 | jaxlib 0.11.2 | sm_90": "89c4cd1dce50a19a",
    "exp2 bfloat16 | jaxlib 0.11.2 | sm_90": "37256b7a631fce28",
    "expm1 float32 | jaxlib 0.11.2 | sm_90": "74188c42b4cebc48",
    "expm1 bfloat16 | jaxlib 0.11.2 | sm_90": "502bc21477885d44",
    "igamma float32 | jaxlib 0.11.2 | sm_90": "5611a5cd141e43f5",
    "igamma bfloat16 | jaxlib 0.11.2 | sm_90": "1e1f6680d28d8f28",
    "igamma_grad_a float32 | jaxlib 0.11.2 | sm_90": "b6442601c453317c",
    "igamma_grad_a bfloat16 | jaxlib 0.11.2 | sm_90": "87187721feef2912",
    "igammac float32 | jaxlib 0.11.2 | sm_90": "2936442b67547d1b",
    "igammac bfloat16 | jaxlib 0.11.2 | sm_90": "964b9c7d8d38d201",
    "lgamma float32 | jaxlib 0.11.2 | sm_90": "26157ba013c3a839",
    "lgamma bfloat16 | jaxlib 0.11.2 | sm_90": "5a8d3632e0218ae9",
    "log float32 | jaxlib 0.11.2 | sm_90": "70f49028e9e2bc8d",
    "log bfloat16 | jaxlib 0.11.2 | sm_90": "3b1c7963a2f5dfaf",
    "log1p float32 | jaxlib 0.11.2 | sm_90": "8001136dc36a95f1",
    "log1p bfloat16 | jaxlib 0.11.2 | sm_90": "02af1f20e939964b",
    "log2 float32 | jaxlib 0.11.2 | sm_90": "d7921ee86ea174a9",
    "log2 bfloat16 | jaxlib 0.11.2 | sm_90": "510dadf7e39846db",
    "logistic float32 | jaxlib 0.11.2 | sm_90": "e44dd6435e50517e",
    "logistic bfloat16 | jaxlib 0.11.2 | sm_90": "47d63e71851e15a4",
    "polygamma float32 | jaxlib 0.11.2 | sm_90": "1fe16fa55b884a87",
    "polygamma bfloat16 | jaxlib 0.11.2 | sm_90": "696d4c0ecfb517d7",
    "pow float32 | jaxlib 0.11.2 | sm_90": "2925261acb1a21eb",
    "pow bfloat16 | jaxlib 0.11.2 | sm_90": "ef8279aeec029b20",
    "rsqrt float32 | jaxlib 0.11.2 | sm_90": "ff84d6eade6b4107",
    "rsqrt bfloat16 | jaxlib 0.11.2 | sm_90": "93b881d5b5fd1023",
    "sin float32 | jaxlib 0.11.2 | sm_90": "1d2537184f0d28e4",
    "sin bfloat16 | jaxlib 0.11.2 | sm_90": "aba9a80e0f971573",
    "sinh float32 | jaxlib 0.11.2 | sm_90": "83fb9a05ab21ebf3",
    "sinh bfloat16 | jaxlib 0.11.2 | sm_90": "c03087538aabd7bb",
    "tan float32 | jaxlib 0.11.2 | sm_90": "0dfa3fdd8284921b",
    "tan bfloat16 | jaxlib 0.11.2 | sm_90": "103650b60d7d9e32",
    "tanh float32 | jaxlib 0.11.2 | sm_90": "9ca0e8f3c132ad00",
    "tanh bfloat16 | jaxlib 0.11.2 | sm_90": "a74b4339c2ef4f95",
    "zeta float32 | jaxlib 0.11.2 | sm_90": "86794f437df8346d",
    "zeta bfloat16 | jaxlib 0.11.2 | sm_90": "ab7f3c486fdd1451",
    "div float32 | jaxlib 0.11.2 | sm_90": "2f982ffde4d27e14",
    "div bfloat16 | jaxlib 0.11.2 | sm_90": "6149645be4efbd3e",
    "sqrt float32 | jaxlib 0.11.2 | sm_90": "7152d6256e36a62e",
    "sqrt bfloat16 | jaxlib 0.11.2 | sm_90": "8cc0eb72fa2cf935",
    "rem float32 | jaxlib 0.11.2 | sm_90": "032d1a9faa477bda",
    "rem bfloat16 | jaxlib 0.11.2 | sm_90": "b12d37308c84b874",
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
        "attention bfloat16 96": (SplitAttentionContract().id, lambda: attention(96, jnp.bfloat16)),
        "attention bfloat16 192": (SplitAttentionContract(key_block=64).id, lambda: attention(192, jnp.bfloat16)),
        "attention bfloat16 256": (SplitAttentionContract(key_block=64).id, lambda: attention(256, jnp.bfloat16)),
    }
    return {f"{name} | {contract} | {_architecture()}": call for name, (contract, call) in found.items()} | functions()


def _architecture() -> str:
    """Returns this machine's; where there is no GPU the names are listed alone."""
    return cuda_architecture() if jax.default_backend() == "gpu" else HOPPER


def functions() -> dict[str, Callable[[], jax.Array]]:
    """Returns the element-wise functions under `bijax.invariant`, whose bits are those of a version of XLA."""
    x, y = (jnp.asarray(array(seed, (64, 100), np.float32)) * 3 for seed in (8, 9))
    where = f"jaxlib {jax.lib.__version__} | {_architecture()}"

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
