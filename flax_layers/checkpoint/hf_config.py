"""The configuration of a Hugging Face folder."""

from pathlib import Path
from typing import Any

from .config import LlamaConfig, default_head_dim
from .errors import CheckpointError
from .hf_fields import MOST_LISTED, number, read_json, whole_number
from .hf_hybrid import HYBRIDS, rotary_fields, text_fields
from .hf_models import MODELS
from .rope import RopeScaling, rope_scaling


def hf_config(folder: Path) -> LlamaConfig:
    """Reads `config.json` and, for the tokens that end generation, `generation_config.json` if present.

    The format's defaults fill in what old files omit: one key/value head per head, an epsilon of 1e-6, 2048 positions,
    and the model type's defaults. Fields that do not affect the numbers (names, versions, dropout) are not read.

    Raises:
        FileNotFoundError: If there is no `config.json`.
        CheckpointError: If the model's type is not in `hf_models.MODELS`, if a field is missing or damaged, or if one
            asks for a feature that the model does not have: another activation, quantised weights, own code.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; give a GGUF file or a folder with config.json and safetensors"
        )
    fields = text_fields(read_json(path), path)
    if fields.get("model_type") in HYBRIDS:
        fields = rotary_fields(fields, path)
    if not isinstance(fields.get("model_type"), str) or fields["model_type"] not in MODELS:
        raise CheckpointError(
            f"{path}: expected one of the model types {list(MODELS)}, got {fields.get('model_type')!r}; "
            "use a checkpoint of a supported model"
        )
    model = MODELS[fields["model_type"]]
    fields = {**model.defaults, **fields}
    for name, neutral in model.neutral_values().items():
        if name in fields and fields[name] not in neutral:
            raise CheckpointError(
                f"{path}: {name} must be {' or '.join(map(repr, neutral))} or absent, got {fields[name]!r}; this kind "
                "of model does not have that feature: use a checkpoint without it"
            )
    hidden_size = whole_number(fields, "hidden_size", path)
    num_heads = whole_number(fields, "num_attention_heads", path)
    rotated = next((name for name in (model.head_dim, "head_dim") if fields.get(name) is not None), None)
    head_dim = (
        default_head_dim(hidden_size, num_heads)
        if rotated is None
        else whole_number(fields, rotated, path, most=MOST_LISTED)
    )
    max_positions = whole_number(fields, "max_position_embeddings", path, 2048)
    more = model.read(fields, path)
    rotary_dim = more.get("rotary_dim") or head_dim
    theta, scaling, window_theta = _rope(fields, path, rotary_dim, max_positions)
    return LlamaConfig(
        vocab_size=whole_number(fields, "vocab_size", path),
        hidden_size=hidden_size,
        intermediate_size=whole_number(fields, "intermediate_size", path),
        num_layers=whole_number(fields, "num_hidden_layers", path, most=MOST_LISTED),
        num_heads=num_heads,
        num_kv_heads=whole_number(fields, "num_key_value_heads", path, num_heads),
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        window_rope_theta=window_theta,
        rms_norm_eps=number(fields.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        tie_word_embeddings=fields["tie_word_embeddings"],
        max_position_embeddings=max_positions,
        bos_token_id=_first(_token_ids(fields, "bos_token_id", path)),
        eos_token_ids=_eos_token_ids(folder, fields),
        **more,
    )


def _rope(
    fields: dict[str, Any], path: Path, head_dim: int, max_positions: int
) -> tuple[float, RopeScaling | None, float | None]:
    """Returns base and scaling of the rotary frequencies, and the base in layers with a window if it is another."""
    # Old files have `rope_theta` and `rope_scaling` side by side, newer ones keep both in `rope_parameters`, which has
    # one object for each kind of layers where they differ.
    parameters, window_theta = fields.get("rope_parameters"), fields.get("rope_local_base_freq")
    if isinstance(parameters, dict) and "full_attention" in parameters:
        of_window = parameters.get("sliding_attention") or {}
        if not isinstance(of_window, dict) or of_window.get("rope_type", "default") != "default":
            raise CheckpointError(
                f"{path}: rope_parameters must be of the type 'default' for layers with a window, got {of_window!r}"
            )
        window_theta = of_window.get("rope_theta", window_theta)
        parameters = parameters["full_attention"]
    stated = {"rope_scaling": fields.get("rope_scaling"), "rope_parameters": parameters}
    thetas = [] if fields.get("rope_theta") is None else [number(fields["rope_theta"], "rope_theta", path)]
    for name, rope in stated.items():
        if rope is not None and not isinstance(rope, dict):
            raise CheckpointError(f"{path}: {name} must be an object or absent, got {rope!r}; the file is damaged")
        if rope is not None and "rope_theta" in rope:
            thetas.append(number(rope["rope_theta"], f"{name}.rope_theta", path))
    if len(set(thetas)) > 1:
        raise CheckpointError(f"{path}: states the rope base more than once, got {thetas}; leave one of them")
    theta = thetas[0] if thetas else number(fields["default_rope_theta"], "rope_theta", path)
    scalings = []
    for name, rope in stated.items():
        if rope is not None:
            try:
                scalings.append(rope_scaling(rope, theta=theta, head_dim=head_dim, max_positions=max_positions))
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {name}: {error}") from error
    if len(set(scalings)) > 1:
        raise CheckpointError(f"{path}: rope_scaling and rope_parameters contradict each other; leave one of them")
    window = None if window_theta is None else number(window_theta, "rope_local_base_freq", path)
    return theta, scalings[0] if scalings else None, window


def _eos_token_ids(folder: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_json(path)
        if "eos_token_id" in generation:
            return _token_ids(generation, "eos_token_id", path)
    return _token_ids(fields, "eos_token_id", folder / "config.json")


def _token_ids(fields: dict[str, Any], name: str, path: Path) -> tuple[int, ...]:
    value = fields.get(name)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in values):
        raise CheckpointError(
            f"{path}: {name} must be a token id or a list of them, got {value!r}; the file is damaged"
        )
    return tuple(dict.fromkeys(values))


def _first(token_ids: tuple[int, ...]) -> int | None:
    return token_ids[0] if token_ids else None
