"""The general dot product: an element's bits in every company of rows, columns and batch entries."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.lax.dot_general import dot_general
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MatmulContract, matmul_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.cpu import stacked
from pallas_kernels.matmul.cpu.stacked import Storage
from pallas_kernels.matmul.schedule.cpu import StackStep, stack_entries
from tests.matmul.reference import emulate
from tests.tiers import full_only

pytestmark = pytest.mark.usefixtures("hopper")

SIZES = dict(zip("bhijklmn", (5, 3, 7, 11, 96, 4, 1, 13), strict=True))

SPECS = {
    "x @ w": "ik,kj->ij",
    "x @ w.T": "ik,jk->ij",
    "w @ x": "kj,ik->ij",
    "vector @ w": "k,kj->j",
    "w @ vector": "jk,k->j",
    "inner product": "k,k->",
    "rows of rows": "bik,jk->bij",
    "experts": "ik,bkj->bij",
    "stack": "bik,bkj->bij",
    "stack, K last": "bik,bjk->bij",
    "stack, K first": "bki,bjk->bij",
    "stacked vectors": "bk,bkj->bj",
    "stacked inner products": "bk,bk->b",
    "heads between": "bihk,bjhk->bhij",
    "weighted values": "bhik,bkhj->bihj",
    "gradient": "ki,kj->ij",
    "stacked gradient": "bki,bkj->bij",
    "two contracted": "ikl,klj->ij",
    "outer product": "bi,bj->bij",
    "one column": "ik,km->im",
}


def invariant_form(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns the function with every stock dot product replaced by ours."""

    def evaluate(jaxpr: Any, consts: Any, *arrays: Any) -> list[Any]:
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arrays), strict=True))

        def read(v: Any) -> Any:
            return v.val if hasattr(v, "val") else values[v]

        for eqn in jaxpr.eqns:
            given = [read(v) for v in eqn.invars]
            if eqn.primitive is lax.dot_general_p:
                results = [dot_general(*given, **eqn.params)]
            elif "jaxpr" in eqn.params:
                results = evaluate(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, *given)
            else:
                results = eqn.primitive.bind(*given, **eqn.params)
                results = results if eqn.primitive.multiple_results else [results]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def replaced(*arrays: Any) -> jax.Array:
        closed = jax.make_jaxpr(function)(*arrays)
        return evaluate(closed.jaxpr, closed.consts, *arrays)[0]

    return replaced


@functools.cache
def product(spec: str, *, stock: bool = False, preferred: str | None = None) -> Callable[..., jax.Array]:
    def plain(*arrays: jax.Array) -> jax.Array:
        return jnp.einsum(spec, *arrays, preferred_element_type=preferred)

    return jax.jit(plain if stock else invariant_form(plain))


def letters(spec: str) -> tuple[str, str, str]:
    operands, result = spec.split("->")
    left, right = operands.split(",")
    return left, right, result


def data(spec: str, dtype: str = "float32", **sizes: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a large dynamic range, so that a changed order shows."""
    rng = np.random.default_rng(len(spec))
    shapes = [[(SIZES | sizes)[c] for c in operand] for operand in letters(spec)[:2]]
    scale = [2.0 ** rng.integers(-4, 5, s) for s in shapes]
    left, right = (rng.standard_normal(s) * f for s, f in zip(shapes, scale, strict=True))
    return left.astype(dtype), right.astype(dtype)


def restrict(array: Any, operand: str, letter: str, index: slice) -> Any:
    return array[tuple(index if c == letter else slice(None) for c in operand)]


def check(spec: str, arrays: tuple[np.ndarray, np.ndarray], *, stock: bool = False) -> int:
    """Compares all with parts along every letter that is not contracted; returns how many elements differ."""
    left, right, result = letters(spec)
    function = product(spec, stock=stock)
    whole = np.asarray(function(*arrays))
    differing = 0
    for letter in result:
        size = SIZES[letter]
        for index in {slice(size // 2, size // 2 + 1), slice(1 if size > 3 else 0, size)}:
            part = function(*(restrict(a, o, letter, index) for a, o in zip(arrays, (left, right), strict=True)))
            expected = restrict(whole, result, letter, index)
            if stock:
                differing += int((np.asarray(part) != expected).sum())
            else:
                assert_bits_equal(part, expected, err_msg=f"{spec}: {index} of {letter}")
    return differing


@pytest.mark.tier("full", fast=("x @ w", "stack, K last"))
@pytest.mark.parametrize("name", SPECS)
def test_an_element_does_not_know_how_many_others_there_are(name: str) -> None:
    check(SPECS[name], data(SPECS[name]))


@pytest.mark.tier("full", fast=("w @ vector", "experts", "stack, K first"))
@pytest.mark.parametrize("name", SPECS)
def test_neighbours_do_not_matter(name: str) -> None:
    spec = SPECS[name]
    left, right, result = letters(spec)
    arrays = data(spec)
    whole = np.asarray(product(spec)(*arrays))
    for letter, bad in itertools.product(result, (np.inf, np.nan)):
        keep = SIZES[letter] // 2
        spoiled = []
        for array, operand in zip(arrays, (left, right), strict=True):
            copy = array.copy()
            for index in (slice(0, keep), slice(keep + 1, None)):
                if letter in operand:
                    restrict(copy, operand, letter, index)[...] = bad
            spoiled.append(copy)
        one = slice(keep, keep + 1)
        assert_bits_equal(
            restrict(np.asarray(product(spec)(*spoiled)), result, letter, one),
            restrict(whole, result, letter, one),
            err_msg=f"{spec}: {bad} next to {letter}={keep}",
        )


def test_control_plain_jax_differs() -> None:
    """The same comparison finds that the stock product changes bits with the company."""
    differing = [check(SPECS[n], data(SPECS[n]), stock=True) for n in ("x @ w", "stack", "stack, K last")]
    assert sum(differing) > 0


@pytest.mark.tier("full")
@pytest.mark.parametrize(("left", "right"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("spec", ["bik,bkj->bij", "bik,bjk->bij", "ki,kj->ij"])
def test_narrow_types_are_summed_in_float32(spec: str, left: str, right: str) -> None:
    x, w = data(spec, left)[0], data(spec, right)[1]
    wide = product(spec)(x.astype(np.float32), w.astype(np.float32))
    result = jnp.einsum(spec, x, w).dtype
    actual = product(spec)(x, w)
    assert actual.dtype == result
    assert_bits_equal(actual, wide.astype(result))
    assert_bits_equal(product(spec, preferred="float32")(x, w), wide)


@pytest.mark.tier(
    "full",
    fast=(
        "k,kj->j-(0, None)-[(6, 96), (96, 11)]",
        "k,kj->j-(0, 0)-[(6, 96), (6, 96, 11)]",
        "ik,kj->ij-(None, 0)-[(7, 96), (6, 96, 11)]",
        "ik,kj->ij-(1, 2)-[(7, 6, 96), (96, 11, 6)]",
    ),
)
@pytest.mark.parametrize(
    ("single", "axes", "shapes"),
    [
        ("k,kj->j", (0, None), [(6, 96), (96, 11)]),
        ("k,kj->j", (0, 0), [(6, 96), (6, 96, 11)]),
        ("ik,kj->ij", (None, 0), [(7, 96), (6, 96, 11)]),
        ("ik,kj->ij", (1, 2), [(7, 6, 96), (96, 11, 6)]),
        ("jk,k->j", (None, 0), [(11, 96), (6, 96)]),
        ("jk,k->j", (0, 0), [(6, 11, 96), (6, 96)]),
        ("jk,ik->ij", (0, None), [(6, 11, 96), (7, 96)]),
        ("ki,kj->ij", (0, 0), [(6, 96, 7), (6, 96, 11)]),
        ("k,k->", (0, None), [(6, 96), (96,)]),
        ("i,j->ij", (0, 0), [(6, 7), (6, 11)]),
        ("bik,bkj->bij", (0, 0), [(6, 3, 4, 300), (6, 3, 300, 11)]),
    ],
)
def test_vmap_gives_the_bits_of_the_single_product(
    single: str, axes: tuple[int | None, int | None], shapes: list[tuple[int, ...]]
) -> None:
    arrays = [np.random.default_rng(len(s)).standard_normal(s).astype(np.float32) for s in shapes]
    mapped = jax.jit(invariant_form(jax.vmap(functools.partial(jnp.einsum, single), in_axes=axes)))(*arrays)
    for entry in (0, 3):
        alone = [a if d is None else np.take(a, entry, d) for a, d in zip(arrays, axes, strict=True)]
        assert_bits_equal(mapped[entry], product(single)(*alone), err_msg=f"entry {entry}")


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("spec", "shapes", "contract"),
    [
        ("ik,kj->ij", [(3, 576), (576, 17)], matmul_contract(576, transpose_w=False)),
        ("bik,bkj->bij", [(2, 1, 1100), (2, 1100, 24)], matmul_contract(1100, transpose_w=False)),
        ("bik,bjk->bij", [(2, 3, 600), (2, 40, 600)], matmul_contract(600, transpose_w=True)),
        ("bki,bkj->bij", [(2, 300, 9), (2, 300, 6)], MatmulContract(128)),
        ("ki,kj->ij", [(300, 512), (300, 16)], MatmulContract(128)),
        ("bik,bkj->bij", [(2, 8, 512), (2, 512, 512)], matmul_contract(512, transpose_w=False)),
        ("ibk,kbj->bij", [(6, 2, 576), (576, 2, 40)], matmul_contract(576, transpose_w=False)),
        ("k,k->", [(70_000,), (70_000,)], matmul_contract(70_000, transpose_w=True)),
        ("bik,bkj->bij", [(2, 1, 64), (2, 64, 33)], matmul_contract(64, transpose_w=False)),
        ("ik,kj->ij", [(5, 16), (16, 9)], matmul_contract(16, transpose_w=False)),
    ],
    ids=[
        *("plain", "stack of vectors", "stack, transposed", "stack over rows", "over rows", "wide stack"),
        *("stack in the middle", "inner product", "short vectors", "short"),
    ],
)
def test_the_contract_is_what_is_computed(spec: str, shapes: list[tuple[int, ...]], contract: MatmulContract) -> None:
    x, w = (np.random.default_rng(len(s)).standard_normal(s).astype(np.float32) for s in shapes)
    actual = np.asarray(product(spec)(x, w))
    left, right, _ = letters(spec)
    if "b" in spec:
        actual = actual[-1]
        x, w = (np.take(a, -1, operand.index("b")) for a, operand in ((x, left), (w, right)))
    if spec == "k,k->":
        actual, x, w, left, right = actual.reshape(1, 1), x[None], w[None], "ik", "jk"
    rows = np.moveaxis(x, left.replace("b", "").index("k"), 1)
    columns = np.moveaxis(w, right.replace("b", "").index("k"), 0)
    few = slice(0, 5)
    assert_bits_equal(actual[few], emulate(rows[few], columns, contract))


@pytest.mark.parametrize("spec", [full_only("ki,kj->ij"), "bki,bkj->bij"])
def test_sums_over_rows_are_split_invariant(spec: str) -> None:
    x, g = data(spec, k=300)
    whole = product(spec)(x, g)
    axis = letters(spec)[0].index("k")
    cuts = zip(np.split(x, [128, 256], axis), np.split(g, [128, 256], axis), strict=True)
    parts = [product(spec)(*cut) for cut in cuts]
    assert_bits_equal(parts[0] + parts[1] + parts[2], whole)
    zeros = np.zeros_like(np.take(x, range(20), axis)), np.zeros_like(np.take(g, range(20), axis))
    padded = [np.concatenate(pair, axis) for pair in zip((x, g), zeros, strict=True)]
    assert_bits_equal(product(spec)(*padded), whole)


@pytest.mark.tier(
    "full",
    fast=(
        "b-bik,bjk->bij",
        "b-ki,kj->ij",
        "b-b,bi->i",
        "i-bki,bkj->bij",
        "i-b,bi->i",
        "j-ik,kj->ij",
        "j-bik,bjk->bij",
        "j-b,bi->i",
        "k-bik,bjk->bij",
        "k-bki,bkj->bij",
        "k-ki,kj->ij",
        "k-b,bi->i",
    ),
)
@pytest.mark.parametrize("spec", ["ik,kj->ij", "bik,bjk->bij", "bki,bkj->bij", "ki,kj->ij", "b,bi->i", "bk,bk->b"])
@pytest.mark.parametrize("letter", "bijk")
def test_dimensions_of_length_zero(spec: str, letter: str) -> None:
    arrays = data(spec, **{letter: 0})
    expected = np.einsum(spec, *arrays)
    if letter in spec:
        assert_bits_equal(product(spec)(*arrays), expected)


@pytest.mark.tier("full", fast=("w @ x", "vector @ w", "rows of rows", "outer product"))
@pytest.mark.parametrize("name", SPECS)
def test_values_against_float64(name: str) -> None:
    spec = SPECS[name]
    x, w = (a.astype(np.float64) for a in data(spec))
    contracted = set(letters(spec)[0]) - set(letters(spec)[2])
    terms = int(np.prod([SIZES[c] for c in contracted], initial=1.0))
    error = abs(np.asarray(product(spec)(*data(spec)), np.float64) - np.einsum(spec, x, w))
    assert (error <= (terms + 1) * 2.0**-24 * np.einsum(spec, abs(x), abs(w))).all()


@pytest.mark.parametrize("spec", ["ik,kj->ij", "bik,bjk->bij", "bki,bkj->bij", "ki,kj->ij"])
def test_lowers_for_cuda(spec: str) -> None:
    assert product(spec).trace(*data(spec)).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.tier("full", fast=("bi,bj->bij",))
@pytest.mark.parametrize("spec", ["ik,kj->ij", "bik,bjk->bij", "ki,kj->ij", "k,k->", "bi,bj->bij"])
def test_float64(spec: str) -> None:
    with jax.enable_x64(True):
        x, w = data(spec, "float64")
        check(spec, (x, w))
        actual = np.asarray(product(spec)(x, w))
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, np.einsum(spec, x, w), rtol=1e-12, atol=1e-12)
        narrow = data(spec)
        assert_bits_equal(
            product(spec, preferred="float64")(*narrow), product(spec)(*(a.astype(np.float64) for a in narrow))
        )


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")], ids="-".join)
def test_narrow_operands_and_a_wide_result(dtypes: tuple[str, str]) -> None:
    """`jnp.einsum` of some versions of JAX converts the operands itself."""
    with jax.enable_x64(True):
        x, w = (jnp.asarray(a, dtype) for a, dtype in zip(data("ik,kj->ij"), dtypes, strict=True))
        multiply = functools.partial(
            jax.lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), preferred_element_type=jnp.float64
        )
        run = jax.jit(bijax.invariant(multiply))
        actual = run(x, w)
        assert_bits_equal(actual, run(x.astype(jnp.float64), w.astype(jnp.float64)))
        assert_bits_equal(run(x[:1], w), actual[:1])


@pytest.mark.tier("full")
@pytest.mark.parametrize("storage", [Storage(), Storage(transpose_w=True), Storage(transpose_x=True)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_stack_without_a_program_keeps_its_bits(
    storage: Storage, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no program honours the contract, one product is computed after the other."""
    with jax.enable_x64(dtype == "float64"):
        rng = np.random.default_rng(3)
        x, w = (rng.standard_normal(s).astype(dtype) for s in ((3, 5, 300), (3, 300, 24)))
        x = x.swapaxes(1, 2) if storage.transpose_x else x
        w = w.swapaxes(1, 2) if storage.transpose_w else w
        multiply = functools.partial(stacked.matmul, contract=MatmulContract(128, dtype=dtype), **storage._asdict())
        usual = jax.jit(lambda x, w: multiply(x, w))(x, w)
        monkeypatch.setattr(stacked, "stack_steps", lambda *_, **__: [])
        assert_bits_equal(jax.jit(lambda x, w: multiply(x, w))(x, w), usual)


def test_a_program_of_another_order_is_found_out() -> None:
    """The control of the comparison: one dot over the whole of K means another contract than blocks of 64."""
    assert not stacked.honours_contract(StackStep("whole", 8, 256), (2, 8, 576, 256), MatmulContract(64), Storage())


def test_stacks_are_cut_into_programs_of_bounded_size() -> None:
    step = StackStep("rows", 512, 512)
    assert stack_entries(step, 8, 512, 128) == 2
    assert stack_entries(step, 9, 512, 128) == 2
    assert stack_entries(StackStep("whole", 1, 64), 2000, 1024, 512) == 1000
    assert stack_entries(StackStep("whole", 4096, 4096), 2, 4096, 512) == 0


def test_what_has_no_invariant_form() -> None:
    square = (((1,), (0,)), ((), ()))
    x = jnp.ones((2, 2))
    with pytest.raises(UnsupportedError, match=r"complex64\[2,2\]"):
        dot_general(x.astype(complex), x.astype(complex), dimension_numbers=square)
    tiny = x.astype(jnp.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn\[2,2\]"):
        dot_general(tiny, tiny, dimension_numbers=square)
    half = x.astype(jnp.float16)
    with pytest.raises(UnsupportedError, match="F16_F16_F16"):
        dot_general(half, half, dimension_numbers=square, precision=lax.DotAlgorithmPreset.F16_F16_F16)
    with pytest.raises(TypeError, match="contracting"):
        dot_general(x, jnp.ones((3, 2)), dimension_numbers=square)


@pytest.mark.parametrize("entries", [4, 16, 37])
def test_inner_products_that_are_crossed_keep_what_belongs_together(entries: int) -> None:
    """Small integers, whose sums are exact in any order."""
    x, w = np.random.default_rng(entries).integers(-9, 10, (2, entries, 1, 70)).astype(np.float32)
    contract = matmul_contract(70, transpose_w=True)
    y = jax.jit(
        functools.partial(stacked._form, StackStep("crossed", 16, 16), contract=contract, storage=Storage(False, True))
    )(x, w)
    assert_bits_equal(y[:, 0, 0], (x * w).sum((1, 2)))
