"""The order in which the gated delta rule is computed."""

import math
from dataclasses import dataclass

from pallas_kernels.base_contract import Contract


@dataclass(frozen=True)
class DeltaRuleContract(Contract):
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

    Example:
        >>> DeltaRuleContract().id
        'gated-delta-rule/v1/f32-chunk64-rows'
    """

    ID = "gated-delta-rule/v{version}/f32-chunk{chunk}-rows"
    chunk: int = 64
    least: float = -104.0

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two, got {self.chunk}.")
        if not (math.isfinite(self.least) and self.least < 0):
            raise ValueError(f"least must be negative and finite, got {self.least}.")


@dataclass(frozen=True)
class MmaDeltaRuleContract(Contract):
    """The order of `DeltaRuleContract` on tensor cores, for keys, queries and values of 16 bits.

    With the names used there, E(x) = 2**x by the instruction `ex2.approx.ftz`, and c(x; ...) a chain: a float32
    accumulator that starts at x, to which a tensor core adds products of 16-bit numbers, 16 at a time in ascending
    order:

        G_t  = G_(t-1) + max(g_t, least) * log2(e), G_(-1) = 0
        a_ti = ~(beta_t * ((k_t . k_i) * E(G_t - G_i)))         for i < t
        T_t  = ~c(e_t; -a_ti T_i for i < t)                     row t of the inverse of I + A, rounded
        P_t  = ~c(0; ~((q_t . k_i) * E(G_t - G_i)) T_i for i <= t)
        r_t  = ~(beta_t * fma(-E(G_t), k_t . ~S, v_t))
        o_t  = ~(scale * c(E(G_t) (q_t . ~S); P_ti r_i for i <= t))
        u_t  = ~(c(0; T_ti r_i for i <= t) * E(G_n - G_t))
        S'   = c(E(G_n) S; k_t u_t for all t)

    Products with a row that comes later, or that is not a row of the chunk, are zeros and leave an accumulator as it
    is. The instruction is `mma.sync` or `wgmma`, which have the same bits. Zeros in outputs are positive.

    A row makes its head nan from there on if its key has no finite length, its beta or its g (other than -inf) is not
    finite, or its row of T is not finite in the dtype of the values. Such a key, beta or g, and such elements of T, are
    0 in what other rows compute.

    Attributes:
        chunk: Rows of a chunk.
        least: As in `DeltaRuleContract`.

    Example:
        >>> MmaDeltaRuleContract().id
        'gated-delta-rule/v1/mma16-chunk64-rows'
    """

    ID = "gated-delta-rule/v{version}/mma16-chunk{chunk}-rows"
    chunk: int = 64
    least: float = -104.0


@dataclass(frozen=True)
class MmaDeltaRuleGradientContract(Contract):
    """The order of the gradients on tensor cores, for keys, queries and values of 16 bits.

    With the names of `MmaDeltaRuleContract` and its T, P, G, beta, r and S, w the scale, n the last row of the chunk,
    O_t the cotangent of the outputs, X that of the state after the chunk, and chains also for products with a dot:

        U_t  = c(0; T_ti r_i for i <= t)
        z_t  = ~((k_t . ~X) * E(G_n - G_t))
        R_t  = c(w * c(0; P_it O_i); T_it z_i)                      in these two i is any row of the chunk
        e_t  = ~((w * E(G_t)) * O_t),  f_t = ~(-(beta_t * E(G_t)) * ~R_t)
        a_ti = -(~R_t . ~U_i) for i < t,  b_ti = w * (O_t . ~U_i) for i <= t
        m_ti = (k_t . k_i) * E(G_t - G_i) for i < t,  h_ti = (q_t . k_i) * E(G_t - G_i) for i <= t
        l_t  = c(0; ~X ~(U_t * E(G_n - G_t)))

    The value heads of a key head continue the same chains upwards; dq and dk begin at 0 and are rounded once:

        dq_t = c(dq_t; ~S e_t; ~(b_ti E(G_t - G_i)) k_i for all i)
        p_ti = ~(beta_t a_ti E(G_t - G_i))
        dk_t = c(c(dk_t; ~S f_t) + l_t; p_ti k_i; p_it k_i; ~(b_it E(G_i - G_t)) q_i, each for all i)

    The other gradients, with sum(x) = c(0; ^x) + c(0; ^(x - ^x)) where ^x is x rounded to bfloat16:

        dv_t = ~(beta_t * R_t)
        dbeta_t = sum(~R_t (v_t - E(G_t) (k_t . ~S))) + sum_i(a_ti m_ti)
        j_ti = a_ti * (beta_t * m_ti) + b_ti * h_ti
        x_t  = sum(E(G_t) (w (O_t (q_t . ~S)) - beta_t (~R_t (k_t . ~S)))),  y_t = sum(k_t l_t)
        dG_t = (sum_i(j_ti) - sum_i(j_it)) + (x_t - y_t),  and at row n + (E(G_n) * sum(~X S) + sum of y)
        dg_t = sum of dG_i for i >= t, or 0 where g_t < least

    and the cotangent of the state before the chunk is c(E(G_n) X; e_t q_t; f_t k_t). The sum of ~X S is one over the
    rows of the state for each column; these, the sum of y and that of dG_i add halves, x_i + x_(i + width / 2), until
    one number is left.

    The instruction is `mma.sync` or `wgmma`, which have the same bits.

    Attributes:
        chunk: Rows of a chunk.

    Example:
        >>> MmaDeltaRuleGradientContract().id
        'gated-delta-rule-gradients/v1/mma16-chunk64'
    """

    ID = "gated-delta-rule-gradients/v{version}/mma16-chunk{chunk}"
    chunk: int = 64
