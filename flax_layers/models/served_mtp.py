"""The head for multi-token prediction of a served model: drafts of tokens after the next one."""

import functools

import jax

from bijax.core.hashed_once import HashedOnce

from ._layered import OfBlock, _extend
from .block import Rotary, start_positions
from .layers import KVCache, RMSNorm
from .llama import Llama
from .mtp import MTPHead
from .served_programs import flattened

type Layer = tuple[jax.Array, jax.Array | None]
"""Keys and values of the head's block, or its latents."""


class ServedHead:
    """A head with the parts of its model that it shares, separated for programs that share their structures.

    Args:
        head: The head.
        model: Its model.

    Raises:
        ValueError: If they do not belong together.
    """

    def __init__(self, head: MTPHead, model: Llama) -> None:
        head.check_model("ServedLlama", model.config)
        self._sizes = {**model.cache_sizes(), "num_layers": 1}
        self._block, self._parameters = jax.tree.structure(head.block), tuple(jax.tree.leaves(head.block))
        joins = [flattened((head, model.embed, norm, model.rotary)) for norm in (model.norm, head.norm)]
        self._joins = [(HashedOnce(structure), given) for structure, given in joins]
        structure, given = flattened((head.norm, model.projection))
        self.end = HashedOnce(structure), given

    def init_pages(self, num_pages: int, page_size: int) -> Layer:
        """Returns the keys and values of the head's block."""
        cache = KVCache.paged([[0]], num_pages=num_pages, page_size=page_size, **self._sizes)
        return cache.keys[0], cache.values[0]

    def extend(
        self,
        stored: Layer,
        hidden: jax.Array,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        *,
        own: bool,
    ) -> tuple[jax.Array, Layer]:
        """Applies the head to tokens; see `ServedLlama.draft`."""
        capacity = page_table.shape[1] * stored[0].shape[1]
        structure, given = self._joins[own]
        x, rotary = _join(structure, given, hidden, tokens, start, lengths, capacity)
        places = (page_table, start, lengths, None, None, OfBlock())
        (x, _), kept = _extend(self._block, self._parameters, (x, None), rotary, stored, *places, alone=True)
        return x, kept


@functools.partial(jax.jit, static_argnames=("structure", "capacity"))
def _join(
    structure: HashedOnce,
    given: tuple[jax.Array, ...],
    hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    capacity: int,
) -> tuple[jax.Array, Rotary]:
    head, embed, norm, rotary = jax.tree.unflatten(structure.parts[0], given)
    kind: RMSNorm = norm
    positions = start_positions(rotary, tokens.shape[1], start=start, lengths=lengths, capacity=capacity)
    return head.join(embed, kind, hidden, tokens), rotary(positions)
