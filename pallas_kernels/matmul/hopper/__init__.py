"""Matmul on a Hopper GPU."""

from pallas_kernels.matmul.hopper.launch import gated_matmul as gated_matmul
from pallas_kernels.matmul.hopper.launch import matmul as matmul
from pallas_kernels.matmul.hopper.launch import weight_gradient as weight_gradient
