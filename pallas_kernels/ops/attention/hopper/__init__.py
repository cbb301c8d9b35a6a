"""Attention on a Hopper GPU."""

from pallas_kernels.ops.attention.hopper._scores import supports_cap as supports_cap
from pallas_kernels.ops.attention.hopper._scores import supports_scale as supports_scale
from pallas_kernels.ops.attention.hopper.backward import attention_gradients as attention_gradients
from pallas_kernels.ops.attention.hopper.launch import attention as attention
