"""Steps of a hybrid model of Qwen3-Next's layers, ready to be timed."""

from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import bijax
from benchmarks import model_steps
from benchmarks.model_steps import Arrays, Cell, Step, own_loss, plain_loss
from benchmarks.recurrent_ops import RecurrentOps
from flax_layers import Llama
from flax_layers.checkpoint import LinearAttentionConfig, LlamaConfig
from flax_layers.checkpoint.experts import ExpertsConfig
from flax_layers.models._layered import Layers, run_blocks
from flax_layers.models.block import start_tokens
from flax_layers.models.layers import DeltaNetState, LayerCache
from flax_layers.routing import Routing

EXPERTS: Final = 16
"""Qwen3-Next has 512. All of 16 go through few more products than the 10 of each token, which is how plain JAX computes
them, so the experts decide less than in the whole model."""

CHUNK: Final = 64


def config(layers: int, keys: int) -> LlamaConfig:
    """Returns the numbers of Qwen3-Next-80B-A3B with fewer layers and experts."""
    return LlamaConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5120,
        num_layers=layers,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=keys,
        bos_token_id=None,
        eos_token_ids=(),
        qk_norm=True,
        norm_offset=1.0,
        output_gate=True,
        rotary_dim=64,
        experts=ExpertsConfig(
            intermediate_size=512, shared_size=512, shared_gate=True, routing=Routing(num_experts=EXPERTS, topk=10)
        ),
        linear=LinearAttentionConfig(
            num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, layers=(True, True, True, False)
        ),
    )


def model(shape: LlamaConfig, cell: Cell, ops: Any) -> Llama:
    """Returns a model with random weights: float32 for training, else bfloat16."""
    dtype = jnp.float32 if cell.kind == "train" else jnp.bfloat16
    return Llama(shape, dtype=jnp.bfloat16, param_dtype=dtype, ops=ops, rngs=nnx.Rngs(0))


def step(model: Llama, cell: Cell) -> Step:
    """Returns a function of `Arrays.changed` and `Arrays.kept`, as `model_steps.step` does.

    A prompt and a token give the logits of the last token, and the cache. Decoding is always at the same positions:
    what a step says about them is dropped.
    """
    if cell.kind in ("gradient", "train"):
        return model_steps.step(model, cell, plain_loss if isinstance(model.norm.ops, RecurrentOps) else own_loss)
    graph, *_ = nnx.split(model, nnx.Param, ...)

    def extend(stored: Any, start: Any, params: Any, others: Any, tokens: jax.Array) -> Any:
        merged: Llama = nnx.merge(graph, params, others)
        lengths = jnp.full(cell.batch, tokens.shape[1], jnp.int32)
        places: dict[str, Any] = {"start": start, "lengths": lengths}
        x, angles = start_tokens(merged.embed, merged.rotaries, tokens, **places, capacity=cell.keys)
        x, new = run_blocks(Layers(merged).blocks, x, angles, stored, None, start, lengths, one_program=True)
        found = jnp.argmax(merged.logits(x[:, -1]), axis=-1)
        return found, [_at_once_more(*pair) for pair in zip(stored, new, strict=True)]

    return extend


def _at_once_more(before: Any, after: Any) -> Any:
    if not isinstance(after, DeltaNetState):
        return after
    rule = replace(after.rule, edge=before.rule.edge, length=before.rule.length)
    return after._replace(rule=rule)


def arrays(model: Llama, cell: Cell) -> Arrays:
    """Returns arguments of a step; in a cell they serve all models of one structure."""
    if cell.kind in ("gradient", "train"):
        return model_steps.arrays(model, cell)
    _, params, others = nnx.split(model, nnx.Param, ...)
    draw = np.random.default_rng(0)
    new = 1 if cell.kind == "decode" else cell.keys
    tokens = jnp.asarray(draw.integers(0, model.config.vocab_size, (cell.batch, new)).astype(np.int32))
    cache = model.cache(batch=cell.batch, capacity=cell.keys)
    start = _starts(cell) if cell.kind == "decode" else np.zeros(cell.batch, np.int32)
    stored: list[Any] = [
        (layer.keys, layer.values) if isinstance(layer, LayerCache) else layer for layer in cache.layers(model.config)
    ]
    if cell.kind == "decode":
        stored = [_filled(layer, start) if isinstance(layer, DeltaNetState) else layer for layer in stored]
    return Arrays((stored,), (jnp.asarray(start), params, others, tokens))


def _starts(cell: Cell) -> np.ndarray:
    """Returns positions of tokens, spread over the rows of a chunk; one sequence of 64 goes over an edge."""
    chunk = (cell.keys - 1) // CHUNK * CHUNK - CHUNK
    rows = np.arange(cell.batch) * 37 % 55 + 1 if cell.batch > 1 else np.array([30])
    rows[CHUNK - 1 :: CHUNK] = CHUNK
    return (chunk + rows).astype(np.int32)


def _filled(state: DeltaNetState, start: np.ndarray) -> DeltaNetState:
    """Returns a state with the size of numbers that a model's has, after `start` tokens; each array is its own."""
    rule, keys = state.rule, jax.random.split(jax.random.key(0), 4)

    def normal(i: int, like: jax.Array) -> jax.Array:
        return jax.random.normal(keys[i], like.shape)

    inverse = jnp.tril(normal(3, rule.inverse) * 0.1, -1) + jnp.eye(CHUNK)
    filled = bijax.DeltaRuleState(
        state=normal(0, rule.state) * 0.1,
        key=bijax.l2_norm(normal(1, rule.key)).astype(rule.key.dtype),
        residual=normal(2, rule.residual).astype(rule.residual.dtype),
        inverse=inverse.astype(jnp.bfloat16).astype(jnp.float32),
        decay=jnp.broadcast_to(jnp.arange(CHUNK) * -0.1, rule.decay.shape) + 0.0,
        edge=jnp.asarray((start - 1) // CHUNK * CHUNK, jnp.int32),
        length=jnp.asarray(start, jnp.int32),
    )
    return state._replace(rule=filled)
