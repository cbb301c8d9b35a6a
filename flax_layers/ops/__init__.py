"""The two sets of operations that a layer can be built on: invariant and plain JAX."""

from .invariant import INVARIANT as INVARIANT
from .invariant import Ops as Ops
from .plain import PLAIN as PLAIN
from .plain import PlainOps as PlainOps
