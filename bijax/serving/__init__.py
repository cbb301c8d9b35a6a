"""An engine that serves many requests at once, with the bits that each would get alone."""

from bijax.serving.errors import EngineError as EngineError
from bijax.serving.errors import QueueFullError as QueueFullError
from bijax.serving.outputs import Completion as Completion
from bijax.serving.outputs import EngineStats as EngineStats
from bijax.serving.outputs import RequestOutput as RequestOutput
from bijax.serving.outputs import TokenLogprob as TokenLogprob
from bijax.serving.params import SamplingParams as SamplingParams
