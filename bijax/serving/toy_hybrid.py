"""A small hybrid model with random weights, linear and full attention, for tests and as an example. Needs Flax."""

from typing import Final

import numpy as np

from flax_layers import Llama, ServedLlama
from flax_layers.checkpoint import Checkpoint, LinearAttentionConfig, LlamaConfig, Weights
from flax_layers.checkpoint.weights import Shape, expected_shapes

CONFIG: Final = LlamaConfig(
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_ids=(),
    qk_norm=True,
    norm_offset=1.0,
    output_gate=True,
    rotary_dim=4,
    linear=LinearAttentionConfig(num_key_heads=1, num_value_heads=2, key_dim=8, value_dim=8, layers=(True, False)),
)


def toy_hybrid(*, seed: int) -> ServedLlama:
    """Returns a model of one layer with linear attention and one with attention, with weights drawn from a seed."""
    return ServedLlama(random_model(seed=seed))


def random_model(*, seed: int) -> Llama:
    """Returns the same model, not served."""
    rng = np.random.default_rng(seed)
    shapes = dict(expected_shapes(CONFIG))
    drawn = {name: _draw(rng, name, shape) for name, shape in shapes.items()}
    return Llama.from_checkpoint(Checkpoint(CONFIG, Weights(shapes, lambda name: drawn[name]), None))


def _draw(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("embed_tokens.weight"):
        return (values / 2).astype(np.float32)  # so that several tokens are likely
    if len(shape) > 1:
        return (values / shape[-1] ** 0.5).astype(np.float32)
    return (values / 8 + name.endswith("linear_attn.norm.weight")).astype(np.float32)
