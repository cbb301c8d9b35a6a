"""Drop-in replacements for the layers of `flax.nnx`, made batch-invariant.

They take the arguments of the originals, and have their parameters, initial values and submodule names. `MoE`,
`QuantLinear` and `QuantMoE` have no original.
"""

from typing import Final

from flax import nnx as _nnx

from ..models.layers import MoE as MoE
from ..models.layers import QuantizedWeight as QuantizedWeight
from ..models.layers import QuantLinear as QuantLinear
from ..models.layers import QuantMoE as QuantMoE
from ._drop_in import invariant_layer as invariant_layer
from .activation import PReLU as PReLU
from .attention import MultiHeadAttention as MultiHeadAttention
from .attention import RoPE as RoPE
from .linear import Conv as Conv
from .linear import ConvTranspose as ConvTranspose
from .linear import Einsum as Einsum
from .linear import Embed as Embed
from .linear import Linear as Linear
from .linear import LinearGeneral as LinearGeneral
from .linear import LoRA as LoRA
from .linear import LoRALinear as LoRALinear
from .normalization import BatchNorm as BatchNorm
from .normalization import GroupNorm as GroupNorm
from .normalization import InstanceNorm as InstanceNorm
from .normalization import LayerNorm as LayerNorm
from .normalization import RMSNorm as RMSNorm
from .normalization import SpectralNorm as SpectralNorm
from .normalization import WeightNorm as WeightNorm
from .pooling import avg_pool as avg_pool
from .pooling import max_pool as max_pool
from .pooling import min_pool as min_pool
from .pooling import pool as pool
from .recurrent import RNN as RNN
from .recurrent import Bidirectional as Bidirectional
from .recurrent import GRUCell as GRUCell
from .recurrent import LSTMCell as LSTMCell
from .recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from .recurrent import SimpleCell as SimpleCell
from .stochastic import Dropout as Dropout

DROP_INS: Final[dict[type[_nnx.Module], type[_nnx.Module]]] = {
    cls.__bases__[0]: cls
    for cls in (
        Linear,
        LinearGeneral,
        Einsum,
        Conv,
        ConvTranspose,
        Embed,
        LoRA,
        LoRALinear,
        RMSNorm,
        LayerNorm,
        GroupNorm,
        InstanceNorm,
        BatchNorm,
        SpectralNorm,
        WeightNorm,
        Dropout,
        PReLU,
        MultiHeadAttention,
        RoPE,
        LSTMCell,
        OptimizedLSTMCell,
        GRUCell,
        SimpleCell,
        RNN,
        Bidirectional,
    )
}
"""The drop-in of each original."""
