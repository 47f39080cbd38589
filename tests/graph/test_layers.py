import math

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from compress import trace
from compress.graph.layers import layers, total_macs
from compress.roofline_model.counting import workload

NAMES = ("resnet18", "mobilenet_v2", "shufflenet_v2_x0_5", "squeezenet1_1", "efficientnet_b0", "vit_b_32")


@pytest.mark.parametrize("name", NAMES)
def test_macs_agree_with_torchs_counter(name, monkeypatch):
    model, x = torchvision.models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)  # torch counts nothing inside it
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    macs, unknown = total_macs(layers(trace(model, x)))
    assert unknown == ()
    assert 2 * macs == counter.get_total_flops()


def test_hand_count():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))
    conv, relu, up = layers(trace(model, torch.randn(2, 3, 8, 8)))
    assert conv.macs == 2 * 8 * 4 * 4 * 3 * 9
    assert relu.macs == 0
    assert up.macs == 2 * 8 * 4 * 4 * 4 * 4
    assert (conv.weight_elements, conv.bias_elements, conv.kernel) == (216, 8, (3, 3))
    assert (conv.input_shapes, conv.output_shape) == (((2, 3, 8, 8),), (2, 8, 4, 4))


def test_unknown_is_not_zero():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.fft.fft2(x).real

    macs, unknown = total_macs(layers(trace(Odd(), torch.randn(1, 3, 8, 8))))
    assert macs == 0
    assert [name for name in unknown if "fft" in name]


def test_numbers_computed_from_sizes_are_no_operations():
    """timm's MobileViT rounds sizes up with math.ceil, which stays in the graph of a traced network."""

    class Rounded(nn.Module):
        def forward(self, x):
            height = math.ceil(x.shape[2] / 2) * 2
            return nn.functional.interpolate(x, size=(height, height))

    graph = trace(Rounded(), torch.randn(1, 3, 7, 7))
    assert graph.graph.find_nodes(op="call_function", target=math.ceil)
    assert [layer.kind for layer in layers(graph)] == ["resize"] and total_macs(layers(graph)) == (0, ())
    assert workload(Rounded(), torch.randn(1, 3, 7, 7)).operations[-1].activation_elements == 3 * (49 + 64)
