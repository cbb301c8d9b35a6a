"""Where engines and prompts come from: models that are read here, or servers."""

import dataclasses
from typing import Any

import numpy as np

from bijax.determinism.command import TOY, TOY_HYBRID, DeterminismError
from bijax.determinism.remote import RemoteEngine
from bijax.serving import Engine, EngineOptions, ModelOptions
from bijax.serving.model import Model
from bijax.serving.options import MTP, PROMPT_LOOKUP
from bijax.serving.toy import ToyModel

_SENTENCE = "Tell me about batch invariance, and why the same request should always get the same answer. "


class LocalSource:
    """Makes engines in this process.

    Args:
        path: A checkpoint, or the name of a model on the hub; None for SmolLM2, "toy" or "toy-hybrid" for a toy model.
        model_options: Of the model.
        options: Of the engines.

    Raises:
        DeterminismError: If the model cannot be read, or not cut over devices as the options say.
    """

    def __init__(self, path: str | None, model_options: ModelOptions, options: EngineOptions) -> None:
        self._path = path
        self._model_options = model_options
        self._options = options
        self._tokenizer: Any = None
        self._model = self._read()
        vocab_size = self._model.vocab_size
        self._tokens: list[int] = (
            np.random.default_rng(0).integers(0, vocab_size, self._model.max_length).tolist()
            if self._tokenizer is None
            else self._tokenizer.encode(_SENTENCE)
        )

    def open(
        self,
        *,
        num_pages: int | None = None,
        speculative_tokens: int | None = None,
        prefix_cache: bool | None = None,
        reload: bool = False,
    ) -> Engine:
        """Returns a new engine; see `OpenEngine`."""
        changes: dict[str, Any] = {
            "num_pages": num_pages,
            "speculative_tokens": speculative_tokens,
            "prefix_cache": prefix_cache,
        }
        if speculative_tokens == 0:
            changes["speculative_algorithm"] = PROMPT_LOOKUP
        changed = dataclasses.replace(self._options, **{n: v for n, v in changes.items() if v is not None})
        return Engine(self._read() if reload else self._model, tokenizer=self._tokenizer, options=changed)

    def prompt(self, length: int) -> list[int]:
        """Returns a prompt of this many tokens; each is a prefix of the longer ones."""
        return _repeat(self._tokens, length)

    def _read(self) -> Model:
        if self._path in (TOY, TOY_HYBRID) and self._model_options.tensor_parallel_size is not None:
            raise DeterminismError(
                f"--tensor-parallel-size must be left out with {self._path!r}, which is not cut over devices, got"
                f" {self._model_options.tensor_parallel_size}; name a checkpoint"
            )
        drafts = self._options.speculative_algorithm == MTP
        if self._path == TOY:
            return ToyModel.random(seed=0)
        if self._path == TOY_HYBRID:
            from bijax.serving.toy_hybrid import toy_hybrid

            return toy_hybrid(seed=0, draft_head=drafts)
        from bijax.serving.load import find_model, load_model
        from flax_layers.checkpoint import CheckpointError, load_checkpoint

        try:
            checkpoint = load_checkpoint(find_model(self._path))
            self._tokenizer = checkpoint.tokenizer
            return load_model(checkpoint, self._model_options, draft_head=drafts)
        except (CheckpointError, OSError, ValueError) as error:
            raise DeterminismError(str(error)) from error


class RemoteSource:
    """A server instead of an engine.

    Args:
        server: The server.
    """

    def __init__(self, server: RemoteEngine) -> None:
        self._server = server
        self._tokens = server.encode(_SENTENCE)

    def open(
        self,
        *,
        num_pages: int | None = None,
        speculative_tokens: int | None = None,
        prefix_cache: bool | None = None,
        reload: bool = False,
    ) -> RemoteEngine:
        """Returns the server, whose options cannot be changed.

        Raises:
            ValueError: If options are given.
        """
        if reload or any(option is not None for option in (num_pages, speculative_tokens, prefix_cache)):
            raise ValueError("the options of a server cannot be changed.")
        return self._server

    def prompt(self, length: int) -> list[int]:
        """Returns a prompt of this many tokens; each is a prefix of the longer ones."""
        return _repeat(self._tokens, length)


def _repeat(tokens: list[int], length: int) -> list[int]:
    return (tokens * (length // len(tokens) + 1))[:length]
