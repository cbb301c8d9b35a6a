"""The description of a matrix product that determines its contract."""

from dataclasses import dataclass
from typing import Final

IN_TF32: Final = frozenset(
    {
        "default",
        "high",
        "tf32_tf32_f32",
        "f16_f16_f32",
        "f16_f16_f16",
        "bf16_bf16_f32",
        "bf16_bf16_bf16",
    }
)
"""The precisions for which JAX multiplies float32 operands in TF32 or less on a GPU; the others use float32."""

_WIDE: Final = "float64"


@dataclass(frozen=True)
class ProductSpec:
    """The properties of a product's weights and operation, independent of the batch.

    Attributes:
        dtypes: Dtypes of the two operands.
        out_dtype: Dtype of the result.
        k: Length of the sum; 0 where it runs over the batch, in gradients of weights.
        along_k: Whether the order of the sum is that of weights stored as (N, K).
        precision: See `bijax.dispatch.precision.precision_name`.
        splits: Number of K splits.
        activation: Applied to the product, see `pallas_kernels.matmul.activations.activate`.
    """

    dtypes: tuple[str, str]
    out_dtype: str
    k: int = 0
    along_k: bool = False
    precision: str = "default"
    splits: int = 1
    activation: str | None = None

    @property
    def is_wide(self) -> bool:
        """Whether sums are float64."""
        return _WIDE in (*self.dtypes, self.out_dtype)

    @property
    def dtype(self) -> str | None:
        """The dtype of both operands, if it has the precision of the sum; None if they need conversion."""
        one, other = self.dtypes
        return one if one == other and self.is_wide == (one == _WIDE) else None

    @property
    def is_mixed(self) -> bool:
        """Whether one operand is float32, the other bfloat16, and the sums float32."""
        return {*self.dtypes} == {"bfloat16", "float32"} and not self.is_wide

    @property
    def in_tf32(self) -> bool:
        """Whether float32 operands may be multiplied in TF32."""
        return self.precision in IN_TF32

    @property
    def parts(self) -> int:
        """The bfloat16 limbs of a float32 operand multiplied with bfloat16: at least as exact as JAX's product."""
        return 2 if self.in_tf32 else 3
