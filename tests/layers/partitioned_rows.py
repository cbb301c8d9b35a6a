"""Prompts whose rows are cut between sums, on eight devices of a CPU, a program of its own for `test_partition`."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, PartitionedLlama, Routing, partition
from flax_layers.checkpoint import LlamaConfig
from flax_layers.checkpoint.experts import ExpertsConfig
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.layers.partitioned_models import CONFIG, mesh

TOKENS = on_device(np.random.default_rng(0).integers(0, 64, (4, 256)))
EXPERTS = ExpertsConfig(intermediate_size=16, routing=Routing(num_experts=8, topk=2))


def extended(cut: PartitionedLlama, tokens: jax.Array = TOKENS) -> Any:
    """Returns the dtypes of what is gathered when a prompt is appended, the logits and the keys."""
    cache = cut.cache(batch=tokens.shape[0], capacity=256)
    lowered = jax.jit(cut.extend).lower(cut.params, tokens, cache)
    gathered = re.findall(r"stablehlo.all_gather.*x(\w+)>$", lowered.as_text(), re.MULTILINE)
    logits, after = lowered.compile()(cut.params, tokens, cache)
    return set(gathered), logits, after.keys


def rows(**changes: Any) -> None:
    """The bits of one device and of rows that are not cut; plain JAX differs."""
    config = {**CONFIG, "max_position_embeddings": 256, "experts": EXPERTS, **changes}
    model = Llama(LlamaConfig(**config), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    whole = partition(model, mesh(1))
    _, *expected = extended(whole)
    for devices in (2, 8):
        cut = partition(model, mesh(devices))
        gathered, *found = extended(cut)
        assert_bits_equal(found, expected)
        # No float32 sums of all rows on any device, as short prompts have.
        assert "f32" not in gathered
    assert "f32" in extended(cut, TOKENS[:2])[0]
    plain = [extended(cut.with_ops(PLAIN))[1] for cut in (whole, cut)]
    with pytest.raises(AssertionError):
        assert_bits_equal(*plain)


def gradient() -> None:
    """The gradient of a norm's scale is a sum over rows, so it is refused instead of having other bits."""
    model = Llama(LlamaConfig(**{**CONFIG, "max_position_embeddings": 256, "experts": EXPERTS}), rngs=nnx.Rngs(0))
    cut = partition(model, mesh(2))
    cache = cut.cache(batch=4, capacity=256)
    with pytest.raises(UnsupportedError, match=r"Block\.extend has no gradient"):
        jax.grad(lambda params: cut.extend(params, TOKENS, cache)[0].sum())(cut.params)


CHECKS: dict[str, Any] = {
    "rows": lambda: rows(qk_norm=True, output_norms=True, output_bias=True),
    "gradient": gradient,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
