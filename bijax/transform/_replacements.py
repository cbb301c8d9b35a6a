"""Which function of the library stands for which primitive."""

import functools
from collections.abc import Callable
from typing import Any, Final

from bijax.lax.conv import conv_general_dilated
from bijax.lax.cumulative import cumlogsumexp, cumprod, cumsum
from bijax.lax.dot_general import dot_general
from bijax.lax.extremes import clamp, cummax, cummin, maximum, minimum
from bijax.lax.ragged_dot import ragged_dot_general
from bijax.lax.reduce import reduce_max, reduce_min, reduce_prod, reduce_sum
from bijax.lax.reduce_program import reduce, reduce_window
from bijax.lax.scatter import scatter_add, scatter_mul, scatter_sub
from bijax.lax.scatter_apply import scatter_apply
from bijax.lax.scatter_chosen import scatter, scatter_max, scatter_min
from bijax.lax.windows import (
    reduce_window_max,
    reduce_window_min,
    reduce_window_sum,
    select_and_gather_add,
    select_and_scatter_add,
)
from bijax.ops._cudnn_attention import cudnn_attention, cudnn_attention_gradients
from bijax.parallel._collectives import psum, reduce_scatter

Replacement = Callable[..., Any]

REPLACEMENTS: Final[dict[str, Replacement]] = {
    "clamp": clamp,
    "conv_general_dilated": conv_general_dilated,
    "cumlogsumexp": cumlogsumexp,
    "cummax": cummax,
    "cummin": cummin,
    "cumprod": cumprod,
    "cumsum": cumsum,
    "dot_general": dot_general,
    **dict.fromkeys(("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"), cudnn_attention),
    **dict.fromkeys(("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"), cudnn_attention_gradients),
    "max": maximum,
    "min": minimum,
    "psum": psum,
    "psum_invariant": psum,
    "ragged_dot_general": ragged_dot_general,
    "reduce": reduce,
    "reduce_max": reduce_max,
    "reduce_min": reduce_min,
    "reduce_prod": reduce_prod,
    "reduce_scatter": reduce_scatter,
    "reduce_sum": reduce_sum,
    "reduce_window": reduce_window,
    "reduce_window_max": reduce_window_max,
    "reduce_window_min": reduce_window_min,
    "reduce_window_sum": reduce_window_sum,
    "scatter": scatter,
    "scatter-add": scatter_add,
    "scatter-max": scatter_max,
    "scatter-min": scatter_min,
    "scatter-mul": scatter_mul,
    "scatter-sub": scatter_sub,
    "scatter_apply": scatter_apply,
    "select_and_gather_add": select_and_gather_add,
    "select_and_scatter_add": select_and_scatter_add,
}
"""Takes the operands and parameters of the primitive; where it carries a program, that as the argument `program`."""

_ON_GPU: Final = {
    name: functools.partial(REPLACEMENTS[name], on_gpu=True)
    for name in ("reduce_max", "reduce_min", "reduce_prod", "reduce_sum")
}
"""Those that are written otherwise for a GPU, with the same bits."""


def replacement(name: str, platform: str) -> Replacement:
    """Returns the function that stands for a primitive on a platform."""
    return REPLACEMENTS[name] if platform == "cpu" else _ON_GPU.get(name, REPLACEMENTS[name])


COLLECTIVES: Final = frozenset({"psum", "psum_invariant", "reduce_scatter"})
"""Those that speak to other devices, and so must see the axes."""
