"""The two sets of operations that a layer can be built on: invariant and plain JAX."""

from .invariant import INVARIANT as INVARIANT
from .invariant import InvariantOps as InvariantOps
from .plain import PLAIN as PLAIN
from .plain import PlainOps as PlainOps
from .protocol import Ops as Ops
