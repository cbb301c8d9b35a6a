"""The arguments of an nnx class, for `inspect.signature` and `help`."""

import inspect
from typing import Any


class ConstructorSignature:
    """As the attribute `__signature__` of an nnx class: the arguments of its `__init__`.

    The metaclass of nnx takes any arguments, and those are what `inspect` shows without the attribute.

    Example:
        >>> class Layer:
        ...     __signature__ = ConstructorSignature()
        ...     def __init__(self, width: int) -> None: ...
        >>> inspect.signature(Layer)
        <Signature (width: int) -> None>
    """

    def __get__(self, module: Any, cls: type) -> inspect.Signature:
        if module is not None:
            raise AttributeError("__signature__")  # an instance is called with the arguments of __call__
        initialize = inspect.getattr_static(cls, "__init__")
        signature = inspect.signature(initialize)
        return signature.replace(parameters=list(signature.parameters.values())[1:])
