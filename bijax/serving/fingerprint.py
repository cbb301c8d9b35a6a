"""The fingerprint of everything, except the weights, that fixes the bits of an engine."""

from typing import Any, Final

import jax
import jax.numpy as jnp

import bijax
from bijax.inspect.contracts import contracts
from bijax.sampling import sample
from bijax.serving.model import Model, state_interval

_ROWS: Final = 2
_TOKENS: Final = 4


def fingerprint(model: Model, *, page_size: int) -> str:
    """Returns the fingerprint of the contracts of a step: the model with a paged cache, and sampling.

    Args:
        model: The model; a pytree, as those that run in one program are.
        page_size: Tokens of a page.

    Guarantee: as `bijax.contracts`: engines with equal fingerprints and equal weights give equal bits on one
    architecture.

    Example:
        >>> from bijax.serving.toy import ToyModel
        >>> len(fingerprint(ToyModel.random(seed=0), page_size=8))
        32
    """
    has_states = state_interval(model) is not None

    def step(model: Any, pages: Any, tokens: jax.Array, table: jax.Array, counts: jax.Array) -> Any:
        slots = {"slots": jnp.arange(_ROWS)} if has_states else {}
        hidden, pages = model.extend(pages, tokens, table, counts, counts, **slots)
        drawn = sample(
            model.logits(hidden[:, 0]),
            seeds=jnp.zeros((_ROWS, 2), jnp.uint32),
            positions=counts,
            temperature=jnp.ones(_ROWS, jnp.float32),
        )
        return pages, drawn

    def like(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model)
    given: Any = model
    pages = jax.eval_shape(lambda: given.init_pages(_ROWS, page_size))
    if has_states:
        pages = (pages, jax.eval_shape(lambda: given.init_states(_ROWS)))
    return contracts(
        bijax.invariant(step), shapes, pages, like(_ROWS, _TOKENS), like(_ROWS, 1), like(_ROWS)
    ).fingerprint
