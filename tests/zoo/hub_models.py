"""Every model type of transformers, shrunk: few layers, small widths, seeded random weights, and one batch of made-up inputs.

A configuration is made from the library's own default by shrinking what its name says it is (layers, widths, heads, vocabulary, image
and patch sizes, experts); as many layers stay as are needed to see every kind of layer that the default has. Nothing is downloaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from zoo.hub_details import FIELDS, INPUTS, Inputs, merged

BATCH, NUM_TOKENS, NUM_FRAMES, NUM_SAMPLES = 4, 32, 64, 8000
WIDTH, HEADS, HEAD_DIM, INNER, VOCABULARY, IMAGE, PATCH = 64, 4, 16, 128, 320, 64, 16
MOST_LAYERS = 8
MOST_PARAMETERS = 40_000_000
AUDIO = ("audio_config", "encoder_config")
BOTH = ("ZERO_SHOT_IMAGE_CLASSIFICATION", "PRETRAINING")  # tasks of models that need text and an image

# The first of these that a model type has a class in is what is trained.
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "PRETRAINING",
    "BACKBONE",
)

# What a field becomes that the default leaves open, and that some models cannot do without.
WHERE_UNSAID = {
    "vocab_size": VOCABULARY,
    "head_dim": HEAD_DIM,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_key_value_heads": HEADS,
    "mask_token_id": 4,
    "pad_token_id": 1,
}

KEY_VALUE_HEADS = r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num"

# (what a field's name must match, how its default value shrinks); the first match counts.
RULES: tuple[tuple[str, Any], ...] = (
    (r"(n_|num_)?(routed_|local_)?experts|(n|num)_(routed|local)_experts|moe_num_experts", lambda v: min(v, 4)),
    (r"num_experts_per_tok(en)?|moe_top_?k|top_k_experts|num_selected_experts|moe_k", lambda v: min(v, 2)),
    (r"n_group|topk_group|num_expert_groups?", lambda v: 1),
    (r"first_k_dense_replace|moe_layer_start_index", lambda v: min(v, 1)),
    (r".*(q_lora_rank|kv_lora_rank|o_lora_rank)", lambda v: HEAD_DIM),
    (r"(qk_rope_head_dim|rotary_dim)", lambda v: HEAD_DIM // 2),
    (r".*head_dim|d_kv|.*head_size|attention_head_size|.*_head_dim_.*", lambda v: HEAD_DIM),
    (r".*(heads|n_head|_nhead|nhead)", lambda v: HEADS),
    (r"num_feat_extract_layers|num_conv_.*|num_adapter_layers", lambda v: v),
    (r"num_hidden_layers|.*(n_layers?|num_layers|_layers|_depth|num_blocks|_n_blocks)|depth", lambda v: min(v, 2)),
    (
        r".*(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|ffn_size|mlp_dim|inner_dim|feedforward_dim|ff_dim|dim_feedforward)|mlp_hidden_size",
        lambda v: INNER,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|embedding_dim|projection_dim|dim|hidden_size_per_layer_input|out_hidden_size"
        r"|width|emb_dim|proj_dim|conv_dim|output_dim|model_dim|latent_dim|d_latents|lru_width|output_hidden_size|latent_size|channels|num_channels_hidden)",
        lambda v: min(v, WIDTH),
    ),
    (r"codebook_size", lambda v: min(v, 256)),
    (r"(.*_)?vocab_size(_.*)?|num_embeddings", lambda v: min(v, VOCABULARY)),
    (
        r"(max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|max_sequence_length)",
        lambda v: min(v, 128),
    ),
    (r"window_size", lambda v: min(v, 4)),
    (r"image_size|input_size|resolution", lambda v: IMAGE),
    (r"(.*_)?patch_size", lambda v: min(v, PATCH)),
    (r"attention_window|sliding_window|.*chunk_size|attention_chunk_size|local_attention_window_size|block_size", lambda v: min(v, 16)),
    (r"state_size|ssm_state_size|mamba_d_state|time_step_rank", lambda v: min(v, 8)),
    (r"num_queries|num_latents|num_query_tokens", lambda v: min(v, 8)),
)


def shrunk(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration whose value changes, smaller; nested configurations become dictionaries.

    Args:
        defaults: field → the library's default, as ``config.to_dict()`` gives it.
    """
    out = {name: small for name, value in defaults.items() if (small := _shrunk_field(name, value, defaults)) is not None}
    if "qk_rope_head_dim" in out and "head_dim" in out:
        out["head_dim"] = out["qk_rope_head_dim"]
    return out | _layers(defaults, out)


def _shrunk_field(name: str, value: Any, defaults: Mapping[str, Any]) -> Any:
    """What one field becomes; None: it stays."""
    if value is None:
        return WHERE_UNSAID.get(name)
    if isinstance(value, (bool, str)):
        return None
    if name == "attention_types":  # of GPT-Neo: kinds, and how often all of them
        return [[value[0][0], 1]]
    if isinstance(value, Mapping):
        return _shrunk_mapping(name, value)
    if name.endswith(("token_id", "token_index")):
        ids = value if isinstance(value, list) else [value]
        small = [v % 100 + 10 if isinstance(v, int) and v >= VOCABULARY else v for v in ids]
        return small if isinstance(value, list) else small[0]
    if (rule := next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)) is None:
        return None
    if re.fullmatch(KEY_VALUE_HEADS, name):
        return HEADS if value == defaults.get("num_attention_heads") else min(value, 2)
    if isinstance(value, int):
        return rule(value)
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return _shrunk_list(name, list(value), rule)
    return None


def _shrunk_mapping(name: str, value: Mapping[str, Any]) -> dict[str, Any] | None:
    if "model_type" in value:
        small = shrunk(value)
        return dict(value) | small | _stages(value, small)
    if "mrope_section" in value:  # how many of a head's pairs turn by time, height and width
        third = HEAD_DIM // 6
        return dict(value) | {"mrope_section": [HEAD_DIM // 2 - 2 * third, third, third]}
    return None


def _stages(defaults: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Of a backbone inside of a model: the layers that it hands on, which are as many as before."""
    names = defaults.get("out_features")
    if not names or "num_hidden_layers" not in changed:
        return {}
    number = max(len(names), changed["num_hidden_layers"])
    indices = list(range(number - len(names) + 1, number + 1))
    return {"num_hidden_layers": number, "out_features": [f"stage{index}" for index in indices], "out_indices": indices}


def _shrunk_list(name: str, values: list[int], rule: Callable[[int], int]) -> list[int]:
    """One number per stage or per axis of an image. Widths of stages stay, for they depend on one another."""
    if re.search(r"layers|depth|blocks", name):
        return [min(v, 2) for v in values]
    if re.search(r"heads", name):
        return [2 ** (stage + 1) for stage in range(len(values))]
    return [rule(v) for v in values] if len(set(values)) == 1 else values


def _layers(defaults: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """As many layers as show every kind that the default has, and what is said of each."""
    if "num_hidden_layers" not in changed or not isinstance(defaults["num_hidden_layers"], int):
        return {}
    per_layer = {name: value for name, value in defaults.items() if isinstance(value, list) and len(value) == defaults["num_hidden_layers"]}
    first_of_each = [value.index(one) for value in per_layer.values() for one in value if not isinstance(one, (int, float))]
    number = min(max(2, 1 + max(first_of_each, default=1)), MOST_LAYERS)
    kept = {name: value[:number] for name, value in per_layer.items()}
    by_index = {
        name: {key: one for key, one in value.items() if int(key) < number}
        for name, value in defaults.items()
        if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value)
    }
    return kept | by_index | {"num_hidden_layers": number}


def model_types() -> list[str]:
    """Every model type of the installed transformers that has a class for one of `TASKS`."""
    return sorted({model_type for task in TASKS for model_type in _classes(task)})


def _classes(task: str) -> Mapping[str, Any]:
    from transformers.models.auto import modeling_auto

    found: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
    return found


def task_of(model_type: str) -> str:
    """The task that a model type is trained for."""
    return next(task for task in TASKS if model_type in _classes(task))


def build(model_type: str) -> nn.Module:
    """The model of a type, on the CPU, with seeded random weights, in training mode.

    Raises:
        ValueError: what is left after shrinking is larger than `MOST_PARAMETERS`.
    """
    model_class, config_class, changes = _recipe(model_type)
    torch.manual_seed(0)
    model: nn.Module = model_class(_read_by(model_class, config_class(**changes)))
    return model.train()


def _read_by(model_class: Any, config: Any) -> Any:
    """What a model is made from: of a configuration with several parts the one of the text, if that is what the model takes."""
    text = getattr(config, "text_config", None)
    return text if text is not None and model_class.config_class is type(text) else config


@cache
def _recipe(model_type: str) -> tuple[Any, Any, dict[str, Any]]:
    """The classes of a model and of its configuration, and what to make the configuration with."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = _classes(task_of(model_type))[model_type]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    changes = shrunk(default.to_dict()) | ({"use_cache": False} if hasattr(default, "use_cache") else {})
    changes = merged(changes, FIELDS.get(model_type, {}))
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(_read_by(model_class, config_class(**changes))).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} million parameters are left after shrinking, more than {MOST_PARAMETERS / 1e6:.0f}")
    return model_class, config_class, changes


def inputs_of(model: nn.Module, task: str) -> Inputs:
    """Seeded inputs by the names in the model's signature."""
    torch.manual_seed(1)
    config: Any = model.config
    names = inspect.signature(model.forward).parameters
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    tokens = torch.randint(3, min(vocabulary, 100), (BATCH, NUM_TOKENS))
    out: Inputs = {}
    if "input_ids" in names:
        out["input_ids"] = tokens
        if "attention_mask" in names:
            out["attention_mask"] = torch.ones_like(tokens)
    if "decoder_input_ids" in names:
        out["decoder_input_ids"] = torch.randint(3, min(vocabulary, 100), (BATCH, NUM_TOKENS))
    if "pixel_values" in names and (
        "input_ids" not in names or names["pixel_values"].default is names["pixel_values"].empty or task in BOTH
    ):
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", IMAGE)
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        frames = (config.num_frames,) if task == "VIDEO_CLASSIFICATION" else ()
        out["pixel_values"] = torch.randn(BATCH, *frames, channels if isinstance(channels, int) else 3, *size)
    if "input_features" in names:
        parts = (config, *(getattr(config, name, None) for name in AUDIO))
        audio = next((one for one in parts if hasattr(one, "num_mel_bins")), None)
        if hasattr(config, "input_feat_per_channel"):
            out["input_features"] = torch.randn(BATCH, NUM_FRAMES, config.input_feat_per_channel)
        else:
            out["input_features"] = torch.randn(BATCH, getattr(audio, "num_mel_bins", 80), NUM_FRAMES)
    if "input_values" in names:
        out["input_values"] = torch.randn(BATCH, NUM_SAMPLES)
    if (
        "labels" in names
        and "pixel_values" not in names
        and "input_ids" in out
        and task in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
    ):
        out["labels"] = tokens
    return INPUTS.get(config.model_type, _as_they_are)(config, out)


def _as_they_are(config: Any, inputs: Inputs) -> Inputs:
    return inputs
