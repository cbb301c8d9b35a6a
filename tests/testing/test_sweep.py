"""assert_batch_invariant: variant functions are caught and named, invariant ones pass, wrong calls are refused."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import (
    BATCH_SIZES,
    NEIGHBOURS,
    BatchInvarianceError,
    assert_batch_invariant,
    batch_variance_report,
    hostile_rows,
)
from tests.arrays import on_device

X = on_device(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)
sweep = functools.partial(assert_batch_invariant, batch_sizes=(1, 2, 3, 5), modes=("jit",))


def failure(fn, *args, **kwargs):
    with pytest.raises(BatchInvarianceError) as caught:
        sweep(fn, *args, **kwargs)
    assert isinstance(caught.value, AssertionError)
    return caught.value


def bump(x, where):
    """One ULP more, at the given places."""
    pattern = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.where(where, pattern + 1, pattern), jnp.float32)


# --- the control: plain JAX is caught -------------------------------------------------------------------------------


# Which shapes vary depends on the vector width of the machine; one of them has to.


def test_control_plain_dot_is_variant():
    def check_all():
        for k in (333, 576, 2048):
            rng = np.random.default_rng(k)
            x, w = (on_device(rng.standard_normal(shape), jnp.float32) for shape in ((16, k), (k, 128)))
            assert_batch_invariant(jnp.dot, x, w, batch_axes=(0, None), modes=("jit",))

    with pytest.raises(BatchInvarianceError):
        check_all()


def test_control_plain_rms_norm_is_variant():
    def rms_norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def check_all():
        for columns in (77, 576):
            data = hostile_rows(0, (16, columns), "float32")
            for name in ("normal", "linspace", "cancelling"):
                assert_batch_invariant(rms_norm, data[name], modes=("jit",))

    with pytest.raises(BatchInvarianceError):
        check_all()


# --- variant functions, each caught and named -----------------------------------------------------------------------


def test_dependence_on_the_batch_size_is_named():
    error = failure(lambda x: bump(x, (x.shape[0] == 3) & (jnp.arange(4) >= 2)), X)
    first = error.first
    assert (first.batch_size, first.row, first.position, first.neighbours, first.mode) == (3, 0, 0, "given", "jit")
    assert (first.differing, first.size, first.element.index, first.element.ulp_distance) == (2, 4, (2,), 1)
    assert error.report.differing_batch_sizes == (3,)
    alone, batched = np.asarray(X)[0, 2], np.asarray(bump(X, True))[0, 2]
    assert str(error).splitlines()[:6] == [
        "not batch-invariant, first difference: batch of 3, row 0 at position 0, neighbours given, jit",
        "  reference: row 0 alone, jit",
        "  output: 2 of 4 elements of the row differ, first (2,)",
        f"    alone    {alone!s} 0x{alone.view(np.uint32):08x}",
        f"    in batch {batched!s} 0x{batched.view(np.uint32):08x}",
        "    ULP distance 1",
    ]


def test_dependence_of_one_row_on_the_batch_size():
    error = failure(lambda x: bump(x, (jnp.arange(x.shape[0]) == 0)[:, None] & (x.shape[0] > 1)), X)
    assert (error.first.batch_size, error.first.position) == (2, 0)


def test_dependence_on_the_position_is_named():
    error = failure(lambda x: bump(x, (jnp.arange(x.shape[0]) == 2)[:, None]), X)
    first = error.first
    assert (first.batch_size, first.position, first.row) == (3, 2, 2)
    assert error.report.differing_batch_sizes == (3, 5)
    assert "batch of 3, row 2 at position 2, neighbours given, jit" in str(error)


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_leak_through_zero_times_a_neighbour_is_named(kind):
    error = failure(lambda x: x + 0.0 * jnp.roll(x, 1, axis=0).sum(), jnp.abs(X), neighbours=("given", kind))
    first = error.first
    assert (first.batch_size, first.position, first.neighbours) == (2, 0, kind)
    assert first.element.ulp_distance is None
    assert error.report.max_ulp_distance is None
    assert error.report.nan_mismatches == error.report.differing_elements > 0
    assert f"neighbours {kind}, jit" in str(error)
    assert "ULP distance none (nan)" in str(error)


def test_signs_of_nans_are_compared_where_asked_for():
    def signed(x):
        nan = jnp.where(jnp.arange(len(x)) % 2 == 0, jnp.uint32(0x7FC00000), jnp.uint32(0xFFC00000))
        return jnp.broadcast_to(jax.lax.bitcast_convert_type(nan, jnp.float32)[:, None], x.shape)

    assert_batch_invariant(signed, X, batch_sizes=(2, 3), neighbours=("given",), modes=("jit",))
    first = failure(signed, X, neighbours=("given",), modes=("jit",), nan_bits=True).first
    assert (first.position, first.differing, first.element.actual_bits) == (1, first.size, "0xffc00000")


def test_dependence_on_ordinary_neighbours():
    assert failure(lambda x: x + x.max(axis=0), X).first.neighbours == "given"


@pytest.mark.parametrize("kind", [kind for kind in NEIGHBOURS if kind not in ("given", "permuted", "copies")])
def test_each_kind_of_neighbour_is_tried_at_every_position(kind):
    seen = set()

    given = {row.tobytes() for row in np.asarray(X)}

    def fn(x):
        seen.update(i for i, row in enumerate(np.asarray(x)) if row.tobytes() not in given)
        return x

    sweep(fn, X, neighbours=(kind,), modes=("eager",), batch_sizes=(5,))
    assert seen == {0, 1, 2, 3, 4}


def test_dependence_on_a_copy():
    def fn(x):
        return bump(x, jnp.all(x == x[:1]) & (x.shape[0] > 1))

    assert failure(fn, X).first.neighbours == "copies"


def test_jit_against_eager_is_named_as_such():
    def fn(x):
        return bump(x, isinstance(x, jax.core.Tracer))

    error = failure(fn, X, modes=("jit", "eager"))
    first = error.first
    assert (first.batch_size, first.neighbours, first.mode, first.reference_mode) == (1, "alone", "eager", "jit")
    assert "batch of 1, row 0 alone, eager" in str(error)
    assert "eager and jit differ; modes=('jit',) tries one" in str(error)
    sweep(fn, X, modes=("jit",))
    sweep(fn, X, modes=("eager",))


def test_a_function_that_is_not_deterministic_is_named_as_such():
    calls = []

    def fn(x):
        calls.append(1)
        return x + len(calls)

    assert "the function is not deterministic" in str(failure(fn, X, modes=("eager",)))


def test_the_first_output_that_differs_is_named():
    def fn(x):
        return {"good": x, "bad": (x[:, 0], bump(x, x.shape[0] > 2))}

    error = failure(fn, X)
    assert error.first.output == "output['bad'][1]"
    assert "output['bad'][1]: 4 of 4 elements" in str(error)


def test_the_sign_of_zero_counts():
    error = failure(lambda x: jnp.where(x.shape[0] > 1, -0.0, 0.0) * jnp.ones_like(x), X)
    assert "0 (only the sign of zero differs)" in str(error)
    assert error.report.max_ulp_distance == 0


@pytest.mark.tier("full")
def test_a_seed_repeats_a_sweep_and_another_changes_it():
    def fn(x):
        return bump(x, (jnp.arange(x.shape[0]) == 2)[:, None])

    reports = [
        batch_variance_report(fn, X, neighbours=("permuted",), modes=("jit",), seed=seed) for seed in (1, 1, 2, 3)
    ]
    assert str(reports[0]) == str(reports[1])
    assert len({report.first.row for report in reports}) > 1


def test_the_error_survives_pickling():
    error = failure(lambda x: x + x.max(), X)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# --- invariant functions pass ---------------------------------------------------------------------------------------


@pytest.mark.tier("full", fast=("argmax-bfloat16",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "fn",
    [lambda x: x + 1, lambda x: jnp.sort(x, axis=-1), lambda x: jnp.argmax(x, axis=-1), jax.jit(jnp.negative)],
    ids=["add", "sort", "argmax", "already-jitted"],
)
def test_exact_row_functions_pass(fn, dtype):
    assert_batch_invariant(fn, X.astype(dtype))


@pytest.mark.tier("full")
def test_hostile_rows_may_be_under_test_themselves():
    for x in hostile_rows(0, (8, 6), "bfloat16").values():
        sweep(lambda x: jnp.flip(x, axis=-1), x, modes=("jit",))


def test_report_of_a_clean_sweep():
    report = batch_variance_report(lambda x: x * 2, X)
    assert report.invariant
    assert report.first is None
    assert report.differing_batch_sizes == ()
    assert str(report) == f"no difference in {report.cases} cases, {report.elements} elements"


# --- axes, pytrees, kinds of arguments ------------------------------------------------------------------------------


def test_axes_and_pytrees():
    def fn(batch, weights, scale):
        y = batch["x"] * weights["w"][:, None] * scale
        return [y, (batch["length"], y.sum()), None]

    batch = {"x": X.T, "length": jnp.arange(8)}
    sweep(
        fn,
        batch,
        {"w": jnp.ones(4), "name": "unused", "bias": None},
        2.0,
        batch_axes=({"x": -1, "length": 0}, None, None),
        out_batch_axes=[1, (0, None), 0],
    )


@pytest.mark.tier("full")
def test_integer_rows_keep_given_values():
    seen = set()

    def fn(x, length):
        seen.update(np.asarray(length).tolist())
        return x[:, 0] * length

    lengths = np.array([3, 3, 5, 7, 11, 13, 17, 19])
    sweep(fn, X, lengths, modes=("eager",))
    assert seen == set(lengths.tolist())
    sweep(lambda tokens: tokens * 2, lengths)
    sweep(lambda mask: ~mask, lengths > 6)
    assert failure(lambda tokens: tokens - tokens.max(), lengths).first.element.ulp_distance is None


def test_unbatched_arguments_are_untouched():
    weights, config = {"w": np.ones(4, np.float32)}, object()

    def eager(x, weights_, config_, flag):
        assert weights_ is weights
        assert config_ is config
        assert flag is True
        return x * weights_["w"]

    def traced(x, weights_, config_, flag):
        assert isinstance(weights_["w"], jax.core.Tracer)
        assert config_ is config
        assert flag is True
        return x * weights_["w"]

    sweep(eager, X, weights, config, True, batch_axes=(0, None, None, None), modes=("eager",))
    sweep(traced, X, weights, config, True, batch_axes=(0, None, None, None), modes=("jit",))


def test_one_compilation_per_batch_size():
    traces = []

    def fn(x):
        traces.append(x.shape[0])
        return x

    assert_batch_invariant(fn, X, modes=("jit",))
    assert sorted(traces) == sorted(BATCH_SIZES)


def test_an_empty_batch_is_compared_by_shape():
    sweep(lambda x: x + 1, X, batch_sizes=(0, 4))
    with pytest.raises(ValueError, match="same structure, dtype and shape at every batch size"):
        sweep(lambda x: x if x.shape[0] else x[:, :2], X, batch_sizes=(0, 4))


def test_rows_that_are_single_numbers():
    sweep(lambda x: -x, X[:, 0])
    assert failure(lambda x: x - x.max(), X[:, 0]).first.element.index == ()


def test_two_rows_are_enough():
    sweep(lambda x: -x, X[:2])


# --- wrong calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((X, X[:3]), {}, ValueError, "same number of rows in every batched array.*8 rows.*3 rows.*with None"),
        ((X,), {"batch_axes": None}, ValueError, "at least one argument with a batch axis; got 1 arguments"),
        ((X,), {"batch_axes": (0, None)}, ValueError, "one entry per argument, 1; got 2"),
        ((X,), {"batch_axes": 2}, ValueError, r"an array with an axis 2; got float32\(8, 4\)"),
        ((X,), {"batch_axes": (1.0,)}, TypeError, "expected ints and None; got 1.0 of type float"),
        ((X,), {"batch_axes": (True,)}, TypeError, "expected ints and None; got True"),
        ((X,), {"batch_axes": "0"}, TypeError, "a tuple with one entry .* got '0'"),
        (({"a": X},), {"batch_axes": ({"b": 0},)}, ValueError, "a prefix of argument 0; got {'b': 0}"),
        ((X, 2.0), {}, ValueError, "a jax or NumPy array to have batch axis 0; got 2.0 of type float"),
        ((X[:1],), {}, ValueError, "at least 2 rows .* got 1. Pass more rows"),
        ((X[:0],), {}, ValueError, "at least 2 rows .* got 0"),
        ((np.zeros((4, 2)),), {}, TypeError, "got float64, which becomes float32"),
        ((np.array([0, 2**40]),), {}, TypeError, "got int64, which becomes int32"),
        ((jax.random.split(jax.random.key(0), 4),), {}, TypeError, "jax.random.key_data"),
        ((X,), {"batch_sizes": ()}, ValueError, "at least one size"),
        ((X,), {"batch_sizes": (2, -1)}, ValueError, "sizes of 0 or more; got -1"),
        ((X,), {"batch_sizes": (2.0,)}, TypeError, "expected ints; got 2.0"),
        ((X,), {"batch_sizes": 3}, TypeError, "batch_sizes: expected a sequence of ints; got 3"),
        ((X,), {"modes": None}, ValueError, "modes: expected a non-empty sequence of names among jit, eager; got None"),
        ((X,), {"modes": ("vmap",)}, ValueError, r"modes: .* among jit, eager; got \('vmap',\)"),
        ((X,), {"modes": "jit"}, ValueError, "modes: expected a non-empty sequence of names"),
        ((X,), {"neighbours": ("noise",)}, ValueError, "neighbours: .* among given, permuted"),
        ((X.astype(int),), {"neighbours": ("nan",)}, ValueError, "'given', 'permuted' or 'copies'"),
        ((X,), {"out_batch_axes": None}, ValueError, "at least one output with a batch axis"),
        ((X,), {"out_batch_axes": 5}, ValueError, "1 rows along axis 5 for a batch of 1; got shape"),
        ((X,), {"out_batch_axes": 1}, ValueError, r"1 rows along axis 1 for a batch of 1; got shape \(1, 4\)"),
        ((X,), {"out_batch_axes": (0, 0)}, ValueError, "out_batch_axes: .* prefix of the output"),
    ],
)
def test_wrong_calls_are_refused(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        assert_batch_invariant(lambda x, *_: x, *args, **kwargs)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"bijax\.testing: expected a function, got str"):
        assert_batch_invariant("softmax", X)  # type: ignore[arg-type]


def test_an_output_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match="complex64"):
        sweep(lambda x: x.astype(jnp.complex64), X)


def test_an_exception_in_the_function_says_in_which_batch():
    def fn(x):
        if x.shape[0] == 3:
            raise RuntimeError("three")
        return x

    with pytest.raises(RuntimeError) as caught:
        sweep(fn, X)
    assert "raised in a batch of 3, neighbours given, jit" in caught.value.__notes__
