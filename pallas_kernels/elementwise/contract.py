"""How element-wise code is computed."""

from dataclasses import dataclass
from typing import Final, Literal

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class ElementwiseContract(Contract):
    """How element-wise code is computed.

    Every addition, product, quotient and square root is rounded once, in the dtype of the program (float32 for 16-bit
    dtypes where a function is computed), and never contracted. Exception: in a whole program that a CPU runs as one
    (`bijax.elementwise`), products are contracted with the sums that use them, and roundings to 16 bits before a
    conversion to float32 are left out, always the same ones. The functions (exp, log, tanh, sin, ...) are

    - "xla": XLA's own for the platform, on whole vectors. Their bits depend on the processor and the jaxlib version.
    - "ptx": as in the Hopper kernels. exp(x) is ex2.approx.ftz.f32 of the product with log2(e), corrected for the
      rounding of that product if the result is float32; log is libdevice's logf; silu and gelu are computed with
      tanh.approx.f32 or ex2 (`pallas_kernels.matmul.hopper.activation`).

    Attributes:
        functions: The implementation of the functions.

    Example:
        >>> ElementwiseContract("ptx").id
        'elementwise/v1/f32-ptx'
    """

    ID = "elementwise/v{version}/f32-{functions}"
    functions: Literal["xla", "ptx"] = "xla"

    def __post_init__(self) -> None:
        if self.functions not in ("xla", "ptx"):
            raise ValueError(f"functions must be 'xla' or 'ptx', got {self.functions!r}.")


XLA_FUNCTIONS: Final = ElementwiseContract("xla")
"""Element-wise code of portable programs and of the CPU."""


PTX_FUNCTIONS: Final = ElementwiseContract("ptx")
"""Element-wise code of kernels on a Hopper GPU."""
