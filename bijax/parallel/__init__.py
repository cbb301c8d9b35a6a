"""Operations inside `jax.shard_map` whose bits do not depend on the number of devices.

Sums over devices are fixed binary trees, products are cut into leaves of such a tree, and rows that are cut over
devices travel without being added. `axis=None` means one device, with the same bits.
"""

from bijax.parallel._experts import Dispatched as Dispatched
from bijax.parallel._experts import moe_combine as moe_combine
from bijax.parallel._experts import moe_dispatch as moe_dispatch
from bijax.parallel._gradients import ParallelGradient as ParallelGradient
from bijax.parallel._gradients import accumulate_gradients as accumulate_gradients
from bijax.parallel._processes import check_processes as check_processes
from bijax.parallel._products import column_parallel as column_parallel
from bijax.parallel._products import row_parallel as row_parallel
from bijax.parallel._rows import all_rows as all_rows
from bijax.parallel._rows import own_rows as own_rows
from bijax.parallel._sums import broadcast_to_leaves as broadcast_to_leaves
from bijax.parallel._sums import psum as psum
from bijax.parallel._sums import psum_scatter as psum_scatter
from bijax.parallel._sums import tree_sum as tree_sum
from bijax.parallel._vocabulary import vocab_parallel_argmax as vocab_parallel_argmax
from bijax.parallel._vocabulary import vocab_parallel_embed as vocab_parallel_embed
from bijax.parallel._vocabulary import vocab_parallel_logprobs as vocab_parallel_logprobs
from bijax.parallel._vocabulary import vocab_parallel_sample as vocab_parallel_sample
