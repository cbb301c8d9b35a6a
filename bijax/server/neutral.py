"""Fields of SGLang's, OpenAI's and vLLM's requests that are not served, and their neutral values.

Clients send all fields of their API, most with the default. Such a value is accepted and ignored, since a server with
the field would answer the same. Any other value would change the answer, and is refused. Null, `{}`, and a list of
neutral values, including the empty list, are neutral in each of these fields and not listed.
"""

from collections.abc import Callable
from typing import Any

# The field -> its neutral values. A type means all of its values: no reply depends on them.
type Neutral = dict[str, tuple[Any, ...]]

_CONSTRAINED: Neutral = {"structural_tag": (), "stop_regex": (), "custom_params": ()}
# Every answer is deterministic; there is no faster class of requests.
_CLASS: Neutral = {"deterministic": (True,)}
_TEXT: Neutral = {"no_stop_trim": (False,), "spaces_between_special_tokens": (bool,), "stream_interval": (1,)}
_DISAGGREGATED: Neutral = {
    "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (), "bootstrap_pair_key": (), "routed_dp_rank": (),
    "data_parallel_rank": (), "disagg_prefill_dp_rank": (),
}  # fmt: skip
_SGLANG: Neutral = {
    "return_hidden_states": (False,), "return_routed_experts": (False,), "routed_experts_start_len": (0,),
    "session_id": (str,), "session_params": (), "custom_logit_processor": (), "extra_key": ("",),
    "cache_salt": ("",), "custom_labels": (dict,), "images_config": (),
}  # fmt: skip

GENERATE: Neutral = _DISAGGREGATED | _SGLANG | _CLASS | {
    "input_embeds": (), "image_data": (), "video_data": (), "audio_data": (), "mm_hashes": (), "modalities": ("text",),
    "use_audio_in_video": (False,), "token_ids_logprob": (), "return_sampling_mask": (False,),
    "return_flat_raw_top_logprobs": (False,), "return_flat_raw_top_logprobs_b64": (False,),
    "return_indexer_topk": (False,), "return_bytes": (False,), "return_entropy": (False,),
    "return_prompt_token_ids": (False,), "lora_id": (), "conversation_id": (str,), "routing_key": (str,),
    "background": (False,), "require_reasoning": (False,), "log_metrics": (True,), "no_logs": (False,),
    "external_trace_header": (dict,), "received_time": (int, float),
}  # fmt: skip

GENERATE_SAMPLING: Neutral = _CONSTRAINED | _TEXT | {"beam_width": (1,)}

_OPENAI: Neutral = _CONSTRAINED | _TEXT | _DISAGGREGATED | _SGLANG | _CLASS | {
    # OpenAI's
    "user": (str,), "metadata": (dict,), "safety_identifier": (str,), "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,), "prompt_cache_options": (dict,), "store": (bool,),
    "service_tier": (str,),
    # vLLM's and SGLang's
    "use_beam_search": (False,), "length_penalty": (1.0,), "include_stop_str_in_output": (False,), "bad_words": (),
    "truncate_prompt_tokens": (), "prompt_logprobs": (), "watermarking": (False,),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "return_cached_tokens_details": (False,),
    "kv_transfer_params": (), "vllm_xargs": (), "thinking_token_budget": (-1,),
}  # fmt: skip

STRUCTURED: Neutral = {
    "structural_tag": (), "whitespace_pattern": (), "disable_fallback": (bool,), "disable_any_whitespace": (bool,),
    "disable_additional_properties": (False,),
}  # fmt: skip

COMPLETIONS: Neutral = _OPENAI | {"best_of": (1,), "suffix": ("",), "add_special_tokens": (True,)}

CHAT: Neutral = _OPENAI | {
    "parallel_tool_calls": (bool,), "functions": (),
    "function_call": ("none", "auto"), "modalities": ("text",), "audio": (), "prediction": (), "moderation": (),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "web_search_options": (),
    "include_reasoning": (bool,), "separate_reasoning": (bool,), "stream_reasoning": (bool,),
    "echo": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "add_special_tokens": (False,), "documents": (), "chat_template": (), "chat_template_kwargs": (),
}  # fmt: skip

TOKENIZE: Neutral = {
    "add_special_tokens": (True,), "return_token_strs": (False,), "continue_final_message": (False,),
    "chat_template": (), "chat_template_kwargs": (), "mm_processor_kwargs": (), "tools": (),
}  # fmt: skip

RESPONSES: Neutral = _CONSTRAINED | _TEXT | _CLASS | {
    "user": (str,), "store": (bool,), "service_tier": (str,), "safety_identifier": (str,), "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,), "prompt_cache_options": (dict,), "background": (False,), "conversation": (),
    "previous_response_id": (), "prompt": (), "reasoning": (), "truncation": ("disabled",), "tools": (),
    "tool_choice": ("none", "auto"), "parallel_tool_calls": (bool,), "max_tool_calls": (), "context_management": (),
    "moderation": (), "top_logprobs": (0,),
}  # fmt: skip

EMBEDDINGS: Neutral = {
    "dimensions": (), "user": (str,), "add_special_tokens": (True,), "truncate_prompt_tokens": (), "normalize": (True,),
    "rid": (str,),
}  # fmt: skip

SCORE: Neutral = {
    "user": (str,),
    "rid": (str,),
    "priority": (0,),
    "return_pooled_hidden_states": (False,),
}

STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

# A server's answer can be sent back unchanged as a message.
MESSAGE: Neutral = {
    "refusal": (), "function_call": (), "audio": (), "annotations": (), "reasoning_content": ("",),
}  # fmt: skip


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is neutral: the reply does not depend on it.

    Args:
        value: As JSON has it.
        neutral: The neutral values and types of the field, in addition to those of every field.

    Example:
        >>> is_neutral(None, ()), is_neutral([None, None], ()), is_neutral([{}], ()), is_neutral("x", (str,))
        (True, True, True, True)
        >>> is_neutral(1, (1.0,)), is_neutral(True, (1,)), is_neutral(["text", "audio"], ("text",))
        (True, False, False)
    """
    if value is None or value == {}:
        return True
    if isinstance(value, list):
        return all(is_neutral(item, neutral) for item in value)
    return any(
        type(value) is one
        if isinstance(one, type)
        else value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in neutral
    )


def wanted(neutral: tuple[Any, ...], shown: Callable[[object], str]) -> str:
    """What to do with a field that has another value, for errors.

    Args:
        neutral: As for `is_neutral`.
        shown: Writes a value.
    """
    values = [shown(one) for one in neutral if not isinstance(one, type)]
    kinds = [f"a value of the type {_JSON[one]}" for one in neutral if isinstance(one, type)]
    return "leave it out" + (f", or send {' or '.join([*values, *kinds])}" if neutral else "")


_JSON = {str: "string", bool: "boolean", dict: "object", int: "integer", float: "number"}
