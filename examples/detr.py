"""A small RT-DETRv2 (Lv et al., arXiv 2407.17140) or D-FINE (Peng et al., arXiv 2410.13842) of transformers.

Both are what a recipe takes (recipes/detr-scenes.yaml; `--set model.options.family=d_fine`).

The network returns logits (N, queries, classes) and boxes (N, queries, 4), centre and size in shares of the image; in
training also those of each layer and of the encoder, which learn too. A box has one query: there is no suppression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torchvision.ops import box_convert
from transformers import (
    DFineConfig,
    DFineForObjectDetection,
    RTDetrResNetConfig,
    RTDetrV2Config,
    RTDetrV2ForObjectDetection,
)
from transformers.loss.loss_rt_detr import RTDetrLoss

SIDE = 320
"""Height and width of the images."""


FAMILIES = {
    "rt_detr_v2": (RTDetrV2Config, RTDetrV2ForObjectDetection),
    "d_fine": (DFineConfig, DFineForObjectDetection),
}


@cache
def config(
    num_classes: int, width: int = 128, layers: int = 3, queries: int = 100, family: str = "rt_detr_v2"
) -> RTDetrV2Config | DFineConfig:
    """Return a small detector: a ResNet-18, `width` channels in encoder and decoder, no denoising queries."""
    narrow = {"encoder_hidden_dim": width, "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width, "d_model": width}
    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
    backbone = RTDetrResNetConfig(layer_type="basic", **sizes, out_features=["stage2", "stage3", "stage4"])
    return FAMILIES[family][0](
        backbone_config=backbone,
        encoder_in_channels=[128, 256, 512],
        decoder_in_channels=[width] * 3,
        decoder_layers=layers,
        num_queries=queries,
        num_denoising=0,
        num_labels=num_classes,
        hidden_expansion=0.5,
        **narrow,
    )


class Detr(nn.Module):
    """A detector from images to logits and boxes.

    Args:
        num_classes: number of classes.
        width: channels of encoder and decoder.
        layers: of the decoder.
        queries: boxes of an image.
        family: `rt_detr_v2` or `d_fine`, which moves the edges of a box by distributions.
    """

    def __init__(
        self, num_classes: int, width: int = 128, layers: int = 3, queries: int = 100, family: str = "rt_detr_v2"
    ) -> None:
        super().__init__()
        self.detector = FAMILIES[family][1](config(num_classes, width, layers, queries, family))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return logits and boxes, and in training those of every layer (N, layers, queries, .) and of the encoder."""
        found = self.detector(images)
        if not self.training:
            return found.logits, found.pred_boxes
        layers = (found.intermediate_logits, found.intermediate_reference_points)
        return found.logits, found.pred_boxes, *layers, found.enc_topk_logits, found.enc_topk_bboxes


def loss(outputs: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the mean loss of a batch: RT-DETR's, of pairs by the Hungarian method, for each layer that is there."""
    logits, boxes, *further = (one.float() for one in outputs)
    pairs = [(logits, boxes)]
    if further:
        classes, places, encoder_logits, encoder_boxes = further
        pairs += [*zip(classes.unbind(1)[:-1], places.unbind(1)[:-1], strict=True), (encoder_logits, encoder_boxes)]
    labels = []
    for one in targets:
        known = ~one["ignored"]
        places = box_convert(one["boxes"][known] / SIDE, "xyxy", "cxcywh")
        labels.append({"class_labels": one["labels"][known].to(boxes.device), "boxes": places.to(boxes.device)})
    criterion = RTDetrLoss(config(logits.shape[2])).to(boxes.device)
    parts = [criterion({"logits": one, "pred_boxes": place}, labels) for one, place in pairs]
    return torch.stack([sum(part.values()) for part in parts]).sum()


def decode(outputs: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return the boxes of the highest scores of each image."""
    logits, boxes = outputs[:2]
    scores, best = logits.sigmoid().flatten(1).topk(min(100, logits[0].numel()))
    edges = box_convert(boxes, "cxcywh", "xyxy").clamp(0, 1) * SIDE
    query, label = best // logits.shape[2], best % logits.shape[2]
    rows = zip(edges.gather(1, query[..., None].expand(-1, -1, 4)), scores, label, strict=True)
    return [{"boxes": one, "scores": score, "labels": kind} for one, score, kind in rows]
