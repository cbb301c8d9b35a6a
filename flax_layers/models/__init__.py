"""Models built from the layers of this package, generation with them, and scores of texts."""

from .experts_weights import experts_from_checkpoint as experts_from_checkpoint
from .generate import Generation as Generation
from .generate import generate as generate
from .llama import Llama as Llama
from .mtp import MTPHead as MTPHead
from .partition import load_partitioned as load_partitioned
from .partition import partition as partition
from .partitioned import PartitionedLlama as PartitionedLlama
from .partitioned_head import partition_head as partition_head
from .score import score as score
from .served import ServedLlama as ServedLlama
from .served_partitioned import ServedPartitionedLlama as ServedPartitionedLlama
from .served_partitioned_head import DraftingPartitionedLlama as DraftingPartitionedLlama
