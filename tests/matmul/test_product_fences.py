"""What a kernel's product is compiled to, whatever stands around it, and how its form is chosen."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax import hlo
from bijax.testing import bits
from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul import cpu
from pallas_kernels.matmul.cpu import stacked
from pallas_kernels.matmul.cpu.verify import trials
from pallas_kernels.matmul.schedule.cpu import StackStep, Step
from pallas_kernels.parts.xla.tiles import isolate, isolated_dot
from tests.arrays import on_device

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the programs of this file are XLA:CPU's")

STACK = (((2,), (1,)), ((0,), (0,)))
Dot = Callable[..., jax.Array]


def normal(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def barred_dot(x: jax.Array, w: jax.Array, dims: Any) -> jax.Array:
    """The product between barriers alone, which layouts cross."""
    return isolate(lax.dot_general(*isolate(x, w), dims))[0]


def product_of(text: str) -> str:
    """What the one product of a compiled program says of itself, and the shapes and layouts of its operands."""
    shapes = dict(re.findall(r"%(\S+) = (\S+) ", text))
    (line,) = re.findall(r"= (\S+ dot\(.*)", text)
    line = re.sub(r", (frontend_attributes|metadata|backend_config)=.*", "", line)
    return re.sub(r"%([\w.\-]+)", lambda name: shapes[name[1]], line)


def products_differ(dot: Dot, shape: tuple[int, int, int, int], after: Callable[[jax.Array], jax.Array]) -> bool:
    """Whether a product is compiled in two ways, alone and after a transpose of its rows."""
    g, m, k, n = shape
    x, w = jnp.zeros((g, m, k)), jnp.zeros((g, k, n))
    alone = jax.jit(lambda x, w: dot(x, w, STACK)).lower(x, w).compile().as_text()
    transposed_w = jnp.zeros((k, g, m))
    among = jax.jit(lambda x, w: after(dot(x.transpose(1, 2, 0), w, STACK))).lower(transposed_w, w).compile().as_text()
    return product_of(alone) != product_of(among)


AROUND = [lambda y: y, lambda y: y.transpose(2, 0, 1)]
SHAPES = [(8, 1, 2, 8), (3, 1, 64, 16), (1, 1, 7, 16), (2, 4, 3, 8), (5, 2, 8, 8)]


@pytest.mark.tier("full", fast=("(8, 1, 2, 8)", "(1, 1, 7, 16)", "(2, 4, 3, 8)"))
@pytest.mark.parametrize("shape", SHAPES)
def test_no_layout_around_a_product_changes_its_form(shape: tuple[int, int, int, int]) -> None:
    assert not any(products_differ(isolated_dot, shape, after) for after in AROUND)


def test_barriers_alone_let_layouts_through() -> None:
    assert any(products_differ(barred_dot, shape, after) for shape in SHAPES for after in AROUND)


def fused_chain(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Stacks of products in fused chains; in float64 each product is exact, and so is nearly every sum."""
    y = np.zeros((*x.shape[:2], w.shape[2]), np.float32)
    for i in range(x.shape[2]):
        y = (y.astype(np.float64) + x[:, :, i, None].astype(np.float64) * w[:, None, i]).astype(np.float32)
    return y


@pytest.mark.tier("full", fast=("2-2-1", "3-3-2", "5-4-1"))
@pytest.mark.parametrize(("m", "k", "n"), [(4, 3, 1), (3, 8, 1), (4, 8, 1), (2, 2, 1), (3, 3, 2), (5, 4, 1)])
def test_a_form_is_accepted_only_if_it_is_a_fused_chain(m: int, k: int, n: int) -> None:
    """Small results say little: three of four elements of a short sum are alike in any order."""
    contract, storage = MatmulContract(k), stacked.Storage()
    x, w = (np.asarray(normal(i, *shape)) for i, shape in enumerate([(64, m, k), (64, k, n)]))
    expected = bits(fused_chain(x, w))
    for form in ("columns", "rows"):
        step = StackStep(form, m, 8)
        if stacked.honours_contract(step, (1, m, k, n), contract, storage):
            run = jax.jit(stacked._program(step, contract, storage))
            found = np.concatenate([np.asarray(run(x[i : i + 1], w[i : i + 1])[0]) for i in range(64)])
            assert (bits(found) == expected).all(), form
    # What is run after all, whichever form it is; one that leaves the fusing to the compiler is compiled, as in use.
    whole = jax.jit(functools.partial(stacked.matmul, contract=contract))
    found = np.concatenate([np.asarray(whole(x[i : i + 1], w[i : i + 1])) for i in range(64)])
    assert (bits(found) == expected).all()


def test_small_programs_are_compared_often_and_large_ones_once() -> None:
    assert trials(1, 3, 1) == trials(4, 8, 8) == 32
    assert trials(512, 576, 1536) == 1
    assert 1 < trials(64, 32, 64) < 32
    assert cpu.honours_contract(Step("gemv", 1), 3, 8, MatmulContract(3), False)


def tensor_product(rows: int) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """The pattern of an equivariant tensor product: coupling coefficients, weights and features in a chain."""
    couplings = [normal(10 + i, a, b, c) for i, (a, b, c) in enumerate([(3, 3, 1), (1, 3, 3), (3, 1, 3), (3, 3, 3)])]
    weights = [normal(20 + i, 4, 5) for i in range(len(couplings))]

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        parts = []
        for c, w in zip(couplings, weights, strict=True):
            left, right = x[:, :, : c.shape[0]], y[:, : c.shape[1]]
            crossed = lax.dot_general(c, right, (([1], [1]), ([], [])))  # (a, c, rows)
            part = lax.dot_general(crossed, left, (([0], [2]), ([2], [0])))  # (rows, c, 4)
            parts.append(jnp.einsum("zkm,mn->znk", part, w).reshape(x.shape[0], -1))
        return jnp.concatenate(parts, 1)

    return f, (normal(1, rows, 4, 3), normal(2, rows, 3))


def batches_that_differ(f: Callable[..., jax.Array]) -> list[int]:
    _, arguments = tensor_product(17)
    run = jax.jit(f)
    whole = bits(run(*arguments))
    return [n for n in (1, 2, 3, 8) if (bits(run(*(a[:n] for a in arguments))) != whole[:n]).any()]


@pytest.mark.tier("full")  # the fault that it found has its smallest program below
def test_an_equivariant_tensor_product() -> None:
    f, arguments = tensor_product(1)
    assert batches_that_differ(f)  # the control
    assert not batches_that_differ(bijax.invariant(f))
    with pytest.raises(hlo.HloInvarianceError, match=r"transform the function with bijax\.invariant"):
        hlo.assert_hlo_invariant(f, *arguments)
    hlo.assert_hlo_invariant(bijax.invariant(f), *arguments)
    assert not hlo.compare_hlo(f, arguments, tensor_product(8)[1]).alike
    assert hlo.compare_hlo(bijax.invariant(f), arguments, tensor_product(8)[1]).alike


@pytest.mark.tier("full", fault=("(1, 3)",))
@pytest.mark.parametrize("sizes", [(1, 3), (2, 8)], ids=str)
def test_two_products_with_an_axis_of_length_one(sizes: tuple[int, ...]) -> None:
    """The smallest program in which a form that rounds every product was accepted."""
    c, g, a = normal(0, 3, 3, 1), normal(1, 17, 1, 3), normal(2, 17, 4, 3)

    def f(g: jax.Array, a: jax.Array) -> jax.Array:
        return lax.dot_general(lax.dot_general(c, g, (([1], [2]), ([], []))), a, (([0], [2]), ([2], [0])))

    run = jax.jit(bijax.invariant(f))
    whole = bits(run(g, a))
    for n in sizes:
        for start in range(17 - n + 1):
            some = slice(start, start + n)
            assert (bits(run(g[some], a[some])) == whole[some]).all()
