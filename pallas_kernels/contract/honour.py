"""Checks that a kernel supports a contract."""

from typing import Any

from pallas_kernels.errors import UnsupportedError


def honour(kernel: str, contract: Any, *supported: Any) -> None:
    """Checks that a kernel supports the contract passed to it.

    Args:
        kernel: Name of the kernel, for the error message.
        contract: The contract passed to it.
        *supported: The contracts that it supports.

    Raises:
        UnsupportedError: If the contract is not one of these.
    """
    if contract not in supported:
        names = " or ".join(one.id for one in supported)
        raise UnsupportedError(f"{kernel}: expected the contract {names}, got {getattr(contract, 'id', contract)!r}.")
