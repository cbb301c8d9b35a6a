"""How the arguments of a program that is being lowered are cut over devices, from the attributes that JAX gave them."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Final

from jax.interpreters.mlir import ir

_SHARDING: Final = re.compile(r"sdy\.sharding<mesh<\[(?P<axes>[^\]]*)\](?P<order>[^>]*)>, \[(?P<dimensions>.*?)\]")
_AXIS: Final = re.compile(r'"([^"]+)"=(\d+)')
_DIMENSION: Final = re.compile(r"\{([^{}]*)\}")
_NAME: Final = re.compile(r'"([^"]+)"')


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an argument is cut.

    Attributes:
        mesh: Names and sizes of the axes of the mesh.
        dimension: The only dimension that is cut.
        names: The axes of the mesh that it is cut over.
        count: Devices along them.
    """

    mesh: tuple[tuple[str, int], ...]
    dimension: int
    names: tuple[str, ...]
    count: int


def cuts_of(module: Any, variables: Sequence[Any]) -> dict[Any, Cut]:
    """Returns which arguments of a module's whole program are cut along one dimension.

    Args:
        module: The module, in which nothing but the head of that program is lowered yet; none are cut in another.
        variables: The variables of a program's arguments.
    """
    functions = [f for f in module.body.operations if "function_type" in f.attributes]
    if len(functions) != 1 or "arg_attrs" not in functions[0].attributes:
        return {}
    (block,) = functions[0].regions[0].blocks
    attributes, arguments = list(functions[0].attributes["arg_attrs"]), list(block.arguments)
    first = len(attributes) - len(variables)  # constants come before
    if first < 0 or ir.InsertionPoint.current.block != block or len(list(block.operations)):
        return {}
    shapes = [tuple(getattr(argument.type, "shape", ())) for argument in arguments[first:]]
    if shapes != [getattr(v.aval, "shape", ()) for v in variables]:
        return {}
    found = {v: read(str(attribute)) for v, attribute in zip(variables, attributes[first:], strict=True)}
    return {v: cut for v, cut in found.items() if cut is not None and v.aval.shape[cut.dimension] % cut.count == 0}


def read(attributes: str) -> Cut | None:
    """Reads the attributes of an argument.

    Returns:
        How it is cut; None if it is not, if it is cut along several dimensions or over a part of an axis, or if the
        mesh has its devices in an order of its own.
    """
    match = _SHARDING.search(attributes)
    if match is None or match["order"]:
        return None
    sizes = {name: int(size) for name, size in _AXIS.findall(match["axes"])}
    dimensions = _DIMENSION.findall(match["dimensions"])
    cut = [(number, text) for number, text in enumerate(dimensions) if _NAME.search(text)]
    if len(cut) != 1 or ":" in cut[0][1]:
        return None
    names = tuple(_NAME.findall(cut[0][1]))
    count = math.prod(sizes[name] for name in names)
    return Cut(tuple(sizes.items()), cut[0][0], names, count) if count > 1 else None
