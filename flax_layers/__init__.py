"""Batch-invariant layers for Flax, and models built from batch-invariant operations."""

from . import _needs_flax as _needs_flax  # first: it tells what to install where Flax is missing
from . import linen as linen
from . import nnx as nnx
from .conversion import Conversion as Conversion
from .conversion import conversion_report as conversion_report
from .conversion import convert as convert
from .conversion import quantize_variables as quantize_variables
from .models import Generation as Generation
from .models import Llama as Llama
from .models import MTPHead as MTPHead
from .models import PartitionedLlama as PartitionedLlama
from .models import ServedLlama as ServedLlama
from .models import ServedPartitionedLlama as ServedPartitionedLlama
from .models import generate as generate
from .models import load_partitioned as load_partitioned
from .models import partition as partition
from .models import score as score
from .models.layers import KVCache as KVCache
from .ops import INVARIANT as INVARIANT
from .ops import PLAIN as PLAIN
from .ops import Ops as Ops
from .routing import Routing as Routing
