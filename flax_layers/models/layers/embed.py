"""An embedding, and the projection back onto it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._dtypes import promote
from ._initializers import EMBEDDING


class Embed(nnx.Module):
    """Looks up rows of a table by token id, as `flax.nnx.Embed`, with the operations as an argument.

    Args:
        num_embeddings: Rows of the table (the vocabulary).
        features: Length of a row.
        dtype: Dtype of the result and of the computation; the table's by default.
        param_dtype: Dtype of the table.
        embedding_init: Initializer of the table.
        scale: Factor of the rows that are looked up, rounded to `dtype`; `attend` does without.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        embedding: (num_embeddings, features) parameter.

    Guarantee: row-invariant with `INVARIANT`, both the look-up and `attend`. The gradient of the table is
    split-invariant for cuts of the tokens at multiples of 128 from either, but not from both together: they are added
    before the micro-batches are.

    Example:
        >>> embed = Embed(10, 4, rngs=nnx.Rngs(0))
        >>> x = embed(jnp.array([[1, 2, 3]]))
        >>> x.shape, embed.attend(x).shape
        ((1, 3, 4), (1, 3, 10))
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        embedding_init: nnx.Initializer = EMBEDDING,
        scale: float = 1.0,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        self.embedding = nnx.Param(embedding_init(rngs.params(), (num_embeddings, features), param_dtype))
        self.num_embeddings = num_embeddings
        self.features = features
        self.scale = scale
        self.dtype = dtype
        self.ops = ops

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows (..., features) of the token ids (...), integers.

        Ids that are known only inside `jax.jit` cannot be checked; those out of range get nan, never another row.

        Raises:
            TypeError: If the ids are not integers.
            ValueError: If an id is out of range.
        """
        check_token_ids(tokens, self.num_embeddings)
        (table,) = promote(self.dtype, self.embedding[...])
        rows = self.ops.embed(table, tokens)
        return rows if self.scale == 1 else self.ops.scale(rows, self.scale)

    def attend(self, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        """Multiplies by the transposed table, without a copy of it.

        Args:
            x: (..., features).
            preferred_element_type: Dtype of the result; the computation's by default.

        Returns:
            (..., num_embeddings).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If the last dimension of x is not `features`.
        """
        if x.shape[-1:] != (self.features,):
            raise ValueError(f"Embed.attend: x must have the shape (..., {self.features}), got {x.shape}.")
        x, table = promote(self.dtype, x, self.embedding[...])
        return self.ops.matmul(x, table, transpose_w=True, preferred_element_type=preferred_element_type)


def check_token_ids(tokens: Any, num_embeddings: int) -> None:
    """Checks that token ids are integers and, unless they are traced, in range.

    Raises:
        TypeError: If they are not integers.
        ValueError: If one is out of range.
    """
    dtype = jnp.result_type(tokens)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"token ids must be integers, got {dtype.name}{jnp.shape(tokens)}; convert them to jnp.int32.")
    if isinstance(tokens, jax.core.Tracer):
        return
    wrong = np.argwhere((np.asarray(tokens) < 0) | (np.asarray(tokens) >= num_embeddings))
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"token ids must be from 0 to {num_embeddings - 1}, got {int(np.asarray(tokens)[index])} at index {index}"
            f" of an array of shape {jnp.shape(tokens)}; is this the tokenizer of this model?"
        )
