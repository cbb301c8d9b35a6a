"""Flax layers and models built from batch-invariant operations."""

from .models import Generation as Generation
from .models import Llama as Llama
from .models import generate as generate
from .nnx import MLP as MLP
from .nnx import Attention as Attention
from .nnx import Embed as Embed
from .nnx import KVCache as KVCache
from .nnx import LayerCache as LayerCache
from .nnx import Linear as Linear
from .nnx import RMSNorm as RMSNorm
from .nnx import RotaryEmbedding as RotaryEmbedding
from .nnx import RotaryTable as RotaryTable
from .ops import INVARIANT as INVARIANT
from .ops import PLAIN as PLAIN
from .ops import Ops as Ops
