"""Finds row regions: element-wise operations and reductions of the last dimension that can be one kernel.

XLA:GPU splits a softmax or its gradient, written as separate operations, into a pass per reduction and one after it,
each of which reads a matrix of scores. On a Hopper GPU one kernel computes all of it, with the same bits: it is a
schedule, so it may apply to a forward pass and not to the gradient, or to one row length and not to another (but for
any number of rows: a version of XLA with another exponential must not make bits depend on the batch).

A region grows from a reduction along the operations before and after it, up to other kinds of operations. It is
dropped if something between two of its operations is outside, since one kernel cannot run both before and after it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from bijax.transform.fusion._kinds import (
    FLOATS,
    TESTS,
    VECTOR,
    Kind,
    Region,
    arranged,
    is_variable,
    transposed,
    types_fit,
)
from bijax.transform.fusion._ones import reads_one, writes_one

Equation = Any

MOST_COLUMNS: Final = 1 << 18
"""Columns of a row, at most: blocks of a cluster share the longest rows. Column indices are exact in float32."""

_LEAST_COLUMNS: Final = 128
_WHOLE: Final = 8  # columns, so that 16-bit rows are multiples of 16 bytes

_ON_BOTH: Final = frozenset(("add", "sub", "mul", "div", "neg", "square", "integer_pow", "convert_element_type"))
_ON_VECTORS: Final = _ON_BOTH - {"div"} | {"broadcast_in_dim", "reshape"}
_ON_NUMBERS: Final = _ON_BOTH | TESTS | {"abs", "add_any", "max", "rsqrt", "select_n", "stop_gradient"}
_ON_COLUMNS: Final = _ON_BOTH | {"add_any", "exp", "select_n"}
NAMES: Final = _ON_NUMBERS | _ON_COLUMNS | {"broadcast_in_dim", "reshape", "transpose", "reduce_max", "reduce_sum"}
"""Operations of regions, apart from scatters that write one number into each row."""

MASKING: Final = frozenset({"iota", "and", "or", "not", "ge", "gt", "le", "lt", "eq", "ne"})
"""Operations of masks: they stay outside, before everything else."""


class Program:
    """A program that is searched for regions.

    Attributes:
        equations: Its equations.
        outvars: Its results.
        fits: Whether an equation should be made invariant, and may be part of a region.
    """

    def __init__(self, equations: Sequence[Equation], outvars: Sequence[Any], fits: Sequence[bool]) -> None:
        self.equations = equations
        self.outvars = {v for v in outvars if is_variable(v)}
        self.fits = fits
        self.maker: dict[Any, int] = {}
        self.users: dict[Any, list[int]] = {}
        self._constants: dict[Any, float] = {}
        self._levels: list[int] = []
        self._waiting_for_none: set[Any] = set()
        self._free: set[int] = set()
        self._vectors: set[Any] = set()
        levels: dict[Any, int] = {}
        for at, eqn in enumerate(equations):
            for v in eqn.invars:
                if is_variable(v):
                    self.users.setdefault(v, []).append(at)
            for v in eqn.outvars:
                self.maker[v] = at
            level = max((levels.get(v, 0) for v in eqn.invars if is_variable(v)), default=0)
            level += not (fits[at] and (_may_join(eqn) or eqn.primitive.name in MASKING or self.is_one(eqn)))
            self._levels.append(level)
            levels |= dict.fromkeys(eqn.outvars, level)
            if self._is_free(eqn):
                self._free.add(at)
                self._waiting_for_none |= {*eqn.outvars}
            if self._makes_vector(eqn):
                self._free.add(at)
                self._vectors |= {*eqn.outvars}
            if (
                eqn.primitive.name in ("broadcast_in_dim", "reshape")
                and (value := self.constant(eqn.invars[0])) is not None
            ):
                self._constants[eqn.outvars[0]] = value

    def constant(self, atom: Any) -> float | None:
        """Returns the number that a value repeats, None for other values."""
        if not is_variable(atom):
            value = np.asarray(atom.val)
            return float(value) if value.ndim == 0 and atom.aval.dtype.name in FLOATS else None
        return self._constants.get(atom)

    def is_one(self, eqn: Equation) -> bool:
        """Returns whether an equation writes one number into each row of zeros."""
        return writes_one(eqn, self.constant(eqn.invars[0]) if eqn.invars else None)

    def is_picked(self, v: Any, region: Region) -> bool:
        """Returns whether the outside takes only single elements of a value, or of element-wise results of it.

        Then it is computed where they are taken, which is cheaper than writing it.
        """
        outside = (self.equations[at] for at in self.users.get(v, ()) if at not in region.equations)
        return v not in self.outvars and all(
            reads_one(eqn, v)
            or (
                eqn.primitive.name in ("add", "sub", "mul", "neg", "convert_element_type")
                and eqn.outvars[0].aval.shape == v.aval.shape
                and self.is_picked(eqn.outvars[0], region)
            )
            for eqn in outside
        )

    def _is_free(self, eqn: Equation) -> bool:
        """Returns whether an equation uses only rows of one number, and so waits for nothing else."""
        values = self._values(eqn)
        free = bool(values) and _may_join(eqn) and self._waiting_for_none.issuperset(values)
        return free or self.is_one(eqn)

    def _makes_vector(self, eqn: Equation) -> bool:
        """Returns whether an equation computes shared columns, such as a weight, from shared columns only."""
        values = self._values(eqn)
        if not values or eqn.primitive.name not in _ON_VECTORS or not all(map(self._is_vector, values)):
            return False
        shape, repeats = eqn.outvars[0].aval.shape, eqn.primitive.name == "broadcast_in_dim"
        if any(v.aval.shape[-1:] != shape[-1:] for v in values) or not _may_join(eqn):
            return False
        if repeats:
            return bool(eqn.params["broadcast_dimensions"][-1] == len(shape) - 1)
        return bool(math.prod(shape[:-1]) == 1)

    def _is_vector(self, v: Any) -> bool:
        return len(v.aval.shape) == 1 or v in self._vectors

    def _values(self, eqn: Equation) -> list[Any]:
        return [v for v in eqn.invars if is_variable(v) and v not in self._constants]

    def regions(self) -> Iterator[Region]:
        """Yields the regions of the program; they are disjoint."""
        taken: set[int] = set()
        for at, eqn in enumerate(self.equations):
            if at in taken or not self.fits[at] or eqn.primitive.name not in ("reduce_max", "reduce_sum"):
                continue
            region = self._from(at)
            if region is not None and not region.equations & taken and self._pays(region):
                taken |= region.equations
                yield region

    def results(self, region: Region) -> list[Any]:
        """Returns the values of a region that are used outside."""
        made = [v for at in sorted(region.equations) for v in self.equations[at].outvars]
        return [v for v in made if v in self.outvars or not region.equations.issuperset(self.users.get(v, ()))]

    def _from(self, start: int) -> Region | None:
        (operand,) = self.equations[start].invars
        shape: tuple[int, ...] = getattr(operand.aval, "shape", ())
        if not is_variable(operand) or operand.aval.dtype.name not in FLOATS or len(shape) < 2:
            return None
        if self.equations[start].params["axes"] != (len(shape) - 1,) or 0 in shape:
            return None
        if not _LEAST_COLUMNS <= shape[-1] <= MOST_COLUMNS or shape[-1] % _WHOLE:
            return None
        labels = tuple(range(len(shape) - 1))
        region = Region(tuple(shape[:-1]), shape[-1], {operand: Kind(True, labels)})
        waiting, seen = [start], {start}
        while waiting:
            at = waiting.pop()
            found = self._kinds(region, at)
            if found is None or any(region.kinds.get(v, kind) != kind for v, kind in found.items()):
                seen.discard(at)  # what is unknown now may be known later
                continue
            region.kinds |= found
            region.equations.add(at)
            for v in found:
                near = [*self.users.get(v, ()), *([self.maker[v]] if v in self.maker else [])]
                fresh = [n for n in near if n not in seen and self._is_near(n, start)]
                waiting += fresh
                seen |= {*fresh}
        return region if self._is_apart(region) else None

    def _is_near(self, at: int, start: int) -> bool:
        return self.fits[at] and (self._levels[at] == self._levels[start] or at in self._free)

    def _kinds(self, region: Region, at: int) -> dict[Any, Kind] | None:
        """Returns the kinds of an equation's values if it belongs to a region that it shares a value with."""
        eqn = self.equations[at]
        name, out = eqn.primitive.name, eqn.outvars[0]
        if self.is_one(eqn):
            return self._one(region, eqn)
        if not _may_join(eqn) or len(eqn.outvars) != 1 or out in self._constants:
            return None
        atoms = self._values(eqn)
        if any(not is_variable(v) and self.constant(v) is None for v in eqn.invars):
            return None
        if any(v.aval.dtype.name not in (*FLOATS, "bool") for v in (out, *atoms)):
            return None
        if name in ("reduce_max", "reduce_sum"):
            return self._reduced(region, eqn)
        if out in self._vectors and out.aval.shape[-1] == region.columns:
            whole = region.kinds.get(out)
            if whole is None:
                return None
            if name not in ("broadcast_in_dim", "reshape") and not types_fit(name, eqn):
                return None
            return {out: whole} | dict.fromkeys(atoms, VECTOR)
        known = next((region.kinds[v] for v in (*atoms, out) if v in region.kinds and not region.kinds[v].shared), None)
        if known is None:
            return None
        if name == "transpose":
            return transposed(region, eqn)
        if name in ("broadcast_in_dim", "reshape"):
            return arranged(region, eqn, known)
        widths = (*known.labels,), out.aval.shape
        sizes = tuple(region.sizes[label] for label in widths[0])
        if out.aval.shape == (*sizes, region.columns):
            if name not in _ON_COLUMNS or not types_fit(name, eqn):
                return None
            kinds = {out: Kind(True, known.labels)}
            for v in atoms:
                if v in self._vectors and name != "select_n" and math.prod(v.aval.shape) == region.columns:
                    kinds[v] = VECTOR
                    continue
                if v.aval.shape not in ((*sizes, region.columns), (*sizes, 1)):
                    return None
                if v.aval.shape[-1] == 1 and (v.aval.dtype.name not in FLOATS or name == "select_n"):
                    return None
                kinds[v] = Kind(v.aval.shape[-1] != 1, known.labels)
            return kinds
        if out.aval.shape not in (sizes, (*sizes, 1)) or name not in _ON_NUMBERS or not types_fit(name, eqn):
            return None
        if not atoms or any(v.aval.shape != out.aval.shape for v in atoms):
            return None
        if name == "max" and len(atoms) != 1:
            return None
        return {v: Kind(False, known.labels) for v in (out, *atoms)}

    def _one(self, region: Region, eqn: Equation) -> dict[Any, Kind] | None:
        (out,), (_, *numbers) = eqn.outvars, eqn.invars
        if out not in region.kinds or not all(map(is_variable, numbers)):
            return None
        labels = region.kinds[out].labels
        if out.aval.shape != (*(region.sizes[label] for label in labels), region.columns):
            return None
        number = Kind(False, labels)
        return {out: Kind(True, labels)} | {v: number for v in numbers if v not in self._constants}

    def _reduced(self, region: Region, eqn: Equation) -> dict[Any, Kind] | None:
        (operand,), (out,) = eqn.invars, eqn.outvars
        if not is_variable(operand) or out.aval.dtype.name not in FLOATS:
            return None
        shape, axes = operand.aval.shape, eqn.params["axes"]
        known = region.kinds.get(operand) or region.kinds.get(out)
        if known is None:
            return None
        if operand in region.kinds and not known.wide:
            if eqn.primitive.name != "reduce_sum" or any(shape[axis] != 1 for axis in axes):
                return None
            left = tuple(label for d, label in enumerate(known.labels) if d not in axes)
            return {operand: known, out: Kind(False, left)}
        if axes != (len(shape) - 1,) or shape != (*(region.sizes[i] for i in known.labels), region.columns):
            return None
        if len(known.labels) != len(region.sizes):
            return None
        return {operand: Kind(True, known.labels), out: Kind(False, known.labels)}

    def _is_apart(self, region: Region) -> bool:
        """Returns whether nothing outside is computed from the region and used in it."""
        downstream: set[Any] = set()
        for at, eqn in enumerate(self.equations):
            if at in region.equations:
                if any(is_variable(v) and v in downstream for v in eqn.invars):
                    return False
            elif any(is_variable(v) and (v in downstream or self._made_in(region, v)) for v in eqn.invars):
                downstream |= {*eqn.outvars}
        return True

    def _made_in(self, region: Region, v: Any) -> bool:
        return self.maker.get(v, -1) in region.equations

    def _pays(self, region: Region) -> bool:
        """Returns whether a region writes columns computed from its reductions."""
        results = [v for v in self.results(region) if region.kinds[v].wide and not region.kinds[v].shared]
        names = {self.equations[at].primitive.name for at in region.equations}
        divided = any(
            self.equations[at].primitive.name == "div" and region.kinds[self.equations[at].outvars[0]].wide
            for at in region.equations
        )
        return bool(results) and ({"exp", "div"} <= names or ("reduce_sum" in names and divided) or "rsqrt" in names)


def _may_join(eqn: Equation) -> bool:
    """Returns whether an equation may be part of a region, by its name."""
    name = eqn.primitive.name
    if name == "integer_pow":
        return bool(eqn.params["y"] == 2)
    return name in NAMES and (name not in ("exp", "rsqrt") or eqn.params.get("accuracy") is None)
