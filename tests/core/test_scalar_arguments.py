"""What is not an array: numbers, names and axes that are no such thing get errors of the documented types."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device

X, W, WEIGHT, Q = (on_device(np.ones(shape, np.float32)) for shape in ((4, 6), (6, 5), 6, (1, 4, 2, 8)))
LABELS = jnp.asarray(np.zeros(4, np.int32))

NUMBERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rms_norm": ("eps", lambda n: bijax.rms_norm(X, eps=n)),
    "layer_norm": ("eps", lambda n: bijax.layer_norm(X, eps=n)),
    "head_rms_norm": ("eps", lambda n: bijax.head_rms_norm(X[None], eps=n)),
    "gated_rms_norm": ("eps", lambda n: bijax.gated_rms_norm(X, X, eps=n)),
    "l2_norm": ("eps", lambda n: bijax.l2_norm(X, eps=n)),
    "offset": ("weight_offset", lambda n: bijax.rms_norm(X, WEIGHT, weight_offset=n)),
    "softmax_cross_entropy": ("z_loss", lambda n: bijax.softmax_cross_entropy(X, LABELS, z_loss=n)),
}
INTEGERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sum": ("an axis", lambda n: bijax.sum(X, n)),
    "axes of sum": ("an axis", lambda n: bijax.sum(X, (0, n))),
    "softmax": ("an axis", lambda n: bijax.softmax(X, n)),
    "var": ("ddof", lambda n: bijax.var(X, ddof=n)),
    "head_rms_norm": ("head_offset", lambda n: bijax.head_rms_norm(X[None], head_offset=n)),
    "softmax_cross_entropy": ("ignore_index", lambda n: bijax.softmax_cross_entropy(X, LABELS, ignore_index=n)),
}
ARRAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "matmul": ("x", lambda a: bijax.matmul(a, W)),
    "matmul by": ("w", lambda a: bijax.matmul(X, a)),
    "gated_matmul": ("x", lambda a: bijax.gated_matmul(a, W, W)),
    "softmax": ("x", bijax.softmax),
    "sum": ("x", bijax.sum),
    "rms_norm": ("x", bijax.rms_norm),
    "dot_product_attention": ("query", lambda a: bijax.dot_product_attention(a, Q, Q)),
    "embed": ("table", lambda a: bijax.embed(a, LABELS)),
    "embed of": ("tokens", lambda a: bijax.embed(X, a)),
    "softmax_cross_entropy": ("logits", lambda a: bijax.softmax_cross_entropy(a, LABELS)),
}
FLAGS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sum": ("keepdims", lambda b: bijax.sum(X, keepdims=b)),
    "std": ("keepdims", lambda b: bijax.std(X, keepdims=b)),
    "logsumexp": ("keepdims", lambda b: bijax.logsumexp(X, keepdims=b)),
    "matmul": ("transpose_w", lambda b: bijax.matmul(X, jnp.ones((6, 6)), transpose_w=b)),
    "dot_product_attention": ("is_causal", lambda b: bijax.dot_product_attention(Q, Q, Q, is_causal=b)),
    "sample": (
        "batch_invariant",
        lambda b: bijax.sampling.sample(X, seeds=LABELS, positions=LABELS, batch_invariant=b),
    ),
}
OF_INTEGERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "embed": ("tokens", lambda a: bijax.embed(X, a)),
    "softmax_cross_entropy": ("labels", lambda a: bijax.softmax_cross_entropy(X, a)),
    "group_matmul": ("group_sizes", lambda a: bijax.group_matmul(X, W[None], a)),
    "dot_product_attention": ("query_seq_lengths", lambda a: bijax.dot_product_attention(Q, Q, Q, query_seq_lengths=a)),
    "paged_attention": ("page_table", lambda a: bijax.paged_attention(Q, Q, Q, a, [1])),
    "sample": ("seeds", lambda a: bijax.sampling.sample(X, seeds=a, positions=LABELS)),
    "sample at": ("positions", lambda a: bijax.sampling.sample(X, seeds=LABELS, positions=a)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    argument, call = NUMBERS[name]
    for wrong in (None, "1", True, [1e-5], jnp.ones(2)):
        with pytest.raises(TypeError, match=f"bijax.*{argument} must be a number, got"):
            call(wrong)
    with pytest.raises(TypeError, match=f"{argument} must be .*known when the program is traced, got a traced"):
        jax.jit(call)(1e-5)
    with pytest.raises(ValueError, match=f"{argument} must be a finite number.*, got nan"):
        call(float("nan"))
    expected = call(0.5)
    for right in (np.float32(0.5), jnp.float32(0.5)):
        assert_bits_equal(call(right), expected)
    assert_bits_equal(jax.jit(call, static_argnums=0)(0.5), expected)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    argument, call = INTEGERS[name]
    for wrong in (True, np.True_, 1.0, "1"):
        with pytest.raises(TypeError, match=f"bijax.*{argument} must be an integer, got"):
            call(wrong)
    with pytest.raises(TypeError, match=f"{argument} must be an integer, got a traced int32"):
        jax.jit(call)(1)
    assert_bits_equal(call(np.int64(1)), call(1))


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    argument, call = ARRAYS[name]
    for wrong in (None, [[1.0], [1.0, 2.0]]):
        with pytest.raises(TypeError, match=f"bijax.*: {argument} must be an array of .*, got {type(wrong).__name__}"):
            call(wrong)


@pytest.mark.parametrize("name", FLAGS)
def test_truth_values(name: str) -> None:
    argument, call = FLAGS[name]
    for wrong in ("no", 2, None, [True], jnp.ones(2, bool)):
        with pytest.raises(TypeError, match=f"bijax.*: {argument} must be True or False, got"):
            call(wrong)
    with pytest.raises(TypeError, match=f"{argument} must be True or False when the program is traced, got a traced"):
        jax.eval_shape(call, True)
    assert_bits_equal(call(np.True_), call(1))


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_arrays_of_integers(name: str) -> None:
    argument, call = OF_INTEGERS[name]
    for wrong in ("abc", object(), [[1], [1, 2]], jax.ShapeDtypeStruct((4,), "int32")):
        with pytest.raises(TypeError, match=f"bijax.*: {argument} must be an array of integers, got"):
            call(wrong)
    for wrong, came in ((np.ones(4), "float64"), (jax.random.key(0), "key")):
        with pytest.raises(TypeError, match=rf"bijax.*: {argument} must (hold|be) integers, got {came}.*\["):
            call(wrong)


@pytest.mark.parametrize("call", [bijax.invariant, bijax.elementwise, bijax.audit, bijax.contracts])
def test_functions(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"bijax.*: expected a function, got str"):
        call("abc")


def test_masks_and_biases() -> None:
    for argument, holds in (("mask", "bool"), ("bias", "floats")):
        for wrong in ("abc", [[1.0], [1.0, 2.0]]):
            with pytest.raises(TypeError, match=f"bijax.*: {argument} must be an array of {holds}, got"):
                bijax.dot_product_attention(Q, Q, Q, **{argument: wrong})


def test_tokens_of_64_bits_are_not_cut() -> None:
    rows = bijax.embed(X, np.array([1, 2**32 + 1]))
    assert jnp.isnan(rows).all(axis=1).tolist() == [False, True]


def test_names() -> None:
    for wrong in (["silu"], "tanh", jax.nn.silu):
        for call in (
            lambda a: bijax.matmul(X, W, activation=a),
            lambda a: bijax.gated_matmul(X, W, W, activation=a),
        ):
            with pytest.raises(ValueError, match="activation must be one of"):
                call(wrong)
    for wrong in (["highest"], "highestt", {}):
        with pytest.raises(ValueError, match=r"precision must be one that .* takes, got"):
            bijax.matmul(X, W, precision=wrong)
    pair = ["highest", "default"]
    assert_bits_equal(bijax.matmul(X, W, precision=pair), bijax.matmul(X, W, precision=tuple(pair)))
    for wrong in ("float33", [1], jnp.int32):
        with pytest.raises(TypeError, match="preferred_element_type must be one of float32"):
            bijax.matmul(X, W, preferred_element_type=wrong)


def test_residuals() -> None:
    with pytest.raises(TypeError, match=r"residual must have the dtype float32 of the result, got bfloat16\[4,5\]"):
        bijax.matmul(X, W, residual=jnp.ones((4, 5), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"residual must have the shape of the result, \(4, 5\), got float32\[4,6\]"):
        bijax.matmul(X, W, residual=X)


def test_an_empty_table() -> None:
    empty = jnp.ones((0, 3), jnp.bfloat16)
    for embed in (bijax.embed, jax.jit(bijax.embed)):
        rows = embed(empty, jnp.array([[0, 1]]))
        assert (rows.shape, rows.dtype) == ((1, 2, 3), empty.dtype)
        assert jnp.isnan(rows).all()
    gradient = jax.grad(lambda table: bijax.embed(table, LABELS).astype(jnp.float32).sum())(empty)
    assert gradient.shape == empty.shape
