"""Operations of random networks, continued: kinds and spellings of the traits table that few networks use."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerBlockV2
from torchvision.ops import DropBlock2d, FrozenBatchNorm2d, StochasticDepth

from analysis.random_networks.operations import SIDE, Op, Run, conv, image, norm, plain, tokens


def _frozen() -> FrozenBatchNorm2d:
    made = FrozenBatchNorm2d(8)
    made.running_mean.copy_(torch.randn(8) / 4)
    made.running_var.copy_(torch.rand(8) + 0.5)
    return made


def _windows(block: Callable[..., nn.Module], shift: int) -> Op:
    made = block(8, 2, window_size=[4, 4], shift_size=[shift, shift], mlp_ratio=2.0)
    return Op(lambda s, x, y: s.a(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), a=made)


def _wrapped(module: Callable[[], nn.Module]) -> Callable[[], Op]:
    return lambda: Op(lambda s, x, y: s.a(x), a=module())


def _masked(s: Any, x: Tensor, y: Tensor) -> Tensor:
    t = tokens(x)
    q, k, v = s.q(t), s.k(t), s.v(t)
    scores = torch.baddbmm(s.bias.expand(x.shape[0], -1, -1), q, k.transpose(1, 2), alpha=0.3)
    return image(torch.bmm(scores.masked_fill(s.mask, -100.0).softmax(-1), v))


def _mask_attention() -> Op:
    op = Op(_masked, **{name: nn.Linear(8, 8) for name in "qkv"}, bias=nn.Parameter(torch.randn(1, 64, 64) / 4))
    op.register_buffer("mask", torch.rand(64, 64) > 0.8)
    return op


def _columns(s: Any, x: Tensor, y: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)  # (N, 72, 64)
    result: Tensor = s.a(columns.transpose(1, 2)).transpose(1, 2).unflatten(2, (SIDE, SIDE))
    return result


def _in_place(s: Any, x: Tensor, y: Tensor) -> Tensor:
    z = s.a(x)
    z *= 0.5
    z -= y
    z.clamp_(-2, 2).mul_(torch.sigmoid(z))
    return z


def _embedded() -> Op:
    op = Op(lambda s, x, y: x + s.e(s.places).transpose(0, 1).unflatten(1, (SIDE, SIDE)), e=nn.Embedding(64, 8))
    op.register_buffer("places", torch.arange(64))
    return op


RARE_LAYERS: dict[str, Callable[[], Op]] = {
    "conv 1d": lambda: Op(
        lambda s, x, y: s.n(s.a(x.flatten(2))).view_as(x), a=nn.Conv1d(8, 8, 3, padding=1), n=nn.BatchNorm1d(8)
    ),
    "conv 3d": lambda: Op(
        lambda s, x, y: s.a(x.unsqueeze(2)).squeeze(2), a=nn.Conv3d(8, 8, (1, 3, 3), padding=(0, 1, 1))
    ),
    "conv of circles": lambda: Op(lambda s, x, y: s.a(x), a=conv(padding_mode="circular")),
    "conv of words": lambda: Op(lambda s, x, y: s.a(x), a=nn.Conv2d(8, 8, (1, 5), padding="same")),
    "conv and zeros": lambda: Op(lambda s, x, y: s.a(s.p(x)), p=nn.ZeroPad2d((1, 1, 1, 1)), a=nn.Conv2d(8, 8, 3)),
    "conv and a copied border": lambda: Op(lambda s, x, y: s.a(s.p(x)), p=nn.ReplicationPad2d(1), a=nn.Conv2d(8, 8, 3)),
    "conv and a border of numbers": lambda: Op(
        lambda s, x, y: s.a(s.p(F.relu(x))), p=nn.ConstantPad2d(1, -0.5), a=nn.Conv2d(8, 8, 3)
    ),
    "conv frozen bn": lambda: Op(lambda s, x, y: F.relu(s.n(s.a(x))), a=conv(bias=False), n=_frozen()),
    "conv bn without affine": lambda: Op(lambda s, x, y: s.n(s.a(x)), a=conv(), n=nn.BatchNorm2d(8, affine=False)),
    "bn conv bn": lambda: Op(lambda s, x, y: s.m(s.a(s.n(x))), n=norm(), a=conv(), m=norm()),
    "separable": lambda: Op(
        lambda s, x, y: s.n(s.b(F.hardswish(s.m(s.a(x))))) + x, a=conv(groups=8), m=norm(), b=conv(size=1), n=norm()
    ),
    "inverted residual": lambda: Op(
        lambda s, x, y: s.c(F.relu6(s.b(F.relu6(s.a(x))))) + x,
        a=conv(8, 16, 1),
        b=conv(16, 16, groups=16),
        c=conv(16, 8, 1),
    ),
    "prelu": lambda: Op(lambda s, x, y: s.r(s.a(x)), a=conv(), r=nn.PReLU(8)),
    "rrelu": lambda: Op(lambda s, x, y: s.r(s.a(x)), a=conv(), r=nn.RReLU()),
    "transposed 1d": lambda: Op(
        lambda s, x, y: s.a(F.max_pool1d(x.flatten(2), 2)).unflatten(2, (SIDE, SIDE)),
        a=nn.ConvTranspose1d(8, 8, 2, stride=2),
    ),
    "transposed in groups": lambda: Op(
        lambda s, x, y: F.relu(s.a(x)), a=nn.ConvTranspose2d(8, 8, 3, padding=1, groups=2, bias=False)
    ),
    "upsampled": lambda: Op(
        lambda s, x, y: s.b(s.u(s.a(x))), a=conv(stride=2), u=nn.Upsample(scale_factor=2), b=conv()
    ),
    "upsampled and joined": lambda: Op(
        lambda s, x, y: s.b(torch.cat((F.interpolate(s.a(x), size=y.shape[-2:]), y), dim=1)),
        a=conv(stride=2),
        b=conv(16),
    ),
    "unfold": lambda: Op(_columns, a=nn.Linear(72, 8)),
    "addmm": lambda: Op(
        lambda s, x, y: image(torch.addmm(s.g, tokens(x).reshape(-1, 8), s.h).reshape(-1, 64, 8)),
        g=nn.Parameter(torch.randn(8)),
        h=nn.Parameter(torch.randn(8, 8) / 3),
    ),
    "masked attention": _mask_attention,
    "swin": lambda: _windows(SwinTransformerBlock, 0),
    "swin shifted": lambda: _windows(SwinTransformerBlock, 2),
    "swin of version 2": lambda: _windows(SwinTransformerBlockV2, 2),
    "patch merging": lambda: Op(
        lambda s, x, y: F.pixel_shuffle(s.b(s.a(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)), 2),
        a=PatchMerging(8),
        b=conv(16, 32, 1),
    ),
    "layer norm and linear": lambda: Op(
        lambda s, x, y: image(s.b(F.gelu(s.a(s.n(tokens(x))))) + tokens(x)),
        n=nn.LayerNorm(8),
        a=nn.Linear(8, 16),
        b=nn.Linear(16, 8),
    ),
    "rms norm and linear": lambda: Op(
        lambda s, x, y: image(s.a(s.n(tokens(x)))), n=nn.RMSNorm(8), a=nn.Linear(8, 8, bias=False)
    ),
    "gated linear": lambda: Op(
        lambda s, x, y: image(s.b(torch.mul(*s.a(tokens(x)).chunk(2, dim=-1)))), a=nn.Linear(8, 16), b=nn.Linear(8, 8)
    ),
    "stochastic depth": lambda: Op(
        lambda s, x, y: s.d(s.n(s.a(x))) + x, a=conv(), n=norm(), d=StochasticDepth(0.3, "row")
    ),
    "scaled branch": lambda: Op(lambda s, x, y: s.a(x) * s.g + x, a=conv(), g=nn.Parameter(torch.full((8, 1, 1), 0.3))),
    "embedding": _embedded,
    "in place": lambda: Op(_in_place, a=conv()),
    "list of branches": lambda: Op(
        lambda s, x, y: sum(branch(x) for branch in s.m) / 2, m=nn.ModuleList([conv(), conv(size=1), conv(groups=4)])
    ),
    "sequential": lambda: Op(lambda s, x, y: s.m(x), m=nn.Sequential(conv(), norm(), nn.Hardtanh(0, 4), conv())),
}

_RARE: dict[str, Run] = {
    "addition of a product": lambda s, x, y: torch.add(x, y, alpha=2.0) / 2,
    "pow": lambda s, x, y: torch.tanh(x) ** 2,
    "pow of a sum": lambda s, x, y: (F.relu(x) + 0.5).pow(0.5),
    "rsqrt": lambda s, x, y: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 0.1),
    "sum": lambda s, x, y: x - x.sum(dim=(2, 3), keepdim=True) / 64,
    "max of channels": lambda s, x, y: x * torch.sigmoid(torch.cat([x.amax(1, True), x.mean(1, True)], 1).sum(1, True)),
    "least": lambda s, x, y: x - x.amin(dim=(2, 3), keepdim=True) / 2,
    "maximum and place": lambda s, x, y: x - x.max(dim=1, keepdim=True)[0] / 2,
    "length": lambda s, x, y: x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 0.5),
    "masked": lambda s, x, y: x.masked_fill(y < 0, 0.25),
    "chosen": lambda s, x, y: torch.where(y > 0, x, torch.zeros_like(x)),
    "compared": lambda s, x, y: x * (y > 0),
    "adaptive max pool": lambda s, x, y: x + F.adaptive_max_pool2d(x, (4, 1)).repeat_interleave(2, 2),
    "adaptive avg pool": lambda s, x, y: x * torch.sigmoid(F.adaptive_avg_pool2d(y, (1, 8))),
    "unbound": lambda s, x, y: torch.stack(x.unbind(1)[::-1], dim=1),
    "tensor split": lambda s, x, y: torch.cat(torch.tensor_split(x, (3, 5), dim=1)[::-1], 1),
    "narrow": lambda s, x, y: torch.cat([x.narrow(1, 2, 6), x.select(1, 0).unsqueeze(1), y[:, :1]], 1),
    "moved": lambda s, x, y: torch.movedim(x, 1, -1).movedim(-1, 1),
    "swapped": lambda s, x, y: x.mT + torch.swapaxes(y, 2, 3),
    "repeated": lambda s, x, y: x[:, :4].repeat(1, 2, 1, 1),
    "windows": lambda s, x, y: (
        x.unflatten(2, (2, 4)).unflatten(4, (2, 4)).transpose(3, 4).transpose(4, 3).reshape(x.shape)
    ),
    "average of odd windows": lambda s, x, y: F.avg_pool2d(x, (3, 1), 1, (1, 0), count_include_pad=False),
    "largest of dilated windows": lambda s, x, y: F.max_pool2d(F.pad(x, (2, 2, 2, 2)), 3, 1, dilation=2),
    "pool at its ceiling": lambda s, x, y: F.interpolate(F.max_pool2d(x, 3, 2, ceil_mode=True), size=8),
    "aligned corners": lambda s, x, y: F.interpolate(x[..., ::2, ::2], (8, 8), mode="bilinear", align_corners=True),
    "reflected border": lambda s, x, y: F.pad(x, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 2:],
    "sines": lambda s, x, y: torch.sin(x),
    "running sum": lambda s, x, y: torch.cumsum(x, 3) / 4,
    "erf": lambda s, x, y: torch.erf(x),
    "floor": lambda s, x, y: x - torch.floor(y) / 4,
    "rounded": lambda s, x, y: x + torch.sign(y) / 4,
    "linear interpolation": lambda s, x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda s, x, y: torch.addcmul(x, torch.tanh(x), y, value=0.5),
    "variance": lambda s, x, y: x / torch.sqrt(x.var((2, 3), keepdim=True) + 0.3),
    "detached": lambda s, x, y: x.detach().clone().float() + y.contiguous().to(torch.float32),
    "sizes": lambda s, x, y: x.reshape(x.size(0), x.shape[1] // 2, -1).view(len(x), 8, *x.shape[2:]),
    "whole numbers": lambda s, x, y: (x * 2).int().float() / 2 + y,
    "glu": lambda s, x, y: F.glu(torch.cat([x, y], 1), 1),
    "threshold": lambda s, x, y: F.threshold(x, 0.1, -0.2),
    "softsign": lambda s, x, y: F.softsign(x) * 2,
    "tanhshrink": lambda s, x, y: F.tanhshrink(x),
    "logsigmoid": lambda s, x, y: F.logsigmoid(x),
    "selu": lambda s, x, y: F.selu(x),
    "celu": lambda s, x, y: F.celu(x),
    "hardtanh": lambda s, x, y: F.hardtanh(x, -0.5, 1.5),
    "gelu of tanh": lambda s, x, y: F.gelu(x, approximate="tanh"),
    "instance norm": lambda s, x, y: F.instance_norm(x),
    "response norm": lambda s, x, y: F.local_response_norm(x, 3),
    "rms norm": lambda s, x, y: image(F.rms_norm(tokens(x), (8,))),
    "dropout of channels": lambda s, x, y: F.dropout2d(x, 0.2, s.training),
    "reciprocal": lambda s, x, y: torch.reciprocal(1 + x.abs()),
    "one": lambda s, x, y: x * 1.0 + 0.0,
    "the same twice": lambda s, x, y: x + x,
    "numpy names": lambda s, x, y: torch.concatenate([torch.multiply(x, 0.5)[:, :4], torch.clip(y, -1, 1)[:, 4:]], 1),
}

_MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.Identity": nn.Identity,
    "nn.LeakyReLU": partial(nn.LeakyReLU, 0.1),
    "nn.Softmax2d": nn.Softmax2d,
    "nn.GroupNorm": partial(nn.GroupNorm, 4, 8),
    "nn.InstanceNorm2d": partial(nn.InstanceNorm2d, 8, affine=True),
    "nn.LocalResponseNorm": partial(nn.LocalResponseNorm, 3),
    "nn.Dropout2d": partial(nn.Dropout2d, 0.2),
    "nn.AlphaDropout": partial(nn.AlphaDropout, 0.2),
    "DropBlock2d": partial(DropBlock2d, 0.2, 3),
    "nn.ChannelShuffle": partial(nn.ChannelShuffle, 2),
    "nn.PixelShuffle": lambda: nn.Sequential(nn.PixelUnshuffle(4), nn.PixelShuffle(4)),
    "nn.Flatten": lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (8, 8, 8))),
    "nn.MaxPool2d": partial(nn.MaxPool2d, 3, 1, 1),
    "nn.AvgPool2d": partial(nn.AvgPool2d, 3, 1, 1),
    "nn.ELU": nn.ELU,
    "nn.Softplus": nn.Softplus,
    "nn.Hardsigmoid": nn.Hardsigmoid,
    "nn.Threshold": partial(nn.Threshold, 0.0, -0.1),
    "nn.BatchNorm2d": norm,
}

RARE_OTHERS: dict[str, Callable[[], Op]] = {
    **{name: plain(run) for name, run in _RARE.items()},
    **{name: _wrapped(module) for name, module in _MODULES.items()},
}
