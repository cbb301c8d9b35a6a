"""What is found in programs that are compiled here."""

import functools
import inspect as python_inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax import hlo
from tests.arrays import ones
from tests.tiers import full_only

X = ones((8, 64))
W = ones((64, 32))

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="the programs of this file are XLA:CPU's"),
    pytest.mark.usefixtures("hopper"),
]


def kinds(report):
    return [f.kind for f in report.variant]


def test_a_product_with_all_that_is_said_about_it():
    def f(x, w):
        return x @ w  # this line

    report = hlo.inspect(f, X, W)
    (found,) = report.variant
    line = python_inspect.getsourcelines(f)[1] + 1
    assert (found.verdict, found.terms, found.shape, found.dtypes) == ("variant", 64, "f32[8,32]", ("f32",))
    assert found.source == f"{__file__}:{line}"
    assert found.operation.endswith("dot_general")
    assert found.flops == 2 * 8 * 32 * 64
    assert found.share == 1
    assert (report.platform, report.stage) == ("cpu", "optimised")


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: x.sum(1), {"reduction", "library"}),
        (lambda x: jnp.cumsum(x, 1), {"reduction", "library"}),
        (lambda x: jnp.tanh(x), {"elementwise"}),
        (lambda x: x * x.T.reshape(8, 64) + 1, {"elementwise"}),
        (lambda x: jnp.zeros((4, 64)).at[jnp.arange(8) % 4].add(x), {"scatter"}),
        (lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME"), {"convolution", "library", "dot"}),
        (lambda x: jnp.fft.rfft(x), {"library"}),
        (lambda x: x / x[0], {"division"}),
        (lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x), {"custom_call"}),
        (lambda x: lax.linalg.triangular_solve(jnp.eye(8), x, left_side=True), {"library"}),
    ],
)
def test_what_may_follow_the_batch(f, expected):
    assert set(kinds(hlo.inspect(f, X))) & expected
    with pytest.raises(hlo.HloInvarianceError):
        hlo.assert_hlo_invariant(f, X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.maximum(x, 0) + x,
        lambda x: x.astype(jnp.int32) @ jnp.ones((64, 2), jnp.int32),
        lambda x: x.astype(jnp.int32).sum(1),
        lambda x: jnp.max(x, 1),
        lambda x: jnp.sort(x),
        lambda x: jnp.argmax(x, 1),
        lambda x: x.at[jnp.arange(4)].set(1.0),
        lambda x: x[jnp.arange(4)].T,
        lambda x: jnp.sqrt(x) / jnp.abs(x),
        lambda x: x / 3,
        lambda x: (jax.debug.print("{}", x), x)[1],
    ],
)
def test_what_does_not(f):
    hlo.assert_hlo_invariant(f, X)


def test_loops_count_as_often_as_they_run():
    def f(x, w):
        return lax.fori_loop(0, 5, lambda i, c: c @ w, x)

    report = hlo.inspect(f, X, jnp.ones((64, 64)))
    (found,) = report.variant
    assert found.flops == 5 * 2 * 8 * 64 * 64
    assert [(n.kind, n.trips, n.how) for n in report.findings if n.verdict == "note"] == [("loop", 5, "5 trips")]


def test_layers_that_are_alike_are_one_finding():
    def f(x, w):
        for _ in range(3):
            x = x @ w
        return x

    (found,) = hlo.inspect(f, X, jnp.ones((64, 64))).variant
    assert found.count == 3
    assert found.share == pytest.approx(1)


def test_calls_of_libraries_for_single_matrices_are_notes():
    report = hlo.inspect(lambda x: jnp.linalg.cholesky(x @ x.T), X)
    notes = [f.implementation for f in report.findings if f.verdict == "note"]
    assert any(note.startswith("lapack_") for note in notes)


@functools.cache
def mlp(rows):
    """A small network of bijax operations, its gradient, and arguments."""

    def f(x, w):
        y = bijax.matmul(bijax.rms_norm(x, jnp.ones(64)), w)
        return bijax.softmax(y).astype(jnp.bfloat16)

    def loss(w, x):
        return bijax.sum(bijax.sum(bijax.matmul(x, w), axis=1)[None, :], axis=1)[0]

    return f, jax.grad(loss), (jnp.ones((rows, 64)), W)


@pytest.mark.parametrize("rows", [full_only(1), 5, full_only(130)])
def test_operations_of_bijax_are_ours(rows):
    f, _, args = mlp(rows)
    report = hlo.inspect(f, *args)
    assert report.invariant, report
    assert report.ours
    assert sum(o.share for o in report.ours) > 0.5


def test_gradients_of_bijax_operations_are_ours():
    _, grad, (x, w) = mlp(5)
    hlo.assert_hlo_invariant(grad, w, x)


def test_a_mixed_program_shows_the_part_of_xla():
    f, _, (x, w) = mlp(5)
    report = hlo.inspect(lambda x, w: f(jnp.tanh(x @ w) @ w.T, w), x, w)
    assert "elementwise" in kinds(report)
    lost = [v for v in report.variant if "perhaps from the code of a bijax kernel" in v.reason]
    assert len([v for v in report.variant if v.terms in (32, 64) and v not in lost]) == 2


@pytest.mark.parametrize("rows", [full_only(1), 7])
def test_a_program_under_invariant_is_ours(rows):
    def f(x, w):
        h = jax.nn.gelu(x @ w) * 2 + 1
        return jax.nn.softmax(h - h.mean(1, keepdims=True))

    args = jnp.ones((rows, 64)), W
    report = hlo.inspect(bijax.invariant(f), *args)
    assert report.invariant, report
    assert not hlo.inspect(f, *args).invariant  # the control


def test_every_form_of_a_program():
    f = jax.jit(lambda x, w: x @ w)
    lowered = f.lower(X, W)
    compiled = lowered.compile()
    expected = hlo.inspect(f, X, W)
    assert hlo.inspect(lowered) == hlo.inspect(compiled) == expected
    assert hlo.inspect_text(compiled.as_text(), platform="cpu") == expected
    shapes = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W))
    assert hlo.inspect(f, *shapes) == expected


def test_a_file(tmp_path):
    path = tmp_path / "module.after_optimizations.txt"
    path.write_text(jax.jit(lambda x, w: x @ w).lower(X, W).compile().as_text())
    assert kinds(hlo.inspect(path)) == kinds(hlo.inspect(lambda x, w: x @ w, X, W))


@pytest.mark.parametrize("f", [lambda x: x / x[0], lambda x: jax.nn.softmax(x, -1)])
def test_a_rewritten_division_is_seen_and_not_in_the_invariant_form(f):
    def divisions(report):
        return [v.reason for v in report.variant if v.kind == "division"]

    assert len(divisions(hlo.inspect(f, X))) == 1
    assert hlo.inspect(bijax.invariant(f), X).invariant


def test_loops_over_the_rows_have_other_numbers_of_trips():
    """Systems of equations are solved one after the other. In plain JAX a trip may be a term of a sum."""

    def stacks(rows):
        return jax.ShapeDtypeStruct((rows, 5, 5), np.float32), jax.ShapeDtypeStruct((rows, 5, 1), np.float32)

    found = hlo.compare_hlo(bijax.invariant(jnp.linalg.solve), stacks(3), stacks(40))
    assert 40 in {f.trips for f in found.large.findings if f.invariant_loop and f.verdict == "note"}
    assert found.alike
    assert not hlo.compare_hlo(bijax.invariant(jnp.linalg.solve), stacks(1), stacks(40)).alike  # one trip is no loop
    assert not hlo.compare_hlo(
        lambda a, b: lax.scan(lambda c, x: (c + x, None), a[0], a)[0], stacks(3), stacks(40)
    ).alike


def test_a_division_that_is_rewritten_by_the_shape_is_a_difference():
    def shapes(rows):
        return jax.ShapeDtypeStruct((rows, 8), np.float32), jax.ShapeDtypeStruct((8,), np.float32)

    found = hlo.compare_hlo(lambda x, s: x / s, shapes(1), shapes(64))
    assert [(d.finding.kind, d.small, d.large) for d in found.differences] == [("division", 0, 1)]
    assert hlo.compare_hlo(bijax.invariant(lambda x, s: x / s), shapes(1), shapes(64)).alike


def test_solving_by_substitution_is_told_from_other_routines():
    def solve(b):
        return jax.scipy.linalg.solve_triangular(jnp.eye(64), b.T, lower=True).T

    found = [f for f in hlo.inspect(solve, X).findings if "trsm" in f.implementation]
    assert [f.verdict for f in found] == ["variant"]
    assert found[0].reason.startswith("BLAS")
    text = jax.jit(solve).lower(X).compile().as_text().replace("lapack_strsm", "blas_strsm")
    assert "blas_strsm" in [f.implementation.removesuffix("_ffi") for f in hlo.inspect_text(text).variant]
    assert hlo.inspect_text(text).platform == "cpu"


def test_modules_and_what_flax_jits():
    class Module:
        __hash__ = None

        def __call__(self, x):
            return jnp.maximum(x, 0)

    hlo.assert_hlo_invariant(Module(), X)
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    jitted = nnx.jit(lambda m, x: m(x))
    assert kinds(hlo.inspect(jitted, model, X))
    assert kinds(hlo.inspect_for("cuda", jitted, model, X)) == ["dot"]
    with pytest.raises(TypeError, match=r"got flax\.nnx\..*\.Lowered"):
        hlo.inspect(jitted.lower(model, X))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="expected a function"):
        hlo.inspect(3)
    with pytest.raises(TypeError, match="a program already"):
        hlo.inspect("HloModule m", X)
    with pytest.raises(TypeError, match="expected a function"):
        hlo.compare_hlo("HloModule m", (X,), (X,))
    with pytest.raises(TypeError, match=r"args_small must be a tuple .* got ArrayImpl; .* compare_hlo\(fn, \(small,\)"):
        hlo.compare_hlo(jnp.exp, jnp.asarray(X), (X,))  # would be taken apart into rows
    with pytest.raises(TypeError, match="args_large must be a tuple"):
        hlo.compare_hlo(jnp.exp, (X,), X)


def test_the_program_for_another_platform():
    def f(x, w):
        return jnp.tanh(bijax.matmul(x, w)) @ w.T

    report = hlo.inspect_for("cuda", f, X, W)
    assert (report.platform, report.stage) == ("gpu", "lowered")
    assert [(v.opcode, v.terms) for v in report.variant] == [("tanh", 0), ("dot", 32)]
    assert f"{__file__}:" in report.variant[0].source
    assert report.ours
    assert hlo.inspect_for("cuda", bijax.invariant(f), X, W).invariant


def test_platforms_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=r"expected the platform cuda or .*, got 'gpus'"):
        hlo.inspect_for("gpus", jnp.tanh, X)
    with pytest.raises(TypeError, match=r"inspect_for: expected a function, got str"):
        hlo.inspect_for("cuda", "tanh", X)


def test_random_bits_are_found_before_they_are_expanded():
    def f(key):
        return lax.rng_bit_generator(key, (8,))[1]

    assert [v.kind for v in hlo.inspect_for("cpu", f, jnp.zeros(4, jnp.uint32)).variant] == ["random"]


def test_the_switch_of_a_library_is_seen():
    """XLA:CPU makes another program of one row than of many, and the comparison shows it."""

    def shapes(rows):
        return jax.ShapeDtypeStruct((rows, 64), np.float32), jax.ShapeDtypeStruct((64, 32), np.float32)

    def f(x, w):
        return x @ w

    found = hlo.compare_hlo(f, shapes(1), shapes(64))
    assert not found.alike
    assert {(d.small, d.large) for d in found.differences} == {(1, 0), (0, 1)}
    assert all(d.finding.terms == 64 for d in found.differences)
    same = hlo.compare_hlo(f, shapes(64), shapes(96))
    assert same.alike
    assert "may still choose" in str(same)
    ours = hlo.compare_hlo(bijax.matmul, shapes(1), shapes(64))
    assert ours.alike
    assert str(ours).endswith("the programs' reductions are equal")
