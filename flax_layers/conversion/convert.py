"""The conversion of a whole model."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from flax import linen, nnx

from .linen_model import convert_linen, report_linen
from .nnx_model import convert_nnx, report_nnx
from .quantize import check_quantize
from .report import Conversion
from .rules import Rules


def convert[M: (nnx.Module, linen.Module)](
    model: M,
    rules: Rules = None,
    *,
    quantize: Literal["int8"] | None = None,
    calibration: Sequence[Any] | None = None,
) -> M:
    """Makes the layers of a model batch-invariant.

    An nnx model is changed in place: its layers get the types of `flax_layers.nnx`, wherever they are shared, and keep
    their state; convert it before functions that hold it are jitted. For a linen model an equivalent is returned, with
    the same fields, names, parameters and methods, in which the layers run as `flax_layers.linen` layers whenever a
    method, `init` or `apply` of the model is called; the original model is unchanged. Code that bypasses these to call
    a layer, `converted.bind(variables).layer(x)` or `linen.apply(lambda m, x: m.layer(x), converted)`, runs the
    layer as it was; say `converted.apply(variables, x, method=lambda m, x: m.layer(x))`.

    Code between the layers is unchanged, too. `bijax.invariant` covers a function as a whole.

    With `quantize="int8"` linear layers multiply in int8, and their weights take a quarter of float32's memory. In an
    nnx model they (`flax.nnx.Linear` and its `flax_layers` versions) become `flax_layers.nnx.QuantLinear`, in a linen
    model (`flax.linen.Dense`) `flax_layers.linen.QuantDense`, for which `flax_layers.quantize_variables` makes the
    variables. Their input is smoothed first if there is a calibration batch, as in SmoothQuant with a strength of 1/2:
    the scale of a column is the square root of its largest weight over its largest input. `MoE` becomes
    `QuantMoE`, not smoothed.

    Args:
        model: An nnx or a linen model.
        rules: Ordered pairs, or a mapping, from a type (with its subclasses), a glob or a compiled regular expression
            over the whole path ("blocks/0/mlp", the path of the model is "") to True (convert), False (leave) or a
            subclass to convert to. The first rule that chooses a module decides; without one, every type is converted
            that has a drop-in. A shared module is matched by its first path. Modules inside `linen.jit` share one
            program; choose among them by type.
        quantize: "int8" for linear layers in int8. Leave an output projection by a rule, {"lm_head": False}, to keep
            its accuracy.
        calibration: Arguments of one call of an nnx model, made before it is quantised; without it, smooth scales are
            ones.

    Returns:
        The same nnx model; or a linen model whose type is a subclass of the original's.

    Raises:
        TypeError: If the model or a rule is invalid, a rule converts to a class that does not fit, a linen model
            comes with a calibration batch, or JAX traces the calibration call.
        ValueError: If a rule matches no module, or should convert but converts nothing (for a linen model, when
            `init` has shown its modules), or chooses a layer without a drop-in to be converted (for a linen model, when
            the layer is called), or a linen model is bound. If `quantize` is unknown, a quantised layer has a custom
            product, or the calibration batch does not reach it or is not finite there.

    Guarantee: as the layers that are converted to.

    Example:
        >>> import jax.numpy as jnp
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(3, 1, rngs=nnx.Rngs(1)))
        >>> model = convert(model, {"layers/2": False})
        >>> type(model.layers[0]).__module__, type(model.layers[2]).__module__
        ('flax_layers.nnx.linear', 'flax.nnx.nn.linear')
    """
    _check(model)
    check_quantize(quantize)
    if calibration is not None and quantize is None:
        raise ValueError("convert: calibration belongs to quantize='int8', got it without.")
    if isinstance(model, nnx.Module):
        convert_nnx(model, rules, quantize, calibration)
        return model
    if calibration is not None:
        raise TypeError(
            "convert: a linen model does not hold the weights that a calibration batch meets; calibrate with"
            " quantize_variables(model, variables, *inputs, calibrate=True)."
        )
    return convert_linen(model, rules, quantize)


def conversion_report(
    model: nnx.Module | linen.Module,
    rules: Rules = None,
    *,
    quantize: Literal["int8"] | None = None,
    inputs: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    rngs: Any = None,
) -> Conversion:
    """Tells what `convert` does with each module of a model, without doing it.

    Args:
        model: An nnx or a linen model.
        rules: As for `convert`.
        quantize: As for `convert`.
        inputs: For a linen model, which makes its modules when it is called: arrays or `jax.ShapeDtypeStruct`s with
            which it is initialized, abstractly.
        options: For a linen model: keyword arguments of that call.
        rngs: For a linen model: keys of that call, as for `init`; keys for "params" and "dropout" by default.

    Returns:
        The replaced modules, the unchanged ones, and those not covered with the reason.

    Raises:
        TypeError: As `convert`, or if a linen model has no inputs, or an nnx model has some.
        ValueError: As `convert`.

    Example:
        >>> report = conversion_report(linen.Dense(3), inputs=(jax.ShapeDtypeStruct((1, 2), "float32"),))
        >>> print(report)
        replaced: 1 module
          (the model): Dense -> flax_layers.linen.Dense
    """
    _check(model)
    check_quantize(quantize)
    if isinstance(model, nnx.Module):
        if inputs is not None or options is not None or rngs is not None:
            raise TypeError("conversion_report: an nnx model has its modules; expected no inputs, options or rngs.")
        return report_nnx(model, rules, quantize)
    if inputs is None:
        raise TypeError(
            "conversion_report: a linen model makes its modules when it is called; expected inputs=(x, ...), arrays or"
            " jax.ShapeDtypeStructs to initialize it with."
        )
    if rngs is None:
        rngs = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(0)), strict=True))
    return report_linen(model, rules, quantize, inputs, options or {}, rngs)


def _check(model: Any) -> None:
    if isinstance(model, (nnx.Module, linen.Module)):
        return
    if isinstance(model, type):
        got = f"the class {model.__name__}; make an instance of it first"
    elif isinstance(model, (Mapping, nnx.State, nnx.GraphDef)):
        got = f"a {type(model).__name__} without methods; convert the model whose parameters these are"
    else:
        got = f"{type(model).__name__}"
    raise TypeError(f"convert: expected a model, a flax.nnx.Module or a flax.linen.Module, got {got}.")
