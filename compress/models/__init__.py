"""Networks by name, and files of weights. Here: the `model` section of a recipe."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from compress.support.validation import Classes


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model: a recipe's `model` section.

    Attributes:
        name: a classifier of torchvision (`resnet50`, `torchvision:resnet50`), one of timm (`timm:resnet50`), or a
            function that makes one (`package.module:factory`, called with the options, and with the number of classes
            as `num_classes`, `classes` or `num_labels` if it has such an argument). For the task segmentation the
            names of torchvision are those of its segmentation networks (`lraspp_mobilenet_v3_large`), for detection
            those of its one-stage detectors (`retinanet_resnet50_fpn`, `fcos_resnet50_fpn`, `ssd300_vgg16`,
            `ssdlite320_mobilenet_v3_large`), whose backbone and head become the network, and `fasterrcnn_resnet50_fpn`
            and its like with trained weights, whose box head stays in float. Or a float ONNX file
            (`net.onnx`), which brings its weights; the option {size: [224, 224]} gives sides that it leaves open.
        weights: null = fresh; a file (.safetensors, .pt, .pth, .th, .ckpt, .bin); a function that returns the path of
            one (`package.module:function`), as packages have that ship weights; a name of torchvision's
            (`IMAGENET1K_V2`, `DEFAULT`, `ResNet50_Weights.IMAGENET1K_V2`); or, for timm, `pretrained`.
        num_classes: outputs of the classifier, not fewer than the data has classes; None = as many as the data.
        options: further keyword arguments for the model's function, such as {dropout: 0.1}. googlenet and inception_v3
            are made without auxiliary classifiers; with torchvision's weights from a file they need
            {transform_input: true}.

    Examples:
        >>> spec = compress.ModelSpec(name="mobilenet_v2", options={"width_mult": 0.35})
        >>> compress.build_model(spec, num_classes=4)(images[:2]).shape
        torch.Size([2, 4])
    """

    name: str = "resnet50"
    weights: str | None = None
    num_classes: Classes | None = None
    options: dict[str, Any] = field(default_factory=dict)


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
