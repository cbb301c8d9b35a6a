"""Results have the shapes and dtypes that the documentation states, with `jax.jit` and without."""

from collections.abc import Callable
from typing import Any, Final

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import bijax
from tests.arrays import on_device

X, W, V = (on_device(np.ones(shape, d)) for shape, d in (((3, 5, 8), "bfloat16"), ((8, 6), "bfloat16"), (8, "float32")))
IDS: Final = jnp.array([[1, 0, 2]])

type Result = tuple[tuple[int, ...], str]
CALLS: Final[dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Result]]]] = {
    "matmul": (bijax.matmul, (X, W), [((3, 5, 6), "bfloat16")]),
    "matmul to float32": (
        lambda x, w: bijax.matmul(x, w, preferred_element_type="float32"),
        (X, W),
        [((3, 5, 6), "float32")],
    ),
    "gated_matmul": (bijax.gated_matmul, (X, W, W), [((3, 5, 6), "bfloat16")]),
    "rms_norm": (bijax.rms_norm, (X, V), [((3, 5, 8), "bfloat16")]),
    "rms_norm with a residual": (
        lambda x, w: bijax.rms_norm(x, w, residual=x),
        (X, V),
        [((3, 5, 8), "bfloat16"), ((3, 5, 8), "bfloat16")],
    ),
    "layer_norm": (bijax.layer_norm, (X, V, V), [((3, 5, 8), "bfloat16")]),
    "softmax": (bijax.softmax, (X,), [((3, 5, 8), "bfloat16")]),
    "logsumexp": (lambda x: bijax.logsumexp(x, axis=(0, 2)), (X,), [((5,), "bfloat16")]),
    "sum": (lambda x: bijax.sum(x, axis=1, keepdims=True), (X,), [((3, 1, 8), "bfloat16")]),
    "mean": (lambda x: bijax.mean(x, axis=(0, -1)), (X,), [((5,), "bfloat16")]),
    "var": (lambda x: bijax.var(x, axis=-1), (X,), [((3, 5), "bfloat16")]),
    "softmax_cross_entropy": (lambda x: bijax.softmax_cross_entropy(x, IDS[0]), (X[:, 0],), [((3,), "float32")]),
    "embed": (lambda w: bijax.embed(w, IDS), (W,), [((1, 3, 6), "bfloat16")]),
    "swiglu": (bijax.swiglu, (X,), [((3, 5, 4), "bfloat16")]),
    "scale_dynamic_quant": (
        lambda x: bijax.scale_dynamic_quant(x, V),
        (X[0],),
        [((5, 8), "int8"), ((5,), "float32")],
    ),
}


class ShapesTest(chex.TestCase):
    """chex makes both variants of each case."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((name, name) for name in CALLS)
    def test_results(self, name: str) -> None:
        function, arrays, expected = CALLS[name]
        results = self.variant(function)(*arrays)
        results = results if isinstance(results, tuple) else (results,)
        chex.assert_equal(len(results), len(expected))
        for result, (shape, dtype) in zip(results, expected, strict=True):
            chex.assert_shape(result, shape)
            chex.assert_type(result, jnp.dtype(dtype))
            chex.assert_tree_all_finite(result.astype(jnp.float32))
