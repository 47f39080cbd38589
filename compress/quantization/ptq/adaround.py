"""AdaRound (Nagel et al., arXiv 2004.10568): round each weight up or down so that a layer's outputs change least.

The choice of each weight is relaxed to h(v) in [0, 1], fitted by gradient descent to the layer's float outputs, and
driven to 0 or 1 by a term whose exponent falls (sections 3.2 and 3.3). Inputs are those of the quantized network with
all layers before already rounded, targets those of the float network, both after the activation that follows. A layer
is a matrix product over a few thousand sampled output positions of all images.

The float weights are replaced by their rounded values, which lie on the grid and round to themselves. A layer whose
error on the calibration images does not decrease stays rounded to nearest. Another calibration may move the grid.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from compress.errors import QuantizationError
from compress.files import replacing
from compress.graph.modules import stored_name
from compress.graph.ops import module_kind, node_kind, tensor_of
from compress.kernels.memory_format import along_axis
from compress.quantization.numerics import QuantFormat
from compress.quantization.ptq.walk import Visit
from compress.quantization.quantizer import weight_quantizer_of
from compress.quantization.report import Rounding
from compress.quantization.spec import AdaRoundSpec
from compress.support.progress import NoProgress, Progress

_IMAGES = 16
"""Images that are gathered from at a time."""


@dataclass(frozen=True)
class Rows:
    """Sampled positions of a layer.

    Attributes:
        inputs: (groups, rows, inputs of an output).
        targets: (rows, outputs), before the activation.
        bias: (outputs,) or None.
    """

    inputs: Tensor
    targets: Tensor
    bias: Tensor | None

    def outputs(self, weight: Tensor, chosen: Tensor) -> Tensor:
        groups, _, size = self.inputs.shape
        products = self.inputs[:, chosen] @ weight.reshape(groups, -1, size).mT
        flat = products.transpose(0, 1).flatten(1)
        return flat if self.bias is None else flat + self.bias


def sampled_rows(
    layer: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, count: int, generator: torch.Generator
) -> Rows | None:
    """Sample `count` output positions of a linear layer or a convolution of images, evenly over the images.

    None for another kind of layer, or padding that is not of zeros by numbers. All positions are taken where there are
    no more. `generator` is on the CPU.
    """
    found: Any = layer
    bias = None if found.bias is None else found.bias.detach()
    if module_kind(layer) == "linear":
        x, y = (torch.cat([part.flatten(0, -2) for part in parts]) for parts in (inputs, targets))
        if len(x) > count:
            chosen = torch.randperm(len(x), generator=generator)[:count].to(x.device)
            x, y = x[chosen], y[chosen]
        return Rows(x[None], y, bias)
    if not isinstance(layer, nn.Conv2d) or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return None
    channels, height, width = targets[0].shape[1:]
    each = min(height * width, -(-count // sum(len(part) for part in inputs)))
    windows, outputs = [], []
    for few, expected in zip(_split(inputs), _split(targets), strict=True):
        orders = [torch.randperm(height * width, generator=generator)[:each] for _ in few]
        places = torch.stack(orders).to(few.device)
        windows.append(_gathered(layer, few, places, width))
        flat = expected.flatten(2).gather(2, places[:, None].expand(-1, channels, -1))  # (N, outputs, each)
        outputs.append(flat.transpose(1, 2).flatten(0, 1))
    grouped = torch.cat(windows).unflatten(1, (layer.groups, -1)).flatten(2)  # (rows, groups, inputs of an output)
    return Rows(grouped.transpose(0, 1).contiguous(), torch.cat(outputs), bias)


def _split(parts: Sequence[Tensor]) -> list[Tensor]:
    return [few for part in parts for few in part.split(_IMAGES)]


def _gathered(layer: nn.Conv2d, x: Tensor, places: Tensor, width: int) -> Tensor:
    """The windows of a convolution at output places (N, each): (N * each, channels, kernel height, width)."""
    down, right = (int(side) for side in layer.padding)  # no text: refused before
    padded = nn.functional.pad(x, (right, right, down, down))
    starts = (places // width * layer.stride[0], places % width * layer.stride[1])
    rows, columns = (
        start[:, :, None] + torch.arange(size, device=x.device) * dilation
        for start, size, dilation in zip(starts, layer.kernel_size, layer.dilation, strict=True)
    )
    image = torch.arange(len(x), device=x.device)[:, None, None, None]
    windows = padded[image, :, rows[:, :, :, None], columns[:, :, None, :]]  # (N, each, height, width, channels)
    return windows.flatten(0, 1).permute(0, 3, 1, 2)


CHECK_EVERY = 50
"""Steps between looks at whether all roundings are decided."""
_STRETCH, _SHIFT = 1.2, -0.1  # zeta - gamma and gamma of the paper's rectified sigmoid


def soft_rounding(v: Tensor) -> Tensor:
    """The rectified sigmoid h(v) in [0, 1] (arXiv 2004.10568, eq. 23), which reaches 0 and 1."""
    return (torch.sigmoid(v) * _STRETCH + _SHIFT).clamp(0, 1)


def inverse_rounding(h: Tensor) -> Tensor:
    """The v with soft_rounding(v) = h, for h in [0, 1]."""
    return torch.logit((h - _SHIFT) / _STRETCH)


def regularizer_gradient(h: Tensor, beta: float) -> Tensor:
    """The derivative of the sum of 1 - |2h - 1|^beta (eq. 24); 0 where every h is 0 or 1."""
    distance = 2 * h - 1
    return distance.abs().pow_(beta - 1).mul_(distance.sign()).mul_(-2 * beta)


def beta_at(step: int, spec: AdaRoundSpec) -> float:
    """The exponent after `step` of `spec.steps` steps: cosine from start to end after the warm start."""
    start = spec.warm_start * spec.steps
    share = min(1.0, max(0.0, (step - start) / max(1.0, spec.steps - start)))
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
    return spec.beta_end + (spec.beta_start - spec.beta_end) * cosine


@torch.no_grad()
def learn_rounding(
    layer: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    spec: AdaRoundSpec,
    *,
    activation: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return rounded weights with which a layer reproduces `targets` from `inputs`.

    `inputs` (quantized network) and `targets` (float network, before `activation`: `relu`, `relu6` or ""), (N,
    ...), are given for each batch, `settings` are further arguments of the call. The weights are on the grid of the
    layer's `weight_quantizer`.
    """
    quantizer = weight_quantizer_of(layer)
    weight = tensor_of(layer).detach()
    form: QuantFormat = quantizer.format
    scale = along_axis(quantizer.scale.detach(), weight, form.axis)
    steps = weight / scale
    floor = steps.floor()
    # A weight that saturates has one rounding only, and a zero stays zero, so that a sparsity pattern survives
    free = ((floor >= form.low) & (floor < form.high) & (weight != 0)).to(weight.dtype)
    base = floor.clamp(form.low, form.high)
    generator = torch.Generator().manual_seed(spec.seed)
    images, batch_size = sum(len(part) for part in inputs), spec.batch_size
    rows = sampled_rows(layer, inputs, targets, count=spec.positions, generator=generator)
    x = torch.cat(list(inputs)) if rows is None else rows.inputs[0]
    expected = _activated(torch.cat(list(targets)) if rows is None else rows.targets, activation)
    if rows is not None:
        batch_size = max(spec.batch_size, len(x) * spec.batch_size // images)
    v = inverse_rounding((steps - floor).clamp(0, 1))
    optimizer = torch.optim.Adam([v], lr=spec.lr, fused=v.dtype == torch.float32)
    for step in range(spec.steps):
        chosen = torch.randint(len(x), (min(batch_size, len(x)),), generator=generator).to(x.device)
        sigmoid = torch.sigmoid(v)
        h = (sigmoid * _STRETCH + _SHIFT).clamp_(0, 1)
        rounded = torch.addcmul(base, h, free).mul_(scale).requires_grad_()
        with torch.enable_grad():
            part = rows.outputs(rounded, chosen) if rows else _outputs(layer, rounded, x[chosen], settings)
            outputs = _activated(part, activation)
            (outputs - expected[chosen]).square().sum(1).mean().backward()
        gradient = cast(Tensor, rounded.grad).mul_(scale)
        if step >= spec.warm_start * spec.steps:
            gradient.add_(regularizer_gradient(h, beta_at(step, spec)), alpha=spec.regularization)
        # The chain rule through h(v), whose slope is the sigmoid's where it is not clamped, is written out, because
        # autograd would read and write the weight a dozen times more
        slope = sigmoid.mul_(1 - sigmoid).mul_(_STRETCH).mul_((h > 0) & (h < 1))
        v.grad = gradient.mul_(slope).mul_(free)
        if step % CHECK_EVERY == 0 and step and not bool(v.grad.any()):
            break  # every rounding has reached 0 or 1
        optimizer.step()
    return torch.addcmul(base, (soft_rounding(v) >= 0.5).to(base.dtype), free) * scale


class Rounder:
    """Learns the rounding of each visited layer."""

    def __init__(
        self, spec: AdaRoundSpec, *, folder: Path | None = None, progress: Progress | None = None, total: int = 0
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.progress = progress or NoProgress()
        self.rows: dict[str, Rounding] = {}
        self.progress.start("adaround", total)

    def finish(self) -> tuple[Rounding, ...]:
        self.progress.finish("adaround")
        return tuple(self.rows.values())

    def visit(self, this: Visit) -> None:
        if this.path in self.rows:
            return  # a second call of the layer, whose weights were rounded at the first
        reason = _refusal(this)
        if reason:
            self.rows[this.path] = Rounding(
                layer=this.path, error_nearest=0.0, error_learned=0.0, changed=0.0, reason=reason
            )
        else:
            self.rows[this.path] = self._round(this)
        row = self.rows[this.path]
        self.progress.advance("adaround", 1, error_nearest=row.error_nearest, error_learned=row.error_learned)

    def _round(self, this: Visit) -> Rounding:
        layer: Any = this.layer
        call: dict[str, Any] = {"activation": _activation_after(this.node), "settings": this.settings}
        nearest = layer.quantized_weight.detach().clone()
        path, digest = self._file(this)
        learned = _read(path, digest, nearest)
        if learned is None:
            learned = learn_rounding(layer, this.inputs, this.targets, self.spec, **call)
        errors = self._errors(this, (nearest, learned), call)
        best = learned if errors[1] < errors[0] else nearest
        if path is not None:
            _write(path, digest, best)
        layer.weight.copy_(best)
        changed = (best != nearest).float().mean().item()
        return Rounding(layer=this.path, error_nearest=errors[0], error_learned=min(errors), changed=changed)

    def _errors(self, this: Visit, weights: tuple[Tensor, Tensor], call: dict[str, Any]) -> list[float]:
        """The error of each weight, at positions drawn apart from those that it was learned on."""
        generator = torch.Generator().manual_seed(self.spec.seed + 1)
        rows = sampled_rows(this.layer, this.inputs, this.targets, count=self.spec.positions, generator=generator)
        if rows is None:
            inputs, targets = torch.cat(this.inputs), torch.cat(this.targets)
            return [reconstruction_error(this.layer, weight, inputs, targets, **call) for weight in weights]
        every = torch.arange(len(rows.targets), device=rows.targets.device)
        expected = _activated(rows.targets, call["activation"])
        found = (_activated(rows.outputs(weight, every), call["activation"]) for weight in weights)
        return [(outputs - expected).double().square().mean().item() for outputs in found]

    def _file(self, this: Visit) -> tuple[Path | None, str]:
        """The file for a layer's rounding, and a digest of the values that it is learned from."""
        if self.folder is None:
            return None, ""
        layer: Any = this.layer
        digest = hashlib.sha256(repr(sorted(asdict(self.spec).items())).encode())
        for tensor in (layer.weight, layer.weight_quantizer.scale, *this.inputs):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return self.folder / f"{this.path}.safetensors", digest.hexdigest()


@torch.no_grad()
def reconstruction_error(
    layer: nn.Module,
    weight: Tensor,
    inputs: Tensor,
    targets: Tensor,
    *,
    activation: str = "",
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 64,
) -> float:
    """The mean squared error of a layer's outputs with `weight` against `targets`, both after the activation."""
    total = 0.0
    for x, target in zip(inputs.split(batch_size), targets.split(batch_size), strict=True):
        difference = _activated(_outputs(layer, weight, x, settings), activation) - _activated(target, activation)
        total += difference.double().square().sum().item()
    return total / targets.numel()


def _outputs(layer: nn.Module, weight: Tensor, x: Tensor, settings: Mapping[str, Any] | None = None) -> Tensor:
    quantizer = weight_quantizer_of(layer)
    enabled, quantizer.enabled = quantizer.enabled, False
    try:
        return torch.func.functional_call(layer, {stored_name(layer, "weight"): weight}, (x,), dict(settings or {}))
    finally:
        quantizer.enabled = enabled


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "relu6":
        return F.relu6(x)
    return F.relu(x) if activation == "relu" else x


def _activation_after(node: fx.Node) -> str:
    """`relu` or `relu6` if it is the only consumer of the layer's output, else ""."""
    if len(node.users) != 1:
        return ""
    kind = node_kind(next(iter(node.users)))
    return kind if kind in {"relu", "relu6"} else ""


def _refusal(this: Visit) -> str:
    if weight_quantizer_of(this.layer).format.kind != "int":
        return "FP8 steps are not evenly spaced: rounded to nearest"
    if parametrize.is_parametrized(this.layer):
        return "has a parametrized weight (a sparsity mask): squash it first"
    return ""


def _read(path: Path | None, digest: str, like: Tensor) -> Tensor | None:
    if path is None or not path.is_file():
        return None
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise QuantizationError(f"{path} is no rounding that AdaRound saved ({error}); remove it") from error
    weight = found.get(digest)
    return None if weight is None else weight.to(like)


def _write(path: Path, digest: str, weight: Tensor) -> None:
    content = save({digest: weight.detach().cpu().contiguous()})  # written by us, so that a full disk is an OSError
    with replacing(path) as temporary:
        temporary.write_bytes(content)
