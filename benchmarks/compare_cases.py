"""The 40 programs by which two trees of the library are compared: products, rows, attention and models."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bijax
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import LlamaConfig

PRODUCTS: Final = tuple(
    (m, k, n) for k, n in ((4096, 4096), (4096, 14336), (2048, 6144)) for m in (1, 8, 64, 512, 4096)
)
PRODUCTS_F32: Final = ((64, 2048, 2048), (2048, 2048, 2048))
ROWS: Final = ((8, 4096), (4096, 4096))
HEADS: Final = (32, 8, 128)
"""Query heads, key heads, their width."""

DECODES: Final = ((8, 2048), (64, 2048))
PROMPTS: Final = ((1, 2048), (4, 2048), (1, 8192))
GRADIENTS: Final = ((1, 2048), (2, 2048))
LAYERS: Final = 2
MODEL_DECODES: Final = (1, 8, 64)
KEYS: Final = 2048


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: What it computes, and the shapes.
        function: The program.
        arguments: Makes its arguments.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Sequence[Any]]


def normal(shape: Sequence[int], dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), tuple(shape), dtype)


def normals(*shapes: Sequence[int], dtype: Any = jnp.bfloat16) -> Callable[[], list[jax.Array]]:
    return lambda: [normal(shape, dtype, seed) for seed, shape in enumerate(shapes)]


def pulled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arguments and a cotangent that gives the result and all gradients."""

    def both(*arguments: jax.Array) -> Any:
        out, pull = jax.vjp(function, *arguments[:-1])
        return out, pull(arguments[-1])

    return both


def products() -> Iterator[Case]:
    for m, k, n in PRODUCTS:
        yield Case(f"matmul bfloat16 {m}x{k}x{n}", bijax.matmul, normals((m, k), (k, n)))
    for m, k, n in PRODUCTS_F32:
        yield Case(f"matmul float32 {m}x{k}x{n}", bijax.matmul, normals((m, k), (k, n), dtype=jnp.float32))


def rows() -> Iterator[Case]:
    for shape in ROWS:
        columns = shape[1:]
        labels = jnp.arange(shape[0], dtype=jnp.int32) % shape[1]
        yield Case(f"rms_norm {shape}", bijax.rms_norm, normals(shape, columns))
        yield Case(f"softmax {shape}", bijax.softmax, normals(shape))
        yield Case(f"log_softmax {shape}", bijax.log_softmax, normals(shape))
        yield Case(
            f"cross_entropy {shape}",
            bijax.softmax_cross_entropy,
            functools.partial(lambda shape, labels: [normal(shape), labels], shape, labels),
        )
    yield Case(f"rms_norm gradient {shape}", pulled(bijax.rms_norm), normals(shape, columns, shape))
    yield Case(
        f"cross_entropy gradient {shape}",
        lambda x, labels: jax.grad(lambda x: bijax.softmax_cross_entropy(x, labels).sum())(x),
        lambda: [normal(shape), labels],
    )


def attention() -> Iterator[Case]:
    heads, key_heads, size = HEADS
    for batch, keys in DECODES:
        yield Case(
            f"attention decode {batch}x{keys}",
            lambda q, k, v, keys=keys: bijax.dot_product_attention(q, k, v, is_causal=True, query_offset=keys - 1),
            normals((batch, 1, heads, size), *[(batch, keys, key_heads, size)] * 2),
        )

    def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return bijax.dot_product_attention(q, k, v, is_causal=True)

    for batch, keys in PROMPTS:
        shapes = [(batch, keys, heads, size), *[(batch, keys, key_heads, size)] * 2]
        yield Case(f"attention prefill {batch}x{keys}", causal, normals(*shapes))
    for batch, keys in GRADIENTS:
        shapes = [(batch, keys, heads, size), *[(batch, keys, key_heads, size)] * 2]
        yield Case(f"attention gradient {batch}x{keys}", pulled(causal), normals(*shapes, shapes[0]))


def models() -> Iterator[Case]:
    # Not that of `bench_model_gpu`: `benchmarks` is the other tree's where this file runs for it.
    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=LAYERS,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=KEYS,
        bos_token_id=None,
        eos_token_ids=(),
    )
    own = Llama(shape, ops=INVARIANT, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    plain = nnx.with_attributes(own, ops=PLAIN)
    graph, weights = nnx.split(own)
    plain_graph, plain_weights = nnx.split(plain)

    def tokens(*shape: int) -> jax.Array:
        return jnp.asarray(np.random.default_rng(0).integers(0, 128256, shape), jnp.int32)

    def extend(weights: Any, cache: Any, new: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights).extend(new, cache)[0]

    def filled(batch: int) -> Any:
        return replace(own.cache(batch=batch, capacity=KEYS), lengths=jnp.full(batch, KEYS - 1, jnp.int32))

    def loss(weights: Any, words: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, weights)(words[:, :-1])
        return bijax.mean(bijax.softmax_cross_entropy(logits, words[:, 1:]).reshape(-1))

    def plain_loss(weights: Any, words: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(nnx.merge(plain_graph, weights)(words[:, :-1]))
        return -jnp.take_along_axis(scores, words[:, 1:, None], axis=-1).mean()

    for batch in MODEL_DECODES:
        held = functools.partial(lambda batch: [weights, filled(batch), tokens(batch, 1)], batch)
        yield Case(f"model decode {batch}x{KEYS}", extend, held)
    yield Case(
        f"model prefill 1x{KEYS}", lambda w, x: nnx.merge(graph, w)(x)[:, -1], lambda: [weights, tokens(1, KEYS)]
    )
    yield Case("model gradient 2x512", jax.grad(loss), lambda: [weights, tokens(2, 513)])
    transformed = bijax.invariant(jax.grad(plain_loss))
    yield Case("transformed model gradient 2x512", transformed, lambda: [plain_weights, tokens(2, 513)])


def cases() -> list[Case]:
    return [*products(), *rows(), *attention(), *models()]
