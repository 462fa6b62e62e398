"""What single model types need that the names of their configuration's fields do not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]

# Fields by model type, beside those that shrinking changes; nested configurations by their own fields.
FIELDS: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 16, "vision_config": {"width_coefficient": 0.05, "depth_coefficient": 0.3}},
    "cvt": {"depth": [1, 2, 3]},
    "donut-swin": {"image_size": 128},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.05, "depth_coefficient": 0.3},
    "florence2": {"vision_config": {"embed_dim": [16, 32, 64, 64], "num_heads": [2, 4, 8, 8], "num_groups": [2, 4, 8, 8]}},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}, "vision_config": {"architecture": "mobilenetv3_small_050"}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"qk_head_dim": 24},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "mobilebert": {"embedding_size": 64, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (4, 8)},
    "swin": {"image_size": 128},
    "timm_backbone": {"backbone": "resnet18"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 8,
        "layers_block_type": [*["linear_attention"] * 2, "hybrid", *["linear_attention"] * 4, "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 8,
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 32, "num_query_groups": 4, "kv_channels": 32},
    "zoedepth": {"bottleneck_features": 64},
}


def merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with ``more``, which wins, also inside of nested configurations."""
    out = dict(fields)
    for name, value in more.items():
        inner = out.get(name)
        out[name] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


def _without(*names: str) -> Callable[[Any, Inputs], Inputs]:
    """A part of the model that is not trained then, or labels that it takes in another form."""
    return lambda config, inputs: {name: value for name, value in inputs.items() if name not in names}


def _time_first(config: Any, inputs: Inputs) -> Inputs:
    return inputs | {"input_features": inputs["input_features"].mT.contiguous()}


def _image_tokens(number: int) -> Callable[[Any, Inputs], Inputs]:
    """``number`` tokens of each row stand for the image."""

    def added(config: Any, inputs: Inputs) -> Inputs:
        whole = getattr(config, "vlm_config", config)
        token = next(getattr(whole, name) for name in ("image_token_id", "image_token_index") if hasattr(whole, name))
        tokens = torch.where(inputs["input_ids"] == token, 3, inputs["input_ids"])
        tokens[:, 1 : number + 1] = token
        return inputs | {"input_ids": tokens}

    return added


def _boxes(config: Any, inputs: Inputs) -> Inputs:
    corners = torch.randint(0, 50, (*inputs["input_ids"].shape, 4))
    return inputs | {"bbox": corners.cumsum(-1)}


def _frames(config: Any, inputs: Inputs) -> Inputs:
    vision = getattr(config, "vision_config", config)
    number = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", 4)
    size = getattr(vision, "image_size", None) or vision.crop_size
    return inputs | {"pixel_values_videos": torch.randn(4, number, 3, size, size)}


def _spectrogram(config: Any, inputs: Inputs) -> Inputs:
    return {"input_values": torch.randn(4, config.max_length, config.num_mel_bins)}


def _series(config: Any, inputs: Inputs) -> Inputs:
    return {"past_values": torch.randn(4, config.context_length), "future_values": torch.randn(4, config.horizon_length)}


def _regions(config: Any, inputs: Inputs) -> Inputs:
    return inputs | {"visual_feats": torch.randn(4, 6, config.visual_feat_dim), "visual_pos": torch.rand(4, 6, config.visual_pos_dim)}


def _patches(config: Any, inputs: Inputs) -> Inputs:
    vision = config.vision_config
    return inputs | {
        "pixel_values": torch.randn(4, 16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(4, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 4),
    }


def _question(config: Any, inputs: Inputs) -> Inputs:
    tokens: Tensor = inputs["input_ids"].clone()
    tokens[:, 5] = config.question_token_id
    return inputs | {"input_ids": tokens}


def _sound_of_one_channel(config: Any, inputs: Inputs) -> Inputs:
    return inputs | {"input_values": inputs["input_values"][:, None]}


def _decoder(config: Any, inputs: Inputs) -> Inputs:
    """Sounds in, tokens out."""
    return {"input_features": torch.randn(4, 16, config.d_model), "decoder_input_ids": inputs["input_ids"]}


# Inputs by model type, from the configuration and from those that the names in the model's signature give.
INPUTS: dict[str, Callable[[Any, Inputs], Inputs]] = {
    "audio-spectrogram-transformer": _spectrogram,
    "bros": _boxes,
    "canary": _time_first,
    "cohere_asr": _time_first,
    "colpali": _image_tokens(16),
    "florence2": _image_tokens(5),
    "janus": _image_tokens(16),
    "lasr_ctc": _time_first,
    "llava": _image_tokens(16),
    "lxmert": _regions,
    "omniasr_ctc": _sound_of_one_channel,
    "paligemma": _image_tokens(16),
    "parakeet_ctc": _time_first,
    "perceiver": _without("labels"),
    "pop2piano": _decoder,
    "siglip2": _patches,
    "speech-encoder-decoder": _without("input_features"),
    "splinter": _question,
    "timesfm": _series,
    "timesfm2_5": _series,
    "video_llava": _image_tokens(16),
    "videoprism": _frames,
    "videoprism_vision_model": _frames,
    "vjepa2": _frames,
    **dict.fromkeys(("audioflamingo3", "glmasr", "musicflamingo", "moss_transcribe_diarize"), _without("input_features")),
    **dict.fromkeys(("granite_speech", "granite_speech_plus", "qwen2_audio", "qwen3_asr", "voxtral"), _without("input_features")),
    **dict.fromkeys(("colmodernvbert", "idefics2", "idefics3", "inkling_mm_model"), _without("pixel_values")),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "mistral3", "mistral_large4"), _without("pixel_values")),
}
