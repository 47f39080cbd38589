"""Small networks of transformers' vision architectures, with random weights.

A row is a class of transformers and what its configuration is given beyond `configs.config`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import nn

from analysis.transformers_sweep.configs import (
    CONVNEXT,
    HGNET,
    PIXELS,
    PVT,
    RESNET,
    SWIN,
    TEXT,
    VISION,
    Settings,
    config,
    d_fine,
    detr,
    dinov2,
    resnet,
    rt_detr,
    swin,
)

_TWIN: Settings = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 32}
_LEVIT: Settings = {
    "hidden_sizes": [32, 48, 64],
    "num_attention_heads": [2, 3, 4],
    "depths": [1, 1, 1],
    "key_dim": [8, 8, 8],
    "drop_path_rate": 0,
    "patch_size": 16,
}
_MOBILEVIT: Settings = {"hidden_sizes": [24, 32, 40], "neck_hidden_sizes": [8, 16, 24, 32, 40, 48, 64], "patch_size": 2}
_MOBILEVIT2: Settings = {"width_multiplier": 0.25, "patch_size": 2}
_PERCEIVER: Settings = {
    "num_latents": 8,
    "d_latents": 32,
    "d_model": 32,
    "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1,
}
_DPT: Settings = {
    "num_hidden_layers": 4,
    "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [16, 16, 32, 32],
}
_MAPS: Settings = {"out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "pool_scales": [1, 2]}
_HEADS = {"d_model": 64, "encoder_attention_heads": 8, "decoder_attention_heads": 8}

CLASSIFIERS: dict[str, Settings] = {
    "BeitForImageClassification": {},
    "BitForImageClassification": {**RESNET, "num_groups": 8},
    "CLIPForImageClassification": _TWIN,
    "ConvNextForImageClassification": CONVNEXT,
    "ConvNextV2ForImageClassification": CONVNEXT,
    "CvtForImageClassification": {
        "embed_dim": [16, 32, 48],
        "num_heads": [1, 2, 3],
        "depth": [1, 2, 3],
        "drop_path_rate": [0.0, 0.0, 0.1],
    },
    "Data2VecVisionForImageClassification": {},
    "DeiTForImageClassification": {},
    "DeiTForImageClassificationWithTeacher": {},
    "Dinov2ForImageClassification": {},
    "Dinov2WithRegistersForImageClassification": {},
    "DonutSwinForImageClassification": SWIN,
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.5,
        "depth_coefficient": 0.5,
        "hidden_dim": 640,
        "dropout_rate": 0.1,
    },
    "FocalNetForImageClassification": {
        "embed_dim": 16,
        "hidden_sizes": [32, 48, 64, 64],
        "depths": [1, 1, 2, 1],
        "patch_size": 4,
    },
    "HGNetV2ForImageClassification": HGNET,
    "HieraForImageClassification": {
        "embed_dim": 16,
        "image_size": [64, 64],
        "patch_size": [7, 7],
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 8],
    },
    "IJepaForImageClassification": {},
    "LevitForImageClassification": _LEVIT,
    "LevitForImageClassificationWithTeacher": _LEVIT,
    "MetaClip2ForImageClassification": _TWIN,
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.1},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.35, "classifier_dropout_prob": 0.1},
    "MobileViTForImageClassification": _MOBILEVIT,
    "MobileViTV2ForImageClassification": _MOBILEVIT2,
    "PerceiverForImageClassificationConvProcessing": _PERCEIVER,
    "PerceiverForImageClassificationLearned": _PERCEIVER,
    "PoolFormerForImageClassification": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
    "PPLCNetForImageClassification": {"scale": 0.5, "class_expand": 64},
    "PvtForImageClassification": PVT,
    "PvtV2ForImageClassification": PVT,
    "RegNetForImageClassification": {**RESNET, "groups_width": 8},
    "ResNetForImageClassification": RESNET,
    "SegformerForImageClassification": PVT,
    "SiglipForImageClassification": {"text_config": TEXT, "vision_config": VISION},
    "SwiftFormerForImageClassification": {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "SwinForImageClassification": SWIN,
    "Swinv2ForImageClassification": SWIN,
    "TextNetForImageClassification": {},
    "ViTForImageClassification": {},
    "ViTMSNForImageClassification": {},
}

SEGMENTERS: dict[str, Settings] = {
    "BeitForSemanticSegmentation": _MAPS,
    "Data2VecVisionForSemanticSegmentation": _MAPS,
    "DetrForSegmentation": {**detr(), **_HEADS},
    "DPTForSemanticSegmentation": _DPT,
    "EomtForUniversalSegmentation": {"num_blocks": 1},
    "Mask2FormerForUniversalSegmentation": {
        **{"backbone_config": swin(), "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
        **{"encoder_feedforward_dim": 64, "dim_feedforward": 64, "decoder_layers": 3},
    },
    "MaskFormerForInstanceSegmentation": {
        "backbone_config": swin(),
        "decoder_config": config("DetrConfig", detr()),
        "fpn_feature_size": 32,
        "mask_feature_size": 32,
    },
    "MobileNetV2ForSemanticSegmentation": {"depth_multiplier": 0.35},
    "MobileViTForSemanticSegmentation": {**_MOBILEVIT, "aspp_out_channels": 32},
    "MobileViTV2ForSemanticSegmentation": {**_MOBILEVIT2, "aspp_out_channels": 32},
    "SegformerForSemanticSegmentation": {**PVT, "decoder_hidden_size": 32},
    "UperNetForSemanticSegmentation": {"backbone_config": swin(), "hidden_size": 32, "pool_scales": [1, 2]},
}

DEPTH: dict[str, Settings] = {
    "DepthAnythingForDepthEstimation": {
        "backbone_config": dinov2(),
        "reassemble_hidden_size": 32,
        "neck_hidden_sizes": [16, 16, 32, 32],
    },
    "DPTForDepthEstimation": _DPT,
    "GLPNForDepthEstimation": {**PVT, "decoder_hidden_size": 16},
}

DETECTORS: dict[str, Settings] = {
    "ConditionalDetrForObjectDetection": detr(),
    "DabDetrForObjectDetection": {**detr(), "hidden_size": 32},
    "DFineForObjectDetection": d_fine(),
    "DeformableDetrForObjectDetection": {**detr(), "encoder_n_points": 2, "decoder_n_points": 2},
    "DetrForObjectDetection": detr(),
    "RTDetrForObjectDetection": rt_detr(),
    "RTDetrV2ForObjectDetection": rt_detr(),
    "TableTransformerForObjectDetection": detr(),
    "YolosForObjectDetection": {"image_size": [PIXELS, PIXELS], "num_detection_tokens": 6},
}

BACKBONES: dict[str, Settings] = {
    "Dinov2Backbone": {},
    "DINOv3ConvNextModel": CONVNEXT,
    "DINOv3ViTModel": {},
    "ResNetBackbone": {**RESNET, "out_features": resnet().out_features},
    "VitDetBackbone": {},
}

TASKS = {
    "classification": CLASSIFIERS,
    "segmentation": SEGMENTERS,
    "depth": DEPTH,
    "detection": DETECTORS,
    "backbone": BACKBONES,
}


@dataclass(frozen=True)
class Network:
    """A class of transformers, its task, and settings of its configuration."""

    name: str
    task: str
    settings: Settings
    pixels: int = PIXELS


def networks() -> dict[str, Network]:
    """Return all networks of the study by name."""
    return {name: Network(name, task, settings) for task, rows in TASKS.items() for name, settings in rows.items()}


def build(network: Network) -> nn.Module:
    """Return the network in evaluation mode."""
    torch.manual_seed(0)
    cls = getattr(transformers, network.name)
    model: nn.Module = cls(config(cls.config_class.__name__, network.settings))
    return model.eval()
