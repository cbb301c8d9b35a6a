"""Operations under settings of JAX that a caller may have made, run as a program of its own on eight devices.

`test_callers_settings` starts it with the names of settings; several joined with "+" are in force together. Comparisons
are not kept on disk, where one that was made under settings would be found by the run without them. Compiled programs
are: one that settings do not change is compiled once.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import bijax
from bijax.sampling import sample
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.cpu import launch as attention
from pallas_kernels.matmul.cpu import launch as products
from pallas_kernels.matmul.cpu import stacked, verify
from pallas_kernels.runtime import one_by_one

Setting = Callable[[], AbstractContextManager[Any]]


def mesh(kind: AxisType) -> Any:
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))


SETTINGS: dict[str, Setting] = {
    "set_mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "explicit": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "abstract_mesh": lambda: jax.sharding.use_abstract_mesh(mesh(AxisType.Auto).abstract_mesh),
    "with_mesh": lambda: mesh(AxisType.Auto),
    "mode": bijax.set_batch_invariant_mode,
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "precision": lambda: jax.default_matmul_precision("BF16_BF16_F32"),
    "x64": lambda: jax.enable_x64(True),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "device": lambda: jax.default_device(jax.devices()[3]),
    "guard": lambda: jax.transfer_guard("disallow"),
    "threefry": lambda: jax.threefry_partitionable(False),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "log_compiles": lambda: jax.log_compiles(True),
    "key_reuse": lambda: jax.debug_key_reuse(True),
    "checks": lambda: jax.enable_checks(True),
    "softmax": lambda: jax.softmax_custom_jvp(True),
    "no_narrow_sums": lambda: jax.allow_f16_reductions(False),
}


def operations(k: int) -> dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]]:
    """Returns operations with arguments whose shapes no other `k` has."""
    rng = np.random.default_rng(k)
    x, w, query, key, logits, scale = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((5, k), (k, 40), (2, 7, 4, k // 8), (2, 7, 2, k // 8), (3, k), (k,))
    )
    numbers = jnp.asarray([1, 3, 0], jnp.int32)

    def attend(query: jax.Array, key: jax.Array) -> jax.Array:
        return bijax.dot_product_attention(query, key, key, is_causal=True)

    def drawn(logits: jax.Array, numbers: jax.Array) -> Any:
        return sample(logits, seeds=numbers, positions=numbers, temperature=1.0, top_k=5, top_p=0.9)

    def rows(x: jax.Array, scale: jax.Array) -> jax.Array:
        return bijax.softmax(bijax.rms_norm(x, scale))

    def network(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.nn.gelu(x @ w), axis=-1).sum(-1)

    return {
        "matmul": (bijax.matmul, (x, w)),
        "rows": (rows, (x, scale)),
        "attention": (attend, (query, key)),
        "sample": (drawn, (logits, numbers)),
        "gradients": (jax.grad(lambda x, w: jnp.max(bijax.matmul(x, w)), (0, 1)), (x, w)),
        "gradients of attention": (jax.grad(lambda *a: jnp.max(attend(*a)), (0, 1)), (query, key)),
        "invariant": (bijax.invariant(network), (x, w)),
        "gradient of invariant": (bijax.invariant(jax.grad(lambda x, w: jnp.max(network(x, w)))), (x, w)),
    }


def forget() -> None:
    """Lets the next product of any shape be the first one of its process."""
    for cached in (products.honours_contract, stacked.honours_contract, one_by_one._compiled):
        cached.cache_clear()
    for cached in (attention.honours_contract, attention.honours_gradients, attention._reference_of_probe):
        cached.cache_clear()
    for cached in (verify._expected, verify._compile_reference, verify._compiler_fuses):
        cached.cache_clear()
    jax.clear_caches()


def check(names: list[str], k: int) -> None:
    programs = {name: (jax.jit(f), arguments) for name, (f, arguments) in operations(k).items()}
    if len(names) > 1:  # what compiles for long is compared under each setting alone
        del programs["gradients of attention"], programs["gradient of invariant"], programs["rows"]
    if "infs" in names:  # JAX sets what is not to be drawn to -inf
        del programs["sample"]
    forget()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        # Not jitted, JAX's own functions move numbers to the device, which a guard against transfers forbids.
        inside = {n: (f if "guard" in names else f.__wrapped__)(*arguments) for n, (f, arguments) in programs.items()}
    # What a cache keeps from the inside is the same for an operation and its gradient, which compiles for longer.
    cheap = [name for name in programs if "gradient" not in name]
    outside = {name: programs[name][0](*programs[name][1]) for name in cheap}
    forget()
    alone = {name: f(*arguments) for name, (f, arguments) in programs.items()}
    for name, expected in alone.items():
        assert_bits_equal(inside[name], expected)
    for name in cheap:
        assert_bits_equal(outside[name], alone[name])


if __name__ == "__main__":
    os.environ["BIJAX_LOWERING_CACHE"] = "off"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    for index, argument in enumerate(sys.argv[1:]):
        check(argument.split("+"), 160 + 16 * index)
        print(argument, flush=True)
