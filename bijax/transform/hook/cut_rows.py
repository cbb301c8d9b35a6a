"""Leaves the rows of an invariant program where they are, if XLA partitions it and its rows are cut.

Where XLA partitions a program, the values of invariant operations are gathered (`whole_values`), and every device
computes everything. But a row of an invariant program depends on itself and on the weights alone: if the arguments are
cut along their batch axis, each device may compute the rows that it has. `bijax.transform.rows` says which values hold
rows, and that no operation on the way mixes them or reads their position. Runs of such operations are put under
`jax.shard_map`; arrays that belong to no row are whole on every device. Everything else is gathered as before: sums
over the batch, loops, branches, and operations of which nothing is known.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal, Var
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from bijax.core.explicit_axes import is_cut
from bijax.transform.hook.arguments_cut import Cut, cuts_of
from bijax.transform.hook.whole_values import UNMARKED
from bijax.transform.rows import control, elementwise, indexing, library, moves, products, reductions  # noqa: F401
from bijax.transform.rows.flow import Flow, unknown_array
from bijax.transform.rows.layout import along
from bijax.transform.rows.local import elements, local_call, local_parameters, rows_along
from bijax.transform.rows.value import Value
from bijax.transform.rules.equations import line_of
from pallas_kernels.runtime.own_settings import without_mesh

IsMeant = Callable[[Any], bool]

_CALLS: Final = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
}
"""Operations that call a program, and the parameter that holds it."""


def with_rows_left(ctx: Any, jaxpr: Any, is_meant: IsMeant) -> Any:
    """Returns a program for lowering in which runs of operations on rows are under `jax.shard_map`.

    Args:
        ctx: Context of the module.
        jaxpr: A program. Only that of the whole module is changed, whose arguments say how they are cut.
        is_meant: Whether an equation should be made invariant.
    """
    cuts = cuts_of(ctx.module, jaxpr.invars)
    if not cuts:
        return jaxpr
    rows = _rows_of(jaxpr, ctx.platforms[0], is_meant, cuts)
    return rows.grouped() if rows.elements else jaxpr


def gathering(jaxpr: Any, platform: str, is_meant: IsMeant, cuts: Mapping[Any, Cut]) -> list[tuple[Any, Any]]:
    """Returns the invariant operations for which an array that is cut is gathered, with the array's variable.

    Args:
        jaxpr: The program.
        platform: What it is lowered for.
        is_meant: Whether an equation should be made invariant.
        cuts: How its arguments are cut.
    """
    return _rows_of(jaxpr, platform, is_meant, cuts).gathered(cuts)


def _rows_of(jaxpr: Any, platform: str, is_meant: IsMeant, cuts: Mapping[Any, Cut]) -> "_Rows":
    """Returns where the rows are, for the batch with which most is computed on the rows of one device."""
    flat = jaxpr.replace(eqns=list(_inlined(jaxpr.eqns, is_meant, {})))
    return max((_Rows(flat, platform, is_meant, batch) for batch in _batches(cuts)), key=lambda rows: rows.elements)


def _batches(cuts: Mapping[Any, Cut]) -> list[dict[Any, Cut]]:
    """Returns the arguments by what may be their batch: those with as many rows, cut over the same devices."""
    batches: dict[Any, dict[Any, Cut]] = {}
    for variable, cut in cuts.items():
        key = variable.aval.shape[cut.dimension], cut.mesh, cut.names
        batches.setdefault(key, {})[variable] = cut
    return list(batches.values())


def _inlined(eqns: Any, is_meant: IsMeant, names: Mapping[Any, Any], caller: Any = None) -> Iterator[Any]:
    """Yields equations under other names, and in place of calls of functions the equations of these.

    Args:
        eqns: The equations of a program.
        is_meant: Whether an equation should be made invariant.
        names: The new names of its variables; those that are missing keep theirs.
        caller: The call of the program. Its line is that of equations without one: JAX traces a function once for all
            its callers.
    """

    def renamed(v: Any) -> Any:
        return v if isinstance(v, Literal) else names.get(v, v)

    for given in eqns:
        eqn = given
        if caller is not None and not line_of(eqn):
            eqn = eqn.replace(source_info=caller.source_info)
        operands, results = [renamed(v) for v in eqn.invars], [renamed(v) for v in eqn.outvars]
        program = _called(eqn, is_meant)
        if program is None:
            yield eqn.replace(invars=operands, outvars=results)
            continue
        inner = dict(zip(program.invars, operands, strict=True))
        inner |= {v: Var(v.aval) for called in program.eqns for v in called.outvars}
        copied = []
        for v, result in zip(program.outvars, results, strict=True):
            if isinstance(v, Literal) or v in program.invars or inner[v] in results:
                copied.append((v, result))
            else:
                inner[v] = result
        yield from _inlined(program.eqns, is_meant, inner, eqn)
        for v, result in copied:
            operand = v if isinstance(v, Literal) else inner[v]
            yield eqn.replace(
                primitive=jax.lax.copy_p, invars=[operand], outvars=[result], params={}, effects=frozenset()
            )


def _called(eqn: Any, is_meant: IsMeant) -> Any:
    """Returns the program of a function that an equation calls, if all of it should be made invariant."""
    key = _CALLS.get(eqn.primitive.name)
    program = eqn.params.get(key) if key else None
    if program is None or program.consts or eqn.effects or eqn.ctx.compute_type is not None or not is_meant(eqn):
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(sharding is not _no_sharding() for sharding in shardings):
        return None
    return program.jaxpr if all(is_meant(inner) for inner in program.jaxpr.eqns) else None


@functools.cache
def _no_sharding() -> Any:
    """Returns what stands for the sharding of an argument of `jax.jit` for which none was given."""
    with without_mesh():
        (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).jaxpr.eqns
    return eqn.params["in_shardings"][0]


class _Rows:
    """Where the rows of a batch are in a program.

    Args:
        jaxpr: The program.
        platform: What it is lowered for.
        is_meant: Whether an equation should be made invariant.
        batch: The arguments that hold rows, and how they are cut.

    Attributes:
        elements: Elements that operations on rows compute: what would be computed by every device.
    """

    def __init__(self, jaxpr: Any, platform: str, is_meant: IsMeant, batch: Mapping[Any, Cut]) -> None:
        self._jaxpr, self._is_meant, self._batch = jaxpr, is_meant, batch
        variable, self._cut = next(iter(batch.items()))
        self._rows = variable.aval.shape[self._cut.dimension]
        values = [self._argument(v) for v in jaxpr.invars]
        self._known: dict[Any, Value] = Flow(platform).values(jaxpr, values)
        self._parameters = {id(eqn): found for eqn in jaxpr.eqns if (found := self._local(eqn)) is not None}
        computing = (e for e in jaxpr.eqns if id(e) in self._parameters and e.primitive.name not in UNMARKED)
        self.elements = sum(map(elements, computing))

    def gathered(self, cuts: Mapping[Any, Cut]) -> list[tuple[Any, Any]]:
        """Returns the equations that need an array whole which is cut, and the array."""
        found, cut = [], set(cuts)
        for eqn in self._jaxpr.eqns:
            operands = dict.fromkeys(v for v in eqn.invars if isinstance(v, Var) and v in cut)
            local = self.elements > 0 and id(eqn) in self._parameters
            if local:
                cut.update(eqn.outvars)
            elif eqn.primitive.name == "optimization_barrier":
                cut.update(result for v, result in zip(eqn.invars, eqn.outvars, strict=True) if v in operands)
                continue
            if self._is_meant(eqn) and eqn.primitive.name not in UNMARKED:
                found += [(eqn, v) for v in operands if not (local and self._axis(v) is not None)]
        return found

    def _argument(self, variable: Any) -> Value:
        cut = self._batch.get(variable)
        return unknown_array(variable.aval) if cut is None else Value(along(cut.dimension, self._rows))

    def _axis(self, v: Any) -> int | None:
        """Returns the axis of a variable that holds the rows."""
        value = None if isinstance(v, Literal) else self._known.get(v)
        return None if value is None else rows_along(value, v.aval.shape, self._rows)

    def _has_rows(self, v: Any) -> bool:
        return not isinstance(v, Literal) and v in self._known and self._known[v].rows is not None

    def _local(self, eqn: Any) -> Any:
        """Returns the parameters of an equation for the rows of one device; None if it is not computed so."""
        if not self._is_meant(eqn) or eqn.effects or eqn.ctx.compute_type is not None:
            return None
        arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        if not all(isinstance(a, jax.core.ShapedArray) for a in arrays):
            return None
        if any(jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) for a in arrays):
            return None
        operands, results = [self._axis(v) for v in eqn.invars], [self._axis(v) for v in eqn.outvars]
        lost = any(
            (self._has_rows(v) or is_cut(getattr(v.aval, "sharding", None))) and axis is None
            for v, axis in zip(eqn.invars, operands, strict=True)
        )
        if lost or all(axis is None for axis in operands) or any(axis is None for axis in results):
            return None
        return local_parameters(eqn, operands, [axis for axis in results if axis is not None], self._cut.count)

    def grouped(self) -> Any:
        """Returns the program with runs of operations on rows under `jax.shard_map`."""
        equations: list[Any] = []
        group: list[Any] = []
        made: set[Any] = set()

        def close() -> None:
            if any(eqn.primitive.name not in UNMARKED for eqn in group):
                equations.append(self._mapped(group))
            else:
                equations.extend(group)
            group.clear()
            made.clear()

        for eqn in self._jaxpr.eqns:
            if id(eqn) in self._parameters:
                group.append(eqn)
                made.update(eqn.outvars)
                continue
            if eqn.effects or any(v in made for v in eqn.invars if isinstance(v, Var)):
                close()
            equations.append(eqn)
        close()
        return self._jaxpr.replace(eqns=equations)

    def _mapped(self, group: list[Any]) -> Any:
        """Returns one equation for a run of them."""
        made = {v for eqn in group for v in eqn.outvars}
        inside = {id(eqn) for eqn in group}
        others = [v for eqn in self._jaxpr.eqns if id(eqn) not in inside for v in eqn.invars]
        wanted = {v for v in (*others, *self._jaxpr.outvars) if isinstance(v, Var)}
        operands = (v for eqn in group for v in eqn.invars if isinstance(v, Var) and v not in made)
        given: list[Any] = list(dict.fromkeys(operands))
        results = [v for eqn in group for v in eqn.outvars if v in wanted]
        equations = list(group)

        def run(*arrays: jax.Array) -> list[jax.Array]:
            known = dict(zip(given, arrays, strict=True))
            for eqn in equations:
                operands = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
                axis = cast(int, self._axis(eqn.outvars[0]))
                size = eqn.outvars[0].aval.shape[axis] // self._cut.count
                with set_xla_metadata(**(eqn.ctx.xla_metadata or {})):
                    found = local_call(eqn, self._parameters[id(eqn)], operands, axis, size)
                known |= zip(eqn.outvars, found, strict=True)
            return [known[v] for v in results]

        sizes, names = zip(*((size, name) for name, size in self._cut.mesh), strict=True)
        mapped = jax.shard_map(
            run,
            mesh=AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names)),
            in_specs=tuple(self._spec(v) for v in given),
            out_specs=[self._spec(v) for v in results],
            check_vma=False,
        )
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in given]
        with without_mesh():  # the caller's mesh may have axes of another type
            (eqn,) = jax.make_jaxpr(mapped)(*shapes).jaxpr.eqns
        return eqn.replace(invars=given, outvars=results)

    def _spec(self, v: Any) -> PartitionSpec:
        axis = self._axis(v)
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, self._cut.names)
