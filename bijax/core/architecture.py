"""The target for which a program is lowered."""

import contextlib

import jax
from jax.extend.backend import backends

from bijax.core.contexts import named_architecture, on_several_devices, preferred_kernels
from pallas_kernels import registry
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target


def lowering_for(architecture: str) -> contextlib.AbstractContextManager[None]:
    """Names the GPU for which programs are lowered for CUDA inside, in this thread.

    In a process with an NVIDIA GPU, programs are lowered for that GPU. A process without one that lowers, exports or
    audits a program for CUDA must name the architecture, since the kernels and so the bits depend on it.

    Args:
        architecture: "sm_90" for Hopper, "sm_80" for Ampere, and so on.

    Raises:
        ValueError: If it is not the name of an architecture.

    Example:
        >>> import bijax
        >>> x = jax.ShapeDtypeStruct((8, 4096), "bfloat16")
        >>> with lowering_for("sm_80"):
        ...     lowered = jax.jit(bijax.softmax).trace(x).lower(lowering_platforms=("cuda",))
    """
    if not isinstance(architecture, str) or not Target.parse(architecture).architecture:
        raise ValueError(
            f"bijax.lowering_for: expected the name of an architecture such as 'sm_90', got {architecture!r}."
        )
    return named_architecture(architecture)


def prefer_backend(name: str) -> contextlib.AbstractContextManager[None]:
    """Prefers the kernels of a backend for programs that are lowered inside, in this thread.

    Calls that the backend does not serve on the target are served as they are without a preference. The contracts of a
    backend's kernels, and so the bits, may differ from those of the kernels that would serve otherwise:
    `bijax.contracts` names them.

    Args:
        name: "jax_triton" for kernels through jax-triton on Hopper, where Pallas's Mosaic kernels serve by default; or
            another backend of `bijax kernels`.

    Raises:
        ValueError: If there is no such backend.

    Example:
        >>> import bijax
        >>> with lowering_for("sm_90"), prefer_backend("jax_triton"):
        ...     target_for("cuda")
        Target(platform='cuda', architecture='sm_90', backend='jax_triton', several=False)
    """
    known = registry.backends()
    if name not in known:
        raise ValueError(f"bijax.prefer_backend: expected one of {', '.join(sorted(known))}, got {name!r}.")
    return preferred_kernels(name)


def target_for(platform: str) -> Target:
    """Returns the target of programs for a platform, with the architecture if it is known."""
    known = platform == "cuda" and (named_architecture.value is not None or "cuda" in backends())
    architecture = cuda_architecture() if known else ""
    return Target(platform, architecture, preferred_backend(), on_several_devices.value)


def preferred_backend() -> str:
    """Returns the name of the backend whose kernels are preferred; "" if none is."""
    return preferred_kernels.value


def cuda_architecture() -> str:
    """Returns the architecture for which a program for CUDA is lowered: the named one, or that of this process's GPU.

    Raises:
        UnsupportedError: If none is named and the process has no NVIDIA GPU.
    """
    named: str | None = named_architecture.value
    if named is not None:
        return named
    if "cuda" not in backends():
        raise UnsupportedError(
            "bijax: a program is lowered for CUDA in a process without an NVIDIA GPU; expected the architecture to be"
            " named, since kernels and bits depend on it. Lower it in a block `with bijax.lowering_for('sm_90'):`"
            " (Hopper; 'sm_80' for Ampere)."
        )
    return _architecture(jax.local_devices(backend="cuda")[0])


def cuda_device() -> jax.Device | None:
    """Returns a GPU of this process of the current target architecture; None if it has none."""
    if "cuda" not in backends():
        return None
    device = jax.local_devices(backend="cuda")[0]
    return device if _architecture(device) == cuda_architecture() else None


def _architecture(device: jax.Device) -> str:
    return f"sm_{str(getattr(device, 'compute_capability', 'unknown')).replace('.', '')}"
