"""Gradient accumulation: any cut of a batch at multiples of the unit gives the same bits."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import bijax
from bijax.testing import assert_bits_equal, bits
from tests.tiers import full_only
from tests.transform.compositions import normal

EXAMPLES, UNIT, DIM = 32, 8, 77
X, Y, WEIGHTS = normal(1, EXAMPLES, 6, DIM), normal(2, EXAMPLES, DIM), jnp.abs(normal(3, EXAMPLES))
PARAMS = {"a": normal(4, DIM, DIM, scale=0.1), "b": normal(5, DIM), "c": normal(6, DIM, DIM, scale=0.1)}

Params = dict[str, jax.Array]
Loss = Callable[..., Any]


def tied(p: Params, x: jax.Array, y: jax.Array, weights: jax.Array) -> jax.Array:
    """Weights used twice, once transposed, and a mean over the examples."""
    h = jnp.tanh(x.mean(1) @ p["a"] + p["b"])
    return (((h @ p["a"].T @ p["c"]) - y) ** 2).mean()


def recurrent(p: Params, x: jax.Array, y: jax.Array, weights: jax.Array) -> jax.Array:
    """Weights used at every step of a scan, and a weight for each example."""
    h, _ = lax.scan(lambda h, x: (jnp.tanh(x @ p["a"] + h @ p["c"] + p["b"]), None), y, jnp.swapaxes(x, 0, 1))
    return (((h - y) ** 2).mean(-1) * weights).mean()


def summed(p: Params, x: jax.Array, y: jax.Array, weights: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A sum over the examples, with sums for the caller to divide by."""
    log_probs = jax.nn.log_softmax(x @ p["a"] @ p["c"])
    labels = jnp.argmax(y, -1)
    losses = -jnp.take_along_axis(log_probs, labels[:, None, None], -1).sum((1, 2))
    correct = (log_probs.argmax(-1) == labels[:, None]).sum()
    return (losses * weights).sum(), {"weights": weights.sum(), "correct": correct}


@functools.cache
def of_tied() -> tuple[Any, Any]:
    """The gradient of one loss, and its result for the whole batch, which several tests compare with."""
    gradient = bijax.accumulate_gradients(tied, unit=UNIT)
    return gradient, jax.jit(gradient)(PARAMS, X, Y, WEIGHTS)


def in_parts(gradient: Any, parts: int, *batch: jax.Array, params: Any = PARAMS, jit: bool = True) -> Any:
    """Returns loss and gradients from micro-batches of equal size."""
    add = jax.jit(gradient.add) if jit else gradient.add
    cuts = [jnp.split(x, parts) for x in batch]
    total = gradient.start(params, *(cut[0] for cut in cuts))
    for micro_batch in zip(*cuts, strict=True):
        total = add(total, params, *micro_batch)
    return total.value_and_grad()


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(assert_bits_equal, a, b)


@pytest.mark.parametrize(
    ("loss_fn", "options", "cuts"),
    [
        (tied, {}, (4,)),
        full_only(tied, {}, (2, 4)),
        full_only(recurrent, {}, (2, 4)),
        full_only(summed, {"reduction": "sum", "has_aux": True}, (2, 4)),
    ],
    ids=["tied in 4", "tied", "recurrent", "summed"],
)
def test_any_cut_gives_the_same_bits(loss_fn: Loss, options: dict[str, Any], cuts: tuple[int, ...]) -> None:
    gradient = bijax.accumulate_gradients(loss_fn, unit=UNIT, **options)
    whole = of_tied()[1] if loss_fn is tied else jax.jit(gradient)(PARAMS, X, Y, WEIGHTS)
    for parts in cuts:
        assert_same(in_parts(gradient, parts, X, Y, WEIGHTS), whole)

    # What it is the gradient of, in another order.
    has_aux = options.get("has_aux", False)
    expected = jax.jit(jax.value_and_grad(loss_fn, has_aux=has_aux))(PARAMS, X, Y, WEIGHTS)
    assert jax.tree.structure(whole) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5 * float(jnp.abs(theirs).max()))


def test_control_plain_accumulation_differs() -> None:
    gradient = jax.jit(jax.value_and_grad(tied))
    whole = gradient(PARAMS, X, Y, WEIGHTS)
    parts = [gradient(PARAMS, *micro) for micro in zip(*(jnp.split(a, 4) for a in (X, Y, WEIGHTS)), strict=True)]
    mean = jax.tree.map(lambda *p: functools.reduce(jnp.add, p) / 4, *parts)
    pairs = zip(jax.tree.leaves(mean[1]), jax.tree.leaves(whole[1]), strict=True)
    assert all((bits(a) != bits(b)).any() for a, b in pairs)


@pytest.mark.parametrize(("platform", "barriers"), [("cpu", 1), ("cuda", 0)])
def test_additions_join_the_units_program_on_a_gpu_alone(platform: str, barriers: int) -> None:
    """A barrier around loss and gradient would cost a GPU a pass over the gradients, and their memory."""
    gradient = bijax.accumulate_gradients(lambda w, x: jnp.mean((x @ w) ** 2), unit=2)
    with bijax.lowering_for("sm_90"):
        lowered = jax.jit(gradient).trace(jnp.ones(3), jnp.ones((8, 3))).lower(lowering_platforms=(platform,))
    found = re.findall(r"optimization_barrier .* : tensor<f32>, tensor<3xf32>", lowered.as_text())
    assert len(found) == barriers


@pytest.mark.tier("full")
@pytest.mark.parametrize("every", [False, full_only(True)], ids=["few", "every"])
def test_uneven_cuts_and_ways_to_call(every: bool) -> None:
    (gradient, whole), batch = of_tied(), (X, Y, WEIGHTS)
    add = jax.jit(gradient.add, donate_argnums=0)
    total = gradient.start(PARAMS, *batch)
    for part in (slice(0, 8), slice(8, 32)):
        total = add(total, PARAMS, *(a[part] for a in batch))
    assert int(total.units) == 4
    assert_same(total.value_and_grad(), whole)
    with bijax.set_batch_invariant_mode():
        assert_same(jax.jit(gradient)(PARAMS, *batch), whole)
    if not every:
        return
    total = gradient.add(gradient.start(PARAMS, *batch), PARAMS, *batch)
    assert_same(total.value_and_grad(), whole)

    @jax.jit
    def scanned(params: Params, parts: Any) -> Any:
        start = gradient.start(params, *(p[0] for p in parts))
        total, _ = lax.scan(lambda t, micro: (gradient.add(t, params, *micro), None), start, parts)
        return total.value_and_grad()

    assert_same(scanned(PARAMS, tuple(a.reshape(2, 16, *a.shape[1:]) for a in batch)), whole)


@pytest.mark.tier("full")
def test_several_arguments_and_arguments_without_examples() -> None:
    def loss_fn(a: jax.Array, x: jax.Array, shift: jax.Array, b: jax.Array, *, power: int) -> jax.Array:
        return (((x.mean(1) + shift) @ a @ b) ** power).mean()

    shift = normal(7, EXAMPLES // 2, DIM)[0]
    gradient = bijax.accumulate_gradients(loss_fn, unit=4, argnums=(0, 3), batch_argnums=1)
    call, add = (jax.jit(functools.partial(fn, power=2)) for fn in (gradient, gradient.add))
    loss, (da, db) = call(PARAMS["a"], X, shift, PARAMS["c"])
    total = gradient.start(PARAMS["a"], X, shift, PARAMS["c"], power=2)
    for part in jnp.split(X, 4):
        total = add(total, PARAMS["a"], part, shift, PARAMS["c"])
    assert_same(total.value_and_grad(), (loss, (da, db)))


@pytest.mark.parametrize("with_bits", [False, full_only(True)], ids=["dtypes", "and bits"])
def test_narrow_and_wide_dtypes(with_bits: bool) -> None:
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    gradient = bijax.accumulate_gradients(tied, unit=UNIT)
    total = gradient.start(narrow, X, Y, WEIGHTS)
    assert {g.dtype for g in jax.tree.leaves(total.grads)} == {jnp.dtype(jnp.float32)}
    run = jax.jit(gradient) if with_bits else functools.partial(jax.eval_shape, gradient)
    loss, grads = run(narrow, X, Y, WEIGHTS)
    assert (loss.dtype, {g.dtype for g in grads.values()}) == (jnp.float32, {jnp.dtype(jnp.bfloat16)})
    if with_bits:
        assert_same(in_parts(gradient, 4, X, Y, WEIGHTS, params=narrow), (loss, grads))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda p: jnp.asarray(np.asarray(p), jnp.float64), (PARAMS, X, Y, WEIGHTS))
        start = gradient.start(*wide)
        assert {g.dtype for g in jax.tree.leaves((start.value, start.grads))} == {jnp.dtype(jnp.float64)}


@pytest.mark.tier("full")
def test_random_numbers_with_a_key_for_each_example() -> None:
    def loss_fn(p: Params, x: jax.Array, keys: jax.Array) -> jax.Array:
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (DIM,)))(keys)
        return ((jnp.where(keep, x.mean(1), 0) @ p["a"]) ** 2).mean()

    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    gradient = bijax.accumulate_gradients(loss_fn, unit=UNIT)
    whole = jax.jit(gradient)(PARAMS, X, keys)
    assert_same(in_parts(gradient, 2, X, keys), whole)


@pytest.mark.tier("full")
def test_nnx_state() -> None:
    model = nnx.Linear(DIM, DIM, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def loss_fn(params: nnx.State, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((nnx.merge(graph, params)(x.mean(1)) - y) ** 2).mean()

    gradient = bijax.accumulate_gradients(loss_fn, unit=UNIT)
    whole = jax.jit(gradient)(params, X, Y)
    assert isinstance(whole[1], nnx.State)
    assert_same(in_parts(gradient, 4, X, Y, params=params), whole)


@pytest.mark.tier("full")
def test_narrow_integers_and_bools_are_counted() -> None:
    def loss_fn(p: Params, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        many = {f"int{n}": jnp.full((2,), 100, f"int{n}") for n in (8, 16, 32)}
        return (x.mean(1) @ p["a"]).sum(), {"bool": x[:, 0, 0].sum() < jnp.inf, "uint8": jnp.uint8(200), **many}

    gradient = bijax.accumulate_gradients(loss_fn, unit=UNIT, reduction="sum", has_aux=True)
    (_, aux), _ = whole = jax.jit(gradient)(PARAMS, X)
    assert_same(in_parts(gradient, 2, X), whole)
    units = EXAMPLES // UNIT
    assert {name: (str(a.dtype), a.ravel()[0].item()) for name, a in aux.items()} == {
        "bool": ("int32", units),
        "uint8": ("uint32", 200 * units),
        **{f"int{n}": ("int32", 100 * units) for n in (8, 16, 32)},
    }


@pytest.mark.tier("full")
def test_empty_last_unit_filled_with_weights_of_zero() -> None:
    gradient = jax.jit(bijax.accumulate_gradients(summed, unit=UNIT, reduction="sum", has_aux=True))
    plain = jax.jit(summed)
    filled = [np.concatenate([a[:27], np.zeros_like(a[:5])]) for a in (X, Y, WEIGHTS)]
    (loss, aux), _ = gradient(PARAMS, *filled)
    expected, expected_aux = plain(PARAMS, X[:27], Y[:27], WEIGHTS[:27])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(aux["weights"], expected_aux["weights"], rtol=1e-6)
    padded = [np.concatenate([a, np.zeros_like(a[:8])]) for a in filled]
    assert_same(gradient(PARAMS, *padded)[1], gradient(PARAMS, *filled)[1])


@pytest.mark.parametrize("examples", [0, 7, 12, 20])
def test_cuts_through_a_unit_are_refused(examples: int) -> None:
    gradient = bijax.accumulate_gradients(tied, unit=UNIT)
    total = gradient.start(PARAMS, X, Y, WEIGHTS)
    batch = (X[:examples], Y[:examples], WEIGHTS[:examples])
    for call in (gradient, gradient.start, functools.partial(gradient.add, total)):
        with pytest.raises(ValueError, match=f"whole units of 8 examples, got {examples}"):
            call(PARAMS, *batch)


def test_wrong_arguments_are_refused() -> None:
    for unit in (0, -1):
        with pytest.raises(ValueError, match="1 or more"):
            bijax.accumulate_gradients(tied, unit=unit)
    for unit in (True, 8.0, "8"):
        with pytest.raises(TypeError, match="an int"):
            bijax.accumulate_gradients(tied, unit=unit)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mean' or 'sum'"):
        bijax.accumulate_gradients(tied, unit=8, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both argnums and batch_argnums"):
        bijax.accumulate_gradients(tied, unit=8, batch_argnums=(0, 1))
    with pytest.raises(ValueError, match="not negative"):
        bijax.accumulate_gradients(tied, unit=8, argnums=-1)
    with pytest.raises(TypeError, match="sequence of ints"):
        bijax.accumulate_gradients(tied, unit=8, argnums=())
    gradient = bijax.accumulate_gradients(tied, unit=UNIT)
    with pytest.raises(ValueError, match="one number of examples"):
        gradient(PARAMS, X, Y[:8], WEIGHTS)
    with pytest.raises(ValueError, match="one number of examples"):
        gradient(PARAMS, X, Y, jnp.float32(1))
    with pytest.raises(TypeError, match="positional arguments"):
        bijax.accumulate_gradients(tied, unit=UNIT, batch_argnums=(1, 2, 3))(PARAMS, X, Y, weights=WEIGHTS)
    with pytest.raises(TypeError, match="aux"):
        bijax.accumulate_gradients(summed, unit=UNIT, has_aux=True)(PARAMS, X, Y, WEIGHTS)
    with pytest.raises(bijax.NotInvariantError):
        bijax.accumulate_gradients(lambda p, x: jnp.linalg.eigvals(x @ p).real.sum(), unit=8)(PARAMS["a"][:, :6], X)


def test_what_cannot_be_added_to_is_refused() -> None:
    """Units of other sizes would have silently become a mean of means."""
    gradient = bijax.accumulate_gradients(tied, unit=UNIT)
    total = gradient.start(PARAMS, X, Y, WEIGHTS)
    with pytest.raises(TypeError, match=r"expected a GradientSum to add to, got tuple; begin with start\(\)"):
        gradient.add(total.value_and_grad(), PARAMS, X, Y, WEIGHTS)  # type: ignore[arg-type]
    others: dict[str, dict[str, Any]] = {
        "unit=8, got one with unit=4": {"unit": 4},
        "reduction='mean', got one with reduction='sum'": {"unit": UNIT, "reduction": "sum"},
    }
    for message, options in others.items():
        other = bijax.accumulate_gradients(tied, **options).start(PARAMS, X, Y, WEIGHTS)
        with pytest.raises(ValueError, match=f"expected a sum with {re.escape(message)}"):
            gradient.add(other, PARAMS, X, Y, WEIGHTS)

    def loss_fn(p: Params, x: jax.Array) -> jax.Array:
        return x.mean() + sum(v.mean().astype(jnp.float32) for v in p.values())

    simple = bijax.accumulate_gradients(loss_fn, unit=UNIT)
    b = PARAMS["b"]
    for params, message in (
        ({"a": b.astype(jnp.bfloat16), "b": b}, "gradient['a'] of float32[77], got gradient['a'] of bfloat16[77]"),
        ({"a": jnp.stack([b, b]), "b": b}, "gradient['a'] of float32[77], got gradient['a'] of float32[2, 77]"),
        ({"a": b}, "gradient['b'] of float32[77], got nothing in its place"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.jit(simple.add)(simple.start({"a": b, "b": b}, X), params, X)
