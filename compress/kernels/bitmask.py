"""Booleans packed eight to a byte, in the order of memory."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.kernels.memory_format import is_channels_last, memory_order

BITS_PER_BYTE = 8


def pack(bits: Tensor) -> Tensor:
    """Pack the booleans of a dense tensor, lowest bit first, padded with zeros; uint8, (ceil(elements / 8),)."""
    flat = memory_order(bits).reshape(-1)
    missing = -flat.numel() % BITS_PER_BYTE
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, missing)) if missing else flat.to(torch.uint8)
    return (flat.view(-1, BITS_PER_BYTE) << _shifts(flat)).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, like: Tensor) -> Tensor:
    """The booleans that `pack` packed, in the shape and memory format of `like`."""
    flat = ((packed[:, None] >> _shifts(packed)) & 1).reshape(-1)[: like.numel()].bool()
    shape = memory_order(like).shape
    if is_channels_last(like):
        return flat.view(shape).permute(0, 3, 1, 2)
    return flat.view(shape)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(BITS_PER_BYTE, dtype=torch.uint8, device=like.device)
