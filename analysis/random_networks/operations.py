"""Operations of random networks: layers in all their forms, and functions without weights.

Each computes with two values of shape (N, 8, 8, 8) and returns another. Kinds and spellings of the traits table that
few networks use come last.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.swin_transformer import PatchMerging, SwinTransformerBlock, SwinTransformerBlockV2
from torchvision.ops import DropBlock2d, FrozenBatchNorm2d, StochasticDepth

CHANNELS = SIDE = 8
Run = Callable[[Any, Tensor, Tensor], Tensor]


class Op(nn.Module):
    """An operation on two values, with the modules and parameters that it needs."""

    def __init__(self, run: Run, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Apply it to the last value and an earlier one, both (N, 8, 8, 8)."""
        return self.run(self, x, y)


class Weights(nn.Module):
    """A module that calls a layer as a function, with parameters of other names."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, shape in shapes.items():
            setattr(
                self, name, nn.Parameter(torch.randn(shape) / max(1, shape[-1] * (9 if len(shape) > 2 else 1)) ** 0.5)
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def conv(inputs: int = 8, outputs: int = 8, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, padding=options.pop("padding", size // 2), **options)


def norm(channels: int = 8) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    made.running_mean = torch.randn(channels) / 4
    made.running_var = torch.rand(channels) + 0.5
    return made


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def image(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(-1, CHANNELS, SIDE, SIDE)


def _tied() -> Op:
    first, second = conv(), conv()
    second.weight = first.weight
    return Op(lambda s, x, y: s.b(F.relu(s.a(x))), a=first, b=second)


def _hooked(before: bool) -> Op:
    layer = conv()
    if before:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    else:
        layer.register_forward_hook(lambda module, args, result: -result)
    return Op(lambda s, x, y: s.a(x), a=layer)


def _buffered() -> Op:
    op = Op(lambda s, x, y: s.a(torch.cat([x, s.grid.expand(x.shape[0], -1, -1, -1)], 1)), a=conv(10))
    op.register_buffer("grid", torch.randn(1, 2, SIDE, SIDE))
    return op


def _attention(s: Any, x: Tensor, y: Tensor) -> Tensor:
    t = tokens(x)
    q, k, v = s.qkv(t).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return image(s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def _multihead(s: Any, x: Tensor, y: Tensor) -> Tensor:
    t = tokens(x)
    return image(s.a(t, t, t, need_weights=False)[0])


def _gate(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(s.b(F.relu(s.a(F.adaptive_avg_pool2d(x, 1)))))


def _changed(s: Any, x: Tensor, y: Tensor) -> Tensor:
    z = s.a(x)
    z += y
    return F.relu(z, inplace=True)


def _noisy(s: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + torch.randn_like(x) if s.training else x


LAYERS: dict[str, Callable[[], Op]] = {
    "conv": lambda: Op(lambda s, x, y: s.a(x), a=conv()),
    "conv bn relu": lambda: Op(lambda s, x, y: s.r(s.n(s.a(x))), a=conv(bias=False), n=norm(), r=nn.ReLU(inplace=True)),
    "conv bn relu6": lambda: Op(lambda s, x, y: s.r(s.n(s.a(x))), a=conv(), n=norm(), r=nn.ReLU6()),
    "conv bn by name": lambda: Op(lambda s, x, y: s.n(input=s.a(input=x)), a=conv(), n=norm()),
    "depthwise": lambda: Op(lambda s, x, y: s.b(F.silu(s.a(x))), a=conv(groups=8), b=conv(size=1)),
    "grouped": lambda: Op(lambda s, x, y: s.a(x), a=conv(groups=2)),
    "dilated": lambda: Op(lambda s, x, y: s.a(x), a=conv(dilation=2, padding=2)),
    "reflected": lambda: Op(lambda s, x, y: s.a(x), a=conv(padding_mode="reflect")),
    "preactivation": lambda: Op(lambda s, x, y: s.a(F.relu(s.n(x))), a=conv(), n=norm()),
    "residual": lambda: Op(lambda s, x, y: F.relu(s.b(F.relu(s.a(x))) + y), a=conv(), b=conv()),
    "residual bn": lambda: Op(lambda s, x, y: s.n(s.a(x)) + x, a=conv(), n=norm()),
    "shared": lambda: Op(lambda s, x, y: s.a(F.relu(s.a(x))), a=conv()),
    "shared bn": lambda: Op(lambda s, x, y: s.n(s.a(x)) + s.n(s.b(y)), a=conv(), b=conv(), n=norm()),
    "tied": _tied,
    "hook after": lambda: _hooked(False),
    "hook before": lambda: _hooked(True),
    "buffer": _buffered,
    "concat": lambda: Op(
        lambda s, x, y: s.c(torch.cat([F.relu(s.a(x)), s.b(x), y], 1)), a=conv(), b=conv(), c=conv(24)
    ),
    "concat pools": lambda: Op(
        lambda s, x, y: s.c(torch.cat([F.max_pool2d(x, 3, 1, 1), F.avg_pool2d(y, 3, 1, 1)], 1)), c=conv(16)
    ),
    "transposed": lambda: Op(
        lambda s, x, y: s.b(F.relu(s.a(x))), a=conv(stride=2), b=nn.ConvTranspose2d(8, 8, 2, stride=2)
    ),
    "transposed to a size": lambda: Op(
        lambda s, x, y: s.n(s.b(s.a(x), output_size=[SIDE, SIDE])),
        a=conv(stride=2),
        b=nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1),
        n=norm(),
    ),
    "linear": lambda: Op(lambda s, x, y: image(s.b(F.gelu(s.a(tokens(x))))), a=nn.Linear(8, 16), b=nn.Linear(16, 8)),
    "linear and number": lambda: Op(
        lambda s, x, y: image(s.a(tokens(x)) + s.g), a=nn.Linear(8, 8, bias=False), g=nn.Parameter(torch.tensor(0.5))
    ),
    "linear bn": lambda: Op(lambda s, x, y: image(s.n(s.a(tokens(x)))), a=nn.Linear(8, 8), n=nn.BatchNorm1d(SIDE**2)),
    "linear on the width": lambda: Op(lambda s, x, y: s.a(x), a=nn.Linear(8, 8)),
    "linear as a function": lambda: Op(
        lambda s, x, y: image(s.a(tokens(x))), a=Weights(lambda s, x: F.linear(x, s.w1, s.b1), w1=(8, 8), b1=(8,))
    ),
    "conv as a function": lambda: Op(
        lambda s, x, y: s.a(x),
        a=Weights(lambda s, x: F.conv2d(x, s.kernel, bias=s.shift, padding=1), kernel=(8, 8, 3, 3), shift=(8,)),
    ),
    "matmul": lambda: Op(lambda s, x, y: torch.matmul(x, y.transpose(-2, -1)) / 8),
    "softmax and matmul": lambda: Op(lambda s, x, y: torch.softmax(x, -1) @ y),
    "einsum": lambda: Op(lambda s, x, y: torch.einsum("bchw,bcvw->bchv", x, y) / 8),
    "einsum diagonal": lambda: Op(lambda s, x, y: torch.einsum("bchw,bcww->bchw", x, y)),
    "attention": lambda: Op(_attention, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)),
    "multihead": lambda: Op(
        lambda s, x, y: s.b(x, y), b=Op(_multihead, a=nn.MultiheadAttention(8, 2, batch_first=True))
    ),
    "gate": lambda: Op(_gate, a=conv(size=1), b=conv(size=1)),
    "changed in place": lambda: Op(_changed, a=conv()),
}

_PLAIN: dict[str, Run] = {
    "relu": lambda s, x, y: F.relu(x),
    "relu method": lambda s, x, y: x.relu(),
    "relu6": lambda s, x, y: F.relu6(x),
    "clamp": lambda s, x, y: x.clamp(-1, 2),
    "clamp above": lambda s, x, y: torch.clamp(x, max=2),
    "leaky": lambda s, x, y: F.leaky_relu(x, 0.2),
    "silu": lambda s, x, y: F.silu(x),
    "gelu": lambda s, x, y: F.gelu(x),
    "hardswish": lambda s, x, y: F.hardswish(x),
    "hardsigmoid": lambda s, x, y: F.hardsigmoid(x),
    "mish": lambda s, x, y: F.mish(x),
    "elu": lambda s, x, y: F.elu(x),
    "softplus": lambda s, x, y: F.softplus(x),
    "sigmoid": lambda s, x, y: torch.sigmoid(x),
    "tanh": lambda s, x, y: x.tanh(),
    "softmax": lambda s, x, y: F.softmax(x, 1) * 4,
    "log softmax": lambda s, x, y: F.log_softmax(x, 1),
    "add": lambda s, x, y: x + y,
    "add method": lambda s, x, y: x.add(y, alpha=-0.5),
    "add function": lambda s, x, y: torch.add(F.relu(x), F.relu(y), alpha=-1),
    "add number": lambda s, x, y: F.relu(x) + (-1),
    "sub": lambda s, x, y: x - y,
    "sub from": lambda s, x, y: 1 - torch.sigmoid(x) * 2,
    "mul": lambda s, x, y: x * torch.sigmoid(y),
    "mul number": lambda s, x, y: torch.mul(F.relu(x), other=-1.0),
    "div": lambda s, x, y: x / (1 + y.abs()),
    "neg": lambda s, x, y: -F.relu(x),
    "maximum": lambda s, x, y: torch.maximum(x, y),
    "minimum": lambda s, x, y: torch.minimum(F.relu(x), y),
    "where": lambda s, x, y: torch.where(x > 0, x, 0.5 * y),
    "square": lambda s, x, y: torch.square(torch.tanh(x)),
    "sqrt": lambda s, x, y: torch.sqrt(F.relu(x) + 0.25),
    "exp": lambda s, x, y: torch.exp(torch.tanh(x)),
    "log": lambda s, x, y: torch.log(1.5 + F.relu(x)),
    "mean": lambda s, x, y: x - x.mean((2, 3), keepdim=True),
    "amax": lambda s, x, y: x - torch.amax(x, dim=1, keepdim=True) / 2,
    "norm": lambda s, x, y: F.normalize(x, dim=1) * 3,
    "layer norm": lambda s, x, y: image(F.layer_norm(tokens(x), (CHANNELS,))),
    "group norm": lambda s, x, y: F.group_norm(x, 2),
    "max pool": lambda s, x, y: F.max_pool2d(x, 3, 1, 1),
    "avg pool": lambda s, x, y: F.avg_pool2d(x, 3, 1, 1),
    "nearest": lambda s, x, y: F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0),
    "bilinear": lambda s, x, y: F.interpolate(F.avg_pool2d(x, 2), size=(SIDE, SIDE), mode="bilinear"),
    "bicubic": lambda s, x, y: F.interpolate(F.relu(F.avg_pool2d(x, 2)), None, 2.0, "bicubic"),
    "pad": lambda s, x, y: F.pad(x, (1, 1, 0, 0))[..., 1:-1],
    "pad with a number": lambda s, x, y: F.pad(F.relu(x), (1, 0, 0, 0), value=-1.0)[..., :-1],
    "reshape": lambda s, x, y: x.reshape(-1, 16, 4, 8).reshape(-1, CHANNELS, SIDE, SIDE),
    "transpose": lambda s, x, y: x.transpose(2, 3),
    "permute": lambda s, x, y: x.permute(0, 3, 1, 2),
    "squeeze": lambda s, x, y: x.unsqueeze(1).squeeze(1),
    "expand": lambda s, x, y: x.mean(1, keepdim=True).expand_as(x),
    "split": lambda s, x, y: torch.cat(list(reversed(torch.split(x, 4, 1))), 1),
    "chunk": lambda s, x, y: torch.cat([x.chunk(2, 1)[0], y[:, 4:]], 1),
    "pixel shuffle": lambda s, x, y: F.pixel_shuffle(F.pixel_unshuffle(x, 2), 2),
    "channel shuffle": lambda s, x, y: F.channel_shuffle(x, 4),
    "roll": lambda s, x, y: torch.roll(x, (1, 2), (2, 3)),
    "flip": lambda s, x, y: torch.flip(x, (3,)),
    "stack": lambda s, x, y: torch.stack([x, y]).mean(0),
    "dropout": lambda s, x, y: F.dropout(x, 0.2, training=s.training),
    "noise": _noisy,
    "operator": lambda s, x, y: operator.add(x, 0.5),
}


def plain(run: Run) -> Callable[[], Op]:
    return lambda: Op(run)


OTHERS: dict[str, Callable[[], Op]] = {name: plain(run) for name, run in _PLAIN.items()}


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
