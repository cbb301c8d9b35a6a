"""The layers that the models of this package are built of; unlike the drop-ins, they take their operations."""

from .attention import Attention as Attention
from .cache import KVCache as KVCache
from .cache import LayerCache as LayerCache
from .delta_net_slots import DeltaNetSlots as DeltaNetSlots
from .delta_net_state import DeltaNetState as DeltaNetState
from .embed import Embed as Embed
from .gated_delta_net import GatedDeltaNet as GatedDeltaNet
from .latent_attention import LatentAttention as LatentAttention
from .linear import Linear as Linear
from .mlp import MLP as MLP
from .moe import MoE as MoE
from .quant_linear import QuantizedWeight as QuantizedWeight
from .quant_linear import QuantLinear as QuantLinear
from .quant_moe import QuantMoE as QuantMoE
from .rms_norm import RMSNorm as RMSNorm
from .rotary import RotaryEmbedding as RotaryEmbedding
from .rotary import RotaryTable as RotaryTable
