"""A kernel for tests: the scores of columns with noise, and the bounds by which columns are skipped."""

import triton
import triton.language as tl

from pallas_kernels.sampling.jax_triton.kernels import _add_noise, _bound


@triton.jit
def bounds_kernel(score_ptr, word_ptr, size, bound_ptr, sum_ptr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(score_ptr + places, mask=places < size, other=0.0)
    word = tl.load(word_ptr + places, mask=places < size, other=0)
    tl.store(bound_ptr + places, _bound(score, word), mask=places < size)
    tl.store(sum_ptr + places, _add_noise(score, word), mask=places < size)
