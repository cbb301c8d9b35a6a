"""The bits of every operation under its contracts, on this machine, are those of the golden hashes."""

import functools

import pytest

from tests.goldens import hashes
from tests.goldens.cases import Case, cases
from tests.tiers import tiered

FEW = (
    *("matmul float32", "matmul bfloat16 gradients", "matmul float32 split_k=4", "gated_matmul bfloat16 gradients"),
    *("rms_norm float32 576 gradients", "softmax bfloat16 2500 gradients", "attention float32 window"),
    *("conv gradients", "cumsum", "scatter-add", "add_rms_norm_dynamic_quant bfloat16", "exp float32"),
)


@functools.cache
def every_case() -> dict[str, Case]:
    return cases()


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    return hashes.load()


@pytest.mark.parametrize("name", tiered(every_case(), fast=FEW))
def test_bits_of_contracts(name: str) -> None:
    compare(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", every_case())
def test_bits_of_contracts_on_a_gpu(name: str) -> None:
    compare(name)


def compare(name: str) -> None:
    case = every_case()[name]
    machine, key = hashes.key_of(name, case)
    known = recorded().get(machine, {})
    if key not in known:
        others = {k.partition(" | ")[0]: k for k in known}
        assert name not in others, f"the contracts have changed from {others[name]!r} to {key!r}: record again"
        pytest.skip(f"no golden hash is recorded for {key!r} on {machine}; see tests/goldens/hashes.py")
    assert hashes.digest(case) == known[key]


def test_another_order_has_another_hash() -> None:
    """The control: products are summed in another order where K is cut into shards."""
    x, w = every_case()["matmul float32 split_k=4"].arrays
    whole, cut = (every_case()[f"matmul float32 {kind}"].function for kind in ("split_k=2", "split_k=4"))
    assert hashes.digest(Case(whole, (x, w))) != hashes.digest(Case(cut, (x, w)))
