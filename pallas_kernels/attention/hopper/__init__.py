"""Attention on a Hopper GPU."""

from pallas_kernels.attention.hopper.backward import attention_gradients as attention_gradients
from pallas_kernels.attention.hopper.latent_launch import latent_attention as latent_attention
from pallas_kernels.attention.hopper.launch import attention as attention
