# Claims about values (never negative, always zero) against the values of the network itself.

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from compress import QuantSpec, quantize
from compress.graph.canonical import canonical_graph
from compress.quantization.placement.insert import read_fx
from compress.quantization.placement.view import always_zero, lowest_values, never_negative
from tests.networks import Net


def network(function, norm=None):
    zero = nn.Conv2d(3, 4, 1, bias=False)
    nn.init.zeros_(zero.weight)
    return Net(
        lambda net, x: net.last(function(net, net.conv(x), net.norm(net.zero(x)))),
        conv=nn.Conv2d(3, 4, 1),
        zero=zero,
        norm=norm or nn.Identity(),
        last=nn.Conv2d(4, 2, 1),
        clamp=nn.Hardtanh(0.0, 2.0),
        cubic=nn.Upsample(scale_factor=2, mode="bicubic"),
    )


def values(graph, x):
    found = {}

    class Watch(fx.Interpreter):
        def run_node(self, n):
            found[n.name] = result = super().run_node(n)
            return result

    with torch.no_grad():
        Watch(graph).run(x)
    return found


def norm(mean=0.0, affine=True):
    made = nn.BatchNorm2d(4, affine=affine).eval()
    nn.init.constant_(made.running_mean, mean)
    return made


POSITIVE = {  # a node, and whether its value is at least 0 for every image
    "relu": (lambda m, y, z: F.relu(y), True),
    "negated by an integer": (lambda m, y, z: F.relu(y) * -1, False),
    "moved below zero": (lambda m, y, z: F.relu(y) + (-3), False),
    "moved up": (lambda m, y, z: F.relu(y) + 0.5, True),
    "subtracted by alpha": (lambda m, y, z: torch.add(F.relu(y), F.relu(-y), alpha=-1), False),
    "divided by a negative": (lambda m, y, z: F.relu(y) / -2.0, False),
    "log_softmax": (lambda m, y, z: F.log_softmax(y, 1), False),
    "softmax": (lambda m, y, z: F.softmax(y, 1), True),
    "exp": (lambda m, y, z: y.exp(), True),
    "log": (lambda m, y, z: y.exp().log(), False),
    "square": (lambda m, y, z: y.square(), True),
    "an even power": (lambda m, y, z: y**2, True),
    "an odd power": (lambda m, y, z: torch.pow(y, 3), False),
    "sqrt": (lambda m, y, z: F.relu(y).sqrt(), True),
    "max and min": (
        lambda m, y, z: F.relu(y) + F.relu(y).amax(1, keepdim=True) + F.relu(y).amin(1, keepdim=True),
        True,
    ),
    "maximum": (lambda m, y, z: torch.maximum(F.relu(y), y), False),  # true, and not known
    "silu of relu": (lambda m, y, z: F.silu(F.relu(y)), True),
    "silu": (lambda m, y, z: F.silu(y), False),
    "shuffled": (lambda m, y, z: F.channel_shuffle(F.relu(y), 2), True),
    "bicubic": (lambda m, y, z: F.interpolate(F.relu(y), scale_factor=2, mode="bicubic"), False),
    "bilinear": (lambda m, y, z: F.interpolate(F.relu(y), scale_factor=2, mode="bilinear"), True),
    "bicubic by position": (lambda m, y, z: F.interpolate(F.relu(y), None, 2.0, "bicubic"), False),
    "clamped": (lambda m, y, z: y.clamp(0.1, 2), True),
    "clamped below zero": (lambda m, y, z: y.clamp(-0.1, 2), False),
    "clamped at a positional bound": (lambda m, y, z: torch.clamp(y, 0.5), True),
    "clamped from above alone": (lambda m, y, z: torch.clamp(y, max=0.5), False),
    "clamped at an integer": (lambda m, y, z: y.clamp(min=0), True),
    "hardtanh above zero": (lambda m, y, z: F.hardtanh(y, min_val=0.0, max_val=2.0), True),
    "hardtanh": (lambda m, y, z: F.hardtanh(y), False),
    "a module that clamps": (lambda m, y, z: m.clamp(y), True),
    "moved by nothing": (lambda m, y, z: F.relu(y) + 0, True),
    "a module that resizes": (lambda m, y, z: m.cubic(F.relu(y)), False),
    "a part": (lambda m, y, z: F.relu(y).repeat(1, 2, 1, 1).chunk(2, 1)[1], True),
    "parts in turn": (lambda m, y, z: torch.cat(F.relu(y).chunk(2, 1)[::-1], 1), True),
    "a part of anything": (lambda m, y, z: y.repeat(1, 2, 1, 1).chunk(2, 1)[1], False),
    "a border of zeros": (lambda m, y, z: F.pad(F.relu(y), (1, 1)).flip(2), True),
    "a border below zero": (lambda m, y, z: F.pad(F.relu(y), (1, 1), value=-1.0), False),
    "a mirrored border": (lambda m, y, z: F.pad(F.relu(y), (1, 1, 0, 0), mode="reflect"), True),
}


def computed(function, *, images):
    # The graph of a network as placement reads it, the values of its nodes, and the node that the function returns.
    torch.manual_seed(0)
    graph = canonical_graph(network(function), torch.randn(2, 3, 6, 6))
    seen = values(graph, 3 * torch.randn(images, 3, 6, 6))
    (last,) = [node for node in graph.graph.nodes if node.target == "last"]
    return read_fx(graph), seen, last.args[0].name


@pytest.mark.parametrize("name", POSITIVE)
def test_signs(name):
    function, expected = POSITIVE[name]
    view, seen, result = computed(function, images=8)
    known = never_negative(view)
    assert all((seen[node.name] >= 0).all() for node in known if node.shape is not None)
    assert (result in {node.name for node in known}) == expected


LOWEST = {  # a node, and the lowest value that is known of it; None: none is
    "gelu": (lambda m, y, z: F.gelu(y), -0.1701),
    "gelu by tanh": (lambda m, y, z: F.gelu(y, approximate="tanh"), -0.1701),
    "silu": (lambda m, y, z: F.silu(y), -0.2785),
    "hardswish": (lambda m, y, z: F.hardswish(y), -0.375),
    "mish": (lambda m, y, z: F.mish(y), -0.3089),
    "quick gelu": (lambda m, y, z: y * torch.sigmoid(1.702 * y), -0.1637),
    "a part": (lambda m, y, z: F.silu(y).repeat(1, 2, 1, 1).chunk(2, 1)[0], -0.2785),
    "pooled": (lambda m, y, z: F.max_pool2d(F.avg_pool2d(F.silu(y), 2), 2), -0.2785),
    "a mean": (lambda m, y, z: F.silu(y).mean((2, 3), keepdim=True), -0.2785),
    "joined": (lambda m, y, z: torch.cat([F.silu(y), F.relu(y), F.hardswish(y)], 2), -0.375),
    "joined with what may be anything": (lambda m, y, z: torch.cat([F.silu(y), y], 2), None),
    "a sum": (lambda m, y, z: F.silu(y) + F.silu(y), None),
    "twice": (lambda m, y, z: F.silu(y) * 2, None),
    "negated": (lambda m, y, z: -F.silu(y), None),
    "bicubic": (lambda m, y, z: F.interpolate(F.silu(y), scale_factor=2, mode="bicubic"), None),
    "silu of relu": (lambda m, y, z: F.silu(F.relu(y)), None),  # never negative
    "elu": (lambda m, y, z: F.elu(y), None),
}


@pytest.mark.parametrize("name", LOWEST)
def test_lowest_values(name):
    # Nothing is lower than what is said; single activations reach it.
    function, expected = LOWEST[name]
    view, seen, result = computed(function, images=64)
    known = lowest_values(view, never_negative(view))
    assert all((seen[node.name] >= least).all() for node, least in known.items() if node.shape is not None)
    assert {node.name: least for node, least in known.items()}.get(result) == expected
    if expected is not None and "mean" not in name and "pooled" not in name:
        assert float(seen[result].min()) < 0.99 * expected


def test_a_negated_relu_keeps_its_values_when_it_is_quantized_for_a_cpu():
    # An unsigned quantizer would make all of it zero.
    model, x = network(lambda m, y, z: F.relu(y) * -1).eval(), torch.randn(8, 3, 6, 6)
    error = quantize(model, x, [x], spec=QuantSpec(target="openvino"))(x) - model(x)
    assert error.abs().max() < 0.05 * model(x).abs().max()


ZERO = {  # a node, and whether its value is zero for every image
    "branch": (lambda m, y, z: z, True),
    "product": (lambda m, y, z: y * z, True),
    "sum of zeros": (lambda m, y, z: z + F.relu(z), True),
    "sum": (lambda m, y, z: z + y, False),
    "a number added": (lambda m, y, z: z + 1, False),
    "elu": (lambda m, y, z: F.elu(z), True),
    "sigmoid": (lambda m, y, z: z.sigmoid(), False),
    "softplus": (lambda m, y, z: F.softplus(z), False),
    "shuffled": (lambda m, y, z: F.channel_shuffle(z, 2), True),
    "unshuffled": (lambda m, y, z: F.pixel_shuffle(F.pixel_unshuffle(z, 2), 2), True),
    "negated": (lambda m, y, z: -z, True),
    "exp": (lambda m, y, z: z.exp(), False),
    "added to a product": (lambda m, y, z: torch.baddbmm(z[:, 0], y[:, 0], y[:, 1])[:, None].repeat(1, 4, 1, 1), False),
    "factor of a product": (lambda m, y, z: torch.bmm(z[:, 0], y[:, 1])[:, None].repeat(1, 4, 1, 1), True),
}
NORMS = {
    "without affine parameters": (lambda m, y, z: F.relu(z) + F.relu(-z), True, norm(affine=False)),
    "centred": (lambda m, y, z: F.relu(z) + F.relu(-z), True, norm()),
    "with a mean": (lambda m, y, z: F.relu(z) + F.relu(-z), False, norm(mean=0.5)),
    "of what is no zero": (lambda m, y, z: m.norm(y), False, norm(affine=False)),
}


@pytest.mark.parametrize("name", [*ZERO, *NORMS])
def test_zeros(name):
    function, expected, *norms = (ZERO | NORMS)[name]
    graph = canonical_graph(network(function, *norms), torch.randn(2, 3, 6, 6), fold=False)
    known = always_zero(read_fx(graph))
    seen = values(graph, 3 * torch.randn(8, 3, 6, 6))
    assert not any(seen[node.name].any() for node in known if torch.is_tensor(seen[node.name]))
    (last,) = [node for node in graph.graph.nodes if node.target == "last"]
    assert (last.args[0].name in {node.name for node in known}) == expected
