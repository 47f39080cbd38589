"""A model's logits, also if it returns a tuple, a named tuple or a dict (as with auxiliary heads in training)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from compress.errors import ModelError


class LogitsOf(nn.Module):
    """Calls `model` and returns its logits alone, for DistributedDataParallel and torch.compile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, classes) of images (N, C, H, W)."""
        return first_tensor(self.model(images))


def first_tensor(output: Any) -> Tensor:
    """Return the logits in `output`: itself, its "logits" or "out" (a key or an attribute), or its first element.

    Raises:
        ModelError: it holds no tensor in these places.
    """
    if isinstance(output, Tensor):
        return output
    value: Any = None
    if isinstance(output, Mapping):
        value = next((output[key] for key in ("logits", "out", *output) if output.get(key) is not None), None)
    elif isinstance(output, (tuple, list)) and output:
        value = output[0]
    else:
        value = getattr(output, "logits", getattr(output, "out", None))
    if isinstance(value, Tensor):
        return value
    raise ModelError(
        f"the model returned {type(output).__name__}: it must return logits (N, classes), alone, first in a tuple, "
        'or as "logits" or "out" of a dict or an object'
    )


def logits_of(forward: LogitsOf, images: Tensor) -> Tensor:
    """Return the logits of images, and report images that the model fails on.

    Raises:
        ModelError: the model fails on them, or returns no logits.
    """
    try:
        logits: Tensor = forward(images)
    except ModelError:
        raise
    except Exception as error:  # the model is its user's and can fail in any way
        raise ModelError(
            f"{type(forward.model).__name__} fails on images of shape {tuple(images.shape)}, the shape of the data's "
            f"images ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error
    return logits


def check_logits(logits: Tensor, *, images: int, num_classes: int) -> None:
    """Refuse logits that do not hold a row for each image and a column for each class.

    Raises:
        ModelError: names the shape that was got.
    """
    if logits.ndim != 2 or logits.shape[0] != images or logits.shape[1] < num_classes:
        raise ModelError(
            f"the model returned logits of shape {tuple(logits.shape)} for {images} images of {num_classes} classes: "
            f"it must be ({images}, {num_classes}) or wider; set model.num_classes, or add a pooling or flatten layer"
        )
