"""Sets of HLO opcodes used by the rules."""

from typing import Final

# fmt: off
REDUCING: Final = frozenset((
    "dot", "ragged-dot", "scaled-dot", "convolution", "reduce", "reduce-window", "scatter", "select-and-scatter",
    "sort", "fft", "cholesky", "triangular-solve",
))
"""Opcodes that combine elements."""

COLLECTIVES: Final = frozenset(("all-reduce", "all-reduce-start", "reduce-scatter"))
"""Opcodes that combine elements across devices."""

ORDER_FREE: Final = frozenset((
    "maximum", "minimum", "and", "or", "xor", "compare", "select", "bitcast", "copy", "convert",
))
"""Opcodes of combiners whose result does not depend on the order."""

TRANSCENDENTAL: Final = frozenset((
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "tan", "sine", "cosine", "power",
    "rsqrt", "cbrt", "erf", "atan2", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
))
"""Element-wise opcodes computed by polynomials or approximations."""

ARITHMETIC: Final = TRANSCENDENTAL | frozenset((
    "add", "subtract", "multiply", "divide", "negate", "abs", "maximum", "minimum", "compare", "select", "sqrt",
))
"""Element-wise opcodes that count as one operation for each element."""

HOLDING: Final = frozenset((
    "call", "while", "conditional", "fusion", "parameter", "constant", "tuple", "get-tuple-element",
))
"""Opcodes without arithmetic."""

EXACT: Final = HOLDING | COLLECTIVES | REDUCING | frozenset((
    "add", "subtract", "maximum", "minimum", "negate", "abs", "select", "compare", "convert", "bitcast",
    "bitcast-convert", "broadcast", "reshape", "transpose", "slice", "pad", "concatenate", "gather", "dynamic-slice",
    "dynamic-update-slice", "copy", "iota", "reverse", "sqrt", "optimization-barrier", "all-gather", "all-to-all",
    "collective-permute", "infeed", "outfeed", "after-all", "domain", "floor", "ceil", "sign", "is-finite",
    "custom-call",
))
"""Opcodes that are not, and do not become, an element-wise product or approximation."""

APPROXIMATED: Final = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "cos", "cosh",
    "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "igamma", "igammac", "lgamma", "log", "log1p", "log2",
    "logistic", "polygamma", "pow", "regularized_incomplete_beta", "rsqrt", "sin", "sinh", "tan", "tanh", "zeta",
))
"""Names of JAX operations that become polynomials or iterations."""
# fmt: on
