"""Replaces equations by row programs where a kernel exists; see `_regions`."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, Var

from bijax.core.architecture import cuda_device, target_for
from bijax.lax.product_of_parts import ProductOfParts
from bijax.transform.fusion._equations import INLINED, in_order, inlined, needed
from bijax.transform.fusion._kinds import Labels, Region, is_variable
from bijax.transform.fusion._layout import Layout
from bijax.transform.fusion._probe import check_functions
from bijax.transform.fusion._products import PRODUCT, products_of
from bijax.transform.fusion._regions import Program
from bijax.transform.fusion._steps import late, used
from pallas_kernels.registry import runs_on
from pallas_kernels.row_program.program import COLUMN, REDUCTIONS, Operation, RowProgram, Step

Equation = Any

ROW_PROGRAM: Final = Primitive("bijax_row_program")
"""Replaces the equations of a region in a program being lowered."""
ROW_PROGRAM.multiple_results = True

_OPERATIONS: Final[dict[str, Operation]] = {
    "abs": "abs",
    "is_finite": "finite",
    "ge": "ge",
    "add": "add",
    "add_any": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "neg": "neg",
    "exp": "exp",
    "rsqrt": "rsqrt",
    "reduce_max": "max",
    "reduce_sum": "sum",
}
_ROUNDED: Final = frozenset({"add", "sub", "mul", "div", "exp", "sum"})
_SAME: Final = frozenset({"transpose", "broadcast_in_dim", "reshape", "stop_gradient"})


def has_row_programs() -> bool:
    """Returns whether the target GPU has kernels for row programs."""
    return runs_on("row_program", target_for("cuda"))


def with_row_programs(jaxpr: Any, wanted: Callable[[Equation], bool]) -> Any:
    """Returns a program with its regions replaced by row programs; the same program if it has no regions.

    Args:
        jaxpr: The program.
        wanted: Whether an equation should be made invariant and may be part of a region.
    """
    if not any(wanted(e) for e in jaxpr.eqns):
        return jaxpr
    equations = inlined(jaxpr.eqns)
    if not any(e.primitive.name in ("reduce_max", "reduce_sum") and wanted(e) for e in equations):
        return jaxpr
    if not has_row_programs():
        return jaxpr
    equations = needed(equations, jaxpr.outvars)
    program = Program(equations, jaxpr.outvars, [wanted(e) for e in equations])
    lies: dict[Any, Labels] = {}
    replaced: dict[int, Equation] = {}
    gone: set[int] = set()
    for region in program.regions():
        built = _Builder(program, region, lies).equation()
        if built is None:
            continue
        new, kept = built
        replaced[min(region.equations)] = new.pop(min(region.equations))
        replaced |= new
        gone |= region.equations - kept | {*new}
    if not replaced:
        return jaxpr
    if (device := cuda_device()) is not None:  # a program that is only lowered here runs elsewhere
        check_functions(device)
    left = [(i, e) for i, e in enumerate(equations) if i not in gone]
    return jaxpr.replace(eqns=in_order([*left, *replaced.items()]))


class _Builder:
    """Builds one equation from a region."""

    def __init__(self, program: Program, region: Region, lies: dict[Any, Labels]) -> None:
        self._program = program
        self._region = region
        self._lies = lies
        self._ids: dict[Any, int] = {}
        self._fresh = itertools.count()
        self._sparse: dict[int, int] = {}
        self._steps: list[Step] = []
        self._columns: list[Any] = []
        self._masks: list[Any] = []
        self._vectors: list[Any] = []
        self._numbers: list[Any] = []

    def equation(self) -> tuple[dict[int, Equation], set[int]] | None:
        """Returns new equations by index, and indices of equations that are still needed; None if it is not possible.

        The new ones are the region's equation at its first index, and products of its results at others.
        """
        region, equations = self._region, self._program.equations
        places = sorted(region.equations)
        self._give(places)
        if not self._columns:
            return None
        for at in places:
            self._step(equations[at])
        given = *self._columns, *self._masks, *self._vectors, *self._numbers
        inputs = {self._ids[v] for v in given}
        kept, made = set[int](), list[Any]()
        for v in self._program.results(region):
            kind = region.kinds[v]
            if self._ids[v] in inputs or kind.shared or (kind.wide and self._program.is_picked(v, region)):
                self._keep(v, kept, made)
            else:
                made.append(v)
        made = list(dict.fromkeys(made))
        results, totals = ([v for v in made if region.kinds[v].wide is wide] for wide in (True, False))
        self._steps = late(used(self._steps, [self._ids[v] for v in made]))
        layout = self._layout(results, totals)
        products = [self._products(v, layout) for v in results]
        program = RowProgram(
            columns=tuple(self._ids[v] for v in self._columns),
            masks=tuple(self._ids[v] for v in self._masks),
            vectors=tuple(self._ids[v] for v in self._vectors),
            numbers=tuple(self._ids[v] for v in self._numbers),
            steps=tuple(self._steps),
            results=tuple(self._ids[v] for v in results),
            dtypes=tuple(
                "bfloat16" if found else v.aval.dtype.name for v, found in zip(results, products, strict=True)
            ),
            parts=tuple(next(iter(found.values())).count if found else 1 for found in products),
            totals=tuple(self._ids[v] for v in totals),
        )
        wide = program.wide()
        reduced = [s.operands[0] for s in self._steps if s.operation in REDUCTIONS]
        if not results or not wide.issuperset((*program.results, *reduced)) or wide & {*program.totals}:
            return None
        if any(s.operation == "rsqrt" for s in self._steps) and any(v.aval.dtype == np.float32 for v in results):
            return None  # a gradient needs a value that XLA recomputes from 16 bits
        new, outvars = dict[int, Equation](), []
        for v, found in zip(results, products, strict=True):
            outvars.append(self._in_parts(v, found, new) if found else v)
        first = equations[places[0]]
        new[places[0]] = first.replace(
            invars=list(given),
            outvars=[*outvars, *totals],
            primitive=ROW_PROGRAM,
            params={"program": program, "layout": layout},
        )
        return new, kept

    def _products(self, v: Any, layout: Layout) -> dict[int, ProductOfParts]:
        """Returns the products that take a result as limbs; none if it is also needed whole."""
        if layout.rows != self._region.kinds[v].labels:
            return {}
        return products_of(v, self._program, self._program.fits.__getitem__)

    def _in_parts(self, v: Any, products: dict[int, ProductOfParts], new: dict[int, Equation]) -> Any:
        """Returns the variable of a result's limbs; adds its products to `new`."""
        count = next(iter(products.values())).count
        shape = count * math.prod(v.aval.shape[:-1]), v.aval.shape[-1]
        apart = Var(v.aval.update(shape=shape, dtype=np.dtype(jnp.bfloat16), weak_type=False))
        for at, product in products.items():
            eqn = self._program.equations[at]
            other = eqn.invars[1 if product.on_the_left else 0]
            new[at] = eqn.replace(invars=[apart, other], primitive=PRODUCT, params={"product": product})
        return apart

    def _give(self, places: Sequence[int]) -> None:
        """Numbers the values from outside."""
        made = {v for at in places for v in self._program.equations[at].outvars}
        for at in places:
            for v in self._program.equations[at].invars:
                if not is_variable(v) or self._program.constant(v) is not None or v in made or v in self._ids:
                    continue
                self._ids[v] = next(self._fresh)
                self._given(v).append(v)

    def _given(self, v: Any) -> list[Any]:
        """Returns the list that a value from outside belongs to."""
        kind = self._region.kinds[v]
        if kind.shared:
            return self._vectors
        if not kind.wide:
            return self._numbers
        return self._masks if v.aval.dtype == np.bool_ else self._columns

    def _operand(self, v: Any) -> int | float:
        value = self._program.constant(v)
        return self._ids[v] if value is None else value

    def _step(self, eqn: Equation) -> None:
        name, out = eqn.primitive.name, eqn.outvars[0]
        operands = [self._operand(v) for v in eqn.invars]
        if self._program.is_one(eqn):
            self._ids[out] = self._add("one", COLUMN, *operands[1:])
            self._sparse[self._ids[out]] = self._add("within", operands[1], float(self._region.columns), operands[2])
            return
        operation: Operation
        chosen = name == "max" and -math.inf in operands
        if chosen or name in _SAME or (name == "convert_element_type" and out.aval.dtype == np.float32):
            self._ids[out] = next(o for o in operands if isinstance(o, int))
            return
        if name == "convert_element_type":
            operation = "round"
        elif name == "max":
            operation = "larger"
        elif name in ("square", "integer_pow"):
            operation, operands = "mul", operands * 2
        elif name == "div" and isinstance(operands[1], float) and math.frexp(operands[1])[0] == 0.5:
            operation, operands = "mul", [operands[0], 1 / operands[1]]  # as XLA's compiler does for a power of two
        elif name == "select_n":
            operation, operands = "select", [operands[0], operands[2], operands[1]]
        elif name == "reduce_sum" and not self._region.kinds[eqn.invars[0]].wide:
            operation = "clear"
        elif name == "reduce_sum" and (one := self._one_of(operands[0])) is not None:
            operation, operands = "clear", [one]  # all other columns are zero
        else:
            operation = _OPERATIONS[name]
        self._ids[out] = self._add(operation, *operands)
        if operation in _ROUNDED and out.aval.dtype != np.float32:
            # 16 bits hold less than half of the digits: double rounding is exact.
            self._ids[out] = self._add("round", self._ids[out])
        if name == "neg" and (one := self._one_of(operands[0])) is not None:
            self._sparse[self._ids[out]] = self._add("neg", one)

    def _one_of(self, operand: float) -> int | None:
        """Returns the only nonzero number of columns that are otherwise zero, or become zero."""
        return self._sparse.get(operand) if isinstance(operand, int) else None

    def _add(self, operation: Operation, *operands: int | float) -> int:
        """Adds a step and returns the number of its value."""
        result = next(self._fresh)
        self._steps.append(Step(operation, result, operands))
        return result

    def _keep(self, v: Any, kept: set[int], made: list[Any]) -> None:
        """Keeps the equations that compute a value from outside values and from the reductions in `made`."""
        at = self._program.maker.get(v)
        if at is None or at not in self._region.equations or at in kept:
            return
        if self._program.equations[at].primitive.name in ("reduce_max", "reduce_sum"):
            made.append(v)
            return
        kept.add(at)
        for operand in self._program.equations[at].invars:
            if is_variable(operand):
                self._keep(operand, kept, made)

    def _layout(self, results: Sequence[Any], totals: Sequence[Any]) -> Layout:
        kinds = self._region.kinds
        columns = []
        for v in self._columns:
            labels = kinds[v].labels
            columns.append((labels, tuple(labels[d] for d in self._lies.get(v, range(len(labels))))))
        found = (self._order_in_product(v, kinds[v].labels) for v in results)
        rows = next((order for order in found if order is not None), columns[0][1])
        for v in results:
            self._lies[v] = tuple(kinds[v].labels.index(label) for label in rows)
        return Layout(
            self._region.sizes,
            rows,
            tuple(columns),
            tuple((kinds[v].labels, self._differs(v, kinds[v].labels)) for v in self._masks),
            tuple(self._complete(v) for v in self._numbers),
            tuple((self._complete(v), tuple(v.aval.shape), v.aval.dtype.name) for v in (*results, *totals)),
        )

    def _complete(self, v: Any) -> Labels:
        """Returns the labels of a value with those of its missing dimensions of 1."""
        labels = self._region.kinds[v].labels
        return (*labels, *(i for i in range(len(self._region.sizes)) if i not in labels))

    def _order_in_product(self, v: Any, labels: Labels) -> Labels | None:
        """Returns the order in which a product takes the rows of a value, or of its transpose."""
        for at in self._program.users.get(v, ()):
            eqn = self._program.equations[at]
            if eqn.primitive.name == "transpose" and eqn.params["permutation"][-1] == len(labels):
                order = tuple(labels[d] for d in eqn.params["permutation"][:-1])
                if (found := self._order_in_product(eqn.outvars[0], order)) is not None:
                    return found
            elif eqn.primitive.name == "dot_general":
                batch = eqn.params["dimension_numbers"][1][0 if eqn.invars[0] is v else 1]
                if len(labels) not in batch:
                    others = (d for d in range(len(labels)) if d not in batch)
                    return tuple(labels[d] for d in (*batch, *others))
        return None

    def _differs(self, v: Any, labels: Labels) -> Labels:
        varies = _varying(v, self._program, {})
        return tuple(label for d, label in enumerate(labels) if d in varies)


def _varying(v: Any, program: Program, known: dict[Any, frozenset[int]]) -> frozenset[int]:
    """Returns the dimensions along which a value may differ; `known` caches those of others."""
    if not is_variable(v):
        return frozenset()
    if v not in known:
        known[v] = _varying_result(v, program, known)
    return known[v]


def _varying_result(v: Any, program: Program, known: dict[Any, frozenset[int]]) -> frozenset[int]:
    every = frozenset(d for d, n in enumerate(v.aval.shape) if n > 1)
    if v not in program.maker:
        return every
    eqn = program.equations[program.maker[v]]
    name, rank = eqn.primitive.name, len(v.aval.shape)
    if name == "iota":
        return frozenset({eqn.params["dimension"]})
    if name == "broadcast_in_dim":
        inner = _varying(eqn.invars[0], program, known)
        return frozenset(int(eqn.params["broadcast_dimensions"][d]) for d in inner)
    if name == "transpose":
        inner = _varying(eqn.invars[0], program, known)
        return frozenset(d for d, source in enumerate(eqn.params["permutation"]) if source in inner)
    if name in INLINED and name != "reshape":
        inputs = [x for x in eqn.invars if is_variable(x) and len(x.aval.shape) > 0]
        if all(len(x.aval.shape) == rank for x in inputs):
            return frozenset[int]().union(*(_varying(x, program, known) for x in inputs))
    return every
