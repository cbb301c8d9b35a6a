"""Steps of whole models, ready to be timed: decoding, prompts, training. Programs of a cell share their arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import bijax
from flax_layers import Llama

Loss = Callable[[jax.Array, jax.Array], jax.Array]
Step = Callable[..., Any]

KINDS = ("decode", "prefill", "gradient", "train", "accumulate")
LEARNING_RATE = 1e-4
UNIT = 4


@dataclass(frozen=True)
class Cell:
    """What is measured: a line of the table.

    Attributes:
        kind: "decode", "prefill", "gradient", "train", or "accumulate", a training step over units of `UNIT` sequences.
        batch: Sequences.
        keys: Their length, in a cache or as a prompt.
    """

    kind: str
    batch: int
    keys: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Reads "kind:batch x keys", as in "decode:8x2048"."""
        kind, sizes = text.split(":")
        batch, keys = sizes.split("x")
        if kind not in KINDS:
            raise ValueError(f"expected one of {', '.join(KINDS)} in front of the colon, got {text!r}.")
        return cls(kind, int(batch), int(keys))

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}x{self.keys}"


@jax.tree_util.register_dataclass
@dataclass
class Arrays:
    """Arguments of programs; the arrays that a step returns replace those that it received.

    Attributes:
        changed: A cache, or parameters and the optimizer's state: given away by each call.
        kept: The rest.
    """

    changed: tuple[Any, ...]
    kept: tuple[Any, ...]


def plain_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy as one writes it in JAX."""
    scores = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(scores, labels[..., None], axis=-1).mean()


def own_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The same by bijax."""
    return bijax.mean(bijax.softmax_cross_entropy(logits, labels).reshape(-1))


def step(model: Any, cell: Cell, loss: Loss, *, plain: bool = True) -> Step:
    """Returns a function of `Arrays.changed` and `Arrays.kept` that returns a small result and the changed arrays.

    Args:
        model: The model.
        cell: What is measured.
        loss: Maps logits and labels to a mean.
        plain: Whether gradients are accumulated by a loop as one writes it in JAX, not by bijax.
    """
    graph, *_ = nnx.split(model, nnx.Param, ...)

    def scored(params: Any, others: Any, tokens: jax.Array) -> jax.Array:
        return loss(nnx.merge(graph, params, others)(tokens[:, :-1]), tokens[:, 1:])

    def gradient(params: Any, others: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(scored)(params, others, tokens)

    def accumulated(params: Any, others: Any, tokens: jax.Array) -> Any:
        if not plain:
            return bijax.accumulate_gradients(scored, unit=UNIT, batch_argnums=2)(params, others, tokens)

        def add(total: Any, unit: jax.Array) -> tuple[Any, None]:
            found = jax.value_and_grad(scored)(params, others, unit)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, found), None

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), params))
        units = cell.batch // UNIT
        (value, slopes), _ = jax.lax.scan(add, start, tokens.reshape(units, UNIT, -1))
        return value / units, jax.tree.map(lambda a, x: (a / units).astype(x.dtype), slopes, params)

    def train(params: Any, moments: Any, others: Any, tokens: jax.Array) -> Any:
        found = accumulated if cell.kind == "accumulate" else gradient
        value, slopes = found(params, others, tokens)
        updates, moments = optimizer().update(slopes, moments, params)
        return value, optax.apply_updates(params, updates), moments

    def extend(cache: Any, params: Any, others: Any, tokens: jax.Array) -> Any:
        logits, new = nnx.merge(graph, params, others).extend(tokens, cache)
        return jnp.argmax(logits[:, -1], axis=-1), replace(new, lengths=cache.lengths)

    def prompt(params: Any, others: Any, tokens: jax.Array) -> jax.Array:
        return jnp.argmax(nnx.merge(graph, params, others)(tokens)[:, -1], axis=-1)

    if cell.kind == "prefill" and not isinstance(model, Llama):
        return prompt
    return {"gradient": gradient, "decode": extend, "prefill": extend}.get(cell.kind, train)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE)


def arrays(model: Any, cell: Cell) -> Arrays:
    """Returns arguments of a step; in a cell they serve all models of one structure."""
    _, params, others = nnx.split(model, nnx.Param, ...)
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (cell.batch, cell.keys + 1)).astype(np.int32))
    if cell.kind == "gradient":
        return Arrays((), (params, others, tokens))
    if cell.kind in ("train", "accumulate"):
        return Arrays((jax.tree.map(jnp.copy, params), optimizer().init(params)), (others, tokens))
    new = 1 if cell.kind == "decode" else cell.keys
    if not isinstance(model, Llama):
        return Arrays((), (params, others, tokens[:, :new]))
    cache = model.cache(batch=cell.batch, capacity=cell.keys)
    return Arrays(
        (replace(cache, lengths=jnp.full(cell.batch, cell.keys - new, jnp.int32)),), (params, others, tokens[:, :new])
    )


def call(program: Any, held: Arrays) -> Any:
    """Runs a compiled step, and keeps what it returns for the next one."""
    found = program(*held.changed, *held.kept)
    if held.changed:
        found, *changed = found
        held.changed = tuple(changed)
    return found
