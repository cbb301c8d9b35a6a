"""Contracts: everything that can move a bit of a result, stated as data.

A contract is chosen from what belongs to the weights and the operation (row length, number of columns, storage order)
and never from what belongs to the batch: the functions below do not receive the number of rows, sequences or queries,
so no choice of theirs can depend on it. Whatever else makes a program fast is a schedule (`pallas_kernels.schedule`).

Source: "contract and schedule" in the project's design.
"""

from pallas_kernels._contract_attention import KEY_BLOCK as KEY_BLOCK
from pallas_kernels._contract_attention import LEAST as LEAST
from pallas_kernels._contract_attention import QUERY_BLOCK as QUERY_BLOCK
from pallas_kernels._contract_attention import SPLIT_HEAD_SIZES as SPLIT_HEAD_SIZES
from pallas_kernels._contract_attention import AttentionContract as AttentionContract
from pallas_kernels._contract_attention import AttentionGradientContract as AttentionGradientContract
from pallas_kernels._contract_attention import SplitAttentionContract as SplitAttentionContract
from pallas_kernels._contract_attention import attention_contract as attention_contract
from pallas_kernels._contract_attention import attention_gradient_contract as attention_gradient_contract
from pallas_kernels._contract_attention import split_attention_contract as split_attention_contract
from pallas_kernels._contract_matmul import MatmulContract as MatmulContract
from pallas_kernels._contract_matmul import Tf32Contract as Tf32Contract
from pallas_kernels._contract_matmul import WgmmaChunkContract as WgmmaChunkContract
from pallas_kernels._contract_matmul import WgmmaContract as WgmmaContract
from pallas_kernels._contract_matmul import matmul_contract as matmul_contract
from pallas_kernels._contract_order import PTX_FUNCTIONS as PTX_FUNCTIONS
from pallas_kernels._contract_order import XLA_FUNCTIONS as XLA_FUNCTIONS
from pallas_kernels._contract_order import ConvContract as ConvContract
from pallas_kernels._contract_order import ElementwiseContract as ElementwiseContract
from pallas_kernels._contract_order import FoldContract as FoldContract
from pallas_kernels._contract_order import PairContract as PairContract
from pallas_kernels._contract_order import ScanContract as ScanContract
from pallas_kernels._contract_order import ShardContract as ShardContract
from pallas_kernels._contract_order import honour as honour
from pallas_kernels._contract_rows import LANES as LANES
from pallas_kernels._contract_rows import ROW_CHUNK as ROW_CHUNK
from pallas_kernels._contract_rows import ChunkContract as ChunkContract
from pallas_kernels._contract_rows import OnlineRowContract as OnlineRowContract
from pallas_kernels._contract_rows import RowContract as RowContract
from pallas_kernels._contract_rows import chunk_contract as chunk_contract
from pallas_kernels._contract_rows import online_row_contract as online_row_contract
from pallas_kernels._contract_rows import row_contract as row_contract
from pallas_kernels._contract_shards import SplitChunkContract as SplitChunkContract
from pallas_kernels._contract_shards import SplitContract as SplitContract
from pallas_kernels._contract_shards import SplitWgmmaContract as SplitWgmmaContract
from pallas_kernels._contract_shards import add_as_tree as add_as_tree
from pallas_kernels._contract_shards import shard_length as shard_length
from pallas_kernels._contract_shards import split_contract as split_contract
from pallas_kernels._contract_shards import split_shards as split_shards
