"""Cases that `make test` leaves to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONG_DOCTESTS = frozenset(
    {
        "bijax.ops.paged_attention.paged_attention",
        "bijax.sampling._sample.sample",
        "bijax.serving.async_engine.AsyncEngine",
        "flax_layers.linen.recurrent.Bidirectional",
        "flax_layers.linen.recurrent.ConvLSTMCell",
        "flax_layers.models.generate.generate",
        "flax_layers.models.layers.attention.Attention",
        "flax_layers.models.layers.moe.MoE",
        "flax_layers.models.layers.quant_moe.QuantMoE",
        "flax_layers.models.llama.Llama",
        "pallas_kernels.ops.attention.cpu.launch.attention",
    }
)
"""Examples of docstrings that compile for seconds and that do what other tests do too."""


def rarely(*values: Any) -> Any:
    """Returns parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def sampled[T](cases: Iterable[T], few: Collection[T]) -> list[Any]:
    """Returns all cases; those that are not among the few are left to `make test-all`."""
    cases = list(cases)
    assert all(case in cases for case in few)
    return [case if case in few else rarely(case) for case in cases]
