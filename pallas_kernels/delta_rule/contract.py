"""The order in which the gated delta rule is computed."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaRuleContract:
    """How the outputs and the state of one head of one sequence are computed.

    Positions are absolute: chunk c holds the positions [c * chunk, (c + 1) * chunk), and row t of it the position
    c * chunk + t. S is the state at the chunk's edge, before its row 0, and ~x is x rounded to the dtype of the values.
    With the key k, query q, value v, gate g and beta of each row, and i <= t for rows of the same chunk:

        G_t  = G_(t-1) + max(g_t, least), G_(-1) = 0            one float32 addition for each row, upwards
        a_ti = beta_t * ((k_t . k_i) * exp(G_t - G_i))          for i < t
        T_t  = e_t - sum_(i < t) a_ti * T_i                     row t of the inverse of I + A; float32, upwards
        P_t  = ~(sum_(i <= t) ~((q_t . k_i) * exp(G_t - G_i)) * ~T_i)
        r_t  = ~(beta_t * (v_t - exp(G_t) * (k_t . ~S)))
        o_t  = ~(scale * (exp(G_t) * (q_t . ~S) + sum_(i <= t) P_ti * r_i))

    and after the last row n of the chunk

        u_t  = ~((sum_(i <= t) ~T_ti * r_i) * exp(G_n - G_t))
        S'   = exp(G_n) * S + sum_t k_t u_t

    Row t of T is computed by forward substitution, in which every product is rounded before it is added. The other sums
    over rows, and over the columns of a head, are matrix products under a contract of matmul, in which the rows after t
    are zeros. Every other step is rounded once. The state is replaced by S' when the first row of the next chunk is
    computed. So row t depends only on S and the rows up to t, and neither on the rows after it nor on which rows were
    computed in the same call.

    Attributes:
        chunk: Rows of a chunk, a power of two.
        least: Smallest gate (logarithm of a decay). exp(-104) is 0 in float32, and sums of a chunk stay accurate.
        version: Raised when the bits of an existing contract change on purpose.

    Example:
        >>> DeltaRuleContract().id
        'gated-delta-rule/v1/f32-chunk64-rows'
    """

    chunk: int = 64
    least: float = -104.0
    version: int = 1

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two, got {self.chunk}.")
        if not (math.isfinite(self.least) and self.least < 0):
            raise ValueError(f"least must be negative and finite, got {self.least}.")

    @property
    def id(self) -> str:
        """Name of the contract, stable across runs and machines."""
        return f"gated-delta-rule/v{self.version}/f32-chunk{self.chunk}-rows"
