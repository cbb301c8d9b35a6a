"""Programs whose rows alone are cut over eight devices, run as a program of its own: `test_sharded_rows` starts it.

Nothing moves, and the bits are those of one device.
"""

import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bijax
from bijax.core.lowering_cache import lowered_forms
from bijax.testing import assert_bits_equal, bits
from bijax.transform.hook.arguments_cut import Cut, read
from tests.arrays import on_device
from tests.transform.place_programs import places

RNG = np.random.default_rng(0)


def numbers(*shape: int) -> jax.Array:
    values = RNG.standard_normal(shape).astype(np.float32)
    values[RNG.random(shape) < 0.1] = -0.0
    values[0, :3] = np.array([np.inf, -np.inf, np.nan])[: min(3, shape[-1])]
    return jnp.asarray(values)


X, W, V = numbers(64, 256), jnp.nan_to_num(numbers(256, 128) / 16), jnp.nan_to_num(numbers(128, 256) / 8)
TOKENS = on_device(RNG.integers(0, 128, (16, 8)), jnp.int32)


def mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def grid() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def network(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    normed = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    inner = jax.nn.gelu(normed @ w)
    turned = jnp.concatenate([-inner[:, 64:], inner[:, :32], jnp.ones((64, 32), x.dtype)], axis=1)
    return jax.nn.softmax(turned @ v + jnp.ones((64, 256)), axis=-1)


def language_model(tokens: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of each row's tokens to one another, with the library's own operations and plain JAX."""
    x = jnp.take(v, tokens, axis=0)
    q, k, value = jnp.split(bijax.matmul(x.reshape(-1, 256), jnp.tile(w, (1, 3))).reshape(16, 8, 3, 128), 3, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    causal = jnp.tril(jnp.ones((8, 8), bool))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(causal, scores, -1e30)), value)
    return bijax.rms_norm(mixed.reshape(16, 8, 128)) @ v


def cut_arguments(first: jax.Array, on: Mesh, names: Any = "data") -> list[jax.Array]:
    specs = P(names), P(), P()
    arrays = map(np.asarray, (first, W, V))
    return [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(arrays, specs, strict=True)]


def moved(compiled: Any) -> set[str]:
    """Returns the operations of a compiled program that move arrays between devices."""
    return set(re.findall(r" (all-\w+|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text()))


def rows(function: Callable[..., Any], first: jax.Array, on: Mesh, names: Any = "data") -> None:
    compiled = jax.jit(bijax.invariant(function)).lower(*cut_arguments(first, on, names)).compile()
    result = compiled(*cut_arguments(first, on, names))
    assert not moved(compiled)
    assert result.sharding.spec == P(names)
    count = 8 if names != "data" or (on.size == 8 and len(on.shape) == 1) else 4
    assert result.addressable_shards[0].data.shape[0] == first.shape[0] // count
    assert_bits_equal(result, jax.jit(bijax.invariant(function))(first, W, V))


def typed(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """A program that JAX takes on explicit meshes."""
    inner = jax.nn.gelu((x - x.mean(-1, keepdims=True)) @ w).reshape(64, 2, 64)
    return jax.nn.softmax(inner.transpose(0, 2, 1).reshape(64, 128) @ v, axis=-1)


def explicit() -> None:
    """An explicit mesh, which the types of arrays name, and one that is set for the program."""
    for kind in (AxisType.Explicit, AxisType.Auto):
        made = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(made):
            given = cut_arguments(X, made)
            compiled = jax.jit(bijax.invariant(typed)).lower(*given).compile()
            result = compiled(*given)
        assert not moved(compiled)
        assert result.sharding.spec[0] == "data"
        assert_bits_equal(result, jax.jit(bijax.invariant(typed))(X, W, V))


def control() -> None:
    """Plain JAX leaves the rows where they are too, with other bits than one device."""
    given = cut_arguments(X, mesh())
    many, one = jax.jit(network)(*given), jax.jit(network)(X, W, V)
    assert (bits(many) != bits(one)).any()


def labelled(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Each row's own entry, and a function that was jitted with shardings of its own."""
    y = bijax.log_softmax(x @ w)
    entries = jnp.arange(8) + jnp.argmax(x[:, :4], axis=1)[:, None]
    return jnp.take_along_axis(y, entries, axis=1, mode="clip")


def inner_shardings() -> None:
    """A function with shardings of its own keeps them: its arguments are gathered for it."""
    whole = NamedSharding(mesh(), P())
    inner = jax.jit(lambda y: jnp.tanh(y), in_shardings=whole, out_shardings=whole)
    function = jax.jit(bijax.invariant(lambda x, w, v: inner(x @ w)))
    compiled = function.lower(*cut_arguments(X, mesh())).compile()
    result = compiled(*cut_arguments(X, mesh()))
    assert moved(compiled)
    assert result.sharding.is_fully_replicated
    assert_bits_equal(result, jax.jit(bijax.invariant(lambda x, w, v: jnp.tanh(x @ w)))(X, W, V))


def recurrent(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Loops in loops and branches: a cell over time, refined in a loop of its own, with a counter and without rows."""

    def refine(_: int, h: jax.Array) -> jax.Array:
        return jax.nn.tanh(h @ w @ v)

    def cell(carry: tuple[jax.Array, jax.Array, jax.Array], part: jax.Array) -> Any:
        count, h, most = carry
        h = jnp.tanh(lax.fori_loop(0, 2, refine, h) + part @ v[:32])
        h = lax.cond(count % 2 == 0, lambda h: h * w[0, 0], lambda h: jnp.ones_like(h) - h, h)
        return (count + 1, h, jnp.maximum(most, h.max(-1))), h[:, :4]

    parts = jnp.moveaxis(x.reshape(64, 8, 32), 1, 0)
    start = jnp.zeros((), jnp.int32), jnp.zeros((64, 256)), jnp.full(64, -jnp.inf)
    (count, h, most), collected = lax.scan(cell, start, parts, reverse=True)
    _, halved = lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 3, c[1] / 2), (0, most))
    return jnp.concatenate([h, most[:, None], halved[:, None], collected[0]], axis=1)


def loops_over_rows() -> None:
    """What a loop carries from row to row, or adds over rows, is gathered."""

    def mixing(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        upwards, kept = lax.scan(lambda c, row: (jnp.tanh(c + row @ w), c[:3]), jnp.zeros(128), x)

        def shared(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(c @ w @ v - c.mean(0)), c[:, 0]

        until = lax.while_loop(lambda c: (c > 0.1).any(), lambda c: c / 2, jnp.abs(x))
        chosen = lax.cond((x > 0).all(), lambda y: y, lambda y: -y, x @ w)
        return upwards, kept, lax.scan(shared, x, None, length=2), until, chosen

    x = jnp.nan_to_num(X, posinf=1.0, neginf=-1.0)
    given = cut_arguments(x, mesh())
    compiled = jax.jit(bijax.invariant(mixing)).lower(*given).compile()
    assert moved(compiled)
    assert_bits_equal(compiled(*given), jax.jit(bijax.invariant(mixing))(x, W, V))


def loss(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    logits = jnp.tanh(x @ w) @ v
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[:, 0])


def gradients() -> None:
    """A loss is gathered, a number for each row; sums over the batch are those of one device."""
    x = jnp.nan_to_num(X, posinf=1.0, neginf=-1.0)
    step = jax.value_and_grad(loss, (0, 1))
    first, w, v = cut_arguments(x, mesh())
    compiled = jax.jit(bijax.invariant(step)).lower(w, v, first).compile()
    assert moved(compiled) == {"all-gather"}
    assert_bits_equal(compiled(w, v, first), jax.jit(bijax.invariant(step))(W, V, x))


def forms() -> None:
    """Kernels are lowered once for all numbers of devices among which XLA divides a program; sums over rows wait."""
    made: list[bytes] = []
    make: Any = lowered_forms._form

    def noted(*given: Any) -> bytes:
        made.append(make(*given))
        return made[-1]

    def on(devices: int, *given: jax.Array) -> str:
        cut = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), P("data"))
        x, *others = (jax.device_put(a, cut if i == 0 else NamedSharding(cut.mesh, P())) for i, a in enumerate(given))
        text: str = jax.jit(lambda *given: program(*given)).lower(x, *others).as_text()
        return text

    lowered_forms._form = noted
    try:
        program: Any = lambda x: bijax.softmax(x)  # noqa: E731  outside of an invariant program it is gathered
        assert "manual_computation" not in on(8, X)
        alone = len(made)
        assert alone
        assert "sdy.sharding_constraint" in on(2, X)
        assert len(made) == alone
        jax.jit(lambda x: program(x)).lower(X)  # one device has a form of its own
        assert len(made) == alone + 1
    finally:
        lowered_forms._form = make
    program = bijax.invariant(lambda x, w, v: jax.grad(lambda w, v: network(x, w, v).sum(), (0, 1))(w, v))
    assert on(8, X, W, V).count("sdy.manual_computation") == 1


def not_rows() -> None:
    """What mixes rows, or reads their position, is gathered: the bits are those of one device."""

    def mixing(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        y = jnp.tanh(x @ w)
        places = jnp.arange(64.0)[:, None]
        return y - y.mean(0), y * places, jnp.roll(y, 1, 0), y[::-1] @ v, jnp.sort(y, 0), jnp.cumsum(y, 0)

    given = cut_arguments(X, mesh())
    compiled = jax.jit(bijax.invariant(mixing)).lower(*given).compile()
    assert moved(compiled)
    assert_bits_equal(compiled(*given), jax.jit(bijax.invariant(mixing))(X, W, V))
    # Weights with as many rows as the batch, cut over the same devices, are weights.
    square = jnp.nan_to_num(numbers(64, 64))
    both = [jax.device_put(x, NamedSharding(mesh(), P("data"))) for x in (X[:, :64], square)]
    product = jax.jit(bijax.invariant(lambda x, w: jnp.tanh(x @ w)))
    assert_bits_equal(product(*both), product(X[:, :64], square))


def attributes() -> None:
    head = '{sdy.sharding = #sdy.sharding<mesh<["data"=4, "model"=2]'
    mesh_of = (("data", 4), ("model", 2))
    assert read(head + '>, [{"data"}, {}]>}') == Cut(mesh_of, 0, ("data",), 4)
    assert read(head + '>, [{}, {"data", "model"}]>}') == Cut(mesh_of, 1, ("data", "model"), 8)
    for not_read in ('>, [{"data"}, {"model"}]>}', '>, [{}, {}]>}', ', device_ids=[1, 0]>, [{"data"}, {}]>}',
                     '>, [{"data":(1)2}, {}]>}'):  # fmt: skip
        assert read(head + not_read) is None
    assert read("{}") is None


def audits() -> None:
    """An audit says which operations need an array whole; the program is only traced."""

    def gathered(function: Callable[..., Any], *specs: P) -> list[tuple[str, str]]:
        given = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh(), spec))
            for x, spec in zip((X, W, V), specs, strict=True)
        ]
        found = bijax.audit(bijax.invariant(function), *given)
        assert ("gathered" in str(found)) == bool(found.gathered)
        assert all(g.line.rpartition(":")[0].endswith("sharded_rows.py") for g in found.gathered)
        return [(g.primitive, g.shape) for g in found.gathered]

    assert not gathered(network, P(), P(), P())
    assert not gathered(network, P("data"), P(), P())
    assert gathered(network, P("data"), P(None, "data"), P()) == [("dot_general", "f32[256,128]")]
    assert gathered(lambda x, w, v: jnp.tanh(x @ w).sum(0), P("data"), P(), P()) == [("reduce_sum", "f32[64,128]")]
    assert gathered(lambda x, w, v: jnp.sort(x, 0) @ w, P("data"), P(), P()) == [("sort", "f32[64,256]")]
    assert gathered(lambda x, w, v: x @ w, P(None, "data"), P(), P()) == [("dot_general", "f32[64,256]")]


CHECKS: dict[str, Callable[[], None]] = {
    "rows": lambda: rows(network, X, mesh()),
    "control": control,
    "attributes": attributes,
    "audits": audits,
    "explicit": explicit,
    "labelled": lambda: rows(labelled, X, mesh()),
    "inner shardings": inner_shardings,
    "tokens": lambda: rows(language_model, TOKENS, mesh()),
    "one axis of two": lambda: rows(network, X, grid()),
    "two axes": lambda: rows(network, X, grid(), ("data", "model")),
    "forms": forms,
    "gradients": gradients,
    "not rows": not_rows,
    "places": lambda: places(mesh()),
    "loops": lambda: rows(recurrent, X, mesh()),
    "loops over rows": loops_over_rows,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)
