"""The compiled functions of a step: around the model, and after it."""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.hashed_once import HashedOnce
from bijax.sampling._arguments import PENALTIES, read_request
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw
from bijax.sampling._measure import Measured, measure
from bijax.sampling._restrict import what_is_left
from bijax.serving.model import Model, adapter_names, state_interval
from bijax.serving.packed import Given, one_step_on, unpack
from bijax.serving.rows import Extras, Rows


class Scored(NamedTuple):
    """Log-probabilities of the given tokens, (R,) float32, and the largest ones, (R, top)."""

    logprobs: jax.Array
    top_logprobs: jax.Array
    top_tokens: jax.Array


class Advanced(NamedTuple):
    """The results of a call of the model.

    Attributes:
        hidden: (B, T, ...).
        logits: (B, V), after the last new token of each sequence.
        fed: (B,) int32, the first token passed for each sequence.
        pages: The cache.
    """

    hidden: jax.Array
    logits: jax.Array
    fed: jax.Array
    pages: Any


HOST: Final = "pinned_host"
"""The kind of memory in which the host finds what programs write there."""


def for_host[T](arrays: T, to_host: bool) -> T:
    """Returns arrays that the host will read, in its memory if requested.

    A program then ends with the copy. Otherwise the host starts one when it has seen that the program ended, which
    takes a GPU's host 0.2 to 0.5 ms longer (jaxlib 0.11.2).
    """
    if not to_host:
        return arrays
    return jax.device_put(arrays, jax.memory.Space.Host)


type Memory = tuple[jax.Array, jax.Array, jax.Array]
"""Arrays of the shapes of `Advanced.hidden`, `logits` and `fed`, whose contents are undefined."""


def memory_for(model: Model, pages: Any, last: jax.Array, packed: Any, *, table_width: int) -> Memory:
    """Returns such arrays for a call of a model."""

    def brought(model: Model, pages: Any, last: jax.Array, packed: jax.Array) -> Memory:
        return advance(model, pages, unpack(packed, last, table_width=table_width))[:3]

    shapes = jax.eval_shape(brought, model, pages, last, packed)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def extend(model: Model, pages: Any, given: Given, **more: Any) -> tuple[jax.Array, Any]:
    """Appends tokens to sequences, with the slots and adapters of a model that has them; see `Model.extend`."""
    if state_interval(model) is not None:
        more["slots"] = given.slots
    if adapter_names(model):
        more["adapters"] = given.adapters
    return model.extend(pages, given.tokens, given.page_table, given.start, given.lengths, **more)


def advance(model: Model, pages: Any, given: Given, *, common_page_size: int | None = None) -> Advanced:
    """Appends tokens to sequences and returns the logits after them.

    Args:
        model: The model.
        pages: The cache, donated.
        given: The model's inputs.
        common_page_size: Tokens of a page, if the model gets the sequences' common prefix.
    """
    more: dict[str, Any] = {}
    if common_page_size is not None:
        more["common_prefix"] = _common_tokens(given, common_page_size)
    hidden, pages = extend(model, pages, given, **more)
    return Advanced(hidden, model.logits(ends(hidden, given.lengths)), given.tokens[:, 0], pages)


@functools.partial(
    jax.jit,
    static_argnames=("structure", "table_width", "batch_invariant", "common_page_size", "to_host"),
    donate_argnames=("pages", "last", "packed", "memory"),
    keep_unused=True,
)
def advance_and_draw(
    structure: HashedOnce,
    weights: list[jax.Array],
    pages: Any,
    last: jax.Array,
    packed: jax.Array,
    memory: Memory,
    *,
    table_width: int,
    batch_invariant: bool,
    common_page_size: int | None,
    to_host: bool,
) -> tuple[jax.Array, jax.Array, Advanced, jax.Array, jax.Array]:
    """`begin`, `advance` and `draw_tokens` as one program.

    All its arrays but the tokens stay where they are from call to call: XLA gives a GPU the kernels as one graph, in
    which a kernel whose array has moved must be replaced, and that takes the host longer than a launch.

    Args:
        structure: Structure of the model as a pytree.
        weights: Weights of the model.
        pages: As for `advance`.
        last: (S,) int32, the last token of each slot. It is used up.
        packed: See `bijax.serving.packed`. It is used up.
        memory: Where the results of the call of the model are put. It is used up.
        table_width: Entries of a page table.
        batch_invariant: Whether bits must not depend on the batch.
        common_page_size: As for `advance`.
        to_host: As for `for_host`.

    Returns:
        The last token of each slot, `packed` one step on, which is undefined after more than one token, the results
        of the model's call, a token for each of its rows, and these tokens for the host.
    """
    given = unpack(packed, last, table_width=table_width)
    model = jax.tree.unflatten(structure.parts[0], weights)
    found = advance(model, pages, given, common_page_size=common_page_size)
    tokens, last = draw_tokens(found.logits, given, last, batch_invariant=batch_invariant)
    # In the order of the arguments: JAX gives each result the memory of the first argument of its shape.
    return last, one_step_on(packed), found, tokens, for_host(tokens, to_host)


@functools.partial(jax.jit, static_argnames="table_width")
def begin(packed: jax.Array, last: jax.Array, *, table_width: int) -> Given:
    """Returns the model's inputs."""
    return unpack(packed, last, table_width=table_width)


def _common_tokens(given: Given, page_size: int) -> jax.Array:
    """Returns the number of tokens in the pages that all sequences begin with, () int32; padding is ignored.

    Entries after a sequence's end may agree by chance; they affect no valid token.
    """
    differs = jnp.any((given.page_table != given.page_table[:1]) & (given.lengths > 0)[:, None], axis=0)
    return page_size * jnp.argmax(jnp.append(differs, True)).astype(jnp.int32)


@jax.jit
def ends(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns hidden (B, ...) of the last new token of each sequence."""
    ends = jnp.maximum(lengths - 1, 0).reshape(-1, *[1] * (hidden.ndim - 1))
    return jnp.take_along_axis(hidden, ends, axis=1)[:, 0]


@jax.jit
def take(hidden: jax.Array, index: jax.Array) -> jax.Array:
    """Returns hidden (R, ...) of the tokens `index` (R,) of hidden (B, T, ...), counted row by row."""
    return jnp.take(hidden.reshape(-1, *hidden.shape[2:]), index, axis=0)


@jax.jit
def read_pages(pages: Any, index: jax.Array) -> Any:
    """Returns the pages `index` (n,) of a cache, whose arrays have the page as their first dimension."""
    return jax.tree.map(lambda array: array[index], pages)


@functools.partial(jax.jit, donate_argnames="pages")
def write_pages(pages: Any, index: jax.Array, copied: Any) -> Any:
    """Returns the cache with the pages `index` (n,) set. A page that is listed twice is written twice."""
    return jax.tree.map(lambda array, new: array.at[index].set(new), pages, copied)


@functools.partial(jax.jit, static_argnames="batch_invariant", donate_argnames="last")
def draw_tokens(
    left: jax.Array, given: Given, last: jax.Array, *, batch_invariant: bool
) -> tuple[jax.Array, jax.Array]:
    """Draws a token (B,) from each row of logits (B, V), the one after the last new token of the sequence.

    Returns:
        The tokens, and the last token of each slot.
    """
    positions = given.start + given.lengths
    arithmetic = Arithmetic(batch_invariant)
    tokens = draw(left, given.temperature, given.seeds, positions.astype(jnp.uint32), arithmetic)
    places = jnp.where(given.kept < 0, last.shape[0], given.kept)
    return tokens, last.at[places].set(tokens, mode="drop")


@functools.partial(jax.jit, static_argnames="batch_invariant")
def draw_drafted(
    left: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array, *, batch_invariant: bool
) -> jax.Array:
    """Draws a token (R,) from each row of logits (R, V)."""
    return draw(left, temperature, seeds, positions.astype(jnp.uint32), Arithmetic(batch_invariant))


@functools.partial(jax.jit, static_argnames="batch_invariant")
def restrict(logits: jax.Array, rows: Rows, fed: jax.Array, *, batch_invariant: bool) -> jax.Array:
    """Returns the logits that are drawn from.

    Args:
        logits: (R, V).
        rows: What they are sampled with.
        fed: (R,) int32, the tokens before, for those rows whose counts lack them.
        batch_invariant: Whether bits must not depend on the batch.
    """
    extras: dict[str, Any] = dict.fromkeys(Extras._fields)
    if rows.extras is not None:
        extras = rows.extras._asdict()
        lacking = jnp.where(rows.unread, fed, -1)[:, None] == jnp.arange(logits.shape[1])
        extras["output_counts"] = rows.extras.output_counts + lacking
    request = read_request(
        logits,
        seeds=rows.seeds,
        positions=rows.positions,
        temperature=rows.temperature,
        filters={name: getattr(rows, name) for name in ("top_k", "top_p", "min_p")},
        penalties={name: extras.pop(name) for name in PENALTIES},
        **extras,
        num_top=0,
    )
    return what_is_left(request, Arithmetic(batch_invariant))


@functools.partial(jax.jit, static_argnames=("top", "batch_invariant", "to_host"))
def measure_tokens(
    logits: jax.Array,
    left: jax.Array,
    temperature: jax.Array,
    tokens: jax.Array,
    *,
    top: int,
    batch_invariant: bool,
    to_host: bool,
) -> Measured:
    """Returns the log-probabilities of tokens (R,) that were drawn, and the `top` largest, for the host."""
    return for_host(measure(logits, left, temperature, tokens, top, Arithmetic(batch_invariant)), to_host)


@functools.partial(jax.jit, static_argnames=("top", "batch_invariant", "to_host"))
def score(logits: jax.Array, tokens: jax.Array, *, top: int, batch_invariant: bool, to_host: bool) -> Scored:
    """Returns the log-probabilities of the given tokens (R,), and the `top` largest, for the host."""
    logprobs = Arithmetic(batch_invariant).log_softmax(logits)
    found = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, top)
    return for_host(Scored(found, top_logprobs, top_tokens.astype(jnp.int32)), to_host)
