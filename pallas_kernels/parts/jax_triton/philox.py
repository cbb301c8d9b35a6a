"""Counter-based random words in Triton kernels, the same as by `pallas_kernels.parts.philox`."""

from typing import Final

import triton
import triton.language as tl

_ROUNDS: Final = tl.constexpr(7)
_BY_FIRST: Final = tl.constexpr("{ .reg .b64 p; mul.wide.u32 p, $2, 0xD2511F53; mov.b64 {$1, $0}, p; }")
_BY_SECOND: Final = tl.constexpr("{ .reg .b64 p; mul.wide.u32 p, $2, 0xCD9E8D57; mov.b64 {$1, $0}, p; }")
_STEP: Final = tl.constexpr(0x9E3779B9)
_OTHER_STEP: Final = tl.constexpr(0xBB67AE85)


@triton.jit
def philox(key, other_key, counter, position):
    """Returns the four words of Philox-4x32 with 7 rounds, for the counter (counter, position, 0, 0), all uint32."""
    a = counter
    b = tl.zeros_like(a) + position
    c = tl.zeros_like(a)
    d = tl.zeros_like(a)
    for _ in tl.static_range(_ROUNDS):
        high_a, low_a = _halves(a, _BY_FIRST)
        high_c, low_c = _halves(c, _BY_SECOND)
        a, b, c, d = high_c ^ b ^ key, low_c, high_a ^ d ^ other_key, low_a
        key += _STEP
        other_key += _OTHER_STEP
    return a, b, c, d


@triton.jit
def _halves(x, MULTIPLY: tl.constexpr):
    """Returns the upper and lower 32 bits of products, by one instruction."""
    high, low = tl.inline_asm_elementwise(MULTIPLY, "=r,=r,r", [x], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    return high, low
