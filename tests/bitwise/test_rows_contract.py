"""The row contract is what is computed: numpy gives the same bits, and golden hashes say so over time."""

import hashlib
import platform
from pathlib import Path

import jax
import jaxlib
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import row_contract
from tests.bitwise import row_emulation as emulation
from tests.bitwise.row_cases import OURS, all_ops

# Finite rows without denormals, which XLA flushes to zero and numpy does not.
KINDS = ("normal", "linspace", "wide", "cancelling")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [*((c, "float32") for c in (1, 77, 1023, 4200)), (200, "bfloat16"), (200, "float16")],
)
def test_numpy_gives_the_same_bits(columns: int, dtype: str) -> None:
    data = hostile_rows(0, (3, columns), dtype)
    x = np.concatenate([data[kind] for kind in KINDS])
    g = hostile_rows(1, x.shape, dtype)["normal"]
    w = np.random.default_rng(2).standard_normal(columns).astype(np.float32)
    found = jax.jit(all_ops)(x, g, w)
    with np.errstate(over="ignore"):
        expected = {
            "sum": emulation.add_row(x.astype(np.float32))[:, 0].astype(dtype),
            "mean": emulation.mean_row(x.astype(np.float32))[:, 0].astype(dtype),
            "rms_norm": emulation.rms_norm(x, w, 1e-6),
            "head_rms_norm": emulation.rms_norm(x, w + 1 + 1, 1e-6),
            "layer_norm": emulation.layer_norm(x, w, w, 1e-5),
            "var": emulation.variance(x)[:, 0],
        }
        gradients = {
            "softmax": emulation.softmax_gradient(np.asarray(found["softmax"][0]), g),
            "rms_norm": emulation.rms_norm_gradient(x, w, 1e-6, g),
            "layer_norm": emulation.layer_norm_gradient(x, w, 1e-5, g),
        }
    assert_bits_equal({name: found[name][0] for name in expected}, expected)
    assert_bits_equal({name: found[name][1] for name in gradients}, gradients)


def test_the_residual_is_rounded_before_the_norm() -> None:
    x, r = (hostile_rows(seed, (4, 300), "bfloat16")["normal"] for seed in (0, 1))
    w = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    y, h = bijax.rms_norm(x, w, residual=r)
    expected = (x.astype(np.float32) + r.astype(np.float32)).astype(x.dtype)
    assert_bits_equal(h, expected)
    assert_bits_equal(y, emulation.rms_norm(expected, w, 1e-6))
    assert_bits_equal(y, bijax.rms_norm(h, w))


# Operations of nothing but correctly rounded steps: the same hash on every machine.
GOLDEN = {
    "sum": "0cd53cad7e2b6d71",
    "mean": "70b8b90cc0b1fda8",
    "rms_norm": "099f57cc95afcff7",
    "rms_norm_residual": "a5e6e34d4acc0111",
    "head_rms_norm": "88b94ea0235981ac",
    "layer_norm": "0c8ad0effa145369",
    "var": "815edf5141ebbd94",
    "std": "0b53f87bb4228a32",
}
# Exponentials and logarithms are XLA's own: hashes for each processor and jaxlib. These two agree.
_AVX512 = {
    "softmax": "0fe81d2f2b611a99",
    "log_softmax": "5405dbda944210b9",
    "logsumexp": "96021147130120fc",
    "softmax_cross_entropy": "528e9de70f3c2ef4",
}
GOLDEN_EXP = {("x86_64-avx512", "0.12.0.1"): _AVX512, ("x86_64-avx512", "0.11.2"): _AVX512}


def processor() -> str:
    info = Path("/proc/cpuinfo")
    avx512 = info.exists() and "avx512f" in info.read_text()
    return platform.machine() + ("-avx512" if avx512 else "")


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    rng = np.random.default_rng(7)
    x, g = (rng.standard_normal((5, 2500)).astype(np.float32) for _ in range(2))
    found = jax.jit(all_ops)(x, g, g[0])
    return {
        name: hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(y))).hexdigest()[:16]
        for name, y in found.items()
    }


def test_golden_contract() -> None:
    assert row_contract().id == "rows/v2/f32-lanes128to8192-tree"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OURS)
def test_golden_bits(name: str, digests: dict[str, str]) -> None:
    """The bits of the contract on the CPU; they change by decision only (raise the contract's version)."""
    known = GOLDEN
    if name not in GOLDEN:
        key = (processor(), jaxlib.__version__)
        known = GOLDEN_EXP.get(key, {})
        if name not in known:
            pytest.skip(f"no golden hash of {name} is recorded for {key}")
    assert digests[name] == known[name]
