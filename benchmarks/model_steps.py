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

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Cell:
    """What is measured: a line of the table.

    Attributes:
        kind: "decode", "prefill", "gradient" or "train".
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
        if kind not in ("decode", "prefill", "gradient", "train"):
            raise ValueError(f"expected decode, prefill, gradient or train in front of the colon, got {text!r}.")
        return cls(kind, int(batch), int(keys))

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}x{self.keys}"


@jax.tree_util.register_dataclass
@dataclass
class Arrays:
    """What programs are called with; those that a step returns take the place of those that it was given.

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


def step(model: Any, cell: Cell, loss: Loss) -> Step:
    """Returns a function of `Arrays.changed` and `Arrays.kept` that returns a small result and the changed arrays."""
    graph, _ = nnx.split(model)

    def scored(state: Any, tokens: jax.Array) -> jax.Array:
        return loss(nnx.merge(graph, state)(tokens[:, :-1]), tokens[:, 1:])

    def gradient(state: Any, tokens: jax.Array) -> Any:
        return jax.value_and_grad(scored)(state, tokens)

    def train(state: Any, moments: Any, tokens: jax.Array) -> Any:
        value, slopes = jax.value_and_grad(scored)(state, tokens)
        updates, moments = optimizer().update(slopes, moments, state)
        return value, optax.apply_updates(state, updates), moments

    def extend(cache: Any, state: Any, tokens: jax.Array) -> Any:
        logits, new = nnx.merge(graph, state).extend(tokens, cache)
        return jnp.argmax(logits[:, -1], axis=-1), replace(new, lengths=cache.lengths)

    def prompt(state: Any, tokens: jax.Array) -> jax.Array:
        return jnp.argmax(nnx.merge(graph, state)(tokens)[:, -1], axis=-1)

    if cell.kind == "prefill" and not isinstance(model, Llama):
        return prompt
    return {"gradient": gradient, "train": train, "decode": extend, "prefill": extend}[cell.kind]


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(LEARNING_RATE)


def arrays(model: Any, cell: Cell) -> Arrays:
    """Returns arguments of a step; in a cell they serve all models of one structure."""
    _, state = nnx.split(model)
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (cell.batch, cell.keys + 1)).astype(np.int32))
    if cell.kind == "gradient":
        return Arrays((), (state, tokens))
    if cell.kind == "train":
        return Arrays((jax.tree.map(jnp.copy, state), optimizer().init(state)), (tokens,))
    new = 1 if cell.kind == "decode" else cell.keys
    if not isinstance(model, Llama):
        return Arrays((), (state, tokens[:, :new]))
    cache = model.cache(batch=cell.batch, capacity=cell.keys)
    return Arrays((replace(cache, lengths=jnp.full(cell.batch, cell.keys - new, jnp.int32)),), (state, tokens[:, :new]))


def call(program: Any, held: Arrays) -> Any:
    """Runs a compiled step, and keeps what it returns for the next one."""
    found = program(*held.changed, *held.kept)
    if held.changed:
        found, *changed = found
        held.changed = tuple(changed)
    return found
