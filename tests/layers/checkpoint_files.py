"""Writes tiny random Llama checkpoints in both formats, for the tests of the readers."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 2, 4, 2, 8, 24, 40
SPECIALS = ["<s>", "</s>", "<tool>"]
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "ab"), ("1", "2"), ("12", "3")]
CHAT_TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"


def byte_symbols() -> list[str]:
    """The 256 characters of a byte-level alphabet, by byte."""
    symbols, spare = [], 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


TOKENS = [*SPECIALS, *byte_symbols(), *(left + right for left, right in MERGES)]
VOCAB = len(TOKENS)


def random_weights(seed: int = 0, *, tied: bool = False) -> dict[str, np.ndarray]:
    """Float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}."
        shapes |= {
            block + "input_layernorm.weight": (WIDTH,),
            block + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            block + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            block + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            block + "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            block + "post_attention_layernorm.weight": (WIDTH,),
            block + "mlp.gate_proj.weight": (INNER, WIDTH),
            block + "mlp.up_proj.weight": (INNER, WIDTH),
            block + "mlp.down_proj.weight": (WIDTH, INNER),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(weights: dict[str, np.ndarray], *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """The same weights under GGUF names; a Llama's query and key rows have the two channels of a pair side by side."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    tensors = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{GGUF_BLOCK_NAMES[rest]}"
        else:
            stem = names[stem]
        if architecture == "llama" and stem.endswith(("attn_q", "attn_k")):
            # Row by row, so that it shares nothing with the reader's reshape: rows c and c + half become 2c and 2c + 1.
            interleaved = np.empty_like(weight)
            for row in range(len(weight)):
                head, channel = divmod(row, HEAD_DIM)
                half, pair = divmod(channel, HEAD_DIM // 2)
                interleaved[head * HEAD_DIM + 2 * pair + half] = weight[row]
            weight = interleaved
        tensors[f"{stem}.{kind}"] = weight
    return tensors


def gguf_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (VOCAB - 3)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes a GGUF file; matrices are quantised to `kind`, vectors stay float32."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (gguf_metadata() if metadata is None else metadata).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, tensor in (gguf_tensors(random_weights()) if tensors is None else tensors).items():
        if tensor.ndim == 2 and tensor.dtype == np.float32 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_fields() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }


def tokenizer_backend() -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(TOKENS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS[:2])
    backend.add_tokens([tokenizers.AddedToken(SPECIALS[2], normalized=False)])
    return backend


def write_folder(
    folder: Path,
    fields: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    *,
    shards: int = 0,
) -> Path:
    """Writes a Hugging Face folder; with `shards`, the weights in that many files and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_fields() if fields is None else fields))
    tokenizer_backend().save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    weights = random_weights() if weights is None else weights
    if not shards:
        save_file(weights, folder / "model.safetensors")
        return folder
    places = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in list(weights)[shard::shards]}
        save_file(part, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder
