"""Stacks of tiny products: one chain over all entries has the bits of the dots that XLA calls for each."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul.cpu import chain, stacked
from pallas_kernels.matmul.cpu.stacked import Storage
from pallas_kernels.matmul.schedule import cpu as schedule
from pallas_kernels.matmul.schedule.cpu import StackStep
from pallas_kernels.parts.xla.opaque import opaque_zero
from pallas_kernels.parts.xla.tiles import isolate
from tests.arrays import on_device

STORAGES = (Storage(), Storage(transpose_w=True), Storage(transpose_x=True))
STACKS = (
    *(((5, 8, 8, 8), storage) for storage in STORAGES),
    ((37, 3, 3, 3), Storage()),
    ((66, 3, 2, 1), Storage(transpose_w=True)),
    ((9, 4, 32, 5), Storage(transpose_x=True)),
    ((6, 1, 7, 9), Storage()),
)


def operands(kind: str, shape: tuple[int, ...], storage: Storage, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    g, m, k, n = shape
    x = hostile_rows(1, (g, k, m) if storage.transpose_x else (g, m, k), dtype)[kind]
    w = hostile_rows(2, (g, n, k) if storage.transpose_w else (g, k, n), dtype)[kind]
    return x, w


@pytest.mark.tier("full", fast=("(9, 4, 32, 5)-Storage(transpose_x=True, transpose_w=False)",))
@pytest.mark.parametrize(("shape", "storage"), STACKS)
def test_chains_have_the_bits_of_dots(
    shape: tuple[int, ...], storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = MatmulContract(512 if storage.transpose_w else 192)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return stacked.matmul(x, w, contract=contract, **storage._asdict())

    kinds = {kind: operands(kind, shape, storage, "float32") for kind in ("normal", "wide", "zeros", "denormal", "nan")}
    chain = jax.jit(lambda x, w: multiply(x, w))
    chains = {kind: chain(*args) for kind, args in kinds.items()}
    monkeypatch.setattr(stacked, "stack_steps", schedule._dot_steps)
    dot = jax.jit(lambda x, w: multiply(x, w))
    dots = {kind: dot(*args) for kind, args in kinds.items()}
    assert_bits_equal(chains, dots)


def test_tiny_products_are_chains_first() -> None:
    assert schedule.stack_steps(8, 8, 8, 512, transpose_x=False, transpose_w=True)[0] == StackStep("chain", 8, 8)
    for m, k, n, k_block in ((17, 16, 16, 512), (2, 33, 2, 512), (2, 16, 2, 8)):
        steps = schedule.stack_steps(m, k, n, k_block, transpose_x=False, transpose_w=False)
        assert all(step.form != "chain" for step in steps)


@pytest.mark.tier("full", fast=("gij,gj->gi",))
@pytest.mark.parametrize("spec", ["gij,gjk->gik", "gij,gkj->gik", "gij,gj->gi", "gi,gi->g"])
def test_entries_do_not_follow_the_stack(spec: str) -> None:
    left, right = spec.split("->")[0].split(",")
    x, w = (hostile_rows(3, (9,) + (3,) * (len(axes) - 1), "float32")["wide"] for axes in (left, right))
    product = bijax.invariant(lambda x, w: jnp.tanh(jnp.einsum(spec, 1.5 * x, w)) + 1)
    assert_batch_invariant(product, x, w, batch_sizes=(2, 5, 17), modes=("jit",))


def test_a_chain_of_rounded_products_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison: products that are rounded before they are added."""

    def rounded(x: jax.Array, w: jax.Array, *, transpose_x: bool, transpose_w: bool) -> jax.Array:
        total = jax.lax.bitcast_convert_type(opaque_zero(), jnp.float32)
        for i in range(x.shape[2]):
            total = isolate(x[:, :, i, None] * w[:, i, None, :])[0] + total
        return total

    def honoured(sizes: Iterable[int]) -> list[int]:
        stacked.honours_contract.cache_clear()
        contract, storage = MatmulContract(192), Storage()
        return [n for n in sizes if stacked.honours_contract(StackStep("chain", n, n), (5, n, 8, n), contract, storage)]

    sizes = honoured((3, 8, 16))  # a compiler that turns vectors between product and sum rounds both: another form runs
    assert sizes
    monkeypatch.setattr(stacked, "chain", rounded)
    assert not honoured(sizes)
    stacked.honours_contract.cache_clear()


def _in_a_small_loop() -> Callable[[jax.Array], jax.Array]:
    """Products in a loop that XLA:CPU compiles to one function, as part of it is moved out of it."""
    draw = np.random.default_rng(1)
    weights = on_device(draw.standard_normal((19, 7)) / 4, jnp.float32)
    constant = on_device(draw.standard_normal(7), jnp.float32)

    def steps(rows: jax.Array) -> jax.Array:
        def step(rows: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            shifted = constant + 2
            return jnp.tanh(rows * scale), rows @ weights + shifted / shifted

        return jax.lax.scan(step, rows, jnp.asarray([0.5, -1.25, 0.75]))[1].swapaxes(0, 1)

    return bijax.invariant(steps)


def test_chains_in_small_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(2).standard_normal((64, 19)).astype(np.float32)
    sizes = (4, 8, 64)
    assert_batch_invariant(_in_a_small_loop(), rows, batch_sizes=sizes, modes=("jit",))

    # The control: the chain is compiled together with the loop, and LLVM does not contract all of it. XLA compiles
    # loops like this since JAX 0.12.
    if jax.__version_info__ < (0, 12):
        return
    jax.clear_caches()
    monkeypatch.setattr(chain, "_zero", lambda x, _: opaque_zero().astype(f"uint{8 * x.dtype.itemsize}"))
    with pytest.raises(AssertionError):
        assert_batch_invariant(_in_a_small_loop(), rows, batch_sizes=sizes, modes=("jit",))
    jax.clear_caches()
