"""An engine that serves many requests at once, with the bits that each would get alone."""

from bijax.serving.async_engine import AsyncEngine as AsyncEngine
from bijax.serving.disaggregated import DisaggregatedEngine as DisaggregatedEngine
from bijax.serving.engine import Engine as Engine
from bijax.serving.errors import EngineError as EngineError
from bijax.serving.errors import QueueFullError as QueueFullError
from bijax.serving.grammar import Grammar as Grammar
from bijax.serving.model import DraftingModel as DraftingModel
from bijax.serving.model import Model as Model
from bijax.serving.model import StatefulModel as StatefulModel
from bijax.serving.model import Tokenizer as Tokenizer
from bijax.serving.model_options import ModelOptions as ModelOptions
from bijax.serving.options import EngineOptions as EngineOptions
from bijax.serving.outputs import Completion as Completion
from bijax.serving.outputs import EngineStats as EngineStats
from bijax.serving.outputs import RequestOutput as RequestOutput
from bijax.serving.outputs import TokenLogprob as TokenLogprob
from bijax.serving.params import SamplingParams as SamplingParams
