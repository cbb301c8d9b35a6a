"""The audit: every operation with its verdict, its line and its share of the work."""

import dataclasses
import functools
import inspect as python_inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from jax import lax
from jax.experimental import pallas as pl

import bijax
from bijax import hlo
from bijax.inspect.audit import audit
from bijax.inspect.contracts import NoContractError

pytestmark = pytest.mark.usefixtures("hopper")

X = jnp.ones((8, 64))
W = jnp.ones((64, 32))

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="looks at XLA:CPU's program")


def network(x, w):
    y = jnp.tanh(x @ w)
    return jax.nn.softmax(y) * 2 + 1


def verdicts(found, primitive):
    return {o.verdict for o in found.operations if o.primitive == primitive}


def names(found):
    return {o.primitive for o in found.operations}


def test_an_ordinary_program():
    found = audit(network, X, W, platform="cpu")
    assert not found.invariant
    assert {"dot_general", "tanh", "reduce_sum", "exp", "div", "mul"} <= {o.primitive for o in found.variant}
    assert verdicts(found, "add") == verdicts(found, "broadcast_in_dim") == {"invariant"}
    assert all(o.evidence for o in found.operations)


def test_the_same_program_made_invariant():
    found = audit(bijax.invariant(network), X, W, platform="cpu")
    assert found.invariant
    assert found.variant == ()
    assert verdicts(found, "dot_general") == verdicts(found, "tanh") == verdicts(found, "reduce_sum") == {"replaced"}
    assert verdicts(found, "add") == {"invariant"}
    assert names(found) - {"optimization_barrier"} == names(audit(network, X, W))  # barriers stand at the boundary


def test_elementwise_code_on_a_gpu():
    assert verdicts(audit(network, X, W, platform="cuda"), "tanh") == {"variant"}
    found = audit(bijax.invariant(network), X, W, platform="cuda")
    assert verdicts(found, "tanh") == verdicts(found, "add") == {"replaced"}
    assert "XLA:GPU" in next(o.evidence for o in found.operations if o.primitive == "tanh")
    assert {o.primitive for o in audit(network, X, W, platform="cuda").variant} >= {"dot_general", "reduce_sum", "add"}


@pytest.mark.parametrize(
    "make",
    [
        lambda f: jax.jit(bijax.invariant(f)),
        lambda f: bijax.invariant(jax.jit(f)),
        lambda f: functools.partial(bijax.invariant(f)),
        lambda f: jax.jit(lambda *a: jax.jit(bijax.invariant(f))(*a)),
        lambda f: jax.grad(lambda *a: bijax.invariant(lambda *b: f(*b).sum())(*a)),
        lambda f: bijax.invariant(jax.grad(lambda *a: f(*a).sum())),
        lambda f: jax.vmap(bijax.invariant(lambda row, w: f(row[None], w)[0]), (0, None)),
    ],
    ids=["jit outside", "jit inside", "partial", "nested", "grad outside", "grad inside", "vmap"],
)
def test_where_the_transform_stands(make):
    found = audit(make(network), X, W, platform="cpu")
    assert verdicts(found, "dot_general") == {"replaced"}
    assert verdicts(found, "tanh") <= {"replaced"}


def test_the_mode():
    bijax.enable_batch_invariant_mode()
    try:
        assert audit(network, X, W).invariant
    finally:
        bijax.disable_batch_invariant_mode()
    assert not audit(network, X, W).invariant


def test_a_program_that_was_jitted_before_the_mode():
    jitted = jax.jit(network)
    assert not audit(jitted, X, W).invariant
    assert audit(bijax.invariant(jitted), X, W).invariant


HOLDERS = {
    "jit": lambda f: jax.jit(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=5)[0],
    "fori_loop": lambda f: lambda x: lax.fori_loop(0, 5, lambda i, c: f(c), x),
    "while": lambda f: lambda x: lax.while_loop(lambda c: c[0, 0] < 0, f, x),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda c: c, x),
    "remat": lambda f: jax.checkpoint(f),
    "custom_jvp": lambda f: jax.custom_jvp(f),
    "custom_vjp": lambda f: jax.custom_vjp(f),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_programs_inside_programs(name):
    held = HOLDERS[name](lambda x: x @ jnp.ones((64, 64)))
    if name == "custom_jvp":
        held.defjvps(lambda t, *_: t)
    if name == "custom_vjp":
        held.defvjp(lambda x: (held(x), None), lambda _, g: (g,))
    found = audit(held, X)
    (dot,) = [o for o in found.operations if o.primitive == "dot_general"]
    assert dot.verdict == "variant"
    trips = 5 if name in ("scan", "fori_loop") else 1
    assert dot.flops == trips * 2 * 8 * 64 * 64
    assert verdicts(audit(bijax.invariant(held), X), "dot_general") == {"replaced"}


def test_lines_and_counts():
    def f(x, w):
        for _ in range(3):
            x = x @ w  # this line
        return jnp.sort(x)

    found = audit(f, X, jnp.ones((64, 64)))
    (dot,) = [o for o in found.operations if o.primitive == "dot_general"]
    line = python_inspect.getsourcelines(f)[1] + 2
    assert dot.line == f"{__file__}:{line}"
    assert dot.count == 3
    assert dot.shapes == "f32[8,64], f32[64,64] -> f32[8,64]"
    assert dot.share == 1
    # Of a function that JAX itself jits, the line that calls it.
    assert all(o.line.startswith(f"{__file__}:") for o in found.operations)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x: x @ W, 2 * 8 * 64 * 32),
        (lambda x: jnp.einsum("ij,jk,ik->i", x, W, x @ W), None),
        (lambda x: x.sum(1), 8 * 64),
        (lambda x: x.astype(jnp.int32) @ W.astype(jnp.int32), 0),
        (lambda x: lax.conv(x[None, None], jnp.ones((2, 1, 3, 3)), (1, 1), "SAME"), 2 * 2 * 8 * 64 * 9),
        (lambda x: bijax.matmul(x, W), 2 * 8 * 64 * 32),
        (lambda x: bijax.dot_product_attention(x.reshape(8, 4, 16), *[x.reshape(8, 4, 16)] * 2), 4 * 8 * 8 * 64),
        (lambda x: jnp.zeros((4, 64)).at[jnp.arange(8) % 4].add(x), 8 * 64),
        (lambda x: jnp.cumsum(x, 1), 8 * 64),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 4), (1, 1), "SAME"), 4 * 8 * 64),
    ],
)
def test_flops(f, expected):
    found = audit(f, X)
    if expected is not None:
        assert found.flops == pytest.approx(expected, rel=0.02)
    assert sum(o.share for o in found.operations) == pytest.approx(1 if found.flops else 0)


def test_kernels_of_bijax_are_leaves():
    found = audit(lambda x, w: bijax.softmax(bijax.matmul(x, w)), X, W)
    assert found.invariant
    assert "bijax_matmul" in names(found)
    assert "while" not in names(found)


def test_what_is_refused():
    def f(x):
        return lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (8,))[1] + x[:, 0].astype(jnp.uint32)

    outside = audit(f, X)
    assert verdicts(outside, "rng_bit_generator") == {"variant"}
    assert "bijax.invariant refuses rng_bit_generator: " in outside.verdict
    assert "makes the variant operations invariant" not in outside.verdict
    both = audit(lambda x, w: (f(x), x @ w), X, W)
    assert "makes the other variant operations invariant\nbijax.invariant refuses rng_bit_generator: " in both.verdict
    with pytest.raises(NoContractError, match="Move it out of the function or replace it"):
        bijax.contracts(f, X)
    found = audit(bijax.invariant(f), X, compiled=True)
    assert verdicts(found, "rng_bit_generator") == {"refused"}
    assert not found.invariant
    assert found.hlo is None
    with pytest.raises(bijax.NotInvariantError):
        jax.jit(bijax.invariant(f)).lower(X)
    allowed = audit(bijax.invariant(f, allow=["rng_bit_generator"]), X)
    assert verdicts(allowed, "rng_bit_generator") == {"believed"}
    assert "allowed by the caller" in str(allowed)


def test_a_model_that_changes_itself():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(errors.TraceContextError) as raised:
        audit(model, X)
    assert "Pass it as an argument of a function under flax.nnx.jit" in raised.value.__notes__[-1]
    assert audit(nnx.jit(lambda model, x: model(x)), model, X).operations


def test_what_nothing_uses_is_not_listed():
    found = audit(jax.grad(lambda x: bijax.invariant(jnp.sin)(x).sum()), X)
    assert names(found) >= {"cos"}
    assert not names(found) & {"sin", "reduce_sum"}
    printed = audit(lambda x: (jax.debug.print("{}", x.sum()), x)[1], X)
    assert "reduce_sum" in names(printed)


@pytest.mark.parametrize("interpret", [False, True])
def test_a_kernel_of_the_user_is_believed_unless_it_is_interpreted(interpret):
    def f(x):
        def kernel(x_ref, out_ref):
            out_ref[...] = jnp.tanh(x_ref[...])

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x)

    plain, ours = (verdicts(audit(g, X, platform="cpu"), "pallas_call") for g in (f, bijax.invariant(f)))
    assert (plain, ours) == (({"variant"}, {"replaced"}) if interpret else ({"believed"}, {"believed"}))


@pytest.mark.parametrize(("platform", "expected"), [("cpu", "sin"), ("cuda", "cos")])
def test_of_branches_for_platforms_the_one_that_runs_is_judged(platform, expected):
    for branches in ({"cpu": jnp.sin, "cuda": jnp.cos}, {platform: getattr(jnp, expected), "default": jnp.tan}):
        found = audit(lambda x, b=branches: lax.platform_dependent(x, **b), X, platform=platform)
        assert names(found) & {"sin", "cos", "tan"} == {expected}
    found = audit(lambda x: lax.platform_dependent(x, tpu=jnp.sin, default=jnp.cos), X, platform=platform)
    assert names(found) & {"sin", "cos"} == {"cos"}


def test_what_only_a_derivative_runs_is_not_listed():
    def solve(b):
        return lax.custom_linear_solve(lambda v: W.T @ (W @ v), b, lambda _, c: jnp.sin(c), lambda _, c: jnp.cos(c))

    assert names(audit(solve, jnp.ones(32))) & {"sin", "cos", "dot_general"} == {"sin"}


def test_operations_of_a_higher_level_are_expanded():
    found = audit(bijax.invariant(lambda x: jnp.searchsorted(x[0], x[1])), X)
    assert found.invariant
    assert "call_hi_primitive" not in names(found)


def test_integers_are_exact():
    found = audit(lambda x: (x @ x.T).sum(), jnp.ones((4, 4), jnp.int32))
    assert found.invariant
    assert verdicts(found, "dot_general") == {"invariant"}


@on_cpu
def test_the_compiled_program():
    plain = audit(network, X, W, compiled=True)
    assert plain.hlo is not None
    assert plain.hlo.stage == "optimised"
    assert not plain.hlo.invariant
    ours = audit(bijax.invariant(network), X, W, compiled=True)
    assert ours.invariant
    assert ours.hlo.invariant
    assert ours.hlo.ours
    assert "optimised program for cpu" in str(ours)
    other = audit(bijax.invariant(network), X, W, compiled=True, platform="cuda")
    assert (other.hlo.platform, other.hlo.stage) == ("gpu", "lowered")
    assert other.invariant


@pytest.mark.tier("full")
@on_cpu
def test_what_the_audit_calls_invariant_is_so_in_the_compiled_program():
    """The two looks agree: forward and backward, in a loop, with a scatter, a convolution and random numbers."""

    def loss(p, x):
        image = lax.conv(x.reshape(-1, 1, 8, 8), p["k"], (1, 1), "SAME")
        h = jax.nn.gelu(image.reshape(len(x), -1) @ p["w"])
        h, _ = lax.scan(lambda c, _: (jnp.tanh(c @ p["v"]), None), h, None, length=2)
        h = h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
        return jnp.mean(jax.nn.logsumexp(h, -1) + p["e"][jnp.arange(len(x)) % 3].sum(-1))

    p = {"k": jnp.ones((2, 1, 3, 3)), "w": jnp.ones((128, 16)), "v": jnp.ones((16, 16)), "e": jnp.ones((3, 16))}
    step = jax.grad(loss)
    found = audit(bijax.invariant(step), p, X, compiled=True)
    assert found.invariant, found
    control = audit(step, p, X, compiled=True)
    assert control.variant
    assert control.hlo.variant


def test_text_and_json():
    found = audit(network, X, W, compiled=True)
    lines = str(found).splitlines()
    assert lines[0].endswith("FLOPs")
    assert lines[2].startswith("variant")
    assert lines[2].split()[1] == "dot_general"
    assert any(line.startswith("not invariant: ") for line in lines)
    record = json.loads(json.dumps(found.to_json()))
    assert record["hlo"]["findings"]
    assert record["operations"][0].keys() >= {"verdict", "primitive", "line", "evidence", "count", "flops", "share"}
    assert isinstance(found.hlo, hlo.Report)
    empty = audit(lambda x: x, X)
    assert empty.invariant
    assert str(empty).endswith("no operations")


def test_rich():
    console = pytest.importorskip("rich.console").Console(
        width=80, force_terminal=True, color_system="standard", no_color=False
    )
    with console.capture() as capture:
        console.print(audit(network, X, W))
    assert "\x1b[" in capture.get()
    assert "left to XLA" in capture.get()


def test_shapes_and_keywords_are_enough():
    shapes = [jax.ShapeDtypeStruct(a.shape, np.float32) for a in (X, W)]
    assert audit(network, *shapes).operations == audit(network, x=X, w=W).operations


@dataclasses.dataclass(eq=True)
class Unhashable:
    """A module that compares by its weights, and has a method that is named as one of a jitted function."""

    w: jax.Array

    def __call__(self, x):
        return x @ self.w

    def trace(self):
        raise NotImplementedError


def test_a_module_need_not_be_hashable():
    module = Unhashable(W)
    assert verdicts(audit(module, X), "dot_general") == {"variant"}
    assert audit(bijax.invariant(module), X).invariant
    module.w = module.w.astype(jnp.bfloat16)
    assert "bf16[64,32]" in audit(module, X.astype(jnp.bfloat16)).operations[0].shapes


def test_flax_jit():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    for jitted, options in (
        (nnx.jit(lambda m, x: m(x)), {}),
        (nnx.jit(lambda m, x, twice: m(x) * 2 if twice else m(x), static_argnames="twice"), {"twice": True}),
    ):
        assert verdicts(audit(jitted, model, X, platform="cpu", **options), "dot_general") == {"variant"}
        found = audit(bijax.invariant(jitted), model, X, compiled=True, **options)
        assert verdicts(found, "dot_general") == {"replaced"}
        assert found.invariant
        assert found.hlo.invariant


def test_wrong_arguments():
    with pytest.raises(TypeError, match="expected a function"):
        audit(3)
    with pytest.raises(ValueError, match="got 'tpu'"):
        audit(network, X, W, platform="tpu")
