"""A small hybrid model with random weights, linear and full attention, for tests and as an example. Needs Flax."""

from typing import Final

import numpy as np

from flax_layers import Llama, MTPHead, ServedLlama
from flax_layers.checkpoint import Checkpoint, LinearAttentionConfig, LlamaConfig, Weights
from flax_layers.checkpoint.mtp import mtp_shapes
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


def toy_hybrid(*, seed: int, draft_head: bool = False) -> ServedLlama:
    """Returns a model of one layer with linear attention and one with attention, with weights drawn from a seed.

    Args:
        seed: The seed.
        draft_head: Whether it has a head for multi-token prediction.
    """
    return ServedLlama(random_model(seed=seed), draft_head=random_head(seed=seed) if draft_head else None)


def random_model(*, seed: int) -> Llama:
    """Returns the same model, not served."""
    return Llama.from_checkpoint(_checkpoint(seed))


def random_head(*, seed: int) -> MTPHead:
    """Returns a head for that model, which often drafts the token that the model samples.

    Both mostly follow the embedding of the last token: the head passes it on, and its block adds little.
    """
    return MTPHead.from_checkpoint(_checkpoint(seed))


def _checkpoint(seed: int) -> Checkpoint:
    rng = np.random.default_rng(seed)
    shapes, of_head = dict(expected_shapes(CONFIG)), dict(mtp_shapes(CONFIG))
    drawn = {name: _draw(rng, name, shape) for name, shape in {**shapes, **of_head}.items()}
    one = np.eye(CONFIG.hidden_size, dtype=np.float32)
    drawn["mtp.fc.weight"] = np.concatenate([one, one / 2], axis=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        drawn[f"mtp.layers.0.{name}.weight"] /= 2
    mtp = Weights(of_head, lambda name: drawn[name])
    return Checkpoint(CONFIG, Weights(shapes, lambda name: drawn[name]), None, mtp=mtp)


def _draw(rng: np.random.Generator, name: str, shape: Shape) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith("embed_tokens.weight"):
        return (values / 2).astype(np.float32)  # so that several tokens are likely
    if len(shape) > 1:
        return (values / shape[-1] ** 0.5).astype(np.float32)
    return (values / 8 + name.endswith("linear_attn.norm.weight")).astype(np.float32)
