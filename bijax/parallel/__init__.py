"""Operations inside `jax.shard_map` whose bits do not depend on the number of devices.

Sums over devices are fixed binary trees, products are cut into leaves of such a tree, and rows that are cut over
devices travel without being added. `axis=None` means one device, with the same bits.
"""

from bijax.parallel._batch_split import TOKEN_DISTRIBUTION_THRESHOLD as TOKEN_DISTRIBUTION_THRESHOLD
from bijax.parallel._batch_split import BatchSplit as BatchSplit
from bijax.parallel._batch_split import ChildBatch as ChildBatch
from bijax.parallel._batch_split import split_decode as split_decode
from bijax.parallel._batch_split import split_prefill as split_prefill
from bijax.parallel._expert_parts import DispatchedPart as DispatchedPart
from bijax.parallel._expert_parts import join_parts as join_parts
from bijax.parallel._expert_parts import split_dispatched as split_dispatched
from bijax.parallel._experts import Dispatched as Dispatched
from bijax.parallel._experts import moe_combine as moe_combine
from bijax.parallel._experts import moe_combine_done as moe_combine_done
from bijax.parallel._experts import moe_combine_start as moe_combine_start
from bijax.parallel._experts import moe_dispatch as moe_dispatch
from bijax.parallel._experts import moe_dispatch_done as moe_dispatch_done
from bijax.parallel._experts import moe_dispatch_start as moe_dispatch_start
from bijax.parallel._gradients import ParallelGradient as ParallelGradient
from bijax.parallel._gradients import accumulate_gradients as accumulate_gradients
from bijax.parallel._overlap import run_operations as run_operations
from bijax.parallel._overlap import run_overlapped as run_overlapped
from bijax.parallel._overlap import turns as turns
from bijax.parallel._overlap_kind import Overlap as Overlap
from bijax.parallel._processes import check_processes as check_processes
from bijax.parallel._products import column_parallel as column_parallel
from bijax.parallel._products import row_parallel as row_parallel
from bijax.parallel._rows import all_rows as all_rows
from bijax.parallel._rows import own_rows as own_rows
from bijax.parallel._strategies import YIELD as YIELD
from bijax.parallel._strategies import OverlapStrategy as OverlapStrategy
from bijax.parallel._strategies import overlap_strategy as overlap_strategy
from bijax.parallel._sums import broadcast_to_leaves as broadcast_to_leaves
from bijax.parallel._sums import psum as psum
from bijax.parallel._sums import psum_scatter as psum_scatter
from bijax.parallel._sums import tree_sum as tree_sum
from bijax.parallel._transfers import Exchange as Exchange
from bijax.parallel._transfers import Together as Together
from bijax.parallel._transfers import Transfer as Transfer
from bijax.parallel._vocabulary import vocab_parallel_argmax as vocab_parallel_argmax
from bijax.parallel._vocabulary import vocab_parallel_embed as vocab_parallel_embed
from bijax.parallel._vocabulary import vocab_parallel_logprobs as vocab_parallel_logprobs
from bijax.parallel._vocabulary import vocab_parallel_sample as vocab_parallel_sample
