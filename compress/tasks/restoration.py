"""Restoration of images, such as super-resolution and denoising: mean absolute error, PSNR and SSIM."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.errors import ModelError
from compress.support.meters import Figures, TaskMetric
from compress.tasks.base import Floats, Loss, Task, Weights, first_tensor, squared_distance

_WINDOW = 11  # pixels of a side of SSIM's Gaussian window
_LUMINANCE = (65.481 / 255, 128.553 / 255, 24.966 / 255)  # ITU-R BT.601, without the offset that differences lose
_LEAST_ERROR = 1e-10  # 100 dB, of equal images


def psnr(outputs: Tensor, targets: Tensor) -> Tensor:
    """Peak signal to noise ratio of each image in dB, (N,): 10 log10(1 / mean squared error), in float64.

    Args:
        outputs: (N, C, H, W), cut to 0 to 1, as the image that is shown.
        targets: (N, C, H, W), 0 to 1.
    """
    error = (outputs.double().clamp(0, 1) - targets.double()).square().flatten(1).mean(1)
    return -10 * error.clamp_min(_LEAST_ERROR).log10()


def luminance_psnr(outputs: Tensor, targets: Tensor) -> Tensor:
    """`psnr` of Y of YCbCr (ITU-R BT.601), by which papers on super-resolution compare, (N,)."""
    weights = torch.tensor(_LUMINANCE, dtype=torch.float64, device=targets.device)
    return psnr(*((image.double().clamp(0, 1).movedim(1, -1) @ weights)[:, None] for image in (outputs, targets)))


def ssim(outputs: Tensor, targets: Tensor) -> Tensor:
    """Structural similarity of each image (Wang et al., IEEE TIP 2004, section III), (N,).

    The mean over places and channels whose Gaussian window, of 11 and of sigma 1.5, is inside the image, as in the
    authors' program.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure  # lazy: it takes a second

    _, places = structural_similarity_index_measure(
        outputs.float().clamp(0, 1), targets.float(), sigma=1.5, data_range=1.0, return_full_image=True
    )
    edge = _WINDOW // 2
    return places[..., edge:-edge, edge:-edge].flatten(1).mean(1)


class Restored:
    """PSNR, PSNR of luminance (in colour) and SSIM (from 11 x 11 pixels on) of each image, and their means.

    It is the metric of a whole split (`compute`) and of any resample of its images (`values`).
    """

    def __init__(self) -> None:
        self._figures: dict[str, list[Tensor]] = {}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        found = {"psnr": psnr(outputs, targets)}
        if targets.shape[1] == len(_LUMINANCE):
            found["psnr_luminance"] = luminance_psnr(outputs, targets)
        if min(targets.shape[-2:]) >= _WINDOW:
            found["ssim"] = ssim(outputs, targets)
        for name, values in found.items():
            self._figures.setdefault(name, []).append(values.double().cpu())

    def __len__(self) -> int:
        return sum(map(len, self._figures.get("psnr", [])))

    def compute(self) -> Figures:
        """`psnr` and `psnr_luminance` in dB, `ssim` as a share; means over images."""
        return {name: float(torch.cat(values).mean()) for name, values in self._figures.items()}

    def values(self, weights: Weights) -> Floats:
        """Mean PSNR in dB; see `Evidence.values`."""
        return weights @ torch.cat(self._figures["psnr"]).numpy() / weights.sum(1)

    def merge_state(self, other: Restored) -> None:
        for name, values in other._figures.items():
            self._figures.setdefault(name, []).extend(values)


PSNR = TaskMetric(name="psnr", make=Restored, unit="dB", units={"ssim": "%"}, select=first_tensor)


def restoration(*, loss: str = "l1") -> Task:
    return Task(
        name="restoration",
        metric=PSNR,
        loss=LOSSES[loss],
        distance=squared_distance,
        check=check_images,
        draw=drawn,
        evidence=Restored,
    )


def l1(outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean absolute error; its PSNR ends higher than that of squares (Lim et al., arXiv 1707.02921, section 4)."""
    return F.l1_loss(outputs.float(), targets)


def l2(outputs: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    return F.mse_loss(outputs.float(), targets)


LOSSES: dict[str, Loss] = {"l1": l1, "l2": l2}


def check_images(outputs: Tensor, images: Tensor) -> None:
    height, width = images.shape[-2:]
    shape = tuple(outputs.shape)
    whole = outputs.ndim == 4 and shape[0] == len(images) and shape[2] % height == 0 == shape[3] % width
    if not whole or shape[2] // height != shape[3] // width:
        raise ModelError(
            f"the model returned {shape} for images of shape {tuple(images.shape)}: it must be ({len(images)}, "
            f"channels, k x {height}, k x {width}) with a whole k, an image of values from 0 to 1"
        )


def drawn(images: Tensor, outputs: Tensor | None, targets: Tensor | None) -> Tensor:
    found = targets if outputs is None else outputs
    return images if found is None else (found.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
