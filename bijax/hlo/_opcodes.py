"""Sets of HLO opcodes that the rules speak of."""

from typing import Final

# fmt: off
REDUCING: Final = frozenset((
    "dot", "ragged-dot", "scaled-dot", "convolution", "reduce", "reduce-window", "scatter", "select-and-scatter",
    "sort", "fft", "cholesky", "triangular-solve",
))
"""What combines elements."""

COLLECTIVES: Final = frozenset(("all-reduce", "all-reduce-start", "reduce-scatter"))
"""What combines elements of several devices."""

ORDER_FREE: Final = frozenset((
    "maximum", "minimum", "and", "or", "xor", "compare", "select", "bitcast", "copy", "convert",
))
"""What a combiner may consist of so that its order does not show."""

TRANSCENDENTAL: Final = frozenset((
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "tan", "sine", "cosine", "power",
    "rsqrt", "cbrt", "erf", "atan2", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
))
"""Element-wise opcodes that are computed by polynomials or approximations."""

ARITHMETIC: Final = TRANSCENDENTAL | frozenset((
    "add", "subtract", "multiply", "divide", "negate", "abs", "maximum", "minimum", "compare", "select", "sqrt",
))
"""Element-wise opcodes that count as one operation for each element."""

HOLDING: Final = frozenset((
    "call", "while", "conditional", "fusion", "parameter", "constant", "tuple", "get-tuple-element",
))
"""What computes nothing by itself."""

EXACT: Final = HOLDING | COLLECTIVES | REDUCING | frozenset((
    "add", "subtract", "maximum", "minimum", "negate", "abs", "select", "compare", "convert", "bitcast",
    "bitcast-convert", "broadcast", "reshape", "transpose", "slice", "pad", "concatenate", "gather", "dynamic-slice",
    "dynamic-update-slice", "copy", "iota", "reverse", "sqrt", "optimization-barrier", "all-gather", "all-to-all",
    "collective-permute", "infeed", "outfeed", "after-all", "domain", "floor", "ceil", "sign", "is-finite",
    "custom-call",
))
"""Opcodes that neither are an element-wise product or approximation nor become one."""

APPROXIMATED: Final = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh",
    "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma", "igammac", "lgamma", "log", "log1p", "log2",
    "logistic", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sin", "sinh", "tan", "tanh", "zeta",
))
"""Names of operations of JAX that become polynomials or iterations."""
# fmt: on
