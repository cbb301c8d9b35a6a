"""How a token is drawn from a row of logits on a GPU."""

from dataclasses import dataclass, field
from typing import Final

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class GumbelContract(Contract):
    """The Gumbel noise of a column, and the score whose first maximum is drawn.

    With w the column's word of Philox-4x32 (7 rounds; key: the seed, counter: the position and the column) and
    v = min((w + 1/2) / 2**32, 1 - 2**-24), the exponential variable e = -log(1 - v) is the Taylor polynomial of degree
    7, in fused multiply-adds, for v below 1/8, otherwise -log(2) * lg2.approx.ftz.f32(1 - v). The score is the logit
    times the reciprocal of the temperature, rounded, and then fused with lg2.approx.ftz.f32(e) * -log(2).

    Example:
        >>> GumbelContract().id
        'gumbel/v2/philox4x32-7-ptx'
    """

    ID = "gumbel/v{version}/philox4x32-7-ptx"
    version: int = field(default=2, kw_only=True)


GUMBEL: Final = GumbelContract()
"""Drawing on an NVIDIA GPU."""
