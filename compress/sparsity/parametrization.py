"""Masks on a model: a parametrization of `weight` that deep-copies, pickles and compiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from compress.errors import SparsityError, near_misses
from compress.graph.modules import bake, register_picklable
from compress.graph.ops import tensor_of
from compress.sparsity.selection import SCALE, TEMPERATURE, Selection, as_groups, first_logits, gumbel_softmax, patterns
from compress.sparsity.spec import parse_pattern

_PREFIX = "parametrizations.weight."


class NMMask(nn.Module):
    """The mask of one weight, which becomes original * mask.

    `mask` is a boolean buffer of the weight's shape, True = kept; `straight_through` passes the gradient to masked
    elements too.
    """

    mask: Tensor

    def __init__(self, mask: Tensor, *, pattern: str = "", straight_through: bool = False) -> None:
        super().__init__()
        if mask.dtype != torch.bool:
            raise SparsityError(f"a mask must be boolean, got {mask.dtype}")
        self.register_buffer("mask", mask)
        self.pattern = pattern
        self.straight_through = straight_through

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, zero where masked."""
        masked = torch.where(self.mask, weight, 0.0)
        # The second term is zero and has the gradient of the elements that the first one leaves out.
        return masked + torch.where(self.mask, 0.0, weight - weight.detach()) if self.straight_through else masked

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Store all of an assigned weight."""
        return weight

    def extra_repr(self) -> str:
        """Pattern and density."""
        return f"{self.pattern or 'mask'}, density={self.mask.float().mean().item():.3f}"

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *args: Any
    ) -> None:
        layer = prefix.removesuffix(_PREFIX + "0.")
        if f"{prefix}mask" not in state_dict and strict:
            raise SparsityError(_dense_into_sparse(layer.removesuffix(".") or "the model"))
        got = state_dict.get(f"{prefix}mask")
        if isinstance(got, Tensor) and got.shape != self.mask.shape:
            raise SparsityError(
                f"{layer}weight: the checkpoint's mask is {tuple(got.shape)} and the model's {tuple(self.mask.shape)}"
            )
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *args)


class LearnedMask(NMMask):
    """An n:m mask whose choice is trained (`selection`), by `MaskSchedule`.

    Attributes:
        probe: parameter that is zero in every forward pass, and whose gradient is the mask's; the schedule zeroes it.
        choices: (C, m), all masks of a group.
        logits, mean, square, shares: see `Selection`; (groups, C).
    """

    choices: Tensor
    logits: Tensor
    mean: Tensor
    square: Tensor
    shares: Tensor

    def __init__(self, mask: Tensor, *, pattern: str, generator: torch.Generator) -> None:
        super().__init__(mask, pattern=pattern)
        known = parse_pattern(pattern)
        choices, groups = patterns(known.n, known.m, mask.device), as_groups(mask, known.m)
        noise = torch.randn(len(groups), len(choices), generator=generator).to(mask.device)
        self.probe = nn.Parameter(torch.zeros(mask.shape, device=mask.device))
        self.register_buffer("choices", choices, persistent=False)
        self.register_buffer("logits", first_logits(groups, choices, noise))
        self.register_buffer("mean", torch.zeros_like(noise))
        self.register_buffer("square", torch.zeros_like(noise))
        self.register_buffer("shares", gumbel_softmax(self.logits, torch.zeros_like(noise), SCALE[0], TEMPERATURE[0]))

    @property
    def selection(self) -> Selection:
        """The state of the choice, of the same tensors."""
        return Selection(logits=self.logits, mean=self.mean, square=self.square, shares=self.shares)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight, zero where masked."""
        return super().forward(weight) + weight.detach() * self.probe


def apply_masks(
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    pattern: str = "",
    straight_through: bool = False,
    learned: int | None = None,
) -> None:
    """Mask layers of a dense model, in place; the parameters stay the same objects.

    `masks` are boolean, of the weights' shapes; `pattern` is shown by `print(model)`. `learned` is the seed of the
    first logits of masks that are trained; None = masks that are given.

    Raises:
        SparsityError: a layer is unknown or parametrized already, or a mask does not fit. Nothing is changed then.
    """
    modules = dict(model.named_modules())
    for path, mask in masks.items():
        if path not in modules:
            raise SparsityError(f"the model has no layer {path!r}{near_misses(path, modules)}")
        _check_fits(path, modules[path], mask)
    generator = torch.Generator().manual_seed(learned or 0)
    for path, mask in masks.items():
        module = modules[path]
        own = mask.to(tensor_of(module).device, copy=True)
        if learned is None:
            part = NMMask(own, pattern=pattern, straight_through=straight_through)
        else:
            part = LearnedMask(own, pattern=pattern, generator=generator)
        register_picklable(module, "weight", part.train(module.training))


@dataclass(frozen=True, kw_only=True)
class MaskedLayer:
    """A layer, its mask module, and the trained parameter."""

    module: nn.Module
    part: NMMask
    original: nn.Parameter

    @property
    def mask(self) -> Tensor:
        """The buffer that holds the mask."""
        return self.part.mask


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """The layers that are masked, by path."""
    layers = ((path, _masked(module)) for path, module in model.named_modules())
    return {path: layer for path, layer in layers if layer is not None}


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the masks of all masked layers, by path."""
    return {path: layer.mask.clone() for path, layer in masked_layers(model).items()}


def squash_masks(model: nn.Module) -> dict[str, Tensor]:
    """Bake the masks in: weights become plain parameters, zero where masked; in place.

    Further training would change the zeros: hold them with `apply_masks(model, masks)`.

    Returns:
        The masks, by layer path.

    Raises:
        SparsityError: no layer is masked.

    Examples:
        >>> network = nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(3)))
        >>> report = compress.sparsify(network, compress.SparsitySpec())
        >>> {path: mask.float().mean().item() for path, mask in compress.squash_masks(network).items()}
        {'1': 0.5}
    """
    masks = masks_of(model)
    if not masks:
        raise SparsityError("no layer of the model is masked: call sparsify first, or leave squash_masks out")
    for path in masks:
        bake(model.get_submodule(path), "weight")
    return masks


def _masked(module: nn.Module) -> MaskedLayer | None:
    if not parametrize.is_parametrized(module, "weight"):
        return None
    chains: Any = module.parametrizations
    parts = chains["weight"]
    return MaskedLayer(module=module, part=parts[0], original=parts.original) if isinstance(parts[0], NMMask) else None


def _dense_into_sparse(layer: str) -> str:
    return (
        f"the checkpoint is of a dense model and {layer} is masked: load it before sparsify, or into a model whose "
        "masks were squashed"
    )


def _check_fits(path: str, module: nn.Module, mask: Tensor) -> None:
    if parametrize.is_parametrized(module):
        how = "masked" if _masked(module) is not None else "parametrized by something else"
        raise SparsityError(f"layer {path} is {how} already: call squash_masks (or remove it) before masking it")
    weight = module._parameters.get("weight")
    if weight is None:
        raise SparsityError(f"layer {path} ({type(module).__name__}) has no parameter `weight` to mask")
    if mask.dtype != torch.bool or mask.shape != weight.shape:
        raise SparsityError(
            f"layer {path}: a boolean mask of {tuple(weight.shape)} is needed, got {mask.dtype} of {tuple(mask.shape)}"
        )
