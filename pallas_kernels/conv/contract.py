"""The order in which the terms of a convolution are added."""

from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class ConvContract(Contract):
    """How one element of a convolution is summed.

    The kernel positions, in row-major order, are split into groups of nearly equal size with at most `terms` terms
    (positions times input features), but at least one position. A group is a product under a contract of matmul, and
    the groups are added in ascending order in float32. With one input feature the products are rounded and added in
    order, position by position. Where the input is dilated, by factors with a product of at most 16 and along axes
    without strides and kernel dilation, the positions of an output are those that meet elements of the input, and not
    its holes; otherwise holes are terms of zero. A sum over examples (a gradient of weights) is split into groups of
    examples of at most `rows` terms, each group a product; the groups are added in ascending order.

    Attributes:
        terms: Maximum number of terms of a group of positions.
        rows: Maximum number of terms of a group of examples.

    Example:
        >>> ConvContract().id
        'conv/v1/f32-terms512-rows128-fold'
    """

    ID = "conv/v{version}/f32-terms{terms}-rows{rows}-fold"
    terms: int = 512
    rows: int = 128

    def __post_init__(self) -> None:
        if self.terms < 1 or self.rows < 1:
            raise ValueError(f"terms and rows must be at least 1, got {self.terms} and {self.rows}.")
