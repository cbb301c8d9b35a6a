"""Contracts: everything that determines the bits of a result, as data.

A contract is chosen from properties of the weights and the operation (row length, number of columns, storage order),
never of the batch: the functions below do not receive the number of rows, sequences or queries, so their result cannot
depend on it. Everything else that affects speed is a schedule (`pallas_kernels.schedule`).

Source: "contract and schedule" in the project's design.
"""

from pallas_kernels.attention.contract.attention import KEY_BLOCK as KEY_BLOCK
from pallas_kernels.attention.contract.attention import LEAST as LEAST
from pallas_kernels.attention.contract.attention import QUERY_BLOCK as QUERY_BLOCK
from pallas_kernels.attention.contract.attention import SCORE_BLOCK as SCORE_BLOCK
from pallas_kernels.attention.contract.attention import SPLIT_HEAD_SIZES as SPLIT_HEAD_SIZES
from pallas_kernels.attention.contract.attention import AttentionContract as AttentionContract
from pallas_kernels.attention.contract.attention import AttentionGradientContract as AttentionGradientContract
from pallas_kernels.attention.contract.attention import MmaAttentionContract as MmaAttentionContract
from pallas_kernels.attention.contract.attention import SplitAttentionContract as SplitAttentionContract
from pallas_kernels.attention.contract.attention import attention_contract as attention_contract
from pallas_kernels.attention.contract.attention import attention_gradient_contract as attention_gradient_contract
from pallas_kernels.attention.contract.attention import mma_attention_contract as mma_attention_contract
from pallas_kernels.attention.contract.attention import split_attention_contract as split_attention_contract
from pallas_kernels.attention.contract.eight_bits import EightBitContract as EightBitContract
from pallas_kernels.attention.contract.eight_bits import eight_bit_contract as eight_bit_contract
from pallas_kernels.contract.fft import FftContract as FftContract
from pallas_kernels.contract.fft import fft_contract as fft_contract
from pallas_kernels.contract.honour import honour as honour
from pallas_kernels.contract.lapack import LapackContract as LapackContract
from pallas_kernels.contract.lapack import lapack_contract as lapack_contract
from pallas_kernels.contract.pairs import PairContract as PairContract
from pallas_kernels.contract.product import IN_TF32 as IN_TF32
from pallas_kernels.contract.product import ProductSpec as ProductSpec
from pallas_kernels.conv.contract import ConvContract as ConvContract
from pallas_kernels.cumulative.contract import ScanContract as ScanContract
from pallas_kernels.delta_rule.contract import DeltaRuleContract as DeltaRuleContract
from pallas_kernels.delta_rule.contract import MmaDeltaRuleContract as MmaDeltaRuleContract
from pallas_kernels.delta_rule.contract import MmaDeltaRuleGradientContract as MmaDeltaRuleGradientContract
from pallas_kernels.elementwise.contract import PTX_FUNCTIONS as PTX_FUNCTIONS
from pallas_kernels.elementwise.contract import XLA_FUNCTIONS as XLA_FUNCTIONS
from pallas_kernels.elementwise.contract import ElementwiseContract as ElementwiseContract
from pallas_kernels.matmul.contract.batch_sum import ROW_CHUNK as ROW_CHUNK
from pallas_kernels.matmul.contract.batch_sum import ChunkContract as ChunkContract
from pallas_kernels.matmul.contract.batch_sum import chunk_contract as chunk_contract
from pallas_kernels.matmul.contract.k_split import KSplitContract as KSplitContract
from pallas_kernels.matmul.contract.limbs import PartsChunkContract as PartsChunkContract
from pallas_kernels.matmul.contract.limbs import PartsContract as PartsContract
from pallas_kernels.matmul.contract.matmul import MatmulContract as MatmulContract
from pallas_kernels.matmul.contract.matmul import MmaChunkContract as MmaChunkContract
from pallas_kernels.matmul.contract.matmul import MmaContract as MmaContract
from pallas_kernels.matmul.contract.matmul import MmaTf32Contract as MmaTf32Contract
from pallas_kernels.matmul.contract.matmul import Tf32Contract as Tf32Contract
from pallas_kernels.matmul.contract.matmul import WgmmaChunkContract as WgmmaChunkContract
from pallas_kernels.matmul.contract.matmul import WgmmaContract as WgmmaContract
from pallas_kernels.matmul.contract.matmul import chain_contract as chain_contract
from pallas_kernels.matmul.contract.matmul import matmul_contract as matmul_contract
from pallas_kernels.matmul.contract.quant import Float8Contract as Float8Contract
from pallas_kernels.matmul.contract.quant import QuantContract as QuantContract
from pallas_kernels.matmul.contract.quant import QuantizeContract as QuantizeContract
from pallas_kernels.matmul.contract.rounded import RoundedChunkContract as RoundedChunkContract
from pallas_kernels.matmul.contract.rounded import RoundedMatmulContract as RoundedMatmulContract
from pallas_kernels.matmul.contract.rounded import rounded_contract as rounded_contract
from pallas_kernels.matmul.contract.split_k import SplitChunkContract as SplitChunkContract
from pallas_kernels.matmul.contract.split_k import SplitContract as SplitContract
from pallas_kernels.matmul.contract.split_k import SplitMmaContract as SplitMmaContract
from pallas_kernels.matmul.contract.split_k import SplitTreeContract as SplitTreeContract
from pallas_kernels.matmul.contract.split_k import SplitWgmmaContract as SplitWgmmaContract
from pallas_kernels.matmul.contract.split_k import add_as_tree as add_as_tree
from pallas_kernels.matmul.contract.split_k import split_contract as split_contract
from pallas_kernels.matmul.contract.split_k import split_count as split_count
from pallas_kernels.matmul.contract.split_k import split_length as split_length
from pallas_kernels.rows.contract.fold import FoldContract as FoldContract
from pallas_kernels.rows.contract.rows import LANES as LANES
from pallas_kernels.rows.contract.rows import RowContract as RowContract
from pallas_kernels.rows.contract.rows import row_contract as row_contract
from pallas_kernels.rows.contract.tree import TreeContract as TreeContract
from pallas_kernels.sampling.contract import GUMBEL as GUMBEL
from pallas_kernels.sampling.contract import GumbelContract as GumbelContract
from pallas_kernels.softmax.contract import OnlineRowContract as OnlineRowContract
from pallas_kernels.softmax.contract import online_row_contract as online_row_contract
