"""The layers that the models of this package are built of; unlike the drop-ins, they take their operations."""

from .attention import Attention as Attention
from .cache import KVCache as KVCache
from .cache import LayerCache as LayerCache
from .embed import Embed as Embed
from .linear import Linear as Linear
from .mlp import MLP as MLP
from .rms_norm import RMSNorm as RMSNorm
from .rotary import RotaryEmbedding as RotaryEmbedding
from .rotary import RotaryTable as RotaryTable
