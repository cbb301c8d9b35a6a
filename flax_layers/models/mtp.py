"""The head of a model for multi-token prediction (MTP): it predicts the token after the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._signature import ConstructorSignature
from ..ops import INVARIANT, Ops
from .block import Block, project
from .layers import Embed, Linear, RMSNorm
from .llama import Llama
from .llama_weights import checked, read_block
from .same_model import check_same_config

if TYPE_CHECKING:
    # Reading checkpoints needs packages that the model does not.
    from ..checkpoint import Checkpoint, LlamaConfig


class MTPHead(nnx.Module):
    """One block that predicts token t + 2 from the model's state at token t and from token t + 1.

    With e the embedding of token t + 1 and h the model's last norm of its residual stream at token t:

        x_t = block(fc([embedding_norm(e) | hidden_norm(h)]));  logits_t = projection(norm(x_t))

    Embedding, rotary embedding and output projection are the model's. The block has full attention over the x before
    it; it has experts if the model has any. Applied again, with norm(x_t) for h and a token drafted for t + 2, the head
    drafts token t + 3, and so on. The engine uses it for drafts alone (`bijax.serving.EngineOptions`).

    Args:
        config: The numbers of the model.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        config: The numbers of the block.
        embedding_norm: Norm of the embedding.
        hidden_norm: Norm of the model's state.
        fc: Linear layer from both to the block.
        block: The block.
        norm: Norm before the output projection.

    Guarantee: row-invariant with `INVARIANT`, as `Llama`.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2, https://arxiv.org/abs/2412.19437; the same head is
    in Qwen3-Next and Qwen3.5.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> model, head = Llama(config, rngs=nnx.Rngs(0)), MTPHead(config, rngs=nnx.Rngs(1))
        >>> head(model, jnp.array([[1, 5, 9, 4]])).shape
        (1, 3, 32)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ops": ops, "rngs": rngs}
        width = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(width, epsilon=config.rms_norm_eps, scale_offset=config.norm_offset, **common)

        self.config = config.mtp_block()
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.fc = Linear(2 * width, width, use_bias=False, **common)
        self.block = Block(self.config, 0, **common)
        self.norm = norm()

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, ops: Ops = INVARIANT
    ) -> MTPHead:
        """Returns the head of a checkpoint. The weights are read one after another.

        Args:
            checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
            dtype: Dtype of the computation.
            param_dtype: Dtype of the parameters.
            ops: The operations to compute with.

        Raises:
            CheckpointError: If it has no head, or one of another form; see `checkpoint.mtp.checked_mtp_weights`.
        """
        from ..checkpoint.mtp import checked_mtp_weights

        weights, config = checked_mtp_weights(checkpoint), checkpoint.config
        head: MTPHead = nnx.eval_shape(
            lambda: cls(config, dtype=dtype, param_dtype=param_dtype, ops=ops, rngs=nnx.Rngs(0))
        )
        for parameter, value in head._read(weights):
            parameter.set_value(jnp.asarray(value, parameter.dtype))
        return head

    def __call__(self, model: Llama, tokens: jax.Array) -> jax.Array:
        """Maps whole sequences of tokens (B, T) to float32 logits (B, T - 1, vocab_size): row t is of token t + 2.

        Args:
            model: The model, of the same numbers.
            tokens: (B, T) integers.

        Raises:
            TypeError: As `Llama`.
            ValueError: As `Llama`.
        """
        x = self.join(model.embed, model.norm, model.hidden(tokens)[:, :-1], tokens[:, 1:])
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return self.logits(model, self.block(x, model.rotary(positions)))

    def join(self, embed: Embed, norm: RMSNorm, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns what the block maps.

        Args:
            embed: The model's embedding.
            norm: The norm of `hidden`: the model's last one, or this head's if the head is applied again.
            hidden: (B, T, hidden_size), the residual stream before that norm.
            tokens: (B, T) integers, the token after each.
        """
        return self.fc(jnp.concatenate([self.embedding_norm(embed(tokens)), self.hidden_norm(norm(hidden))], axis=-1))

    def logits(self, model: Llama, x: jax.Array) -> jax.Array:
        """Maps the residual stream (..., hidden_size) after the head's block to float32 logits (..., vocab_size)."""
        return project(self.norm, model.projection, (x, None), model.config.logits_soft_cap)

    def check_model(self, op: str, config: LlamaConfig) -> None:
        """Checks that the head belongs to a model with this configuration; `op` is whose argument it is.

        Raises:
            ValueError: If it does not.
        """
        check_same_config(op, "the head", self.config, config.mtp_block())

    def _read(self, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[Any, np.ndarray]]:
        for parameter, name in (
            (self.embedding_norm.scale, "mtp.pre_fc_norm_embedding.weight"),
            (self.hidden_norm.scale, "mtp.pre_fc_norm_hidden.weight"),
            (self.fc.kernel, "mtp.fc.weight"),
            (self.norm.scale, "mtp.norm.weight"),
        ):
            yield parameter, checked(parameter, weights[name].T, name)
        yield from read_block(self.block, self.config, weights, "mtp.layers.0")
