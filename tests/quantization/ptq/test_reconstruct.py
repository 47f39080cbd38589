"""Blocks of graphs, and reconstruction beside calibration alone on images that it did not see."""

import copy

import pytest
import torch
from torch import nn

import compress
from compress import ActivationSpec, AdaRoundSpec, QuantSpec, ReconstructSpec, WeightSpec, insert_quantizers
from compress.errors import QuantizationError
from compress.quantization.modules import _QuantWeight
from compress.quantization.ptq.reconstruct import block_module, blocks, images_of_a_step
from compress.quantization.quantizer import quantizers
from tests.networks import tiny

GENERATOR = torch.Generator().manual_seed(0)
MIXING = torch.randn(6, 3 * 16 * 16, generator=GENERATOR)
X, UNSEEN = ((torch.randn(64, 6, generator=GENERATOR) @ MIXING).view(-1, 3, 16, 16) for _ in range(2))
"""Images of six causes, so that errors of weights add up, and rounding to nearest is far from best."""
SHORT = ReconstructSpec(steps=100, images=64, lr=0.05)


def model():
    torch.manual_seed(0)
    made = tiny()
    made.train()(X)  # statistics of the pictures
    return made.eval()


def spec(target="any", bits=4, activation_bits=None, **more):
    return QuantSpec(
        target=target,
        weights=WeightSpec(num_bits=bits, calibrator="mse"),
        activations=ActivationSpec(num_bits=activation_bits or bits),
        first_last_bits=8,
        **more,
    )


@pytest.mark.parametrize("target", ["any", "openvino", "tensorrt"])
def test_blocks_are_the_network_one_after_another(target):
    qmodel = compress.quantize(model(), X[:2], [X], spec=spec(target))
    found = blocks(qmodel, most=3)
    layers = [name for name, m in qmodel.named_modules() if isinstance(m, _QuantWeight)]
    assert sorted(path for block in found for path in block.layers) == sorted(layers)
    residual = next(block for block in found if "block1.conv1" in block.layers)
    assert {"block1.conv1", "block1.conv2"} == set(residual.layers)
    x = X[:4]
    with torch.no_grad():
        for block in found:
            x = block_module(qmodel, block)(x)
        torch.testing.assert_close(x, qmodel(X[:4]))


def test_layers_in_a_row_are_joined_up_to_a_number():
    chain = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(5)))
    qmodel = compress.quantize(chain.eval(), X[:2], [X], spec=spec(bits=8))
    assert [len(block.layers) for block in blocks(qmodel, most=2)] == [2, 2, 1]
    assert [len(block.layers) for block in blocks(qmodel, most=9)] == [5]


def test_better_than_calibration_on_images_that_it_did_not_see():
    network, noise = model(), {}
    ways = {"plain": {}, "blocks": {"reconstruct": SHORT}}
    for name, more in ways.items():
        qmodel = compress.quantize(network, X[:2], [X], spec=spec(bits=2, activation_bits=8, **more))
        with torch.no_grad():
            noise[name] = (network(UNSEEN) - qmodel(UNSEEN)).square().mean().item()
    assert noise["blocks"] < 0.7 * noise["plain"]
    rows = qmodel.report.reconstruction
    assert all(row.error_after <= row.error_before for row in rows) and any(row.steps for row in rows)
    for (
        name,
        layer,
    ) in qmodel.named_modules():  # weights lie on their grid: saved states and exports hold them as they are
        if isinstance(layer, _QuantWeight):
            torch.testing.assert_close(layer.quantized_weight, layer.weight, msg=name)


def test_the_saved_state_loads_into_a_fresh_graph_of_the_same_spec():
    network, chosen = model(), spec(reconstruct=ReconstructSpec(steps=5, images=32))
    qmodel = compress.quantize(network, X[:2], [X], spec=chosen)
    fresh = insert_quantizers(network, X[:2], chosen)
    fresh.load_state_dict(copy.deepcopy(qmodel.state_dict()))
    with torch.no_grad():
        assert torch.equal(fresh(UNSEEN), qmodel(UNSEEN))
    assert all(q.enabled for _, q in quantizers(qmodel))


def test_refusals():
    with pytest.raises(QuantizationError, match="both learn how to round"):
        compress.quantize(model(), X[:2], [X], spec=spec(reconstruct=SHORT, adaround=AdaRoundSpec()))
    with pytest.raises(QuantizationError, match="reconstruct works on weights that hold their BatchNorm"):
        compress.quantize(model(), X[:2], [X], spec=spec(reconstruct=SHORT, batchnorm="keep"))


class Sized(nn.Module):
    """Reads the number of images at its beginning, for the flattening at its end."""

    def __init__(self, way):
        super().__init__()
        self.way, self.head = way, nn.Linear(8, 4)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        images = {"size": lambda: x.size(0), "shape": lambda: x.shape[0], "whole": lambda: x.size()[0]}[self.way]()
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)).view(images, -1))


@pytest.mark.parametrize("way", ["size", "shape", "whole"])
def test_the_number_of_images_keeps_no_block_together(way):
    """EfficientNet-Lite0 was one block, and its reconstruction took hours."""
    torch.manual_seed(0)
    network, x = Sized(way).eval(), torch.randn(6, 3, 8, 8)
    qmodel = compress.quantize(network, x[:2], [x], spec=spec())
    found = blocks(qmodel, most=1)
    assert len(found) == 3
    with torch.no_grad():
        y = x[:5]
        for block in found:
            y = block_module(qmodel, block)(y)
        torch.testing.assert_close(y, qmodel(x[:5]))


@pytest.mark.parametrize(
    ("x", "y", "images"),
    [((64, 16, 112, 112), (64, 24, 56, 56), 4), ((64, 24, 56, 56), (64, 40, 28, 28), 10),
     ((64, 64, 14, 14), (64, 64, 14, 14), 32), ((64, 197, 384), (64, 197, 384), 32), ((3, 8, 4, 4), (3, 8, 4, 4), 3)],
)  # fmt: skip
def test_blocks_of_large_images_take_few_of_them(x, y, images):
    """32,768 positions: 12,544 of 112 x 112 leave 2, and 4 are the fewest; 3,136 leave 10; else the batch size."""
    assert images_of_a_step(torch.empty(x), torch.empty(y), ReconstructSpec()) == images
