"""The contracts of a whole program, and one fingerprint of them."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import platform as machine
from collections.abc import Callable
from typing import Any, Final

from bijax.core.architecture import cuda_architecture, lowering_for
from bijax.core.checks import check_callable
from bijax.inspect.audit import looked_at, platform_of, program_of
from bijax.inspect.audit_report import Operation
from bijax.transform.fusion import has_row_programs
from pallas_kernels.contract import XLA_FUNCTIONS

_LIBRARIES: Final = {"jaxlib": (XLA_FUNCTIONS.id, "fft/"), "scipy": ("lapack/",)}
"""Packages whose version affects bits, and how the ids of the contracts begin that depend on it."""


class NoContractError(ValueError):
    """A program has no contracts, because an operation of it is not invariant: nothing fixes its bits.

    Attributes:
        operation: The first such operation, as `bijax.audit` describes it.
    """

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        super().__init__(operation)

    def __str__(self) -> str:
        found = self.operation
        if found.refusable:
            advice = "Move it out of the function or replace it"
        else:
            advice = "Make the program invariant with bijax.invariant"
        return (
            f"bijax.contracts: expected a program whose operations are all invariant, got {found.primitive}"
            f" ({found.shapes}) at {found.line or 'an unknown line'}: {found.evidence}. {advice}; bijax.audit lists all"
            " such operations."
        )


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contracts under which a program is computed. Its text lists them.

    Attributes:
        ids: Ids of the contracts, sorted.
        terms: The contracts with the dtypes of the operations that use them, sorted: the input of the fingerprint,
            with the architecture.
        believed: Names of primitives whose bits no contract fixes: the user's Pallas kernels, and primitives that
            `allow` lets pass.
        allowed: Those that `allow` lets pass; names in `allow` without effect are not included.
        platform: "cpu" or "cuda".
        architecture: Architecture of the GPU, such as "sm_90", or of the processor.
        fingerprint: 32 hexadecimal digits.
        row_programs: Whether operations on rows may be computed by one kernel (Hopper GPUs; `fuse_rows` of
            `bijax.invariant`). It is a schedule, so it is not part of the fingerprint.
    """

    ids: tuple[str, ...]
    terms: tuple[str, ...]
    believed: tuple[str, ...]
    allowed: tuple[str, ...]
    platform: str
    architecture: str
    fingerprint: str
    row_programs: bool = False

    def to_json(self) -> dict[str, Any]:
        """Returns everything as JSON-serialisable values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        named = {"believed": self.believed, "allowed by the caller": self.allowed}
        outside = [f"{title}: {', '.join(names)}" for title, names in named.items() if names]
        schedules = ["row programs (no part of the fingerprint)"] if self.row_programs else []
        head = f"{self.fingerprint} on {self.platform} {self.architecture}"
        return "\n".join([head, *self.ids, *outside, *schedules])


def contracts(
    fn: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    architecture: str | None = None,
    **kwargs: Any,
) -> Manifest:
    """Returns the contracts of a program: everything that fixes the bits of its rows.

    Two programs that compute a row by the same operations, for example a trainer's forward pass and a sampler's prefill
    and decoding, compute the same bits if their fingerprints are equal and they run on one architecture. Compare them
    at startup; store one with a checkpoint. The fingerprint does not depend on the number of rows, sequences and
    queries. It does not identify the function either: another activation, or a longer row, is another function.

    The program is traced, not run, compiled or lowered.

    Args:
        fn: As for `bijax.audit`; its operations must all be invariant.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`.
        platform: "cpu" or "cuda"; None for the current one.
        architecture: Architecture of the GPU, such as "sm_90"; None for this process's, or the one named by
            `bijax.lowering_for`.
        **kwargs: Its keyword arguments. For arguments named `platform` or `architecture`, pass a `functools.partial`.

    Raises:
        TypeError: If `fn` is not callable.
        NoContractError: If an operation is not invariant, so that nothing fixes its bits; a `ValueError`.
        ValueError: If there are no rules for the platform, or the architecture is invalid or named for a CPU.
        UnsupportedError: If the architecture is unknown, or some operands have no kernel.

    Guarantee: equal fingerprints of two programs that compute a row by the same operations promise equal bits of it on
    one architecture; where functions of XLA ("...-xla"), its Fourier transforms or LAPACK take part, with one version
    of jaxlib or of SciPy, which is then in the fingerprint, and on one make of processor. What `believed` names is
    outside the promise; it is part of the fingerprint, and so is the fact that `allow` let it pass.

    Example:
        >>> import bijax, jax, jax.numpy as jnp
        >>> w = jnp.ones((2048, 64))
        >>> f = bijax.invariant(lambda x: x @ w)
        >>> contracts(f, jnp.ones((8, 2048)), platform="cpu").ids
        ('matmul/v1/f32-chain512-fold',)
        >>> one, many = (contracts(f, jax.ShapeDtypeStruct((n, 2048), "float32")).fingerprint for n in (1, 64))
        >>> one == many
        True
    """
    check_callable("bijax.contracts", fn)
    platform = platform_of("bijax.contracts", platform, architecture)
    with contextlib.nullcontext() if architecture is None else lowering_for(architecture):
        here = cuda_architecture() if platform == "cuda" else machine.machine()
        has_programs = platform == "cuda" and has_row_programs()
        found = list(looked_at(program_of(fn, args, kwargs), platform, strict=True))
    for operation, *_ in found:
        if operation.verdict in ("variant", "refused"):
            raise NoContractError(operation)
    terms = sorted({term for _, some, _ in found for term in some})
    ids = sorted({term.partition(" ")[0] for term in terms})
    believed = sorted({operation.primitive for operation, *_ in found if operation.unknown})
    allowed = sorted({operation.primitive for operation, *_ in found if operation.allowed})
    libraries = [
        f"{name} {importlib.metadata.version(name)}"
        for name, beginnings in _LIBRARIES.items()
        if any(found_id.startswith(beginnings) for found_id in ids)
    ]
    text = "\n".join([platform, here, *libraries, *terms, *believed, *(f"allowed {name}" for name in allowed)])
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    fused = has_programs and any(request.enabled and request.fuse_rows for *_, request in found)
    return Manifest(tuple(ids), tuple(terms), tuple(believed), tuple(allowed), platform, here, digest, fused)
