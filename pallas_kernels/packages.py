"""Optional packages that the kernels of a backend need."""

import functools
import importlib.util
import warnings
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Packages:
    """Packages without which kernels cannot be lowered.

    Attributes:
        names: Names of the packages on PyPI. A name with "|" stands for alternatives of which one is enough.
        extra: The extra of this distribution that installs them.

    Example:
        >>> Packages(("numpy",), "cuda13").are_installed, Packages(("numpy", "no-such-package"), "cuda13").missing
        (True, ('no-such-package',))
    """

    names: tuple[str, ...]
    extra: str

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of which no package is installed."""
        return tuple(name for name in self.names if not any(map(_is_installed, name.split("|"))))

    @property
    def are_installed(self) -> bool:
        """Whether all of them are installed."""
        return not self.missing

    @property
    def advice(self) -> str:
        """What to install."""
        names = ", ".join(name.replace("|", " or ") for name in self.missing)
        install = " ".join(name.split("|")[0] for name in self.missing)
        return (
            f"{names} not installed; `pip install {install}` installs what is missing (extra {self.extra!r} of bijax)"
        )


_warned: Final[set[Packages]] = set()


def warn_of_missing(packages: Packages, kernel: str) -> None:
    """Warns that kernels are not used because packages are missing, once in a process.

    Args:
        packages: The packages.
        kernel: Name of the first kernel that was passed over.
    """
    if packages in _warned:
        return
    _warned.add(packages)
    warnings.warn(
        f"bijax: the kernel {kernel} and others for this GPU are not used: {packages.advice}. Other kernels serve these"
        " calls instead, under contracts, and so with bits, of their own ('bijax kernels' lists both).",
        UserWarning,
        stacklevel=2,
    )


@functools.cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None
