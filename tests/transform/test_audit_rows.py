"""The rows of a batch, followed through programs of which it is known whether they meet."""

import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

import bijax
from bijax.hlo._frames import short_line
from bijax.inspect import rows_report as all_rules  # noqa: F401  registers the rules
from bijax.testing import batch_variance_report
from bijax.transform.rows.flow import RULES
from bijax.transform.rows.layout import Layout, along, joined, layout, reshaped, sliced
from bijax.transform.rules import registry
from flax_layers.linen import MoE
from flax_layers.routing import Routing
from tests.layers import small_llama
from tests.transform.place_programs import BY_ROW, PLACES, by_row, channels
from tests.transform.row_programs_known import APART, MIXES, PROGRAMS, SUMS, Program, X

ROWS = jnp.linspace(-1, 1, 24).reshape(4, 6)


def report(program: Program) -> Any:
    return bijax.audit(program.function, *program.arguments, batch_axes=program.axes).rows


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_programs(program: Program) -> None:
    rows = report(program)
    assert rows.verdict == program.verdict
    found = {m.primitive for m in rows.meetings if m.effect == program.verdict}
    assert found >= set(program.where)
    assert (found == set()) == (program.verdict == APART)
    assert all("row_programs_known.py:" in m.line for m in rows.meetings)


@pytest.mark.parametrize("name", PLACES)
def test_elements_for_each_place(name: str) -> None:
    """They are followed where they do not come from positions: the row then depends on its place."""
    made = PLACES[name]
    at_rows = bijax.audit(lambda x: x * made(4)[:, None], X, batch_axes=0).rows
    in_rows = bijax.audit(lambda x: x * made(4), X[:, :4], batch_axes=0).rows
    assert [r.verdict for r in (at_rows, in_rows) if r] == [MIXES, APART]
    values = np.asarray(made(4))
    assert (values != values[0]).any()


@pytest.mark.parametrize("name", BY_ROW)
def test_loops_over_rows(name: str) -> None:
    """What a loop computes from a number of each row belongs to that row."""
    found = bijax.audit(lambda x: by_row(BY_ROW[name], x), X, batch_axes=0).rows
    together = bijax.audit(lambda x: by_row(BY_ROW[name], x).sum(0), X, batch_axes=0).rows
    assert [r.verdict for r in (found, together) if r] == [APART, SUMS]


def test_reshapes_that_transpose() -> None:
    """`jax.lax.reshape` with `dimensions`."""
    square = jnp.ones((4, 4))
    columns = bijax.audit(lambda x: x * lax.reshape(jnp.arange(4.0)[:, None], (4, 1), (1, 0)), X, batch_axes=0).rows
    turned = bijax.audit(lambda x: x * lax.reshape(x, (4, 4), (1, 0)), square, batch_axes=0).rows
    back = bijax.audit(lambda x: x * lax.reshape(x.T, (4, 4), (1, 0)), square, batch_axes=0).rows
    assert [r.verdict for r in (columns, turned, back) if r] == [MIXES, MIXES, APART]


def test_filters_of_rows() -> None:
    """Each row is a channel: with a filter of its own it depends on its place."""
    for filters, verdict in ((jnp.arange(12.0).reshape(4, 3), MIXES), (jnp.ones((4, 3)), APART)):
        found = bijax.audit(lambda x, filters=filters: channels(x, filters), X, batch_axes=0).rows
        assert found is not None
        assert found.verdict == verdict


def test_counted_rows() -> None:
    """What a loop over rows counts is their place, what it adds over them a sum."""
    counted = bijax.audit(lambda x: lax.scan(lambda i, row: (i + 1, row * i), 0, x)[1], X, batch_axes=0).rows
    summed = bijax.audit(lambda x: lax.scan(lambda c, row: (c + row, None), X[0], x)[0], X, batch_axes=0).rows
    before = bijax.audit(lambda x: x * lax.scan(lambda c, row: (c + row, c), X[0], x)[1], X, batch_axes=0).rows
    systems = bijax.audit(jax.vmap(lax.linalg.tridiagonal_solve), *(X,) * 3, X[..., None], batch_axes=0).rows
    assert [r.verdict for r in (counted, summed, before, systems) if r] == [MIXES, SUMS, MIXES, APART]


def test_verdicts_are_those_of_a_run() -> None:
    """A control: rows differ beyond rounding where they mix, and not where they are apart."""
    names = ("mean of the batch", "noise from one key", "until all rows end", "sorted rows", "until each row ends")
    for program in PROGRAMS:
        if program.name in names:
            run = batch_variance_report(program.function, ROWS, batch_sizes=(3,), neighbours=("given",), modes=("jit",))
            assert run.too_large_for_rounding == (program.verdict == MIXES), program.name


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Conv(4, (3, 3))(x))
        x = linen.avg_pool(jax.nn.relu(x), (2, 2), (2, 2))
        return linen.Dense(5)(linen.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1)))


def test_batch_norm_and_dropout_of_linen() -> None:
    net, x = Net(), jnp.ones((4, 8, 8, 3))
    variables = jax.eval_shape(lambda: net.init(jax.random.key(0), x, False))
    evaluated = bijax.audit(lambda v, x: net.apply(v, x, False), variables, x, batch_axes=(None, 0))
    assert evaluated.rows is not None
    assert evaluated.rows.verdict == APART

    def train(v: Any, x: jax.Array) -> Any:
        return net.apply(v, x, True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})

    trained = bijax.audit(bijax.invariant(train), variables, x, batch_axes=(None, 0))
    assert trained.rows is not None
    assert trained.rows.verdict == MIXES
    assert {m.primitive for m in trained.rows.mixing} == {"reduce_sum", "random_bits"}
    assert not trained.variant
    assert not trained.invariant


def test_attention_and_batch_norm_of_nnx() -> None:
    rngs = nnx.Rngs(0)
    attention, norm = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
    x = jnp.ones((4, 5, 8))
    for model, verdict in (((attention, norm), MIXES), ((attention, None), APART)):
        found = bijax.audit(
            lambda a, n, x: (lambda y: n(y) if n else y)(a(x, mask=nnx.make_causal_mask(x[..., 0]))),
            *model,
            x,
            batch_axes=(None, None, 0),
        )
        assert found.rows is not None
        assert found.rows.verdict == verdict


def test_experts_of_the_library() -> None:
    layer, x = MoE(8, routing=Routing(num_experts=3, topk=2)), jnp.ones((4, 5, 4))
    variables = jax.eval_shape(lambda: layer.init(jax.random.key(0), x))
    found = bijax.audit(layer.apply, variables, x, batch_axes=(None, 0)).rows
    assert found is not None
    assert found.verdict == APART


@pytest.mark.tier("full")
def test_models_of_the_library() -> None:
    model, tokens = small_llama.model(), jnp.zeros((4, 8), int)
    cache = small_llama.contiguous(model, 4)
    forward = bijax.audit(lambda m, t: m(t), model, tokens, batch_axes=(None, 0)).rows
    step = bijax.audit(
        lambda m, t, c: m.extend(t, c, lengths=jnp.full(4, 8)), model, tokens, cache, batch_axes=(None, 0, 0)
    ).rows
    assert [r.verdict for r in (forward, step) if r] == [APART] * 2


def test_lines_and_json() -> None:
    def centred(x: jax.Array) -> jax.Array:
        return x - x.mean(0)

    found = bijax.audit(bijax.invariant(centred), X, batch_axes=0)
    line = centred.__code__.co_firstlineno + 1
    assert found.rows is not None
    assert [m.line.endswith(f"test_audit_rows.py:{line}") for m in found.rows.mixing] == [True]
    assert json.loads(json.dumps(found.to_json()))["rows"]["verdict"] == MIXES
    assert "mixes rows  reduce_sum" in str(found)
    assert bijax.audit(centred, X).rows is None


def test_arguments_by_name_and_in_trees() -> None:
    def total(x: Any, *, y: Any) -> Any:
        return x["a"] + y

    named = bijax.audit(total, {"a": X}, y=X, batch_axes=0).rows
    assert named is not None
    assert named.verdict == APART
    alone = bijax.audit(total, {"a": X, "b": 1.0}, y=X, batch_axes=({"a": 0, "b": None},)).rows
    assert alone is not None
    assert alone.verdict == MIXES  # y has no rows, and varies along them


@pytest.mark.parametrize(
    ("args", "axes", "error", "message"),
    [
        ((jnp.ones(3), X), 0, ValueError, r"argument 0 has 3 rows, argument 1 has 4 rows.*None"),
        (({"a": jnp.ones(3), "b": jnp.ones(5)}, X), 0, ValueError, r"\(batch_axes=\(None, 0\)\?\)"),
        ((X, X), (0,), ValueError, "one entry per argument, 2; got 1"),
        ((X,), "0", TypeError, "expected an int, None, or a tuple"),
        ((X,), True, TypeError, "expected an int, None, or a tuple"),
        ((X,), (None,), ValueError, "at least one array with a batch axis"),
        ((X[:1],), 0, ValueError, "at least 2 rows .* got 1. Pass jax.ShapeDtypeStruct"),
        ((X,), 2, ValueError, r"expected an axis of argument 0, which has the shape \(4, 6\); got 2"),
    ],
)
def test_wrong_axes(args: tuple[Any, ...], axes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bijax.audit(lambda *args: args[-1], *args, batch_axes=axes)


def test_static_arguments_must_be_bound() -> None:
    function = jax.jit(lambda n, x: x * n, static_argnums=0)
    with pytest.raises(ValueError, match=r"functools\.partial"):
        bijax.audit(function, 3, X, batch_axes=(None, 0))


def test_every_primitive_with_a_rule_is_followed_or_named_here() -> None:
    """A new primitive of JAX must get a rule of its own, or be unknown on purpose."""
    unknown = set(
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_start all_to_all all_to_all_done"
        " all_to_all_start bijax_triton_launch call_exported cudnn_fusion custom_partitioning"
        " dimension_size dot_product_attention_bwd operations"
        " dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper"
        " dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd"
        " dot_product_attention_fwd_wrapper ffi_call io_callback mosaic_gpu_p pallas_call pbroadcast_dynamic ppermute"
        " ppermute_done ppermute_start pure_callback ragged_all_to_all reduce_scatter relayout scaled_dot stage"
        " scaled_matmul scaled_matmul_wrapper scatter_apply tile tpu_custom_call triton_kernel_call"
        " broadcast_to preduced reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p".split()
    )
    programs = {n for n in registry.named() if registry.is_program(n)}
    found = {n.partition(" ")[0] for n in registry.named()} - set(RULES) - programs
    assert found == unknown


def rows_of(array: np.ndarray, rows: Layout, batch: np.ndarray) -> bool:
    """Whether each element belongs to the row that a layout gives."""
    for index in np.ndindex(array.shape):
        number = rows.first
        for f in rows.factors:
            number += index[f.axis] // f.stride % f.size * f.weight
        if array[index] != batch[number % len(batch)]:
            return False
    return True


def test_layouts_are_those_of_arrays() -> None:
    """A sweep over reshapes and slices: each element is of the row that the layout says."""
    batch = np.arange(8)
    followed = 0
    start = np.broadcast_to(batch[:, None], (8, 6))
    for shape in ((8, 6), (48,), (2, 4, 6), (4, 12), (8, 3, 2), (2, 24), (16, 3), (6, 8), (3, 16)):
        rows = reshaped(along(0, 8), (8, 6), shape)
        if rows is None:
            continue
        array = start.reshape(shape)
        assert rows_of(array, rows, batch)
        for axis, length in enumerate(shape):
            for low, high, step in ((0, length // 2, 1), (1, length, 1), (0, length, 2), (length // 2, length, 1)):
                cut = sliced(rows, axis, low, high, step, length)
                if cut is not None:
                    part = np.take(array, np.arange(low, high, step), axis)
                    assert rows_of(part, cut, batch), (shape, axis, low, high, step)
                    followed += 1
    assert followed > 40
    assert reshaped(along(0, 8), (8, 6), (3, 16)) is None  # the control: rows are cut apart


def test_joined_layouts() -> None:
    first, second = sliced(along(0, 8), 0, 0, 5, 1, 8), sliced(along(0, 8), 0, 5, 8, 1, 8)
    assert joined([(first, 5), (second, 3)], 0) == along(0, 8)
    assert joined([(second, 3), (first, 5)], 0) is None
    doubled = joined([(along(0, 8), 8), (along(0, 8), 8)], 0)
    assert doubled is not None
    assert sliced(doubled, 0, 8, 16, 1, 16) == along(0, 8)
    assert layout(()) == Layout(())


def test_html_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bijax.audit(lambda x: x - x.mean(0), X, batch_axes=0)
    html = found._repr_html_()
    assert html.count("<tr") == 2 + len([o for o in found.operations if o.verdict == "variant"]) + 2
    assert "<td" in html
    assert "mixes rows: a row depends" in html

    class Shell:  # as IPython names the files of cells
        compile = type(
            "Compiler",
            (),
            {"format_code_name": staticmethod(lambda f: ("Cell", "In[5]") if f == "/tmp/1.py" else None)},
        )

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=Shell))
    assert short_line("/tmp/1.py:14") == "In[5]:14"
    assert short_line("~/tmp/1.py:14") == "~In[5]:14"
    assert short_line("/tmp/2.py:14") == "2.py:14"
    assert short_line("") == ""
