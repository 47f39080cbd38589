"""A compact YOLO of one's own, as a recipe takes it: a network, its loss and its decoding (recipes/yolo-bccd.yaml).

The network returns a map for each stride, (N, 4 * BINS + classes, H, W): distributions over the distances from the cell
to the four edges of its box, in cells, and a logit for each class. Anchor-free, with a decoupled head and distribution
focal loss as in Li et al. (arXiv 2006.04388), cells assigned by task alignment as in Feng et al. (arXiv 2108.07755).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import batched_nms, box_iou

STRIDES = (8, 16, 32)
BINS = 16
TOP = 10
"""Cells that learn a box."""


class Conv(nn.Sequential):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Block(nn.Module):
    """A cross-stage block: half of the channels pass two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.split, self.first, self.second = Conv(inputs, outputs, 1), Conv(half, half), Conv(half, half)
        self.join = Conv(3 * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs, H, W)."""
        left, right = self.split(x).chunk(2, 1)
        return self.join(torch.cat([left, right, right + self.second(self.first(right))], 1))


class Yolo(nn.Module):
    """Backbone, feature pyramid and head.

    Args:
        num_classes: number of classes.
        width: channels at stride 4.
        decoded: height and width of the images, for a network that returns boxes (N, cells, 4) in pixels and scores
            (N, cells, classes), as many deploy it; such a network is not trained.
    """

    def __init__(self, num_classes: int, width: int = 32, decoded: Sequence[int] | None = None) -> None:
        super().__init__()
        a, b, c, d = width, 2 * width, 4 * width, 4 * width
        self.stem = nn.Sequential(Conv(3, a // 2, stride=2), Conv(a // 2, a, stride=2), Block(a, a))
        self.down = nn.ModuleList(nn.Sequential(Conv(i, o, stride=2), Block(o, o)) for i, o in ((a, b), (b, c), (c, d)))
        self.up = nn.ModuleList([Block(d + c, c), Block(c + b, b)])
        self.back = nn.ModuleList([Conv(b, b, stride=2), Conv(c, c, stride=2)])
        self.mix = nn.ModuleList([Block(b + c, c), Block(c + d, d)])
        self.boxes = nn.ModuleList(nn.Sequential(Conv(n, b), nn.Conv2d(b, 4 * BINS, 1)) for n in (b, c, d))
        self.classes = nn.ModuleList(nn.Sequential(Conv(n, b), nn.Conv2d(b, num_classes, 1)) for n in (b, c, d))
        for head in self.classes:
            nn.init.constant_(head[1].bias, -4.6)  # a score of 1 % at first (Lin et al., arXiv 1708.02002)
        self.decoded = decoded is not None
        if decoded is not None:
            self.expectation = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
            self.expectation.weight.copy_(torch.arange(BINS).view(1, -1, 1, 1))
            points, strides = cells([(decoded[0] // s, decoded[1] // s) for s in STRIDES])
            self.register_buffer("points", points.T[None])
            self.register_buffer("strides", strides.T[None])

    def forward(self, images: Tensor) -> list[Tensor] | tuple[Tensor, Tensor]:
        """Return a map for each stride, or boxes and scores."""
        fine = self.down[0](self.stem(images))
        middle = self.down[1](fine)
        coarse = self.down[2](middle)
        middle = self.up[0](torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1))
        fine = self.up[1](torch.cat([F.interpolate(middle, scale_factor=2.0), fine], 1))
        middle = self.mix[0](torch.cat([self.back[0](fine), middle], 1))
        coarse = self.mix[1](torch.cat([self.back[1](middle), coarse], 1))
        levels = zip(self.boxes, self.classes, (fine, middle, coarse), strict=True)
        maps = [torch.cat([boxes(x), classes(x)], 1) for boxes, classes, x in levels]
        return self._decode(maps) if self.decoded else maps

    def _decode(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([one.flatten(2) for one in maps], 2)
        shares = rows[:, : 4 * BINS].unflatten(1, (4, BINS)).transpose(1, 2).softmax(1)
        near, far = self.expectation(shares).squeeze(1).chunk(2, 1)
        boxes = torch.cat([self.points - near, self.points + far], 1) * self.strides
        return boxes.transpose(1, 2), rows[:, 4 * BINS :].sigmoid().transpose(1, 2)


def cells(sizes: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the centre (cells, 2) of each cell, in cells of its stride, and its stride (cells, 1)."""
    points, strides = [], []
    for (height, width), stride in zip(sizes, STRIDES, strict=True):
        y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
        points.append(torch.stack([x, y], -1).view(-1, 2))
        strides.append(torch.full((height * width, 1), float(stride)))
    return torch.cat(points), torch.cat(strides)


def flattened(maps: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return distributions (N, cells, 4, BINS), class logits, boxes (N, cells, 4) in pixels, cells and strides."""
    points, strides = (part.to(maps[0].device) for part in cells([one.shape[2:] for one in maps]))
    rows = torch.cat([one.float().flatten(2) for one in maps], 2).transpose(1, 2)
    distances = rows[..., : 4 * BINS].unflatten(2, (4, BINS))
    mean = distances.softmax(-1) @ torch.arange(float(BINS), device=rows.device)
    boxes = torch.cat([points - mean[..., :2], points + mean[..., 2:]], -1) * strides
    return distances, rows[..., 4 * BINS :], boxes, points, strides


def decode(maps: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return boxes, scores and labels of each image after non-maximum suppression."""
    _, logits, boxes, _, _ = flattened(maps)
    height, width = (side * STRIDES[0] for side in maps[0].shape[2:])
    return suppressed(boxes, logits.sigmoid(), (height, width))


def suppressed(
    boxes: Tensor,
    scores: Tensor,
    size: tuple[int, int],
    *,
    score: float = 0.02,
    overlap: float = 0.6,
    most: int = 100,
) -> list[dict[str, Tensor]]:
    """Return what non-maximum suppression leaves of each image.

    Args:
        boxes: (N, cells, 4) in pixels.
        scores: (N, cells, classes).
        size: height and width of the images; boxes end at their edges.
        score: least score of a box.
        overlap: largest overlap (IoU) of two boxes of a class.
        most: boxes of an image at most.
    """
    edge, found = boxes.new_tensor([size[1], size[0]] * 2), []
    for one, rows in zip(boxes.clamp(min=0).minimum(edge), scores, strict=True):
        cell, label = (rows > score).nonzero().unbind(1)
        best = rows[cell, label].topk(min(1000, len(cell))).indices
        cell, label = cell[best], label[best]
        kept = batched_nms(one[cell], rows[cell, label], label, overlap)[:most]
        found.append({"boxes": one[cell[kept]], "scores": rows[cell, label][kept], "labels": label[kept]})
    return found


def padded(targets: Sequence[Mapping[str, Tensor]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (N, most, 4), labels (N, most) and which of them count: one tensor each, for a batch of images."""
    rows = [(one["boxes"].to(device), one["labels"].to(device), ~one["ignored"].to(device)) for one in targets]
    rows.append(tuple(part.new_zeros(1, *part.shape[1:]) for part in rows[0]))  # there is a box, if no image has any
    boxes, labels, known = (pad_sequence(list(part), batch_first=True)[:-1] for part in zip(*rows, strict=True))
    return boxes, labels, known


def assigned(
    scores: Tensor, boxes: Tensor, centres: Tensor, truth: Tensor, labels: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Return for each cell of each image the box that it learns, or -1, and how well it does, 0 to 1."""
    near, far = centres - truth[:, :, None, :2], truth[:, :, None, 2:] - centres
    inside = (torch.cat([near, far], -1).amin(-1) > 0) & known[..., None]
    iou = torch.stack([box_iou(*pair) for pair in zip(truth, boxes, strict=True)])
    own = scores.gather(2, labels[:, None].expand(-1, scores.shape[1], -1)).transpose(1, 2)
    fit = own.sqrt() * iou**6 * inside
    least = fit.topk(min(TOP, fit.shape[2]), 2).values[..., -1:]
    fit = fit * (fit >= least) * (fit > 0)
    fit = fit / fit.amax(2, keepdim=True).clamp_min(1e-9) * (iou * (fit > 0)).amax(2, keepdim=True)
    best, box = fit.max(1)
    return torch.where(best > 0, box, -1), best


def loss(maps: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the mean loss of a batch: cross entropy of classes, GIoU of boxes, distribution focal loss.

    The whole batch at once, and cells without a box have the weight 0: a selection of cells would make the host wait
    for the GPU, in every image.
    """
    distances, logits, boxes, points, strides = flattened(maps)
    truth, labels, known = padded(targets, logits.device)
    with torch.no_grad():
        chosen, weight = assigned(logits.sigmoid(), boxes, points * strides, truth, labels, known)
        box = chosen.clamp(min=0)
        learned = truth.gather(1, box[..., None].expand(-1, -1, 4))
        quality = F.one_hot(labels.gather(1, box), logits.shape[2]) * weight[..., None]
        near, far = points - learned[..., :2] / strides, learned[..., 2:] / strides - points
        wanted = torch.cat([near, far], -1).clamp(0, BINS - 1.01)
    overlap = _overlap_loss(boxes, learned)
    entropy = F.binary_cross_entropy_with_logits(logits, quality, reduction="sum")
    total = ((7.5 * overlap + 1.5 * _focal(distances, wanted)) * weight).sum() + 0.5 * entropy
    return total / weight.sum().clamp_min(1)


def _overlap_loss(boxes: Tensor, wanted: Tensor) -> Tensor:
    """Return 1 - GIoU (Rezatofighi et al., arXiv 1902.09630) of each pair of boxes; torchvision's selects by masks."""
    first, last = boxes.split(2, -1), wanted.split(2, -1)
    width, height = (torch.minimum(first[1], last[1]) - torch.maximum(first[0], last[0])).clamp(min=0).unbind(-1)
    outer_width, outer_height = (torch.maximum(first[1], last[1]) - torch.minimum(first[0], last[0])).unbind(-1)
    own, other = ((high - low).unbind(-1) for low, high in (first, last))
    inner, outer = width * height, outer_width * outer_height
    union = own[0] * own[1] + other[0] * other[1] - inner
    return 1 - inner / (union + 1e-7) + (outer - union) / (outer + 1e-7)


def _focal(distances: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross entropy of the two bins around each distance, weighted by how near they are, (N, cells)."""
    low = wanted.floor().long()
    upper = wanted - low
    shares = distances.log_softmax(-1)
    both = [shares.gather(-1, bins[..., None]).squeeze(-1) for bins in (low, low + 1)]
    return -((1 - upper) * both[0] + upper * both[1]).mean(-1)
