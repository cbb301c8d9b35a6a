"""Models built from the layers of this package, and generation with them."""

from .generate import Generation as Generation
from .generate import generate as generate
from .llama import Llama as Llama
from .served import ServedLlama as ServedLlama
