"""Schedules of the Triton matmul. A schedule does not affect the bits, so it may depend on the number of rows."""

from pallas_kernels.matmul.schedule.jax_triton.forms import float8_tile as float8_tile
from pallas_kernels.matmul.schedule.jax_triton.forms import group_gradient_tile as group_gradient_tile
from pallas_kernels.matmul.schedule.jax_triton.forms import reads_columns as reads_columns
from pallas_kernels.matmul.schedule.jax_triton.forms import split_tile as split_tile
from pallas_kernels.matmul.schedule.jax_triton.product import CHAIN as CHAIN
from pallas_kernels.matmul.schedule.jax_triton.product import candidates as candidates
from pallas_kernels.matmul.schedule.jax_triton.product import chain_tile as chain_tile
from pallas_kernels.matmul.schedule.jax_triton.product import tensor_core_tile as tensor_core_tile
from pallas_kernels.matmul.schedule.jax_triton.tile import SplitTile as SplitTile
from pallas_kernels.matmul.schedule.jax_triton.tile import Tile as Tile
