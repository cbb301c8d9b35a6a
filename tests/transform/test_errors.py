"""What the error of a refused operation says: the user's line, why, and what to do instead."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import bijax
from bijax.transform.rules._refused import REFUSED
from bijax.transform.rules.names import CUDNN_ATTENTION

X = jnp.asarray(np.eye(4, dtype=np.float32))


def in_the_mode(x: jax.Array) -> None:
    with bijax.set_batch_invariant_mode():
        jnp.linalg.eigvals(x)


CALLS: dict[str, Callable[[], Any]] = {
    "at top level": lambda: bijax.invariant(jnp.linalg.eigvals)(X),
    "a primitive at top level": lambda: bijax.invariant(jax.lax.linalg.eig)(X),
    "jitted outside": lambda: jax.jit(bijax.invariant(jnp.linalg.eigvals))(X),
    "jitted inside": lambda: bijax.invariant(jax.jit(jnp.linalg.eigvals))(X),
    "mapped": lambda: jax.vmap(bijax.invariant(jnp.linalg.eigvals))(X[None]),
    "in a loop": lambda: jax.lax.map(bijax.invariant(jnp.linalg.eigvals), X[None]),
    "in a gradient": lambda: jax.grad(bijax.invariant(lambda x: jnp.linalg.eigvals(x).real.sum()))(X),
    "lowered": lambda: bijax.invariant(jax.jit(jnp.linalg.eigvals)).lower(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_line_is_the_users(name: str) -> None:
    jnp.linalg.eigvals(X)  # JAX keeps its trace, and with it the line, of the first call
    first = inspect.getsourcelines(CALLS[name])[1]
    with pytest.raises(bijax.NotInvariantError, match=r"bijax\.audit lists") as caught:
        CALLS[name]()
    assert caught.value.primitive == "eig"
    assert caught.value.line == f"{__file__}:{first}"
    assert caught.value.line in str(caught.value)


def test_the_line_in_the_mode() -> None:
    with pytest.raises(bijax.NotInvariantError) as caught:
        in_the_mode(X)
    assert caught.value.line == f"{__file__}:{inspect.getsourcelines(in_the_mode)[1] + 2}"


LIBRARY = "/opt/site-packages/library/search.py"


def of_a_library() -> dict[str, Any]:
    """A module that is installed: jitted functions, of which JAX keeps the trace, and its own callers."""
    names: dict[str, Any] = {"jax": jax}
    source = """
    @jax.jit
    def nearest(x):
        return jax.lax.approx_max_k(x, 2)[0]

    def search(x):
        return jax.lax.map(nearest, x)
    """
    exec(compile(inspect.cleandoc(source), LIBRARY, "exec"), names)
    return names


def test_inside_of_a_library_the_line_is_the_users_and_the_librarys_is_named() -> None:
    library = of_a_library()
    jax.eval_shape(library["nearest"], X)  # somewhere else before

    def first(x: jax.Array) -> jax.Array:
        return library["search"](x[None])

    def second(x: jax.Array) -> jax.Array:
        return jax.vmap(library["nearest"])(x[None])

    for function in (first, second):
        line = f"{__file__}:{inspect.getsourcelines(function)[1] + 1}"
        with pytest.raises(bijax.NotInvariantError) as caught:
            jax.jit(bijax.invariant(function)).lower(X)
        assert (caught.value.line, caught.value.library) == (line, f"{LIBRARY}:3")
        assert f"requested at {line} (by {LIBRARY}:3)" in str(caught.value)
        (found,) = bijax.audit(bijax.invariant(function), X).variant
        assert found.line == line


def test_allow_is_advised_for_what_it_can_be_right_for() -> None:
    def lowered(function: Callable[..., Any], x: Any = X) -> str:
        with pytest.raises(bijax.NotInvariantError) as caught:
            jax.jit(bijax.invariant(function)).lower(x)
        assert "outside" in str(caught.value)
        return str(caught.value)

    assert "allow=('schur',)" in lowered(lambda x: jax.lax.linalg.schur(x)[0])
    # Both would be left to XLA for all operands, the generator's numbers follow the batch, a program is held.
    exported = jax.export.export(jax.jit(lambda x: x @ x))(X)
    assert "allow" not in lowered(exported.call)
    assert "allow" not in lowered(lambda x: jax.lax.acos(x + 1j))
    assert "allow" not in lowered(lambda key: jax.random.normal(key, (3,)), jax.random.key(0, impl="rbg"))


def test_keys_of_another_kind_name_the_line() -> None:
    key = jax.random.key(0, impl="rbg")
    with pytest.raises(bijax.NotInvariantError, match="threefry") as caught:
        bijax.invariant(jax.random.normal)(key, (3,))
    assert caught.value.line == f"{__file__}:{inspect.getsourcelines(test_keys_of_another_kind_name_the_line)[1] + 3}"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dot_product_attention_fp8_bwd", "use bijax.dot_product_attention"),
        ("scaled_matmul_wrapper", "bijax.matmul"),
        ("approx_top_k", "use jax.lax.top_k"),
        ("ffi_call", "use the equivalent operation"),
    ],
)
def test_custom_calls_say_what_to_use_instead(name: str, instead: str) -> None:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda _, x: [x])
    with pytest.raises(bijax.NotInvariantError) as caught:
        jax.jit(bijax.invariant(lambda x: primitive.bind(x))).lower(X)
    assert instead in str(caught.value)
    (found,) = bijax.audit(bijax.invariant(lambda x: primitive.bind(x)), X).variant
    assert found.evidence == REFUSED[name]


def test_cudnn_attention_has_these_names() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    names = {p.name for p in vars(cudnn).values() if isinstance(p, Primitive)}
    assert len(names) >= 8
    assert names <= {*REFUSED, *CUDNN_ATTENTION}


def test_a_decorator_with_options() -> None:
    @bijax.invariant(allow=("pure_callback",))
    def double(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: 2 * x, x, x)

    @bijax.invariant
    def plain(x: jax.Array) -> jax.Array:
        return x + x

    assert double.__name__ == "double"
    assert (double(X) == plain(X)).all()
    with pytest.raises(TypeError, match="expected a function"):
        bijax.invariant(allow=())(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="pure_callbak"):
        bijax.invariant(allow=("pure_callbak",))


@pytest.mark.parametrize("allow", [(), ("dot_general",)])
def test_symbolic_sizes(allow: tuple[str, ...]) -> None:
    """What bijax replaces is not to be allowed: the advice is to export one program for each size."""
    (batch,) = jax.export.symbolic_shape("b")
    rows = jax.ShapeDtypeStruct((batch, 4), jnp.float32)
    with pytest.raises(bijax.NotInvariantError, match=r"export one program for each batch size") as caught:
        jax.export.export(jax.jit(bijax.invariant(lambda x: x @ X, allow=allow)))(rows)
    assert "let it pass" not in str(caught.value)
    exp = bijax.elementwise(jnp.exp)
    for operation in (bijax.softmax, lambda x: bijax.matmul(x, X), lambda x: bijax.mean(x, axis=1), exp):
        with pytest.raises(bijax.UnsupportedError, match=r"symbolic sizes .* Export one program for each batch size"):
            jax.export.export(jax.jit(operation))(rows)


def test_forward_mode() -> None:
    """The library's operations name the way that has it, which has the derivative of plain JAX."""
    for operation in (lambda x: bijax.matmul(x, X), bijax.softmax):
        for derive in (lambda f: jax.jvp(f, (X,), (X,)), lambda f: jax.jacfwd(f)(X), lambda f: jax.hessian(f)(X)):
            with pytest.raises(TypeError, match=r"bijax\.invariant\(jnp\.matmul\)"):
                derive(operation)
    ours, theirs = (jax.jvp(f, (X, X), (X, 2 * X)) for f in (bijax.invariant(jnp.matmul), jnp.matmul))
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("function", [jnp.exp, jax.nn.sigmoid, jnp.sum])
def test_functions_of_8_bit_floats_are_refused_by_name(function: Callable[..., Any], dtype: str) -> None:
    run = jax.jit(bijax.invariant(function))
    with pytest.raises(bijax.NotInvariantError, match=rf"no invariant form for {dtype}; convert to float32 before"):
        run.lower(jnp.ones(3, dtype))


@pytest.mark.parametrize("function", [jnp.max, jnp.min])
def test_extremes_of_floats_without_an_order_are_refused_by_name(function: Callable[..., Any]) -> None:
    """An audit says so too."""
    x = jnp.ones(3, "float8_e4m3fnuz")
    with pytest.raises(bijax.NotInvariantError, match=r"no invariant form for float8_e4m3fnuz; convert to float32"):
        jax.jit(bijax.invariant(function)).lower(x)
    assert [found.verdict for found in bijax.audit(bijax.invariant(function), x).variant] == ["refused"]
