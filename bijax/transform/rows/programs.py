"""Programs on the rows of one device: which equations can be computed so, those of loops and branches included."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal

from bijax.core.explicit_axes import is_cut
from bijax.transform.rows.control import entered, scan_operands
from bijax.transform.rows.flow import Flow
from bijax.transform.rows.inlined import CALLS, IsMeant, inlined
from bijax.transform.rows.local import local_call, local_parameters, rows_along
from bijax.transform.rows.value import Value
from bijax.transform.rules.equations import live

Axes = Sequence[int | None]
Computation = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch.

    Attributes:
        number: How many there are.
        devices: Over how many devices they are cut.
        flow: Follows values through a program.
        is_meant: Whether an equation should be made invariant.
    """

    number: int
    devices: int
    flow: Flow
    is_meant: IsMeant


class RowsProgram:
    """A program with what is known of its values, and the equations that one device can compute for its rows.

    Args:
        jaxpr: The program, an open jaxpr.
        values: What is known of its arguments.
        rows: The rows.

    Attributes:
        rows: The rows.
        jaxpr: The program, with the functions that it calls inlined.
        parameters: The parameters of the equations for the rows of one device, by their ids.
    """

    def __init__(self, jaxpr: Any, values: Sequence[Value], rows: Rows) -> None:
        self.rows = rows
        self.jaxpr = jaxpr.replace(eqns=list(inlined(jaxpr.eqns, rows.is_meant, {})))
        self._known: dict[Any, Value] = rows.flow.values(self.jaxpr, values)
        self.parameters = {id(eqn): found for eqn in live(self.jaxpr) if (found := self._local(eqn)) is not None}

    def axis(self, v: Any) -> int | None:
        """Returns the axis of a variable that holds the rows."""
        value = None if isinstance(v, Literal) else self._known.get(v)
        return None if value is None else rows_along(value, v.aval.shape, self.rows.number)

    def has_rows(self, v: Any) -> bool:
        """Returns whether a variable holds rows, wherever they are and whatever has become of them."""
        return not isinstance(v, Literal) and v in self._known and self._known[v].rows is not None

    def _local(self, eqn: Any) -> Any:
        """Returns the parameters of an equation for the rows of one device; None if it is not computed so."""
        if not self.rows.is_meant(eqn) or eqn.effects or eqn.ctx.compute_type is not None:
            return None
        arrays = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        if not all(isinstance(a, jax.core.ShapedArray) for a in arrays):
            return None
        if any(jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) for a in arrays):
            return None
        operands, results = [self.axis(v) for v in eqn.invars], [self.axis(v) for v in eqn.outvars]
        lost = any(
            (self.has_rows(v) or is_cut(getattr(v.aval, "sharding", None))) and axis is None
            for v, axis in zip(eqn.invars, operands, strict=True)
        )
        if lost or all(axis is None for axis in operands):
            return None
        if eqn.primitive.name in _CONTROL:
            # A counter, for instance, is a result without rows: it is the same on all devices.
            if any(axis is None and self.has_rows(v) for v, axis in zip(eqn.outvars, results, strict=True)):
                return None
            return _CONTROL[eqn.primitive.name](self, eqn, results)
        if any(axis is None for axis in results):
            return None
        return local_parameters(eqn, operands, [axis for axis in results if axis is not None], self.rows.devices)

    def values_of(self, variables: Sequence[Any]) -> list[Value]:
        """Returns what is known of operands."""
        return [Value() if isinstance(v, Literal) else self._known[v] for v in variables]

    def inner(self, program: Any, values: Sequence[Value], results: Axes) -> "RowsProgram | None":
        """Returns a program of one of the equations, if one device can compute all of it for its rows.

        Args:
            program: The program.
            values: What is known of its arguments.
            results: The axis of each result that should hold rows; None if it should have none.
        """
        if getattr(program, "consts", ()):
            return None
        found = RowsProgram(getattr(program, "jaxpr", program), values, self.rows)
        for eqn in live(found.jaxpr):
            known = eqn.primitive.name not in CALLS and not eqn.effects
            touches = any(found.has_rows(v) for v in (*eqn.invars, *eqn.outvars))
            if not known or (touches and id(eqn) not in found.parameters):
                return None
        for v, wanted in zip(found.jaxpr.outvars, results, strict=True):
            if found.has_rows(v) and (wanted is None or found.axis(v) != wanted):
                return None
        return found

    def compute(self, eqn: Any, arrays: Sequence[Any]) -> list[jax.Array]:
        """Computes an equation: for the rows of one device, or as it is if it has none."""
        with set_xla_metadata(**(eqn.ctx.xla_metadata or {})):
            if id(eqn) not in self.parameters:
                found = eqn.primitive.bind(*arrays, **eqn.params)
                return list(found) if eqn.primitive.multiple_results else [found]
            parameters = self.parameters[id(eqn)]
            if callable(parameters):
                return list(parameters(*arrays))
            axis = cast(int, self.axis(eqn.outvars[0]))
            size = eqn.outvars[0].aval.shape[axis] // self.rows.devices
            return local_call(eqn, parameters, arrays, axis, size)

    def __call__(self, *arrays: jax.Array, results: Axes) -> list[jax.Array]:
        """Computes the program for the rows of one device.

        Args:
            *arrays: Its arguments.
            results: As for `inner`.
        """
        known: dict[Any, Any] = dict(zip(self.jaxpr.invars, arrays, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else known[v]

        for eqn in live(self.jaxpr):
            found = self.compute(eqn, [read(v) for v in eqn.invars])
            known |= zip(eqn.outvars, found, strict=True)
        return self.parts([read(v) for v in self.jaxpr.outvars], self.jaxpr.outvars, results)

    def parts(self, arrays: Sequence[Any], variables: Sequence[Any], axes: Axes) -> list[jax.Array]:
        """Returns the entries for the rows of one device of arrays that may have an entry, the same, for each row.

        Args:
            arrays: The arrays.
            variables: Variables of the same shapes and dtypes for all rows.
            axes: The axis of each that holds the rows; None if none does.
        """

        def part(x: Any, aval: Any, axis: int | None) -> jax.Array:
            x = jax.numpy.asarray(x, aval.dtype)
            if axis is None or x.shape[axis] != aval.shape[axis]:
                return x
            return lax.slice_in_dim(x, 0, aval.shape[axis] // self.rows.devices, axis=axis)

        return [part(x, v.aval, axis) for x, v, axis in zip(arrays, variables, axes, strict=True)]


def _scan(outer: RowsProgram, eqn: Any, results: Axes) -> Computation | None:
    constants, carried, arrays = scan_operands(eqn, range(len(eqn.invars)))
    values = outer.values_of(eqn.invars)
    of_carry, of_collected = results[: len(carried)], results[len(carried) :]
    if any(outer.axis(eqn.invars[i]) == 0 for i in arrays) or 0 in of_collected:
        return None  # the loop is over the rows
    after = outer.values_of(eqn.outvars[: len(carried)])
    wanted = [*of_carry, *(None if axis is None else axis - 1 for axis in of_collected)]
    with outer.rows.flow.new_axis() as loop:
        inside = [*(values[i] for i in constants), *after, *(entered(values[i], loop) for i in arrays)]
        program = outer.inner(eqn.params["jaxpr"], inside, wanted)
    if program is None:
        return None

    def run(*operands: Any) -> Sequence[jax.Array]:
        fixed, slices = [operands[i] for i in constants], [operands[i] for i in arrays]
        first = outer.parts([operands[i] for i in carried], eqn.outvars[: len(carried)], of_carry)

        def body(carry: list[jax.Array], slices: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            found = program(*fixed, *carry, *slices, results=wanted)
            return found[: len(carry)], found[len(carry) :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        last, collected = lax.scan(body, first, slices, **options)
        return [*last, *collected]

    return run


def _while(outer: RowsProgram, eqn: Any, results: Axes) -> Computation | None:
    begin = eqn.params["cond_nconsts"]
    end = begin + eqn.params["body_nconsts"]
    values, after = outer.values_of(eqn.invars), outer.values_of(eqn.outvars)
    goes_on = outer.inner(eqn.params["cond_jaxpr"], [*values[:begin], *after], [None])
    body = outer.inner(eqn.params["body_jaxpr"], [*values[begin:end], *after], results)
    if goes_on is None or body is None:
        return None

    def run(*operands: Any) -> Sequence[jax.Array]:
        found: Sequence[jax.Array] = lax.while_loop(
            lambda carry: goes_on(*operands[:begin], *carry, results=[None])[0],
            lambda carry: body(*operands[begin:end], *carry, results=results),
            outer.parts(operands[end:], eqn.outvars, results),
        )
        return found

    return run


def _cond(outer: RowsProgram, eqn: Any, results: Axes) -> Computation | None:
    if outer.has_rows(eqn.invars[0]) or eqn.params.get("branches_platforms"):
        return None
    values = outer.values_of(eqn.invars[1:])
    branches = [outer.inner(branch, values, results) for branch in eqn.params["branches"]]
    if any(branch is None for branch in branches):
        return None
    functions = [functools.partial(branch, results=results) for branch in branches if branch is not None]

    def run(which: Any, *operands: Any) -> Sequence[jax.Array]:
        found: Sequence[jax.Array] = lax.switch(which, functions, *operands)
        return found

    return run


_CONTROL: Final = {"scan": _scan, "while": _while, "cond": _cond}
