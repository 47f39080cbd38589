"""The oracle: pixels at which the gradient of a unit with respect to the image is not zero."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

SMOOTH = (nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Dropout)


# The first and the last pixel of one axis.
Support = tuple[int, int]


def torchvision_model(name: str, *, head: bool = False) -> nn.Module:
    # Return an untrained torchvision classifier, quickly: without initialization and without large heads.
    options: dict[str, Any] = {"init_weights": False} if name in {"inception_v3", "googlenet"} else {}
    if name.startswith("regnet"):  # computes its widths with tensors
        return torchvision.models.get_model(name, weights=None)
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **options)
        if name.startswith(("vgg", "alexnet")) and not head:
            model.classifier = nn.Identity()
    model = model.to_empty(device="cpu")
    for value in [*model.parameters(), *model.buffers()]:
        value.data.zero_()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    return model


def without_chance(model: nn.Module, *, seed: int = 0) -> nn.Module:
    # Return the model in float64 such that no gradient can vanish by chance.
    #
    # All weights are positive, every activation and norm is the identity, and batch norms are at their start. The
    # dependencies between units do not change.
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, SMOOTH) or type(child).__name__ in {"LayerNorm2d", "LayerNorm", "StochasticDepth"}:
                setattr(module, name, nn.Identity())
    for parameter in model.parameters():
        fan = max(1, parameter[0].numel()) if parameter.ndim > 1 else 1
        drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = (0.5 + drawn) / fan**0.5
        parameter.requires_grad_(False)
    return model


@contextlib.contextmanager
def average_pools() -> Iterator[None]:
    # Replace max pools, which depend on their whole window only over many images, by averages over the window.
    def pool(
        x: torch.Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> torch.Tensor:
        assert dilation == 1
        return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, True)

    with mock.patch.object(F, "max_pool2d", pool):
        yield


def supports(
    model: nn.Module, image: torch.Tensor, path: str, units: Sequence[tuple[int, ...]]
) -> list[tuple[Support | None, ...]]:
    # Return ((first row, last), (first column, last)) of the gradient of each unit (row, column) of a module.
    seen: dict[str, torch.Tensor] = {}

    def keep(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        seen["out"] = output
        raise StopIteration  # the rest of the network is not needed

    handle = model.get_submodule(path).register_forward_hook(keep)
    image = image.clone().requires_grad_()
    with average_pools(), contextlib.suppress(StopIteration):
        model(image)
    handle.remove()
    return [support(seen["out"], image, (slice(None), slice(None), *unit)) for unit in units]


def support(output: torch.Tensor, image: torch.Tensor, index: Any, *, least: float = 0.0) -> tuple[Support | None, ...]:
    # Return the first and last pixel of each axis at which the gradient of output[index] is not zero, or None.
    #
    # A share up to `least` of the largest gradient counts as zero: a resize whose position is whole in exact arithmetic
    # gives the next pixel a weight of 1e-15.
    if not output[index].requires_grad:
        return (None,) * (image.ndim - 2)
    (gradient,) = torch.autograd.grad(output[index].sum(), image, retain_graph=True, allow_unused=True)
    if gradient is None:
        return (None,) * (image.ndim - 2)
    far = gradient.abs() <= least * gradient.abs().max() if least else gradient == 0  # not where it overflows
    reached = far.logical_not().flatten(0, 1).any(0)
    found: list[Support | None] = []
    for axis in range(reached.ndim):
        others = [d for d in range(reached.ndim) if d != axis]
        places = (reached.any(dim=others) if others else reached).nonzero().flatten().tolist()
        found.append((places[0], places[-1]) if places else None)
    return tuple(found)
