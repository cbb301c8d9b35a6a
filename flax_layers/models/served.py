"""A Llama model as inference engines call it: the engine allocates the pages of the cache."""

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.contract import SplitAttentionContract

from ..ops import PLAIN
from ._layered import Additions, Layers, _start, run_blocks
from .adapters import Adapters, sort_tokens
from .block import project
from .llama import Llama
from .quantized_cache import QuantizedCache

if TYPE_CHECKING:
    from ..checkpoint import LoRA


class Structure:
    """The static parts of a program: hashed once, and compared by identity first."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.parts == other.parts)


class ServedLlama:
    """A Llama model for `bijax.serving.Engine`.

    On a CPU all blocks of one kind share one compiled program for each shape, where XLA would compile each of them
    again in a program for the whole model. Elsewhere the whole of a step is one program, since a GPU is faster than a
    host that calls the blocks one by one; the model is a pytree for that. The bits are the same.

    Args:
        model: The model.
        one_program: Whether the engine makes one program of a step; by default where the weights are not on a CPU.
        adapters: LoRA adapters by name, from `flax_layers.checkpoint.load_lora`, which requests can choose.
        cache_dtype: Dtype of the keys and values in the cache, see `QuantizedCache`; the model's by default.

    Raises:
        ValueError: If an adapter changes a layer that the model does not have, or there is no such cache.

    Guarantee: row-invariant with a model whose operations are, as `Llama.extend`; see `Adapters` for those.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        ...     head_dim=4, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        ...     max_position_embeddings=64, bos_token_id=1, eos_token_ids=(2,))
        >>> served = ServedLlama(Llama(config, rngs=nnx.Rngs(0)))
        >>> served.vocab_size, served.max_length
        (32, 64)
    """

    def __init__(
        self,
        model: Llama,
        *,
        one_program: bool | None = None,
        adapters: "Mapping[str, LoRA] | Adapters | None" = None,
        cache_dtype: str | QuantizedCache | None = None,
    ) -> None:
        self.model = model
        self._adapters = (
            adapters if isinstance(adapters, Adapters) else Adapters.stack(model, adapters) if adapters else None
        )
        self._layers = Layers(model)
        self._cache = QuantizedCache.choose(model, cache_dtype) if isinstance(cache_dtype, str) else cache_dtype
        if one_program is None:
            one_program = any(d.platform != "cpu" for leaf in jax.tree.leaves(model) for d in leaf.devices())
        self.one_program = one_program
        # Arguments are flattened once: flattening a module takes longer than the call.
        first, self._first = _flattened((model.embed, model.rotaries))
        last, self._last = _flattened((model.norm, model.projection))
        self._structure = Structure(first, tuple((kind, rotary) for kind, _, rotary in self._layers.blocks))
        self._end = Structure(last)
        self._parameters = tuple(parameters for _, parameters, _ in self._layers.blocks)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.model.config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""
        return self.model.config.max_position_embeddings

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The adapters that requests can choose."""
        return () if self._adapters is None else self._adapters.names

    @property
    def least_common_prefix(self) -> int | None:
        """Tokens per attention split, as only whole splits are read once; None without `one_program`."""
        return SplitAttentionContract().split if self.one_program and self.model.norm.ops is not PLAIN else None

    def init_pages(self, num_pages: int, page_size: int) -> list[tuple[jax.Array, jax.Array]]:
        """Returns keys and values of each layer, (pages, page_size, K, H) each."""
        cache = self.model.paged_cache(np.zeros((1, 1), np.int32), num_pages=num_pages, page_size=page_size)
        pages = list(zip(cache.keys, cache.values, strict=True))
        if self._cache is None:
            return pages
        return [(jnp.zeros(keys.shape, self._cache.dtype), jnp.zeros(values.shape, self._cache.dtype))
                for keys, values in pages]  # fmt: skip

    def extend(
        self,
        pages: list[tuple[jax.Array, jax.Array]],
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
        adapters: jax.Array | None = None,
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        """Appends tokens to sequences.

        Args:
            pages: The cache. It is used up.
            tokens: (B, T) int32, each sequence padded at its end.
            page_table: (B, n) int32, the pages of each sequence in the order of its tokens.
            start: (B,) int32, tokens that each sequence has already.
            lengths: (B,) int32, new tokens of each sequence, 0 for padding.
            common_prefix: () int32, tokens that all sequences begin with, in the same pages; None if that is unknown.
            adapters: (B,) int32, 0 for the model itself, i + 1 for adapter i of `adapter_names`; None for the model.

        Returns:
            The residual stream (B, T, hidden_size) after the last block, and the cache.
        """
        model, layers = self.model, self._layers
        capacity = page_table.shape[1] * pages[0][0].shape[1]
        additions = Additions(cache_scales=None if self._cache is None else self._cache.scales)
        if adapters is not None and self._adapters is not None:
            groups = _sort_tokens(self._adapters.members, adapters, length=tokens.shape[1])
            additions = additions._replace(stacks=self._adapters.blocks, groups=groups)
        if self.one_program:
            given = (self._first, self._parameters)
            numbers = (page_table, start, lengths, common_prefix, additions, capacity)
            hidden, written = _extend_all(self._structure, given, tokens, pages, *numbers)
            return hidden, written
        x, angles = _start(model.embed, model.rotaries, tokens, start, lengths, capacity)
        return layers.extend(x, angles, pages, page_table, start, lengths, common_prefix, additions)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to float32 logits (R, vocab_size)."""
        return _project(self._end, self._last, hidden, self.model.config.logits_soft_cap)

    def embed(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to their norms, float32."""
        return _norm(self._end, self._last, hidden)

    def plain(self) -> "ServedLlama":
        """Returns the model with the same weights and stock JAX operations."""
        return self._with_model(nnx.with_attributes(self.model, ops=PLAIN), self._cache)

    def with_weights(self, weights: Any) -> "ServedLlama":
        """Returns the model with other weights, and the same adapters.

        Args:
            weights: A `Llama` of the same sizes, or its state as `nnx.state(model)` returns it. The arrays are shared,
                not copied.

        Raises:
            TypeError: If they have another format.
            ValueError: If they belong to another model.
        """
        if isinstance(weights, Llama):
            weights = nnx.state(weights)
        if not isinstance(weights, nnx.State):
            raise TypeError(f"ServedLlama: weights must be a Llama or its nnx.State, got {type(weights).__name__}.")
        graph, state = nnx.split(self.model)
        ours, theirs = (jax.tree.map(lambda a: (a.shape, a.dtype), s) for s in (state, weights))
        structures: list[Any] = [jax.tree.structure(s) for s in (state, weights)]
        if structures[0] != structures[1] or jax.tree.leaves(ours) != jax.tree.leaves(theirs):
            raise ValueError("ServedLlama: the weights must have the names, shapes and dtypes of the model's own.")
        # Scales of a cache belong to the weights.
        return self._with_model(nnx.merge(graph, weights), None if self._cache is None else self._cache.dtype)

    def _with_model(self, model: Llama, cache: str | QuantizedCache | None) -> "ServedLlama":
        return ServedLlama(model, one_program=self.one_program, adapters=self._adapters, cache_dtype=cache)


def _unflatten(one_program: bool, children: Iterable[Any]) -> ServedLlama:
    model, adapters, cache = children
    return ServedLlama(model, one_program=one_program, adapters=adapters, cache_dtype=cache)


jax.tree_util.register_pytree_node(
    ServedLlama, lambda served: ((served.model, served._adapters, served._cache), served.one_program), _unflatten
)


def _flattened(part: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    leaves, structure = jax.tree.flatten(part)
    return structure, tuple(leaves)


@functools.partial(jax.jit, static_argnames=("structure", "capacity"), donate_argnames="pages")
def _extend_all(
    structure: "Structure",
    given: tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...]],
    tokens: jax.Array,
    pages: list[tuple[jax.Array, jax.Array]],
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    additions: Additions,
    capacity: int,
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    (first, kinds), (arrays, parameters) = structure.parts, given
    embed, rotaries = jax.tree.unflatten(first, arrays)
    x, angles = _start(embed, rotaries, tokens, start, lengths, capacity)
    blocks = [(kind, arrays, rotary) for (kind, rotary), arrays in zip(kinds, parameters, strict=True)]
    places = (page_table, start, lengths, common_prefix, additions)
    return run_blocks(blocks, x, angles, pages, *places, one_program=True)


_sort_tokens = jax.jit(sort_tokens, static_argnames=("members", "length"))


@functools.partial(jax.jit, static_argnames=("structure", "soft_cap"))
def _project(
    structure: "Structure", given: tuple[jax.Array, ...], hidden: jax.Array, soft_cap: float | None
) -> jax.Array:
    norm, projection = jax.tree.unflatten(structure.parts[0], given)
    return project(norm, projection, (hidden, None), soft_cap)


@functools.partial(jax.jit, static_argnames="structure")
def _norm(structure: "Structure", given: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
    norm, _ = jax.tree.unflatten(structure.parts[0], given)
    return norm(hidden).astype(jnp.float32)
