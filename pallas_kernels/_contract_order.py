"""Contracts of everything else that has an order or a form of its own: see `pallas_kernels.contract`."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from pallas_kernels.errors import UnsupportedError


@dataclass(frozen=True)
class ElementwiseContract:
    """How element-wise code is computed.

    Every addition, product, quotient and square root is rounded once, in the dtype of the program (float32 for 16 bits
    where a function is computed), and none is contracted with another. The functions (exp, log, tanh, sin, ...) are

    - "xla": XLA's own for the platform, on whole vectors. Their bits belong to the processor and the version of jaxlib.
    - "ptx": those of the kernels on a Hopper GPU. exp(x) is ex2.approx.ftz.f32 of the product with log2(e), corrected
      for the rounding of that product where the result is float32; log is libdevice's logf; silu and gelu are spelled
      out with tanh.approx.f32 or ex2 (`pallas_kernels.matmul.mosaic_gpu_activation`).

    Attributes:
        functions: Whose functions.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ElementwiseContract("ptx").id
        'elementwise/v1/f32-ptx'
    """

    functions: Literal["xla", "ptx"] = "xla"
    version: int = 1

    def __post_init__(self) -> None:
        if self.functions not in ("xla", "ptx"):
            raise ValueError(f"functions must be 'xla' or 'ptx', got {self.functions!r}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"elementwise/v{self.version}/f32-{self.functions}"


@dataclass(frozen=True)
class ScanContract:
    """How the prefixes of an axis are reduced.

    The axis is cut into blocks of `block` elements at 0, block, 2 * block, ... In a block, element i combines with its
    predecessor at distance 1, 2, 4, ..., block / 2 in turn. The totals of the blocks are scanned in the same way, and
    each block but the first is combined with the scan of the totals before it. An element depends on its prefix alone.

    Attributes:
        block: Elements of a block, a power of two.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ScanContract().id
        'scan/v1/f32-block128-doubling'
    """

    block: int = 128
    version: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"scan/v{self.version}/f32-block{self.block}-doubling"


@dataclass(frozen=True)
class ConvContract:
    """How one element of a convolution is summed.

    The kernel's positions, in row-major order, are taken in groups of nearly one size with at most `terms` terms
    (positions times input features), one position at least. A group is a product under a contract of matmul, and the
    groups are added upwards in float32. With one input feature the products are rounded and added upwards, position by
    position. A sum over examples (a gradient of weights) takes groups of examples of at most `rows` terms each, every
    group a product, and adds the groups upwards.

    Attributes:
        terms: Most terms of one group of positions.
        rows: Most terms of one group of examples.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ConvContract().id
        'conv/v1/f32-terms512-rows128-fold'
    """

    terms: int = 512
    rows: int = 128
    version: int = 1

    def __post_init__(self) -> None:
        if self.terms < 1 or self.rows < 1:
            raise ValueError(f"terms and rows must be at least 1, got {self.terms} and {self.rows}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"conv/v{self.version}/f32-terms{self.terms}-rows{self.rows}-fold"


@dataclass(frozen=True)
class FoldContract:
    """How values that meet in one place are combined: one after the other, upwards, starting at what is there.

    - "window": the elements of a sliding window, axis by axis; the windows that choose one element, by its place in
      them; the elements of a window under a function of the user's, in row-major order.
    - "scatter": the updates of one element, by their indices.
    - "devices": the shards of a sum over devices, by the number of the device.

    Sums are taken in float32 (float64 for float64).

    Attributes:
        over: What is combined.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> FoldContract("scatter").id
        'scatter/v1/f32-fold'
    """

    over: Literal["window", "scatter", "devices"]
    version: int = 1

    def __post_init__(self) -> None:
        if self.over not in ("window", "scatter", "devices"):
            raise ValueError(f"over must be 'window', 'scatter' or 'devices', got {self.over!r}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"{self.over}/v{self.version}/f32-fold"


@dataclass(frozen=True)
class PairContract:
    """How elements are combined by a function of the user's: two neighbours at a time, then two results, and so on.

    Where their number is odd, the last one waits. What is left is combined with the initial value, on its right.

    Attributes:
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> PairContract().id
        'pairs/v1/tree'
    """

    version: int = 1

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"pairs/v{self.version}/tree"


@dataclass(frozen=True)
class ShardContract:
    """How one element of `x @ w` is summed where K is cut into shards, each of them under a contract of its own.

    K is cut at multiples of K / `shards` rounded up to a multiple of 64 (`shard_length`). The shards' sums are added in
    float32 as a fixed binary tree: (0 + 1) + (2 + 3).

    Attributes:
        shards: Shards of K, at least 2.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> ShardContract(4).id
        'matmul/v1/f32-split4-tree'
    """

    shards: int
    version: int = 1

    def __post_init__(self) -> None:
        if self.shards < 2:
            raise ValueError(f"shards must be at least 2, got {self.shards}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"matmul/v{self.version}/f32-split{self.shards}-tree"


XLA_FUNCTIONS: Final = ElementwiseContract("xla")
"""Element-wise code of portable programs and of the CPU."""

PTX_FUNCTIONS: Final = ElementwiseContract("ptx")
"""Element-wise code of kernels on a Hopper GPU."""


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
