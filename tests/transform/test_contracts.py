"""The contracts of programs: ids, fingerprints, and that every kernel is given the one that fixes its bits."""

import ast
import importlib
import inspect
import json
import pickle
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.cli import main
from bijax.core.contracts import recording
from bijax.core.primitive import KERNELS
from bijax.inspect import kernel_table
from bijax.inspect.kernel_table import Row
from bijax.transform.rules._elementwise import CHOOSING
from bijax.transform.rules._ordered import COLLECTIVES, ORDERED, PRODUCTS, RACING
from bijax.transform.rules.names import CUDNN_ATTENTION
from pallas_kernels import contract, registry
from pallas_kernels.cumulative.portable import scan_axis
from pallas_kernels.softmax import portable as softmax

W1, W2 = jnp.ones((512, 1024)), jnp.ones((1024, 300))


def model(x: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jax.nn.gelu(x @ W1) @ W2)


def fingerprint(fn: Callable[..., Any], rows: int, dtype: str = "float32", **options: Any) -> str:
    return bijax.contracts(fn, jax.ShapeDtypeStruct((rows, 512), dtype), **options).fingerprint


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return list(kernel_table.rows())


def test_the_ids_of_a_program() -> None:
    manifest = bijax.contracts(bijax.invariant(model), jnp.ones((8, 512)), platform="cpu")
    assert manifest.ids == (
        "elementwise/v1/f32-xla",
        "matmul/v1/f32-chain128-fold",
        "matmul/v1/f32-chain512-fold",
        "rows/v2/f32-lanes128to8192-tree",
    )
    assert manifest.to_json()["fingerprint"] == manifest.fingerprint
    assert str(manifest).startswith(manifest.fingerprint)
    assert not manifest.believed


def test_a_fingerprint_is_that_of_rows() -> None:
    """It knows nothing of the batch, and everything that fixes a row."""
    invariant = bijax.invariant(model)
    expected = fingerprint(invariant, 8)
    mapped = bijax.invariant(jax.vmap(model))
    assert fingerprint(invariant, 1) == fingerprint(jax.jit(invariant), 300) == expected
    assert bijax.contracts(mapped, jnp.ones((4, 2, 512))).fingerprint == expected
    others = [
        fingerprint(bijax.invariant(lambda x: model(x).astype("bfloat16")), 8, "bfloat16"),
        fingerprint(bijax.invariant(lambda x: jnp.cumsum(model(x), 1)), 8),
        fingerprint(invariant, 8, platform="cuda", architecture="sm_90"),
        fingerprint(invariant, 8, platform="cuda", architecture="sm_80"),
        fingerprint(bijax.invariant(lambda x: model(x[:, :300] @ W1[:300, :512])), 8),
    ]
    assert len({expected, *others}) == 1 + len(others)


def test_another_version_of_a_contract_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fingerprint(bijax.invariant(model), 8)
    monkeypatch.setattr(contract.MatmulContract, "id", property(lambda self: f"matmul/v2/chain{self.k_block}"))
    assert fingerprint(bijax.invariant(model), 8) != expected


def test_the_same_products_by_hand_and_under_the_transform() -> None:
    by_hand = bijax.contracts(lambda x: bijax.matmul(bijax.matmul(x, W1), W2), jnp.ones((8, 512)))
    transformed = bijax.contracts(bijax.invariant(lambda x: (x @ W1) @ W2), jnp.ones((8, 512)))
    assert by_hand.fingerprint == transformed.fingerprint


def test_what_nothing_fixes_is_refused_or_named() -> None:
    with pytest.raises(bijax.NoContractError, match=r"dot_general .* at .*test_contracts\.py") as caught:
        bijax.contracts(model, jnp.ones((8, 512)))
    assert isinstance(caught.value, ValueError)
    assert caught.value.operation.primitive == "dot_general"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(bijax.NoContractError, match="schur"):
        bijax.contracts(bijax.invariant(jax.lax.linalg.schur), jnp.eye(3))
    allowed = bijax.invariant(jax.lax.linalg.schur, allow=["schur"])
    manifest = bijax.contracts(allowed, jnp.eye(3))
    assert (manifest.believed, manifest.allowed) == (("schur",), ("schur",))
    assert "allowed by the caller: schur" in str(manifest)
    without_effect = bijax.contracts(bijax.invariant(model, allow=["schur", "dot_general"]), jnp.ones((8, 512)))
    assert without_effect == bijax.contracts(bijax.invariant(model), jnp.ones((8, 512)))
    with pytest.raises(TypeError, match="expected a function"):
        bijax.contracts(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="platform"):
        bijax.contracts(model, jnp.ones((8, 512)), platform="tpu")
    for function in (bijax.contracts, bijax.audit):  # not those of this machine's CPU, without a word
        with pytest.raises(ValueError, match="architecture='sm_90' is that of a GPU; expected platform='cuda'"):
            function(bijax.invariant(model), jnp.ones((8, 512)), platform="cpu", architecture="sm_90")
    if jax.default_backend() == "cpu":
        with pytest.raises(bijax.UnsupportedError, match="lowering_for"):
            bijax.contracts(bijax.invariant(model), jnp.ones((8, 512)), platform="cuda")


def test_the_shapes_of_results_are_no_use_of_a_contract() -> None:
    x = jax.ShapeDtypeStruct((3, 1237), "float32")  # a shape that nothing else uses
    with recording() as found:
        assert jax.eval_shape(bijax.softmax, x) == x
    assert not found


def test_audits_show_the_ids() -> None:
    report = bijax.audit(bijax.invariant(model), jnp.ones((8, 512)), platform="cuda", architecture="sm_90")
    found = {o.contracts for o in report.operations if o.primitive == "dot_general"}
    assert found == {("matmul/v1/f32-tf32-wgmma8-chain",)}
    assert "[matmul/v1/f32-tf32-wgmma8-chain]" in str(report)
    plain = bijax.audit(model, jnp.ones((8, 512)))
    assert not any(o.contracts for o in plain.operations)


EXACT = frozenset(
    f"bijax_{name}"
    for name in (
        *("largest", "sort_by_expert", "spread_to_experts", "rows_by_count", "rows_of_tokens", "pick_rows"),
        "nan_if_invalid",
    )
)
"""Kernels that compare, count and copy integers and numbers, which no order changes."""

OF_SEVERAL_DEVICES = frozenset({"bijax_peers"})
"""Kernels inside `jax.shard_map`: `tests.parallel.on_peers` compares their contracts with those of one device."""


@pytest.mark.tier("full")
def test_every_registered_kernel_has_a_contract_on_every_target(table: list[Row]) -> None:
    for target in ("cpu", "sm_90", "sm_80"):
        reached = {name for row in table if row.target == target for name in row.primitives}
        assert set(KERNELS) - EXACT - OF_SEVERAL_DEVICES <= reached, target
    assert all(row.contracts for row in table)


@pytest.mark.tier("full")
def test_every_operation_with_an_order_has_a_contract(table: list[Row]) -> None:
    exact = {*CHOOSING, "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min", "select_and_gather_add"}
    # A scatter writes, and its kin choose, in no order that shows; the others share a rule with one that is here.
    shared = {"psum_invariant", "reduce_scatter", "scatter-sub", "scatter-mul", "reduce_prod", "cumprod"}
    shared |= {*CUDNN_ATTENTION}  # by the kernels of attention; JAX binds them only where cuDNN is installed
    reached = {name for row in table for name in row.primitives}
    assert {*ORDERED, *COLLECTIVES, PRODUCTS} - exact - set(RACING) - shared <= reached


def kernels(table: list[Row]) -> Iterator[tuple[str, Any]]:
    for name in sorted({name for row in table for name in row.kernels}):
        module, _, function = name.rpartition(".")
        if "<locals>" not in name and name.startswith("pallas_kernels."):
            yield name, getattr(importlib.import_module(module), function)


@pytest.mark.tier("full")
def test_every_kernel_takes_its_contract_and_reads_it(table: list[Row]) -> None:
    found = dict(kernels(table))
    assert len(found) > 40
    for name, function in found.items():
        if name == "pallas_kernels.matmul.contract.split_k.add_as_tree":
            continue  # the order itself
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
        given = [p for p in inspect.signature(function).parameters if p in ("contract", "functions")]
        assert given, name
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert set(given) <= read, name


def test_a_kernel_refuses_a_contract_that_it_does_not_follow() -> None:
    x = jnp.ones((2, 300))
    with pytest.raises(bijax.UnsupportedError, match="expected the contract elementwise/v1/f32-xla"):
        softmax.softmax(x, contract=contract.row_contract(), functions=contract.PTX_FUNCTIONS)
    with pytest.raises(bijax.UnsupportedError, match="elementwise"):
        scan_axis(x[None], scan="sum", contract=contract.ScanContract(), functions=contract.PTX_FUNCTIONS)
    from pallas_kernels.softmax import hopper

    for wrong in (contract.row_contract(), contract.OnlineRowContract(segment=4096)):
        with pytest.raises(bijax.UnsupportedError, match="online-rows/v1/f32-lanes128-chunk8-segment1024-tree"):
            hopper.softmax(x, contract=wrong)  # type: ignore[arg-type]


def test_the_softmax_family_on_hopper_has_contracts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(case for case in kernel_table.CASES if case.operation == "softmax_cross_entropy")
    monkeypatch.setattr(kernel_table, "CASES", few)
    ids = {i for row in kernel_table.rows() if row.target == "sm_90" for i in row.contracts}
    assert any(i.startswith("online-rows/") for i in ids)
    assert not any(i.startswith("rows/") for i in ids)
    assert contract.PTX_FUNCTIONS.id in ids


def test_another_scan_contract_is_another_order() -> None:
    """The contract is used: the bits follow it."""
    x = np.random.default_rng(0).standard_normal((1, 300, 1)).astype(np.float32) * 100
    one, other = (
        jax.jit(lambda x, block=block: scan_axis(x, scan="sum", contract=contract.ScanContract(block)))(x)
        for block in (128, 16)
    )
    assert (one != other).any()


def test_the_command_prints_the_cases(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(case for case in kernel_table.CASES if case.operation == "gated_matmul")
    monkeypatch.setattr(kernel_table, "CASES", few)
    assert main(["kernels", "--cases"]) == 0
    printed = capsys.readouterr().out
    assert "elementwise/v1/f32-ptx, matmul/v1/f32-wgmma16-chain" in printed
    assert "matmul.hopper.gated_matmul" in printed
    assert "sm_80" in printed
    assert main(["kernels", "--cases", "--target", "cpu", "--json"]) == 0
    assert {on for case in json.loads(capsys.readouterr().out) for on in case["on"]} == {"cpu"}


def missing() -> list[str]:
    """What has to be installed for the kernels through jax-triton."""
    (needed,) = {k.packages for k in registry.kernels() if k.packages is not None}
    return [] if needed.are_installed else [needed.advice]


def test_the_command_prints_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*options: str) -> list[dict[str, Any]]:
        assert main(["kernels", "--json", *options]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    assert len(listed()) == len(registry.kernels())
    hopper, asked_for, anywhere = listed("--operation", "rms_norm", "--target", "sm_90")
    assert hopper == {
        "operation": "rms_norm",
        "on": ["sm_90"],
        "contracts": ["rows/v2/f32-lanes128to8192-tree"],
        "kernel": "pallas_kernels.norm.hopper:rms_norm",
        "conditions": [],
    }
    assert asked_for["conditions"][0] == 'only under bijax.prefer_backend("jax_triton"), or for few rows'
    triton, portable = listed("--operation", "rms_norm", "--target", "sm_80")
    assert portable == anywhere
    assert triton["kernel"] == "pallas_kernels.norm.jax_triton.launch:rms_norm"
    assert triton["conditions"] == [f"not here: {need}" for need in missing()]
    assert {"Tf32Contract", "WgmmaContract"} <= {c for k in listed("--operation", "matmul") for c in k["contracts"]}
    assert main(["kernels", "--operation", "matmul"]) == 0
    printed = capsys.readouterr().out
    assert "WgmmaContract" in printed
    assert "(1) not here:" in printed or 'only under bijax.prefer_backend("jax_triton")' in printed
    for wrong, said in (
        (["--operation", "nothing"], "rms_norm"),
        (["--operation", "softmx"], "no 'softmx', did you mean 'softmax'? The operations are: "),
        (["--operation", "softmx", "--cases", "--target", "cpu"], "did you mean 'softmax'?"),
        (["--operation", "draw", "--target", "cpu"], "no kernel of draw runs on cpu"),
        (["--target", "sm_9"], "such as 'sm_90'"),
        (["--target", "rocm"], "no kernel runs on 'rocm'"),
        (["--target", "rocm", "--cases"], "no kernel runs on 'rocm'"),
    ):
        assert main(["kernels", *wrong]) == 2
        assert said in capsys.readouterr().err
