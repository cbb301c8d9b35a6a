"""Linear attention by the gated delta rule, with a state per sequence instead of keys and values."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

import bijax
from bijax.ops._packed import find_packed
from bijax.ops._sequences import Names
from pallas_kernels.causal_conv.heads import Heads

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._dtypes import promote
from ._initializers import LECUN_NORMAL
from .delta_net_slots import DeltaNetSlots, slot_inputs
from .delta_net_state import MOST_DRAFTS, DeltaNetState
from .linear import Linear

_PACKED: Final = Names("lengths", "cu_seq_lengths", "T")


class GatedDeltaNet(nnx.Module):
    """Linear attention by the gated delta rule, as in Qwen3-Next.

    Queries, keys and values go through a causal convolution with SiLU; then queries and keys are divided by their
    lengths. Each value head has a gate g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), where a and b are
    products of the input. The outputs of the rule are normalised and multiplied by a weight and by silu(z), where z is
    a product of the input too.

    Args:
        features: Length of the last dimension of input and output.
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values, a multiple of `num_key_heads`.
        key_dim: Width of a query and a key head.
        value_dim: Width of a value head.
        conv_width: Tokens that the convolution sees, at least 1.
        epsilon: Added to the mean square in the norm of the outputs.
        dtype: Dtype of the computation; promoted from input and parameters by default.
        param_dtype: Dtype of the parameters but `a_log`, `dt_bias` and `norm_scale`, which are float32.
        kernel_init: Initializer of the kernels.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        qkvz: Linear layer to queries, keys, values and z, in this order, each head by head.
        ba: Linear layer to b and a of each value head, in this order.
        conv: (channels, conv_width) parameter, for the channels of queries, keys and values.
        a_log: (num_value_heads,) parameter.
        dt_bias: (num_value_heads,) parameter.
        norm_scale: (value_dim,) parameter.
        out: Linear layer from the value heads back to `features`.

    Raises:
        ValueError: If `num_key_heads` does not divide `num_value_heads`, or `conv_width` is not positive.

    Guarantee: row-invariant with `INVARIANT`: a token's output depends on the tokens up to it in its own sequence,
    whatever the batch, padding or packing, the cut into parts, and drafts that were replaced.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", https://arxiv.org/abs/2412.06464.

    Example:
        >>> sizes = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 4, "value_dim": 4}
        >>> layer = GatedDeltaNet(8, **sizes, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        features: int,
        *,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int = 4,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = LECUN_NORMAL,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        if num_key_heads < 1 or num_value_heads < 1 or num_value_heads % num_key_heads:
            raise ValueError(
                f"GatedDeltaNet: num_key_heads must divide num_value_heads, got {num_key_heads=} and"
                f" {num_value_heads=}."
            )
        if conv_width < 1:
            raise ValueError(f"GatedDeltaNet: conv_width must be positive, got {conv_width=}.")
        common: dict[str, Any] = {
            "dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init, "ops": ops, "rngs": rngs,
        }  # fmt: skip
        keys, values = num_key_heads * key_dim, num_value_heads * value_dim
        self.channels = 2 * keys + values
        self.qkvz = Linear(features, self.channels + values, use_bias=False, **common)
        self.ba = Linear(features, 2 * num_value_heads, use_bias=False, **common)
        self.conv = nnx.Param(kernel_init(rngs.params(), (conv_width, self.channels), param_dtype).T)
        decays = jax.random.uniform(rngs.params(), (num_value_heads,), jnp.float32, 1e-3, 16)
        self.a_log = nnx.Param(jnp.log(decays))
        self.dt_bias = nnx.Param(jnp.ones(num_value_heads, jnp.float32))
        self.norm_scale = nnx.Param(jnp.ones(value_dim, jnp.float32))
        self.out = Linear(values, features, use_bias=False, **common)
        self.num_key_heads = num_key_heads
        self.num_value_heads = num_value_heads
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.conv_width = conv_width
        self.epsilon = epsilon
        self.ops = ops

    def init_state(self, batch: int, dtype: Any = jnp.float32) -> DeltaNetState:
        """Returns the state of sequences without tokens.

        Args:
            batch: Number of sequences B.
            dtype: Dtype of the computation.

        Raises:
            TypeError: If `batch` is not an integer, or the dtype is unsupported.
            ValueError: If `batch` is negative.
        """
        rule = bijax.DeltaRuleState.zeros(
            batch,
            key_heads=self.num_key_heads,
            value_heads=self.num_value_heads,
            key_size=self.key_dim,
            value_size=self.value_dim,
            dtype=dtype,
        )
        # An array of its own, so that the whole state can be donated.
        rule = dataclasses.replace(rule, length=jnp.zeros(batch, jnp.int32))
        return DeltaNetState(rule, jnp.zeros((batch, self.conv_width + MOST_DRAFTS, self.channels), dtype))

    def init_slots(self, number: int, dtype: Any = jnp.float32) -> DeltaNetSlots:
        """Returns slots for the states of running sequences.

        Args:
            number: Number of slots.
            dtype: Dtype of the computation.

        Raises:
            TypeError: If `number` is not an integer, or the dtype is unsupported.
            ValueError: If `number` is negative.
        """
        inputs = jnp.zeros((number, slot_inputs(self.conv_width), self.channels), dtype)
        return DeltaNetSlots.of(self.init_state(number, dtype)._replace(inputs=inputs))

    def __call__(self, x: jax.Array, *, cu_seq_lengths: Any = None) -> jax.Array:
        """Computes whole sequences, as in training.

        Args:
            x: (B, T, features), each sequence padded at its end: tokens do not see later ones. Or packed sequences
                (T, features).
            cu_seq_lengths: (B + 1,) ints for packed sequences: cumulative token counts, from 0.

        Returns:
            An array of the shape of x.

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If a shape does not fit, or known lengths do not add up.
        """
        if cu_seq_lengths is None:
            mixed, z, g, beta = self._projected(x)
            return self._merged(self._whole(mixed, g, beta), z)
        if x.ndim != 2:
            raise ValueError(f"GatedDeltaNet: packed x must have the shape (tokens, features), got {x.shape}.")
        packed = find_packed("GatedDeltaNet", "x", x.shape[0], cu_seq_lengths, None, _PACKED)
        mixed, z, g, beta = (a[0] for a in self._projected(x[None]))
        y = self._whole(packed.pad(mixed[..., : self.channels]), packed.pad(g), packed.pad(beta))
        return self._merged(packed.unpad(y)[None], z[None])[0]

    def extend(
        self, x: jax.Array, state: DeltaNetState, *, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, DeltaNetState]:
        """Continues sequences.

        Args:
            x: (B, T, features), the new tokens, each sequence padded at its end.
            state: What is known of the sequences, in the dtype of the computation. See `init_state`.
            start: (B,) integers, the position of each sequence's first new token. It may be before tokens that the
                state has: up to 12 tokens back, but not before `state.rule.edge`.
            lengths: (B,) integers from 0 to T, new tokens of each sequence.

        Returns:
            (B, T, features), and the new state. The result is undefined past `lengths`.

        Raises:
            TypeError: If a dtype is not supported, or is not that of the state.
            ValueError: If a shape does not fit, or a known number is out of range.
        """
        mixed, z, g, beta = self._projected(x)
        places = {"start": start, "lengths": lengths}
        heads, inputs = self._conv_heads_extend(mixed, state.inputs, **places)
        y, rule = self.ops.gated_delta_rule_extend(*heads, g, beta, state=state.rule, **places)
        return self._merged(y, z), DeltaNetState(rule, inputs)

    def extend_slots(
        self, x: jax.Array, kept: DeltaNetSlots, slots: jax.Array, *, start: jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, DeltaNetSlots]:
        """Continues sequences whose states are in `slots` (B,); see `extend`.

        The other slots are left alone, and so are those of sequences without tokens. Donate the slots.
        """
        mixed, z, g, beta = self._projected(x)
        places = {"start": start, "lengths": lengths, "slots": slots}
        heads, inputs = self._conv_heads_extend(mixed, kept.inputs, **places)
        y, rule = self.ops.gated_delta_rule_extend(*heads, g, beta, state=kept.rule, **places)
        return self._merged(y, z), kept.with_rule(rule, inputs)

    def _projected(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Returns arrays whose first columns are the inputs of the convolution and whose last ones are z; g and beta.

        The first two are one array: kernels read their columns of it, and nothing is copied.
        """
        if x.ndim != 3:
            raise ValueError(f"GatedDeltaNet: x must have the shape (batch, tokens, features), got {x.shape}.")
        both = self.qkvz(x)
        b, a = jnp.split(self.ba(x), 2, axis=-1)
        g, beta = self.ops.delta_gates(b, a, self.a_log[...], self.dt_bias[...])
        return both, both, g, beta

    def _whole(self, mixed: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
        return self.ops.gated_delta_rule(*self._conv_heads(mixed), g, beta)

    def _conv_heads(self, mixed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values of whole sequences."""
        return self.ops.conv_heads(mixed, self._kernel(mixed), self._sizes)

    def _conv_heads_extend(
        self, mixed: jax.Array, inputs: jax.Array, **places: Any
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        """Returns queries, keys and values of new tokens, and the new inputs of the convolution."""
        return self.ops.conv_heads_extend(mixed, self._kernel(mixed), inputs, self._sizes, **places)

    @property
    def _sizes(self) -> Heads:
        return Heads(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim, eps=1e-6)

    def _kernel(self, mixed: jax.Array) -> jax.Array:
        (kernel,) = promote(mixed.dtype, self.conv[...])
        return jnp.asarray(kernel)

    def _merged(self, y: jax.Array, z: jax.Array) -> jax.Array:
        y = self._normed(y, z)
        return self.out(y.reshape(*y.shape[:2], self.num_value_heads * self.value_dim))

    def _normed(self, y: jax.Array, z: jax.Array) -> jax.Array:
        """Returns the gated norm of heads (B, T, H, V), whose gates are the last columns of z (B, T, ...)."""
        return self.ops.gated_heads(y, z, self.norm_scale[...], eps=self.epsilon)
