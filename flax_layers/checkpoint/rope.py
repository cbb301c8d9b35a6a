"""Scaled rotary frequencies: what checkpoints say of them, as one divisor for each frequency."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from .errors import CheckpointError
from .hf_fields import is_finite

type Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How a model's rotary frequencies differ from its base frequencies.

    Attributes:
        divisors: The divisor of each frequency, the fastest first; half the width of a head in number.
        magnitude: Scale of all cosines and sines.

    Raises:
        CheckpointError: If a number is not positive and finite.

    Example:
        >>> RopeScaling((1.0, 8.0)).magnitude
        1.0
    """

    divisors: tuple[float, ...]
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        for value in (*self.divisors, self.magnitude):
            if not math.isfinite(value) or value <= 0:
                raise CheckpointError(
                    f"divisors of rotary frequencies and their magnitude must be positive and finite, got {value!r}"
                )


def rope_scaling(fields: Fields, *, theta: float, head_dim: int, max_positions: int) -> RopeScaling | None:
    """Reads what Hugging Face calls `rope_scaling`, or the part for one kind of layers of `rope_parameters`.

    The kinds are "default", "linear", "llama3" and "yarn". Those whose frequencies follow the length of the sequence
    ("dynamic", "longrope") are refused: a token would get other numbers when its sequence grows.

    Args:
        fields: The object in the file, with its `rope_type` (or `type`).
        theta: Base of the frequencies.
        head_dim: Width of a head.
        max_positions: Longest sequence that the model supports, if the object does not state the original length.

    Returns:
        The scaling, or None for "default".

    Raises:
        CheckpointError: If the kind is not supported, or a number is missing, surplus or out of range.

    Source: "linear": Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation",
    2023. "llama3": the model card of Llama 3.1. "yarn": Peng et al., "YaRN", 2023.

    Example:
        >>> rope_scaling({"rope_type": "linear", "factor": 2.0}, theta=1e4, head_dim=4, max_positions=64)
        RopeScaling(divisors=(2.0, 2.0), magnitude=1.0)
    """
    kind = fields.get("rope_type", fields.get("type"))
    if kind in ("dynamic", "longrope", "su"):
        raise CheckpointError(
            f"rotary frequencies of the type {kind!r} follow the length of the sequence, so that tokens in a cache"
            " would have been turned by others; use a checkpoint of the types 'default', 'linear', 'llama3' or 'yarn'"
        )
    known = {"default": ((), None), "linear": _LINEAR, "llama3": _LLAMA3, "yarn": _YARN}
    if not isinstance(kind, str) or kind not in known:
        raise CheckpointError(f"rope_type must be one of {list(known)}, got {kind!r}; use such a checkpoint")
    names, read = known[kind]
    surplus = sorted(set(fields) - {"rope_type", "type", "rope_theta", *names})
    if surplus:
        raise CheckpointError(f"a rope_type of {kind!r} has the numbers {list(names)}, got {surplus} too")
    if read is None:
        return None
    try:
        frequencies = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        return read(fields, frequencies, theta, max_positions)
    except CheckpointError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(
            f"the numbers {dict(fields)} and the base {theta} give no rotary frequencies: {error}; the file is damaged"
        ) from error


def rope_number(fields: Fields, name: str, default: float | None = None) -> float:
    """Returns a positive number of the object.

    Raises:
        CheckpointError: If it is missing without a default, or is not such a number.
    """
    value = fields.get(name)
    value = default if value is None else value
    if not is_finite(value) or value <= 0:
        raise CheckpointError(f"{name} of rotary frequencies must be a positive number, got {value!r}")
    return float(value)


def _linear(fields: Fields, frequencies: list[float], theta: float, max_positions: int) -> RopeScaling:
    return RopeScaling((rope_number(fields, "factor"),) * len(frequencies))


def _llama3(fields: Fields, frequencies: list[float], theta: float, max_positions: int) -> RopeScaling:
    """Divides slow frequencies, keeps fast ones and interpolates between them by rotations in the old length."""
    factor, low, high, length = (
        rope_number(fields, name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if low >= high:
        raise CheckpointError(f"low_freq_factor must be below high_freq_factor, got {low} and {high}")

    def divisor(frequency: float) -> float:
        kept = (length * frequency / (2 * math.pi) - low) / (high - low)
        return 1 / ((1 - kept) / factor + kept) if 0 < kept < 1 else (factor if kept <= 0 else 1.0)

    return RopeScaling(tuple(map(divisor, frequencies)))


def _yarn(fields: Fields, frequencies: list[float], theta: float, max_positions: int) -> RopeScaling:
    """The same idea with a ramp over the index of a frequency, and larger cosines and sines."""
    factor, fast = rope_number(fields, "factor"), rope_number(fields, "beta_fast", 32)
    slow = rope_number(fields, "beta_slow", 1)
    length = rope_number(fields, "original_max_position_embeddings", max_positions)
    truncate = fields.get("truncate", True)
    width = 2 * len(frequencies)

    def index(turns: float) -> float:
        """Returns the real-valued index of the frequency with this many rotations in the old length."""
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index(fast), index(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last = last + 0.001 if first == last else last

    def divisor(i: int) -> float:
        divided = min(max((i - first) / (last - first), 0), 1)
        return 1 / (divided / factor + 1 - divided)

    def growth(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1

    if fields.get("attention_factor") is not None:
        magnitude = rope_number(fields, "attention_factor")
    elif fields.get("mscale") and fields.get("mscale_all_dim"):
        magnitude = growth(rope_number(fields, "mscale")) / growth(rope_number(fields, "mscale_all_dim"))
    else:
        magnitude = growth(1)
    return RopeScaling(tuple(map(divisor, range(len(frequencies)))), magnitude)


type _Reader = tuple[tuple[str, ...], Callable[[Fields, list[float], float, int], RopeScaling] | None]

_LINEAR: _Reader = (("factor",), _linear)
_LLAMA3: _Reader = (
    ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    _llama3,
)
_YARN: _Reader = (
    (
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
    _yarn,
)  # fmt: skip
