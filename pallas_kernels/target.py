"""The target of lowering: a JAX platform and, for GPUs, an architecture.

Only this module and `pallas_kernels.registry` compare architectures. A kernel declares its targets by a pattern (see
`rank`), and the registry chooses among the kernels that match.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_CUDA: Final = "cuda"
_ARCHITECTURE: Final = re.compile(r"sm_(\d{2,3})")

_FEATURES: Final[dict[str, Sequence[int]]] = {
    "mma": range(80, 1000),  # mma.sync on bfloat16 and TF32
    "mma_float8": (89, *range(120, 1000)),  # mma.sync on float8; sm_90 and sm_100 have other instructions for it
    "wgmma": range(90, 100),
    "tma": range(90, 1000),
    "tcgen05": range(100, 120),  # not GPUs of compute capability 12
}
"""The compute capabilities, times ten, that have an instruction family."""

_SHARED_KIB: Final[dict[int, int]] = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_LEAST_SHARED_KIB: Final = 48
"""Shared memory that every GPU has for a thread block."""

HOPPER_MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 SXM and of an H200, for which schedules are made."""


@dataclass(frozen=True)
class Target:
    """A platform and an architecture.

    Attributes:
        platform: As JAX names it: "cpu", "cuda", ...
        architecture: "sm_90" for an NVIDIA GPU of compute capability 9.0; "" if the platform has none or it is unknown.
        backend: The backend whose kernels are preferred (`pallas_kernels.registry.find`); "" if none is.
        several: Whether several devices run the program together. It chooses schedules, never bits.

    Raises:
        ValueError: If a name is invalid, or the platform has no architectures.

    Example:
        >>> Target("cuda", "sm_90")
        Target(platform='cuda', architecture='sm_90', backend='', several=False)
        >>> str(Target.parse("sm_80")), str(Target.parse("cpu"))
        ('sm_80', 'cpu')
    """

    platform: str
    architecture: str = ""
    backend: str = ""
    several: bool = False

    def __post_init__(self) -> None:
        has_it = self.platform == _CUDA and _ARCHITECTURE.fullmatch(self.architecture)
        if not self.platform.isalpha() or (self.architecture and not has_it):
            got = f"{self.platform!r} with {self.architecture!r}" if self.architecture else repr(self.platform)
            raise ValueError(
                f"expected a platform such as 'cpu' or 'cuda', or an architecture of 'cuda' such as 'sm_90', got {got}."
            )

    @classmethod
    def parse(cls, name: str) -> "Target":
        """Returns the target named by an architecture ("sm_90") or a platform ("cpu", "cuda")."""
        return cls(_CUDA, name) if _ARCHITECTURE.fullmatch(name) else cls(name)

    def __str__(self) -> str:
        return self.architecture or self.platform

    @property
    def generation(self) -> int:
        """The compute capability times ten, which orders a platform's architectures; 0 without an architecture."""
        return int(self.architecture.removeprefix("sm_") or 0)

    @property
    def features(self) -> frozenset[str]:
        """The instruction families that kernels may require: "mma", "mma_float8", "wgmma", "tma", "tcgen05".

        Example:
            >>> sorted(Target.parse("sm_90").features)
            ['mma', 'tma', 'wgmma']
        """
        return frozenset(name for name, generations in _FEATURES.items() if self.generation in generations)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a thread block can have; the least of all GPUs if this one is not listed.

        Source: table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide.

        Example:
            >>> Target.parse("sm_80").shared_memory, Target.parse("sm_89").shared_memory
            (166912, 101376)
        """
        return _SHARED_KIB.get(self.generation, _LEAST_SHARED_KIB) * 1024

    def is_at_least(self, other: "Target") -> bool:
        """Returns whether this target has the same platform and the same or a later generation.

        Example:
            >>> Target.parse("sm_100").is_at_least(Target.parse("sm_90"))
            True
        """
        return self.platform == other.platform and self.generation >= other.generation


def rank(pattern: str, target: Target) -> tuple[int, int] | None:
    """Returns how specifically a pattern matches a target (larger is more specific); None if it does not match.

    Args:
        pattern: From the most to the least specific: an architecture ("sm_90"), an architecture and all later ones of
            its platform ("sm_80+"), an instruction family ("mma"), a platform ("cuda", "cpu").
        target: The target.

    Raises:
        ValueError: If the pattern is invalid.

    Example:
        >>> [rank(pattern, Target.parse("sm_90")) for pattern in ("sm_90", "sm_80+", "wgmma", "cuda", "sm_100", "cpu")]
        [(3, 90), (2, 80), (1, 0), (0, 0), None, None]
    """
    if pattern in _FEATURES:
        return (1, 0) if pattern in target.features else None
    described = _described(pattern)
    if pattern.endswith("+"):
        return (2, described.generation) if target.is_at_least(described) else None
    if described.architecture:
        is_it = (described.platform, described.architecture) == (target.platform, target.architecture)
        return (3, described.generation) if is_it else None
    return (0, 0) if described.platform == target.platform else None


def names_architecture(pattern: str, platform: str) -> bool:
    """Returns whether a pattern matches only some of a platform's architectures."""
    if pattern in _FEATURES:
        return platform == _CUDA
    described = _described(pattern)
    return bool(described.architecture) and described.platform == platform


def _described(pattern: str) -> Target:
    target = Target.parse(pattern.removesuffix("+"))
    if pattern.endswith("+") and not target.architecture:
        raise ValueError(f"expected an architecture such as 'sm_80' before the '+', got {pattern!r}.")
    return target
