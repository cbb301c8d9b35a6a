"""Stopping XLA:GPU's rewrites of element-wise code, in the lowered program.

How an element's bits could depend on the shape of the program, and how that is prevented:

- *Two code generators.* A fusion is compiled by XLA's loop emitter or by Triton, depending on a cost model of the
  shapes; `exp`, `tanh`, division and most other functions have different bits in the two. A shift before and after each
  function, which Triton does not support, keeps it in the loop emitter. (A single one could end up in the next fusion:
  where a function is transposed and has several users, XLA duplicates the code after it.)
- *Dropped roundings.* XLA removes a conversion to 16 bits and back where the two are adjacent, and not where something
  is between them. The same shift follows everything that rounds to 16 bits.
- *Rewrites.* `(x + 1) + 2` becomes `x + 3`, `exp(x) * exp(y)` becomes `exp(x + y)`, and `x / b` a product with `1 / b`
  where `b` is broadcast, all only where XLA sees it. The shift also follows sums and functions, and a denominator is
  made to look computed.
- *Contraction.* A compiler may fuse a product and a sum of one fusion into a multiply-add, but not across fusions. The
  bits of each product of 32 bits or more are xored with a zero that no compiler knows. (A product of 16 bits is
  separated from a sum by its rounding.)

The shift `b | b & b >> 1` changes nothing: XLA's rewrites do not look through it, but the compiler of its kernels does
and removes it. In float64 the shift only decides a select that always takes the value: XLA leaves a bitcast after it
out of the fusion, and a transpose would then store the bits of a double as an integer, which ptxas 13.0 does by
converting its lower half (`F2I.U32.F64`; 13.5 does not). The zero is a constant after a barrier: XLA removes the
barrier after its last rewrites, and passes the constant to the kernel in memory. It costs an instruction per product.
Neither costs a pass over memory or a kernel.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from bijax.transform.rules.values import positions, repeated, spread

Context = Any
Value = Any
Rule = Callable[..., Sequence[Value]]

_SUMS: Final = frozenset(["add", "add_any", "sub"])
_PRODUCTS: Final = frozenset(["mul", "square"])

_CONVERSION: Final = "convert_element_type"

# fmt: off
_EXPANDED: Final = frozenset(f"chlo.{name}" for name in (
    "acos", "acosh", "asin", "asinh", "atanh", "bessel_i1e", "cosh", "digamma", "erf_inv", "erfc", "lgamma",
    "polygamma", "sinh", "zeta",
))
"""Functions that XLA's front end expands into products, sums and other functions, in some versions."""

_FUNCTIONS: Final = frozenset((
    "atan2", "cbrt", "cosine", "divide", "exponential", "exponential_minus_one", "log", "log_plus_one", "logistic",
    "power", "remainder", "rsqrt", "sine", "sqrt", "tan", "tanh",
))
"""Operations of such expansions that the two code generators compute differently."""
# fmt: on

_REGIONS: Final = frozenset(
    f"stablehlo.{name}"
    for name in ["all_reduce", "reduce", "reduce_scatter", "reduce_window", "scatter", "select_and_scatter", "sort"]
)


def fenced(name: str, stock: Rule, ctx: Context, operands: Sequence[Value], parameters: dict[str, Any]) -> list[Value]:
    """Lowers an element-wise primitive so that its bits do not depend on how XLA:GPU compiles its surroundings.

    Args:
        name: Name of the primitive.
        stock: Its own lowering rule.
        ctx: Context of that rule.
        operands: Its values.
        parameters: Its parameters.
    """
    (out,) = ctx.avals_out
    if _in_region() or jnp.issubdtype(out.dtype, jnp.complexfloating):
        return list(stock(ctx, *operands, **parameters))
    if name == _CONVERSION:
        return [_converted(ctx.avals_in[0].dtype, out.dtype, *stock(ctx, *operands, **parameters))]
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return list(stock(ctx, *operands, **parameters))
    if name in _PRODUCTS and out.dtype.itemsize >= 4:
        return [_through_zero(value) for value in stock(ctx, *operands, **parameters)]
    if name in _PRODUCTS or name in _SUMS:
        return [_through_shift(value) for value in stock(ctx, *operands, **parameters)]
    return [_function(name, stock, ctx, operands, parameters)]


def _converted(source: Any, target: Any, value: Value) -> Value:
    floating = jnp.issubdtype(source, jnp.floating), jnp.issubdtype(target, jnp.floating)
    # Integer conversions do not round; widening a float is exact, and any integer is pinned to one generator.
    exact = not any(floating) or (all(floating) and target.itemsize > source.itemsize)
    return value if exact or jnp.issubdtype(target, np.bool_) else _through_shift(value)


def _function(name: str, stock: Rule, ctx: Context, operands: Sequence[Value], parameters: dict[str, Any]) -> Value:
    (out,) = ctx.avals_out
    # In 16 bits the two code generators round at different points.
    wide = ctx.replace(avals_in=[_widened(a) for a in ctx.avals_in], avals_out=[_widened(out)])
    operands = [_as(x, w) for x, w in zip(operands, wide.avals_in, strict=True)]
    if name == "div":
        numerator, denominator = (repeated(x, out.shape) for x in operands)
        wide = wide.replace(avals_in=wide.avals_out * 2)
        operands = [numerator, _computed(denominator)]
    else:
        operands = [_through_shift(operands[0], _own_shift(name)), *operands[1:]]
    (value,) = [_logistic(*operands)] if name == "logistic" else stock(wide, *operands, **parameters)
    # A rule that traces a program has fenced it inside.
    value = value if _is_fenced(value) else _through_shift(_expanded(value))
    return value if wide.avals_out[0].dtype == out.dtype else _through_shift(_as(value, out))


def _logistic(x: Value) -> Value:
    """Returns 1 / (1 + exp(-x)), like JAX's rule.

    XLA may see that the denominator is broadcast, since a product with 1 is exact, but not that it is constant.
    """
    element: Any = ir.RankedTensorType(x.type).element_type
    one = spread(mlir.ir_constant(np.ones((), f"float{element.width}")), x.type)
    power = _through_shift(hlo.exponential(_through_shift(hlo.negate(x), _own_shift("exp"))))
    return hlo.divide(one, _through_zero(_through_shift(hlo.add(one, power))))


def _widened(aval: Any) -> Any:
    narrow = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
    return aval.update(dtype=np.dtype(np.float32), weak_type=False) if narrow else aval


def _as(value: Value, aval: Any) -> Value:
    element = mlir.dtype_to_ir_type(aval.dtype)
    shaped = ir.RankedTensorType(value.type)
    if shaped.element_type == element:
        return value
    return hlo.convert(ir.RankedTensorType.get(shaped.shape, element), value)


def _through_shift(value: Value, places: int = 1) -> Value:
    """Passes the value through a shift that changes nothing, which only XLA's last compiler can see."""
    shaped = ir.RankedTensorType(value.type)
    if not isinstance(shaped.element_type, ir.F64Type):
        return _through(lambda bits: _absorbed(bits, places), value)
    always = _is_absorbed(hlo.bitcast_convert(_as_integers(shaped), value), places)
    return hlo.select(always, value, spread(mlir.ir_constant(np.float64(0)), shaped))


def _absorbed(bits: Value, places: int = 1) -> Value:
    by = spread(mlir.ir_constant(np.asarray(places, _unsigned(bits))), bits.type)
    return hlo.or_(bits, hlo.and_(bits, hlo.shift_right_logical(bits, by)))


def _is_absorbed(bits: Value, places: int = 1) -> Value:
    """Returns whether the shift changes nothing, which is always true."""
    return hlo.compare(bits, _absorbed(bits, places), hlo.ComparisonDirectionAttr.get("EQ"))


def _own_shift(name: str) -> int:
    """Returns the shift distance for the operand of a function.

    XLA merges equal shifts; one that several functions share might get a separate fusion.
    """
    return 2 + zlib.crc32(name.encode()) % 29


def _through_zero(value: Value) -> Value:
    """Passes the value through an xor with a zero that no compiler can see."""

    def mask(bits: Value) -> Value:
        return hlo.xor(bits, spread(_hidden(np.zeros((), _unsigned(bits))), bits.type))

    return _through(mask, value)


def _through(operation: Callable[[Value], Value], value: Value) -> Value:
    bits = hlo.bitcast_convert(_as_integers(ir.RankedTensorType(value.type)), value)
    return hlo.bitcast_convert(value.type, operation(bits))


def _as_integers(shaped: Any) -> Any:
    """Returns the type of the bits of an array of floats."""
    element = shaped.element_type
    return ir.RankedTensorType.get(shaped.shape, ir.IntegerType.get_unsigned(element.width))


def _unsigned(bits: Value) -> str:
    element: Any = ir.RankedTensorType(bits.type).element_type
    return f"uint{element.width}"


def _is_fenced(value: Value) -> bool:
    bits = _operands(value, "stablehlo.bitcast_convert")
    if bits:
        return bool(_operands(bits[0], "stablehlo.or", "stablehlo.xor"))
    chosen = _operands(value, "stablehlo.select")
    compared = _operands(chosen[0], "stablehlo.compare") if chosen else []
    return bool(compared) and compared[0] in _operands(compared[1], "stablehlo.or")[:1]


def _operands(value: Value, *names: str) -> list[Value]:
    """Returns the operands of the operation that makes a value, none if it has another name than these."""
    owner = value.owner
    made = isinstance(owner, (ir.Operation, ir.OpView)) and owner.operation.name in names
    return list(owner.operation.operands) if made else []


def _hidden(constant: np.ndarray) -> Value:
    return hlo.OptimizationBarrierOp([mlir.ir_constant(constant)]).results[0]


def _computed(denominator: Value) -> Value:
    """Returns the denominator as a value that XLA cannot identify as broadcast or constant."""
    shaped = ir.RankedTensorType(denominator.type)
    if all(n == 1 for n in shaped.shape):
        return _through_zero(denominator)  # there are no positions here, and a constant would be visible
    # A select is not a broadcast if the alternative is not: a select between two would be computed once.
    numbers = positions(shaped)
    return hlo.select(_is_absorbed(numbers), denominator, hlo.bitcast_convert(shaped, numbers))


def _in_region() -> bool:
    """Returns whether the program that is being lowered is the combiner of a reduction, sort or scatter."""
    owner = ir.InsertionPoint.current.block.owner
    return owner.operation.name in _REGIONS


def _expanded(value: Value) -> Value:
    """Expands a function for which XLA has no instruction, with a fence after each product and function in it."""
    owner = value.owner
    if not isinstance(owner, (ir.Operation, ir.OpView)) or owner.operation.name not in _EXPANDED:
        return value
    call = owner.operation
    module = ir.Module.create()
    types = [x.type for x in call.operands]
    with ir.InsertionPoint(module.body):
        function = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get("expansion"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [value.type])),
            },
            regions=1,
        )
    block = ir.Block.create_at_start(function.regions[0], types)
    with ir.InsertionPoint(block):
        copy = _clone(call, block.arguments)
        ir.Operation.create("func.return", operands=[copy.results[0]])
    _register_passes()
    passmanager.PassManager.parse("builtin.module(func.func(chlo-legalize-to-stablehlo))").run(module.operation)
    body = function.regions[0].blocks[0]
    values = dict(zip(body.arguments, call.operands, strict=True))
    *steps, end = body.operations
    for step in steps:
        operation = step.operation
        values[operation.results[0]] = _step(operation, [values[x] for x in operation.operands])
    return values[end.operation.operands[0]]


def _step(operation: Any, operands: list[Value]) -> Value:
    name = operation.name.removeprefix("stablehlo.")
    floating = isinstance(ir.RankedTensorType(operation.results[0].type).element_type, ir.FloatType)
    if name == "divide" and floating:
        operands[1] = _computed(operands[1])
    elif name in _FUNCTIONS and floating:
        operands[0] = _through_shift(operands[0], _own_shift(name))
    value = _clone(operation, operands).results[0]
    if not floating:
        return value
    if name == "multiply":
        return _through_zero(value)
    return _through_shift(value) if name in _FUNCTIONS or name in ("add", "subtract") else value


def _clone(operation: Any, operands: Sequence[Value]) -> Any:
    copy = operation.clone()
    for i, value in enumerate(operands):
        copy.operation.operands[i] = value
    return copy.operation


@functools.cache
def _register_passes() -> None:
    hlo.register_stablehlo_passes()
