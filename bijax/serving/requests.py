"""Requests made from the arguments of callers, which are checked."""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from typing import Any

from jax.sharding import Mesh

from bijax.serving.grammar import Grammars
from bijax.serving.model import Tokenizer, has_draft_head
from bijax.serving.options import MTP, PROMPT_LOOKUP, EngineOptions
from bijax.serving.params import SamplingParams
from bijax.serving.sequence import Request, Sequence, random_seed, seed_of
from bijax.serving.text import TextStream
from bijax.serving.tokens import read_prompt


def check_engine(model: Any, eos_token_ids: Any, options: Any) -> None:
    """Checks the components of an engine.

    Raises:
        TypeError: If an argument has the wrong type; the message names it.
        ValueError: If a head of the model is to make drafts, and it has none.
    """
    lacking = [
        name for name in ("vocab_size", "max_length", "init_pages", "extend", "logits") if not hasattr(model, name)
    ]
    if lacking:
        raise TypeError(
            f"Engine: model must be a bijax.serving.Model, such as flax_layers.ServedLlama, got {type(model).__name__},"
            f" which has no {', '.join(lacking)}."
        )
    if not isinstance(eos_token_ids, Iterable) or isinstance(eos_token_ids, (str, bytes)):
        raise TypeError(f"Engine: eos_token_ids must be a collection of integers, got {eos_token_ids!r}.")
    if options is not None and not isinstance(options, EngineOptions):
        raise TypeError(f"Engine: options must be EngineOptions, got {type(options).__name__}.")
    if options is not None and options.speculative_algorithm == MTP and not has_draft_head(model):
        raise ValueError(
            f"Engine: speculative_algorithm={MTP!r} needs a model with a head for multi-token prediction, got"
            f" {type(model).__name__} without one; pass one to the model (flax_layers.ServedLlama takes draft_head,"
            f" which MTPHead.from_checkpoint reads), or use {PROMPT_LOOKUP!r}."
        )


def on_mesh(model: Any, mesh: Any) -> Any:
    """Returns a model with its weights and its cache cut over a mesh.

    Raises:
        TypeError: If `mesh` is not a mesh.
        ValueError: If the model cannot be cut, or not in this way.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"Engine: mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}.")
    if not hasattr(model, "partitioned"):
        raise ValueError(
            f"Engine: mesh must be None with a model that has no method partitioned, got a mesh of {dict(mesh.shape)}"
            f" with {type(model).__name__}."
        )
    return model.partitioned(mesh)


def overlapped(model: Any, options: EngineOptions) -> Any:
    """Returns a model that computes with the overlap that the options name.

    Raises:
        ValueError: If its experts are not on several devices.
    """
    overlap = options.overlap()
    if overlap is None:
        return model
    devices = getattr(model, "expert_devices", 1)
    if devices < 2:
        name = "enable_two_batch_overlap" if options.enable_two_batch_overlap else "enable_single_batch_overlap"
        raise ValueError(
            f"Engine: {name} needs a model whose experts are on several devices, got a {type(model).__name__} with"
            f" experts on {devices}; pass a mesh with more, or leave the option out."
        )
    return model.overlapped(overlap)


def make_request(
    name: str,
    prompt: Items[int],
    params: SamplingParams,
    *,
    key: tuple[int, int],
    vocab_size: int,
    longest: int,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
    default_seed: int | None,
    seed_from_prompt: bool = False,
    grammars: Grammars | None = None,
    adapters: Items[str] = (),
) -> Request:
    """Returns a request with its sequences.

    Args:
        name: Its name.
        prompt: Tokens.
        params: Its sampling parameters.
        key: Its place in the order of all requests.
        vocab_size: The model's.
        longest: Longest sequence that fits, in tokens.
        tokenizer: For its texts, or None.
        eos_token_ids: End-of-text tokens of the model.
        default_seed: Used if it has no seed; None for a random one.
        seed_from_prompt: Whether it is a hash of the prompt then.
        grammars: Compiles its grammar.
        adapters: Names of the model's adapters.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a token is outside the vocabulary, the prompt is empty or too long, the grammar is invalid, or
            there is no such adapter.
    """
    if not isinstance(name, str):
        raise TypeError(f"Engine: request_id must be a string, got {name!r}.")
    if not isinstance(params, SamplingParams):
        raise TypeError(f"Engine: params must be SamplingParams, got {type(params).__name__}.")
    given, tokens = read_prompt(prompt, vocab_size)
    params.check_tokens(vocab_size, eos_token_ids)
    adapter = find_adapter(params.adapter, adapters)
    if params.stop and tokenizer is None:
        raise ValueError("SamplingParams: stop strings need a tokenizer, and this engine has none; use stop_token_ids.")
    left_out = special_token_ids(tokenizer) if params.skip_special_tokens else frozenset()
    room = longest - (1 if params.max_new_tokens else 0)
    if len(tokens) > room:
        raise ValueError(
            f"Engine: the prompt must have at most {room} tokens, which model and cache have room for, got"
            f" {len(tokens)}."
        )
    matcher = None if params.grammar is None or grammars is None else grammars.matcher(params.grammar)
    seed = params.seed if params.seed is not None else default_seed
    if seed is None:
        seed = seed_of(tokens) if seed_from_prompt else random_seed()
    request = Request(name, given, params, key, vocab_size, adapter)
    stop_tokens = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    request.sequences = [
        Sequence(
            request,
            index,
            (seed + index) % 2**64,
            tokens[:],
            stop_tokens,
            None if tokenizer is None else TextStream(tokenizer, params.stop, left_out),
            least=len(tokens) + params.min_new_tokens,
            most=min(len(tokens) + params.max_new_tokens, longest),
            matcher=None if matcher is None else matcher.copy(),
        )
        for index in range(params.n)
    ]
    return request


def params_of(prompts: Any, params: SamplingParams | Items[SamplingParams] | None) -> list[SamplingParams]:
    """Returns the sampling parameters of each prompt.

    Args:
        prompts: The prompts.
        params: For all, or for each; None for the default ones.

    Raises:
        TypeError: If the prompts are not a sequence.
        ValueError: If the numbers of params and prompts differ.
    """
    if not isinstance(prompts, Collection):
        raise TypeError(f"Engine: prompts must be a sequence of prompts, got {type(prompts).__name__}.")
    each = list(params) if isinstance(params, Items) else [params or SamplingParams()] * len(prompts)
    if len(each) != len(prompts):
        raise ValueError(f"Engine: expected params for each of the {len(prompts)} prompts, got {len(each)}.")
    return each


def find_adapter(name: str | None, names: Items[str]) -> int:
    """Returns the number of an adapter in a step: 0 for None, which is the model itself.

    Args:
        name: Its name, or None.
        names: Of the model's adapters.

    Raises:
        ValueError: If no adapter has that name.
    """
    if name is None:
        return 0
    if name not in names:
        known = f"one of {', '.join(names)}, or None for the model itself" if names else "None: the model has none"
        raise ValueError(f"SamplingParams: adapter must be {known}, got {name!r}.")
    return names.index(name) + 1


def special_token_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the tokens that a text without special tokens leaves out.

    Raises:
        ValueError: If the tokenizer does not name them.
    """
    if tokenizer is None:
        return frozenset()
    found = getattr(tokenizer, "special_token_ids", None)
    if found is None:
        raise ValueError(
            "SamplingParams: skip_special_tokens must be False with a tokenizer that has no special_token_ids, got"
            " True."
        )
    return frozenset(found)
