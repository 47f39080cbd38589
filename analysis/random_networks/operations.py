"""Operations of random networks: layers in all their forms, and functions without weights.

Each computes with two values of shape (N, 8, 8, 8) and returns another; kinds that are rarer are in `rarer`.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
