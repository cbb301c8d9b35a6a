"""How element-wise code is computed."""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class ElementwiseContract:
    """How element-wise code is computed.

    Every addition, product, quotient and square root is rounded once, in the dtype of the program (float32 for 16 bits
    where a function is computed), and none is contracted with another; but a whole program that a CPU runs as one, as
    `bijax.elementwise` has it, rounds a product together with the sum that takes it, always the same ones. The
    functions (exp, log, tanh, sin, ...) are

    - "xla": XLA's own for the platform, on whole vectors. Their bits belong to the processor and the version of jaxlib.
    - "ptx": those of the kernels on a Hopper GPU. exp(x) is ex2.approx.ftz.f32 of the product with log2(e), corrected
      for the rounding of that product where the result is float32; log is libdevice's logf; silu and gelu are spelled
      out with tanh.approx.f32 or ex2 (`pallas_kernels.matmul.hopper.activation`).

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


XLA_FUNCTIONS: Final = ElementwiseContract("xla")
"""Element-wise code of portable programs and of the CPU."""


PTX_FUNCTIONS: Final = ElementwiseContract("ptx")
"""Element-wise code of kernels on a Hopper GPU."""
