"""Initializers of parameters, as in `flax.nnx`."""

from flax import nnx

LECUN_NORMAL = nnx.initializers.lecun_normal()
EMBEDDING = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
ZEROS = nnx.initializers.zeros_init()
