"""Leaves the rows of an invariant program where they are, if XLA partitions it and its rows are cut.

Where XLA partitions a program, the values of invariant operations are gathered (`whole_values`), and every device
computes everything. But a row of an invariant program depends on itself and on the weights alone: if the arguments are
cut along their batch axis, each device may compute the rows that it has. `bijax.transform.rows` says which values hold
rows, and that no operation on the way mixes them or reads their position. Runs of such operations are put under
`jax.shard_map`; arrays that belong to no row are whole on every device. Loops and branches are such operations if all
of their programs are. Everything else is gathered as before: sums over the batch, and what nothing is known of.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from bijax.core.partitioning import RETYPED
from bijax.transform.hook.arguments_cut import Cut, cuts_of
from bijax.transform.hook.whole_values import UNMARKED
from bijax.transform.rows import control, elementwise, indexing, library, moves, products, reductions  # noqa: F401
from bijax.transform.rows.flow import Flow, unknown_array
from bijax.transform.rows.inlined import IsMeant
from bijax.transform.rows.layout import along
from bijax.transform.rows.local import elements
from bijax.transform.rows.programs import Rows, RowsProgram
from bijax.transform.rows.value import Value
from pallas_kernels.runtime.own_settings import without_mesh


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
    return max((_Rows(jaxpr, platform, is_meant, batch) for batch in _batches(cuts)), key=lambda rows: rows.elements)


def _batches(cuts: Mapping[Any, Cut]) -> list[dict[Any, Cut]]:
    """Returns the arguments by what may be their batch: those with as many rows, cut over the same devices."""
    batches: dict[Any, dict[Any, Cut]] = {}
    for variable, cut in cuts.items():
        key = variable.aval.shape[cut.dimension], cut.mesh, cut.names
        batches.setdefault(key, {})[variable] = cut
    return list(batches.values())


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
        self._is_meant, self._batch = is_meant, batch
        variable, self._cut = next(iter(batch.items()))
        self._number = variable.aval.shape[self._cut.dimension]
        rows = Rows(self._number, self._cut.count, Flow(platform), is_meant)
        self._program = RowsProgram(jaxpr, [self._argument(v) for v in jaxpr.invars], rows)
        self._jaxpr, self._parameters = self._program.jaxpr, self._program.parameters
        computing = (e for e in self._jaxpr.eqns if id(e) in self._parameters and e.primitive.name not in UNMARKED)
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
                found += [(eqn, v) for v in operands if not (local and self._program.axis(v) is not None)]
        return found

    def _argument(self, variable: Any) -> Value:
        cut = self._batch.get(variable)
        return unknown_array(variable.aval) if cut is None else Value(along(cut.dimension, self._number))

    def grouped(self) -> Any:
        """Returns the program with runs of operations on rows under `jax.shard_map`."""
        equations: list[Any] = []
        group: list[Any] = []
        waiting: list[Any] = []  # other equations that need its results: a group goes on until it needs theirs
        made: set[Any] = set()
        late: set[Any] = set()

        def close() -> None:
            if any(eqn.primitive.name not in UNMARKED for eqn in group):
                equations.extend(self._mapped(group))
            else:
                equations.extend(group)
            equations.extend(waiting)
            for collected in (group, waiting, made, late):
                collected.clear()

        for eqn in self._jaxpr.eqns:
            operands = [v for v in eqn.invars if isinstance(v, Var)]
            if id(eqn) in self._parameters:
                if any(v in late for v in operands):
                    close()
                group.append(eqn)
                made.update(eqn.outvars)
            elif eqn.effects:
                close()
                equations.append(eqn)
            elif any(v in made or v in late for v in operands):
                waiting.append(eqn)
                late.update(eqn.outvars)
            else:
                equations.append(eqn)
        close()
        return self._jaxpr.replace(eqns=equations)

    def _mapped(self, group: list[Any]) -> list[Any]:
        """Returns one equation for a run of them, with the changes of types before and after it."""
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
                known |= zip(eqn.outvars, self._program.compute(eqn, operands), strict=True)
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
        invars, outvars = [self._typed(v) for v in given], [self._typed(v) for v in results]
        eqn = eqn.replace(invars=invars, outvars=outvars)
        before, after = zip(given, invars, strict=True), zip(outvars, results, strict=True)
        return [*self._retyped(eqn, before), eqn, *self._retyped(eqn, after)]

    def _retyped(self, eqn: Any, pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
        """Returns equations like another one that make variables of others, where these are not the same."""
        return [
            eqn.replace(
                primitive=RETYPED,
                invars=[old],
                outvars=[new],
                params={"type": new.aval.update(sharding=self._sharding(new))},
                effects=frozenset(),
            )
            for old, new in pairs
            if old is not new
        ]

    def _typed(self, v: Any) -> Any:
        """Returns a variable whose type says how `jax.shard_map` cuts the array, which it takes from types."""
        mesh = self._sharding(v).mesh
        explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit}
        if not explicit:
            return v
        names = tuple(name for name in self._cut.names if name in explicit) or None
        rows = self._program.axis(v)
        axes = [names if axis == rows else None for axis in range(v.aval.ndim)]
        wanted = NamedSharding(mesh, PartitionSpec(*axes))
        return v if self._sharding(v) == wanted else Var(v.aval.update(sharding=wanted))

    def _sharding(self, v: Any) -> Any:
        """Returns how the type of a variable says that it is cut: without a mesh not at all, on that of the batch."""
        own, batch = v.aval.sharding, next(iter(self._batch)).aval.sharding.mesh
        return NamedSharding(batch, PartitionSpec(*(None,) * v.aval.ndim)) if own.mesh.empty else own

    def _spec(self, v: Any) -> PartitionSpec:
        axis = self._program.axis(v)
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, self._cut.names)
