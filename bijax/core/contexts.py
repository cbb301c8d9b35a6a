"""Values of a thread that are part of the keys of JAX's caches.

All are made here together: each new one makes JAX trace and compile again what it had compiled before, and JAX asks
not to make them while other threads use it.
"""

import dataclasses
from typing import Final

import jax


@dataclasses.dataclass(frozen=True)
class Request:
    """The caller's request to make programs invariant.

    Attributes:
        enabled: Whether to make the program invariant.
        allowed: Names of primitives that may stay although they are not known to be invariant.
        fuse_rows: Whether operations on rows may become row programs (`bijax.transform.fusion`).
    """

    enabled: bool = False
    allowed: tuple[str, ...] = ()
    fuse_rows: bool = True


OFF: Final = Request()

request_context = jax.make_user_context(default_value=OFF)
"""The request of a thread."""

named_architecture = jax.make_user_context(default_value=None)
"""The GPU that a thread lowers programs for; None for the present one."""

preferred_kernels = jax.make_user_context(default_value="")
"""The backend whose kernels are preferred; empty for none."""

on_several_devices = jax.make_user_context(default_value=False)
"""Whether several devices run the program that is being lowered."""

linen_conversion = jax.make_user_context(default_value=None)
"""How `flax_layers.convert` converts the linen model that is being called, so that `linen.jit` keeps the traces of
both models apart; None outside of one."""
