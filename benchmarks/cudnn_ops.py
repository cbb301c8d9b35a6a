"""The operations of a plain model with cuDNN's attention."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from flax_layers.ops import PlainOps


@dataclass(frozen=True)
class CudnnOps(PlainOps):
    """Stock JAX operations; several tokens attend to each other alone, as those of a prompt in an empty cache do."""

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        page_table: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        if page_table is not None:
            places = {"page_table": page_table, "start": start, "lengths": lengths}
            return super().attention(query, key, value, **places, **options)
        if any(option is not None for option in options.values()):
            raise NotImplementedError(f"this model has plain attention, got {options}")
        if start is None or lengths is None or query.shape[1] > 1:
            key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        seen = (start + lengths).astype(jnp.int32)
        one = jnp.ones_like(seen)
        return jax.nn.dot_product_attention(
            query, key, value, query_seq_lengths=one, key_value_seq_lengths=seen, implementation="cudnn"
        )
