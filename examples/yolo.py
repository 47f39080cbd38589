"""A YOLO of one's own in four sizes, as a recipe takes it: networks, losses and decoding (recipes/yolo-scenes.yaml).

The network returns a map for each stride, (N, 4 * BINS + classes, H, W): distributions over the distances from the cell
to the four edges of its box, in cells, and a logit for each class. Anchor-free, with a decoupled head and distribution
focal loss as in Li et al. (arXiv 2006.04388), cells assigned by task alignment as in Feng et al. (arXiv 2108.07755).

With `end_to_end` a box has one cell, so that no suppression is needed, and a second head, which training alone has,
learns ten cells for each (Wang et al., YOLOv10, arXiv 2405.14458, section 3.1; YOLO26 has it too).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import batched_nms

STRIDES = (8, 16, 32)
BINS = 16
TOP = 10
"""Cells that learn a box."""
SIZES = {"n": (0.5, 0.25, 1024), "s": (0.5, 0.5, 1024), "m": (0.5, 1.0, 512), "l": (1.0, 1.0, 512)}
"""Multiples of depth and width and the most channels before them: the `scales` of Ultralytics' yolo11.yaml and
yolo26.yaml, over two blocks a stage and 128, 256, 512 and 1,024 channels at the strides 4 to 32."""


class Conv(nn.Sequential):
    """Convolution, BatchNorm, SiLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.SiLU())


class Block(nn.Module):
    """A cross-stage block: half of the channels pass pairs of convolutions with shortcuts; all steps are joined."""

    def __init__(self, inputs: int, outputs: int, depth: int = 1) -> None:
        super().__init__()
        half = outputs // 2
        self.split = Conv(inputs, outputs, 1)
        self.pairs = nn.ModuleList(nn.Sequential(Conv(half, half), Conv(half, half)) for _ in range(depth))
        self.join = Conv((2 + depth) * half, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, outputs, H, W)."""
        steps = list(self.split(x).chunk(2, 1))
        for pair in self.pairs:
            steps.append(steps[-1] + pair(steps[-1]))
        return self.join(torch.cat(steps, 1))


class Yolo(nn.Module):
    """Backbone, feature pyramid and head.

    Args:
        num_classes: number of classes.
        width: channels at stride 4.
        size: `n`, `s`, `m` or `l` in place of a width; None = one block a stage and four times the width at stride 32.
        end_to_end: a head whose boxes need no suppression, and in training a second one beside it, so that there are
            six maps.
        decoded: height and width of the images, for a network that returns boxes (N, cells, 4) in pixels and scores
            (N, cells, classes), as many deploy it; such a network is not trained.
    """

    points: Tensor
    strides: Tensor

    def __init__(
        self,
        num_classes: int,
        width: int = 32,
        size: str | None = None,
        end_to_end: bool = False,
        decoded: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        a, b, c, d, depth = width, 2 * width, 4 * width, 4 * width, 1
        if size is not None:
            deep, wide, most = SIZES[size]
            a, b, c, d = (int(wide * min(most, channels)) for channels in (128, 256, 512, 1024))
            depth = round(2 * deep)
        stages = ((a, b), (b, c), (c, d))
        self.stem = nn.Sequential(Conv(3, a // 2, stride=2), Conv(a // 2, a, stride=2), Block(a, a, depth))
        self.down = nn.ModuleList(nn.Sequential(Conv(i, o, stride=2), Block(o, o, depth)) for i, o in stages)
        self.up = nn.ModuleList([Block(d + c, c, depth), Block(c + b, b, depth)])
        self.back = nn.ModuleList([Conv(b, b, stride=2), Conv(c, c, stride=2)])
        self.mix = nn.ModuleList([Block(b + c, c, depth), Block(c + d, d, depth)])
        self.boxes, self.classes = heads((b, c, d), num_classes)
        self.end_to_end = end_to_end
        if end_to_end:
            self.many_boxes, self.many_classes = heads((b, c, d), num_classes)
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
        found = [fine, middle, coarse]
        if self.end_to_end and self.training:  # one cell a box is too little to learn features from
            single = _maps(self.boxes, self.classes, [x.detach() for x in found])
            return single + _maps(self.many_boxes, self.many_classes, found)
        maps = _maps(self.boxes, self.classes, found)
        return self._decode(maps) if self.decoded else maps

    def _decode(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        rows = torch.cat([one.flatten(2) for one in maps], 2)
        shares = rows[:, : 4 * BINS].unflatten(1, (4, BINS)).transpose(1, 2).softmax(1)
        near, far = self.expectation(shares).squeeze(1).chunk(2, 1)
        boxes = torch.cat([self.points - near, self.points + far], 1) * self.strides
        return boxes.transpose(1, 2), rows[:, 4 * BINS :].sigmoid().transpose(1, 2)


def heads(channels: Sequence[int], num_classes: int) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Return what makes distributions, and what makes logits, for each stride."""
    inner = min(64, channels[0])
    boxes = nn.ModuleList(nn.Sequential(Conv(n, inner), nn.Conv2d(inner, 4 * BINS, 1)) for n in channels)
    logits = [nn.Conv2d(inner, num_classes, 1) for _ in channels]
    for last in logits:
        nn.init.constant_(last.get_parameter("bias"), -4.6)  # a score of 1 % at first (Lin et al., arXiv 1708.02002)
    classes = nn.ModuleList(nn.Sequential(Conv(n, inner), last) for n, last in zip(channels, logits, strict=True))
    return boxes, classes


def _maps(boxes: nn.ModuleList, classes: nn.ModuleList, found: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([box(x), label(x)], 1) for box, label, x in zip(boxes, classes, found, strict=True)]


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


def decode_single(maps: Sequence[Tensor], most: int = 100) -> list[dict[str, Tensor]]:
    """Return the boxes of the highest scores of each image, of a network with `end_to_end`."""
    _, logits, boxes, _, _ = flattened(maps)
    height, width = (side * STRIDES[0] for side in maps[0].shape[2:])
    boxes = boxes.clamp(min=0).minimum(boxes.new_tensor([width, height] * 2))
    scores, best = logits.sigmoid().flatten(1).topk(min(most, logits[0].numel()))
    cell, label = best // logits.shape[2], best % logits.shape[2]
    rows = zip(boxes.gather(1, cell[..., None].expand(-1, -1, 4)), scores, label, strict=True)
    return [{"boxes": one, "scores": score, "labels": kind} for one, score, kind in rows]


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
    rows: list[tuple[Tensor, ...]] = [
        (one["boxes"].to(device), one["labels"].to(device), ~one["ignored"].to(device)) for one in targets
    ]
    rows.append(tuple(part.new_zeros(1, *part.shape[1:]) for part in rows[0]))  # there is a box, if no image has any
    boxes, labels, known = (pad_sequence(list(part), batch_first=True)[:-1] for part in zip(*rows, strict=True))
    return boxes, labels, known


def assigned(
    scores: Tensor, boxes: Tensor, centres: Tensor, truth: Tensor, labels: Tensor, known: Tensor, top: int = TOP
) -> tuple[Tensor, Tensor]:
    """Return for each cell of each image the box that it learns, or -1, and how well it does, 0 to 1."""
    near, far = centres - truth[:, :, None, :2], truth[:, :, None, 2:] - centres
    inside = (torch.cat([near, far], -1).amin(-1) > 0) & known[..., None]
    iou = 1 - _overlap_loss(boxes[:, None], truth[:, :, None], enclosing=False)
    own = scores.gather(2, labels[:, None].expand(-1, scores.shape[1], -1)).transpose(1, 2)
    fit = own.sqrt() * iou**6 * inside
    least = fit.topk(min(top, fit.shape[2]), 2).values[..., -1:]
    fit = fit * (fit >= least) * (fit > 0)
    fit = fit / fit.amax(2, keepdim=True).clamp_min(1e-9) * (iou * (fit > 0)).amax(2, keepdim=True)
    best, box = fit.max(1)
    return torch.where(best > 0, box, -1), best


def end_to_end_loss(maps: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the mean loss of a network with `end_to_end`: of both heads if there are six maps, else of the first."""
    single = loss(maps[:3], targets, top=1)
    return single + loss(maps[3:], targets) if len(maps) > 3 else single


def loss(maps: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]], top: int = TOP) -> Tensor:
    """Return the mean loss of a batch: cross entropy of classes, GIoU of boxes, distribution focal loss.

    The whole batch at once, and cells without a box have the weight 0: a selection of cells would make the host wait
    for the GPU, in every image.
    """
    distances, logits, boxes, points, strides = flattened(maps)
    truth, labels, known = padded(targets, logits.device)
    with torch.no_grad():
        chosen, weight = assigned(logits.sigmoid(), boxes, points * strides, truth, labels, known, top)
        box = chosen.clamp(min=0)
        learned = truth.gather(1, box[..., None].expand(-1, -1, 4))
        quality = F.one_hot(labels.gather(1, box), logits.shape[2]) * weight[..., None]
        near, far = points - learned[..., :2] / strides, learned[..., 2:] / strides - points
        wanted = torch.cat([near, far], -1).clamp(0, BINS - 1.01)
    overlap = _overlap_loss(boxes, learned)
    entropy = F.binary_cross_entropy_with_logits(logits, quality, reduction="sum")
    total = ((7.5 * overlap + 1.5 * _focal(distances, wanted)) * weight).sum() + 0.5 * entropy
    return total / weight.sum().clamp_min(1)


def _overlap_loss(boxes: Tensor, wanted: Tensor, enclosing: bool = True) -> Tensor:
    """Return 1 - GIoU (Rezatofighi et al., arXiv 1902.09630) of each pair of boxes; torchvision's selects by masks.

    Without `enclosing` 1 - IoU.
    """
    first, last = boxes.split(2, -1), wanted.split(2, -1)
    width, height = (torch.minimum(first[1], last[1]) - torch.maximum(first[0], last[0])).clamp(min=0).unbind(-1)
    outer_width, outer_height = (torch.maximum(first[1], last[1]) - torch.minimum(first[0], last[0])).unbind(-1)
    own, other = ((high - low).unbind(-1) for low, high in (first, last))
    inner, outer = width * height, outer_width * outer_height
    union = own[0] * own[1] + other[0] * other[1] - inner
    apart = 1 - inner / (union + 1e-7)
    return apart + (outer - union) / (outer + 1e-7) if enclosing else apart


def _focal(distances: Tensor, wanted: Tensor) -> Tensor:
    """Return the cross entropy of the two bins around each distance, weighted by how near they are, (N, cells)."""
    low = wanted.floor().long()
    upper = wanted - low
    shares = distances.log_softmax(-1)
    both = [shares.gather(-1, bins[..., None]).squeeze(-1) for bins in (low, low + 1)]
    return -((1 - upper) * both[0] + upper * both[1]).mean(-1)
