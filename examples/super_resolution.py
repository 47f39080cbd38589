"""Three networks for super-resolution, as a recipe takes them (recipes/super-resolution.yaml); pixels are 0 to 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.swin_transformer import SwinTransformerBlock


class Fsrcnn(nn.Sequential):
    """FSRCNN (Dong et al., arXiv 1608.00367): it shrinks, maps, expands, and enlarges by a transposed convolution."""

    def __init__(self, scale: int = 2, channels: int = 56, narrow: int = 12, depth: int = 4) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 5, padding=2), nn.PReLU(channels)]
        layers += [nn.Conv2d(channels, narrow, 1), nn.PReLU(narrow)]
        for _ in range(depth):
            layers += [nn.Conv2d(narrow, narrow, 3, padding=1), nn.PReLU(narrow)]
        layers += [nn.Conv2d(narrow, channels, 1), nn.PReLU(channels)]
        enlarge = nn.ConvTranspose2d(channels, 3, 9, stride=scale, padding=4, output_padding=scale - 1)
        super().__init__(*layers, enlarge)


class Enlarge(nn.Module):
    """Adds features to the input, repeated, and shuffles them into place (Du et al., arXiv 2105.09750).

    The network learns a difference, so that what rounding does to features does not touch the image itself.
    """

    def __init__(self, channels: int, scale: int) -> None:
        super().__init__()
        self.scale, self.conv = scale, nn.Conv2d(channels, 3 * scale**2, 3, padding=1)

    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        """Return (N, 3, scale H, scale W)."""
        return F.pixel_shuffle(self.conv(features) + x.repeat_interleave(self.scale**2, dim=1), self.scale)


class Distill(nn.Module):
    """A residual feature distillation block (Liu, Tang and Wu, arXiv 2009.11551, section 3.2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.distilled = nn.ModuleList(nn.Conv2d(channels, half, 1) for _ in range(3))
        self.refined = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(channels, half, 3, padding=1)
        self.join, self.attention = nn.Conv2d(4 * half, channels, 1), Attention(channels, channels // 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, channels, H, W)."""
        parts, rest = [], x
        for distilled, refined in zip(self.distilled, self.refined, strict=True):
            parts.append(F.leaky_relu(distilled(rest), 0.05))
            rest = F.leaky_relu(refined(rest) + rest, 0.05)
        parts.append(F.leaky_relu(self.last(rest), 0.05))
        return x + self.attention(self.join(torch.cat(parts, dim=1)))


class Attention(nn.Module):
    """Enhanced spatial attention: a gate for each place, of a coarse view (Liu, Tang and Wu, section 3.3)."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)
        self.skip, self.down = nn.Conv2d(narrow, narrow, 1), nn.Conv2d(narrow, narrow, 3, stride=2)
        self.coarse = nn.Conv2d(narrow, narrow, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, channels, H, W)."""
        narrow = self.first(x)
        seen = self.coarse(F.relu(F.max_pool2d(self.down(narrow), 7, stride=3)))
        seen = F.interpolate(seen, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return x * torch.sigmoid(self.last(seen + self.skip(narrow)))


class Rfdn(nn.Module):
    """A residual feature distillation network (Liu, Tang and Wu, arXiv 2009.11551)."""

    def __init__(self, scale: int = 2, channels: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Distill(channels) for _ in range(blocks))
        self.join, self.smooth = nn.Conv2d(blocks * channels, channels, 1), nn.Conv2d(channels, channels, 3, padding=1)
        self.enlarge = Enlarge(channels, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 3, scale H, scale W)."""
        first = seen = self.first(x)
        found = []
        for block in self.blocks:
            seen = block(seen)
            found.append(seen)
        joined = F.leaky_relu(self.join(torch.cat(found, dim=1)), 0.05)
        return self.enlarge(self.smooth(joined) + first, x)


class SwinIR(nn.Module):
    """SwinIR in its light form (Liang et al., arXiv 2108.10257): residual groups of shifted windows."""

    def __init__(self, scale: int = 2, channels: int = 60, groups: int = 4, depth: int = 6, window: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.groups = nn.ModuleList(
            nn.Sequential(
                *(
                    SwinTransformerBlock(channels, 6, [window, window], [i % 2 * window // 2] * 2, mlp_ratio=2.0)
                    for i in range(depth)
                )
            )
            for _ in range(groups)
        )
        self.after = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(groups))
        self.norm, self.smooth = nn.LayerNorm(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.enlarge = Enlarge(channels, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 3, scale H, scale W)."""
        first = seen = self.first(x)
        for group, conv in zip(self.groups, self.after, strict=True):
            seen = seen + conv(group(seen.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        normed = self.norm(seen.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.enlarge(self.smooth(normed) + first, x)
