"""How a kernel refuses a contract that it does not follow."""

from typing import Any

from pallas_kernels.errors import UnsupportedError


def honour(kernel: str, contract: Any, *supported: Any) -> None:
    """Makes sure that a kernel is given a contract that it follows.

    Args:
        kernel: Name of the kernel, for the error.
        contract: What it is given.
        *supported: What it follows.

    Raises:
        UnsupportedError: If the contract is none of these.
    """
    if contract not in supported:
        names = " or ".join(one.id for one in supported)
        raise UnsupportedError(f"{kernel}: expected the contract {names}, got {getattr(contract, 'id', contract)!r}.")
