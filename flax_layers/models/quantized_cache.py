"""Caches of 8 bits for keys and values: the dtype, and scales that belong to the weights."""

import functools
from dataclasses import dataclass
from typing import Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from ._layered import Layers, Stored, _start
from .layers import KVCache
from .llama import Llama
from .partitioned import PartitionedLlama

DTYPES: Final = ("int8", "float8_e4m3fn")

_SEQUENCES: Final = 4
_TOKENS: Final = 64
_MARGIN: Final = 1.25
_LARGEST: Final = 127


@functools.partial(jax.tree_util.register_dataclass, data_fields=["scales"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantizedCache:
    """A cache that stores keys and values divided by scales, in 8 bits; larger quotients are clamped. A pytree.

    With "float8_e4m3fn" the scales are 1, and numbers up to 448 fit, as in other engines. With "int8" each channel of
    each head has one: 1/127 of 1.25 times the largest number that the channel has for 256 random tokens, always the
    same ones. So scales depend on the weights alone, and no bit on the requests served before.

    Attributes:
        scales: For each block those of keys and of values, float32, (K,) or (K, H).
        dtype: "int8" or "float8_e4m3fn".

    Guarantee: row-invariant, as `bijax.paged_attention` with such a cache: prefill, chunks, decoding and a warm prefix
    cache read the same 8 bits.
    """

    scales: tuple[tuple[jax.Array, jax.Array], ...]
    dtype: str

    @classmethod
    def choose(cls, model: Llama | PartitionedLlama, dtype: str) -> "QuantizedCache":
        """Returns the cache for a model.

        Args:
            model: The model. The scales of one that is cut over devices are those of its own keys and values, and the
                same on any number of devices.
            dtype: "int8" or "float8_e4m3fn".

        Raises:
            ValueError: If it is not supported, or the model has latent or linear attention, which has no keys
                and values.

        Example:
            >>> QuantizedCache.choose(None, "float8_e5m2")
            Traceback (most recent call last):
                ...
            ValueError: QuantizedCache: dtype must be one of int8, float8_e4m3fn, got 'float8_e5m2'.
        """
        if dtype not in DTYPES:
            raise ValueError(f"QuantizedCache: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
        if model.config.latent is not None or model.config.linear is not None:
            raise ValueError(
                f"QuantizedCache: a cache of {dtype} needs a model with keys and values in every layer, got one with"
                f" {'latent' if model.config.latent is not None else 'linear'} attention; leave the dtype out."
            )
        if dtype == "int8":
            return cls(_measured(model), dtype)
        ones = jnp.ones(model.config.num_kv_heads, jnp.float32)
        return cls(((ones, ones),) * model.config.num_layers, dtype)


def _measured(model: Llama | PartitionedLlama) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Returns scales by the keys and values that a model has for random tokens."""
    config = model.config
    length = min(_TOKENS, config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (_SEQUENCES, length)).astype(np.int32)
    if config.bos_token_id is not None:
        tokens[:, 0] = config.bos_token_id
    cache: KVCache = model.cache(batch=_SEQUENCES, capacity=length)
    if isinstance(model, PartitionedLlama):
        _, cache = jax.jit(model.extend)(model.params, tokens, cache)
        return tuple((_scale(keys), _scale(cache.values[i])) for i, keys in enumerate(cache.keys))
    start, lengths = jnp.zeros(_SEQUENCES, jnp.int32), jnp.full(_SEQUENCES, length, jnp.int32)
    x, angles = _start(model.embed, model.rotaries, jnp.asarray(tokens), start, lengths, length)
    held: list[Stored] = list(zip(cache.keys, cache.values, strict=True))
    _, stored = Layers(model).extend(x, angles, held, None, start, lengths)
    pairs = cast(list[tuple[jax.Array, jax.Array]], stored)
    return tuple((_scale(keys), _scale(values)) for keys, values in pairs)


@jax.jit
def _scale(numbers: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.abs(numbers.astype(jnp.float32)), axis=(0, 1))
    return jnp.where(largest > 0, largest, 1) * (_MARGIN / _LARGEST)
