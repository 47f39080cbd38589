"""Small configurations of transformers, and those that are parts of others."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import transformers

PIXELS = 64

Settings = dict[str, Any]

_SMALL: Settings = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    **{"image_size": PIXELS, "patch_size": 8, "num_labels": 10, "drop_path_rate": 0.0},
    **{"encoder_layers": 1, "decoder_layers": 2, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 12},
    **{"fusion_hidden_size": 32, "auxiliary_channels": 32},
}
"""Settings of configurations that have such a field."""

STAGES = ["stage1", "stage2", "stage3", "stage4"]
CONVNEXT: Settings = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "patch_size": 4}
RESNET: Settings = {"embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1]}
SWIN: Settings = {"embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4], "window_size": 2, "patch_size": 4}
PVT: Settings = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
HGNET: Settings = {
    "hidden_sizes": [16, 32, 48, 64],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 32, 48],
    "stage_mid_channels": [8, 8, 16, 16],
    "stage_out_channels": [16, 32, 48, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
}
TEXT: Settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
VISION: Settings = {**TEXT, "image_size": PIXELS, "patch_size": 8}


def config(kind: str, settings: Settings) -> Any:
    """Return a small configuration: an object of the class `kind` of transformers."""
    cls = getattr(transformers, kind)
    if dataclasses.is_dataclass(cls):
        known = {field.name for field in dataclasses.fields(cls)}
    else:
        known = set(inspect.signature(cls.__init__).parameters)
    return cls(**{k: v for k, v in _SMALL.items() if k in known} | {"num_labels": 10} | settings)


def resnet() -> Any:
    """Return a ResNet with all stages as its outputs."""
    return config("ResNetConfig", {**RESNET, "out_features": STAGES})


def swin() -> Any:
    """Return a Swin transformer with all stages as its outputs."""
    return config("SwinConfig", {**SWIN, "out_features": STAGES})


def dinov2() -> Any:
    """Return a DINOv2 with four layers, all of them outputs."""
    settings = {"num_hidden_layers": 4, "out_features": STAGES, "reshape_hidden_states": False}
    return config("Dinov2Config", settings)


def detr() -> Settings:
    """Return what DETR and its relatives need."""
    off: Settings = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return {**off, "backbone_config": resnet()}


def rt_detr() -> Settings:
    """Return what RT-DETR needs."""
    backbone = config("RTDetrResNetConfig", {**RESNET, "out_features": STAGES[1:]})
    widths: Settings = {"encoder_in_channels": [32, 64, 64], "decoder_in_channels": [32, 32, 32]}
    more = {"encoder_hidden_dim": 32, "num_denoising": 0, "freeze_backbone_batch_norms": False}
    return {"backbone_config": backbone, **widths, **more}


def d_fine() -> Settings:
    """Return what D-FINE needs."""
    backbone = config("HGNetV2Config", {**HGNET, "out_features": STAGES[1:]})
    return {**rt_detr(), "backbone_config": backbone, "encoder_in_channels": [32, 48, 64]}
