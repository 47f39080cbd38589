"""Windows of convolutions and pools, and torch's functions of them by the number of axes of an image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch.nn.functional as F
from onnx import helper

MAX_POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS: dict[int, Callable[..., Any]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
INTERPOLATIONS: dict[str, dict[int, str]] = {
    "linear": {1: "linear", 2: "bilinear", 3: "trilinear"},
    "cubic": {2: "bicubic"},
}
"""Names of `F.interpolate` by the mode of a Resize."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """The window of a convolution or pool, with an entry for each axis of the image; `pads` are (before, after).

    `ceil`: a last window that is not whole counts.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    ceil: bool

    @property
    def sides(self) -> list[int]:
        """The padding as `F.pad` takes it, the last axis first."""
        return [size for pair in reversed(self.pads) for size in pair]

    @property
    def padding(self) -> tuple[int, ...] | None:
        """The padding as a convolution of torch takes it; None if the two ends of an axis differ."""
        even = all(before == after for before, after in self.pads)
        return tuple(before for before, _ in self.pads) if even else None

    @property
    def pool_padding(self) -> tuple[int, ...] | None:
        """The padding as a pool of torch takes it, which is at most half the kernel; None for another."""
        fits = all(2 * max(pair) <= size for pair, size in zip(self.pads, self.kernel, strict=True))
        return self.padding if fits else None


def read_window(attributes: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None) -> Window:
    """The window of an operator, `auto_pad` resolved, on an image of a size without batch and channels.

    `kernel`: of a convolution; None = the attribute that a pool has.
    """
    kernel = tuple(int(n) for n in (attributes["kernel_shape"] if kernel is None else kernel))
    rank = len(kernel)
    strides, dilations = (tuple(int(n) for n in attributes.get(key, [1] * rank)) for key in ("strides", "dilations"))
    automatic = attributes.get("auto_pad", "NOTSET")
    if automatic in {"NOTSET", "VALID", ""}:
        given = [0] * 2 * rank if automatic == "VALID" else [int(n) for n in attributes.get("pads", [0] * 2 * rank)]
        pads = list(zip(given[:rank], given[rank:], strict=True))
    else:
        pads = []
        for n, k, s, d in zip(size, kernel, strides, dilations, strict=True):
            total = max(0, (-(-n // s) - 1) * s + d * (k - 1) + 1 - n)
            small = total // 2
            pads.append((small, total - small) if automatic == "SAME_UPPER" else (total - small, small))
    return Window(
        kernel=kernel,
        strides=strides,
        dilations=dilations,
        pads=tuple(pads),
        ceil=bool(attributes.get("ceil_mode", 0)),
    )


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {own.name: helper.get_attribute_value(own) for own in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
