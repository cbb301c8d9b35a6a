"""How a model is checked: forward and gradient, at batch sizes, positions and in company of all kinds."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import bijax
from bijax.testing import BatchVarianceReport, assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.transform.compositions import normal

Model = Callable[..., jax.Array]
"""Called with parameters, inputs of shape (batch, ...), and other arguments with a batch axis."""

SIZES = (1, 17)
NEIGHBOURS = ("given", "permuted", "zeros", "huge", "nan")


def with_dx(model: Model) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a function of (params, inputs, cotangents, ...) that gives the results and the gradient of the inputs."""

    def fn(params: Any, x: jax.Array, g: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, backward = jax.vjp(lambda x: model(params, x, *others), x)
        return y, backward(g)[0]

    return fn


def check_model(
    model: Model, params: Any, x: jax.Array, *others: jax.Array, sizes: Sequence[int] = SIZES, mode: bool = True
) -> None:
    """Asserts that results and input gradients do not depend on the batch, and that the audit says so."""
    args = (params, x, _cotangents(model, params, x, *others), *others)
    axes = (None, *[0] * (len(args) - 1))
    fn = bijax.invariant(with_dx(model))
    assert not bijax.audit(fn, *args).variant
    assert_batch_invariant(fn, *args, batch_axes=axes, batch_sizes=sizes, neighbours=NEIGHBOURS, modes=("jit",))
    if mode:
        one = [a[:1] for a in (x, *others)]
        expected = jax.jit(bijax.invariant(model))(params, *one)
        with bijax.set_batch_invariant_mode():
            assert_bits_equal(jax.jit(model)(params, *one), expected)


def check_control(
    model: Model, params: Any, x: jax.Array, *others: jax.Array, sizes: Sequence[int] = SIZES
) -> BatchVarianceReport:
    """Asserts that the same sweep finds differences in plain JAX."""
    args = (params, x, _cotangents(model, params, x, *others), *others)
    report = batch_variance_report(
        with_dx(model),
        *args,
        batch_axes=(None, *[0] * (len(args) - 1)),
        batch_sizes=sizes,
        neighbours=("given",),
        modes=("jit",),
    )
    assert not report.invariant
    assert bijax.audit(with_dx(model), *args).variant
    return report


def _cotangents(model: Model, *args: Any) -> jax.Array:
    return normal(99, *jax.eval_shape(model, *args).shape)
