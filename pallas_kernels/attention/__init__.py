"""Attention over fixed blocks of keys, forward and backward, from contiguous and paged caches."""

from pallas_kernels.attention._spec import AttentionSpec as AttentionSpec
