"""The kernels of all backends, each with its operation, targets, contract and the calls that it serves.

Each module `pallas_kernels/backends/<backend>.py` lists the kernels of a backend and is discovered automatically;
other kernels are added with `register`. A listed kernel is named "module:function" and imported when it is first
chosen, so no backend module is imported before its target has matched. To find the kernels of an operation, search
for its quoted name: `git grep '"rms_norm"'`.
"""

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pallas_kernels.errors import UnsupportedError
from pallas_kernels.packages import Packages, warn_of_missing
from pallas_kernels.target import Target, names_architecture, rank

_BACKENDS: Final = "pallas_kernels.backends"


@dataclass(frozen=True)
class Kernel:
    """A kernel of an operation.

    Attributes:
        operation: Name of the operation, as passed to `find`.
        on: Where it runs: one or more patterns, see `pallas_kernels.target.rank`.
        load: The function, as "module:function", imported when it is first chosen; or the function itself. All kernels
            of an operation take the same arrays and parameters. If the function has a method `serves` (see
            `pallas_kernels.parts.served`), that also decides whether it serves a call.
        contract: The function's `contract` argument: a contract; or a function that maps the call's `fixed` part
            (operation and weights, never the batch) to a contract, or to None for calls that the kernel does not
            serve. None if the function takes no contract.
        functions: The function's `functions` argument, the contract of element-wise code; or a function as for
            `contract` that returns None for calls without element-wise code.
        serves: Takes the kernel's arguments, contracts included, and returns whether the kernel serves the call; by
            default it serves all calls. The result must not depend on the batch, unless all kernels that it selects
            between have the same bits.
        packages: Optional packages that it needs. Where one is missing, the kernel serves no call, and the first call
            that it would have served warns.
        takes_target: Whether the function has an argument `target`: it compiles code for a target when it is traced.
        by_name: Whether it serves calls only if its backend is preferred by the target.
        instead: For a kernel `by_name` with the bits of the target's own kernels: a function, or "module:function",
            that takes the target and the kernel's arguments without contracts and returns whether it serves the call
            instead of them, where no backend is preferred and its packages are installed. The result may depend on the
            batch.
        backend: Name of its backend, which `bijax.prefer_backend` takes. For a listed kernel, the name of the module
            that lists it; for an added one what is passed here, "" for none.
    """

    operation: str
    on: str | tuple[str, ...]
    load: str | Callable[..., Any]
    contract: Any = None
    functions: Any = None
    serves: Callable[..., bool] | None = None
    packages: Packages | None = None
    takes_target: bool = False
    by_name: bool = False
    instead: str | Callable[..., bool] | None = None
    backend: str = ""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The targets that it runs on."""
        return (self.on,) if isinstance(self.on, str) else self.on

    @property
    def name(self) -> str:
        """Full name of the function, as "module:function"."""
        if isinstance(self.load, str):
            return self.load
        function = self.load.func if isinstance(self.load, functools.partial) else self.load
        return f"{function.__module__}:{getattr(function, '__qualname__', repr(function))}"

    def rank(self, target: Target) -> tuple[int, int] | None:
        """Returns the rank of the closest of its patterns that match a target; None if no pattern matches."""
        return max((r for pattern in self.patterns if (r := rank(pattern, target)) is not None), default=None)

    def contracts(self, fixed: Any) -> dict[str, Any] | None:
        """Returns the contracts as keyword arguments; None if the kernel has no contract for this `fixed` part."""
        chosen = self.contract(fixed) if callable(self.contract) else self.contract
        if chosen is None and self.contract is not None:
            return None
        functions = self.functions(fixed) if callable(self.functions) else self.functions
        given = {"contract": chosen, "functions": functions}
        return {name: contract for name, contract in given.items() if contract is not None}

    def function(self) -> Callable[..., Any]:
        """Returns the function, importing its module if necessary."""
        return _loaded(self.load) if isinstance(self.load, str) else self.load


class Found(NamedTuple):
    """The kernel for a call.

    Attributes:
        kernel: The registered kernel.
        function: Its function, with the target if it takes one.
        contracts: The contracts, as keyword arguments of the function.
    """

    kernel: Kernel
    function: Callable[..., Any]
    contracts: dict[str, Any]

    @property
    def is_choosy(self) -> bool:
        """Whether the kernel restricts the calls that it serves."""
        return self.kernel.serves is not None or hasattr(self.kernel.function(), "serves")


_added: Final[list[Kernel]] = []
"""The kernels that are not listed in `pallas_kernels.backends`."""


def register(*kernels: Kernel) -> None:
    """Adds kernels for this process.

    Register them before the first program with their operation is traced: JAX caches compiled programs.

    Args:
        *kernels: The kernels to add.

    Raises:
        ValueError: If a pattern of `on` is invalid.
    """
    for kernel in kernels:
        if not kernel.patterns:
            raise ValueError(f"register: expected targets for the kernel {kernel.name}, got none.")
        for pattern in kernel.patterns:
            rank(pattern, Target("cpu"))
    _added.extend(kernels)


@contextlib.contextmanager
def registered(*kernels: Kernel) -> Iterator[None]:
    """Adds kernels inside a block, for tests; see `register`."""
    register(*kernels)
    try:
        yield
    finally:
        for kernel in kernels:
            _added.remove(kernel)


def added() -> tuple[Kernel, ...]:
    """Returns the kernels that were added."""
    return tuple(_added)


def backends() -> frozenset[str]:
    """Returns the names of the backends, those of added kernels included."""
    return frozenset({*_modules(), *(kernel.backend for kernel in _added if kernel.backend)})


def kernels(operation: str | None = None) -> tuple[Kernel, ...]:
    """Returns the kernels of an operation, or all kernels: first the backends' kernels, then the added ones."""
    return tuple(k for k in (*_listed(), *_added) if operation in (None, k.operation))


def find(operation: str, target: Target, fixed: Any, *arrays: Any, **parameters: Any) -> Found:
    """Returns the kernel that serves a call on a target; if several do, the one with the most specific target pattern.

    Kernels of the backend that the target prefers come first, or those that serve a call `instead`. Among kernels of
    the same rank, one that restricts the calls it serves takes precedence over one that serves all.

    Args:
        operation: Name of the operation.
        target: What the program is lowered for.
        fixed: The part of the call that determines the contracts: it describes the operation and the weights, never
            the batch. Its type is specific to the operation; see the caller.
        *arrays: The arrays of the call.
        **parameters: Its parameters, except for the contracts.

    Raises:
        UnsupportedError: If no kernel serves the call, or the target has no architecture and the kernels differ by it.
        ValueError: If several kernels remain.

    Example:
        >>> from pallas_kernels.contract import row_contract
        >>> kernel = Kernel("double", "cpu", lambda x, contract: x + x, contract=row_contract())
        >>> with registered(kernel):
        ...     found = find("double", Target("cpu"), None, 2)
        >>> found.function(2, **found.contracts)
        4
    """
    found = find_or_none(operation, target, fixed, *arrays, **parameters)
    if found is not None:
        return found
    came = ", ".join(f"{a.dtype}{list(a.shape)}" for a in (*arrays, *parameters.values()) if hasattr(a, "dtype"))
    there = ", ".join(f"{k.name} on {' and '.join(k.patterns)}" for k in kernels(operation)) or "none"
    raise UnsupportedError(
        f"{operation}: no kernel serves ({came}) on {target}, and none is tried instead; registered are: {there}."
    )


def find_or_none(operation: str, target: Target, fixed: Any, *arrays: Any, **parameters: Any) -> Found | None:
    """Returns the kernel as `find` does; None if no kernel serves the call.

    Raises:
        UnsupportedError: If the target has no architecture and the kernels differ by it.
        ValueError: As `find`.
    """
    ranked = _ranked(operation, target)
    call = operation, target, fixed, arrays, parameters
    first = [(r, k) for r, k in ranked if _comes_first(k, target, arrays, parameters)]
    found = _closest(first, *call) if first else None
    return found or _closest([(r, k) for r, k in ranked if not k.by_name], *call)


def serves(operation: str, target: Target, fixed: Any, *arrays: Any, **parameters: Any) -> bool:
    """Returns whether a kernel serves a call on a target; arguments as for `find`.

    Raises:
        UnsupportedError: If the target has no architecture and the kernels differ by it.
        ValueError: As `find`.
    """
    return find_or_none(operation, target, fixed, *arrays, **parameters) is not None


def runs_on(operation: str, target: Target) -> bool:
    """Returns whether an operation has kernels for a target, regardless of the calls that they serve.

    Raises:
        UnsupportedError: If the target has no architecture and the kernels differ by it.
    """
    return bool(_ranked(operation, target))


def candidates(operation: str, target: Target) -> list[Kernel]:
    """Returns the kernels that may serve calls on a target here, those with the most specific pattern first.

    Kernels of a backend that a caller must prefer are left out, and those whose packages are missing.

    Raises:
        UnsupportedError: If the target has no architecture and the kernels differ by it.
    """
    ranked = sorted(_ranked(operation, target), key=lambda pair: pair[0], reverse=True)
    return [k for _, k in ranked if not k.by_name and (k.packages is None or k.packages.are_installed)]


def _ranked(operation: str, target: Target) -> list[tuple[tuple[int, int], Kernel]]:
    known = kernels(operation)
    if not target.architecture and any(names_architecture(p, target.platform) for k in known for p in k.patterns):
        raise UnsupportedError(
            f"{operation}: the kernels differ by the architecture; expected it to be named, got a program for"
            f" {target}. Lower it in a block `with bijax.lowering_for('sm_90'):` (Hopper; 'sm_80' for Ampere), or in a"
            " process with the GPU."
        )
    return [(r, k) for k in known if (r := k.rank(target)) is not None]


def _comes_first(kernel: Kernel, target: Target, arrays: tuple[Any, ...], parameters: dict[str, Any]) -> bool:
    if target.backend:
        return kernel.backend == target.backend
    if kernel.instead is None or (kernel.packages is not None and not kernel.packages.are_installed):
        return False
    instead = _loaded(kernel.instead) if isinstance(kernel.instead, str) else kernel.instead
    return bool(instead(target, *arrays, **parameters))


def _closest(
    ranked: list[tuple[tuple[int, int], Kernel]],
    operation: str,
    target: Target,
    fixed: Any,
    arrays: tuple[Any, ...],
    parameters: dict[str, Any],
) -> Found | None:
    for closest in sorted({r for r, _ in ranked}, reverse=True):
        candidates = (_served(k, target, fixed, arrays, parameters) for r, k in ranked if r == closest)
        serving = [found for found in candidates if found is not None]
        choosy = [found for found in serving if found.is_choosy]
        if len(choosy or serving) > 1:
            names = ", ".join(found.kernel.name for found in choosy or serving)
            raise ValueError(f"{operation}: expected one kernel that serves a call on {target}, got {names}.")
        if serving:
            return (choosy or serving)[0]
    return None


def _served(
    kernel: Kernel, target: Target, fixed: Any, arrays: tuple[Any, ...], parameters: dict[str, Any]
) -> Found | None:
    contracts = kernel.contracts(fixed)
    if contracts is None or (kernel.serves and not kernel.serves(*arrays, **contracts, **parameters)):
        return None
    if kernel.packages is not None and not kernel.packages.are_installed:
        warn_of_missing(kernel.packages, kernel.name)
        return None
    function = kernel.function()
    serves = getattr(function, "serves", None)
    if serves is not None and not serves(*arrays, **contracts, **parameters):
        return None
    return Found(kernel, functools.partial(function, target=target) if kernel.takes_target else function, contracts)


@functools.cache
def _loaded(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


@functools.cache
def _listed() -> tuple[Kernel, ...]:
    """Returns the kernels that the modules of `pallas_kernels.backends` list."""
    lists = ((name, importlib.import_module(f"{_BACKENDS}.{name}").KERNELS) for name in _modules())
    return tuple(replace(kernel, backend=name) for name, listed in lists for kernel in listed)


def _modules() -> list[str]:
    """Returns the names of the modules that list kernels."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(_BACKENDS).__path__))
