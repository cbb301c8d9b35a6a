"""Drop-in replacements for the layers of `flax.linen`, made batch-invariant.

They take the arguments of the originals, and have their parameters, initial values and submodule names. `MoE`,
`QuantDense` and `QuantMoE` have no original.
"""

from typing import Final

from flax import linen as _linen

from ._drop_in import invariant_layer as invariant_layer
from .activation import PReLU as PReLU
from .attention import MultiHeadAttention as MultiHeadAttention
from .attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from .attention import SelfAttention as SelfAttention
from .linear import Conv as Conv
from .linear import ConvLocal as ConvLocal
from .linear import ConvTranspose as ConvTranspose
from .linear import Dense as Dense
from .linear import DenseGeneral as DenseGeneral
from .linear import Einsum as Einsum
from .linear import Embed as Embed
from .moe import MoE as MoE
from .normalization import BatchNorm as BatchNorm
from .normalization import GroupNorm as GroupNorm
from .normalization import InstanceNorm as InstanceNorm
from .normalization import LayerNorm as LayerNorm
from .normalization import RMSNorm as RMSNorm
from .normalization import SpectralNorm as SpectralNorm
from .normalization import WeightNorm as WeightNorm
from .pooling import avg_pool as avg_pool
from .pooling import max_pool as max_pool
from .pooling import pool as pool
from .quantized import QuantDense as QuantDense
from .quantized import QuantMoE as QuantMoE
from .recurrent import RNN as RNN
from .recurrent import Bidirectional as Bidirectional
from .recurrent import ConvLSTMCell as ConvLSTMCell
from .recurrent import GRUCell as GRUCell
from .recurrent import LSTMCell as LSTMCell
from .recurrent import MGUCell as MGUCell
from .recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from .recurrent import SimpleCell as SimpleCell
from .stochastic import Dropout as Dropout

DROP_INS: Final[dict[type[_linen.Module], type[_linen.Module]]] = {
    cls.__bases__[0]: cls
    for cls in (
        Dense,
        DenseGeneral,
        Einsum,
        Conv,
        ConvLocal,
        ConvTranspose,
        Embed,
        RMSNorm,
        LayerNorm,
        GroupNorm,
        InstanceNorm,
        BatchNorm,
        SpectralNorm,
        WeightNorm,
        Dropout,
        PReLU,
        MultiHeadDotProductAttention,
        MultiHeadAttention,
        SelfAttention,
        LSTMCell,
        OptimizedLSTMCell,
        GRUCell,
        MGUCell,
        SimpleCell,
        RNN,
        Bidirectional,
        ConvLSTMCell,
    )
}
"""The drop-in of each original."""
