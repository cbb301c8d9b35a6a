"""The bits of every operation under its contracts, on this machine, are those of the golden hashes."""

import functools
import re

import pytest

from tests.goldens import hashes
from tests.goldens.cases import Case, cases
from tests.goldens.hashes import Golden
from tests.tiers import tiered

FEW = (
    *("matmul float32", "matmul bfloat16 gradients", "matmul float32 split_k=4", "gated_matmul bfloat16 gradients"),
    *("rms_norm float32 576 gradients", "softmax bfloat16 2500 gradients", "attention float32 window"),
    *("conv gradients", "cumsum", "scatter-add", "rsqrt float32", "add_rms_norm_dynamic_quant bfloat16", "exp float32"),
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
    judge(hashes.golden(name, every_case()[name]), recorded())


def judge(found: Golden, recorded: dict[str, dict[str, str]]) -> None:
    """Compares a hash with the recorded one, which must be there on a machine of which others are."""
    machine, key, digest = found
    if machine not in recorded:
        pytest.skip(f"no golden hashes are recorded for {machine}: `{hashes.RECORD}` on this machine records them")
    known = recorded[machine]
    # One case has several contracts where its kernel depends on the packages that are installed.
    name = key.partition(" | ")[0]
    others = " and ".join(repr(k) for k in known if k.partition(" | ")[0] == name)
    assert key in known or not others, f"the contracts have changed from {others} to {key!r}"
    assert key in known, f"{key!r} has no golden hash for {machine}: `{hashes.RECORD}` records it"
    assert digest == known[key]


@pytest.mark.parametrize(
    ("key", "digest", "message"),
    [
        ("new | rows/v1", "00", "'new | rows/v1' has no golden hash for sm_90: `python -m tests.goldens.hashes"),
        ("old | rows/v2", "00", "have changed from 'old | rows/v1' to 'old | rows/v2'"),
        ("old | rows/v1", "01", "assert '01' == '00'"),
    ],
    ids=["a new case", "another contract", "another bit"],
)
def test_what_a_recorded_machine_does_not_pass(key: str, digest: str, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        judge(Golden("sm_90", key, digest), {"sm_90": {"old | rows/v1": "00"}})


def test_a_case_may_have_several_contracts() -> None:
    for contract, digest in (known := {"einsum | matmul/v1": "00", "einsum | matmul/v2": "01"}).items():
        judge(Golden("sm_90", contract, digest), {"sm_90": known})


def test_an_unknown_machine_is_told_how_to_record() -> None:
    with pytest.raises(pytest.skip.Exception, match=re.escape(f"recorded for sm_80: `{hashes.RECORD}`")):
        judge(Golden("sm_80", "old | rows/v1", "00"), {"sm_90": {"old | rows/v1": "00"}})


def test_every_case_is_recorded() -> None:
    """Read from the file, so that a case which `make test` does not run has its hashes as well."""
    groups = {tuple(machine.split(", ")): set(hashes_of) for machine, hashes_of in recorded().items()}
    for architecture, jaxlib in {machine[:2] for machine in groups if len(machine) > 1}:
        parts = {machine[2:]: keys for machine, keys in groups.items() if machine[:2] == (architecture, jaxlib)}
        names = {key.partition(" | ")[0] for keys in (groups[architecture,], *parts.values()) for key in keys}
        assert every_case().keys() <= names, f"on {architecture} with {jaxlib} record {every_case().keys() - names}"
        for kind in ("rsqrt", "products"):
            keys = [keys for part, keys in parts.items() if any(p.startswith(kind) for p in part)]
            assert all(other == keys[0] for other in keys), f"on {architecture} with {jaxlib} not for each {kind}"


def test_another_order_has_another_hash() -> None:
    """The control: products are summed in another order where K is cut into splits."""
    x, w = every_case()["matmul float32 split_k=4"].arrays
    whole, cut = (every_case()[f"matmul float32 {kind}"].function for kind in ("split_k=2", "split_k=4"))
    assert hashes.golden("whole", Case(whole, (x, w))).digest != hashes.golden("cut", Case(cut, (x, w))).digest
