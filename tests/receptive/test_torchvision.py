"""Every torchvision family: the table against the support of autograd gradients, and against published sizes."""

import pytest
import torch

from compress import receptive_field
from tests.receptive.support import supports, torchvision_model, without_chance

PUBLISHED = {
    "alexnet": (195, "features"),
    "vgg16": (212, "features"),
    "resnet18": (435, "layer4"),
    "resnet50": (427, "layer4"),
    "resnet101": (971, "layer4"),
    "mobilenet_v2": (491, "features"),
}

# (model, module whose units are checked, image size): odd and even sizes, not all square
FAMILIES = [
    ("alexnet", "features", (97, 80)),
    ("vgg11_bn", "features", (65, 48)),
    ("resnet34", "layer3", (75, 64)),
    ("resnet50", "layer3", (64, 41)),
    ("resnext50_32x4d", "layer3", (40, 57)),
    ("densenet121", "features.transition3", (63, 48)),
    ("mobilenet_v2", "features", (70, 64)),
    ("mobilenet_v3_large", "features", (64, 50)),
    ("efficientnet_b0", "features", (48, 65)),
    ("inception_v3", "Mixed_7a", (96, 83)),
    ("googlenet", "inception5b", (70, 64)),
    ("convnext_tiny", "features.5", (70, 64)),
    ("regnet_y_400mf", "trunk_output", (40, 64)),
    ("mnasnet0_5", "layers", (64, 47)),
    ("shufflenet_v2_x0_5", "conv5", (64, 71)),
    ("squeezenet1_1", "features", (64, 71)),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    size, path = PUBLISHED[name]
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, 64, 64)).row(path)
    assert row.size == (size, size)
    assert row.status == "exact"
    assert row.effective_stride == (32, 32)


@pytest.mark.parametrize(("name", "path", "size"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_intervals_equal_the_support_of_the_gradient(name, path, size):
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, *size)).row(path)
    height, width = row.units
    units = list(dict.fromkeys([(0, 0), (height // 2, width // 2), (height - 1, width - 1)]))
    model = without_chance(torchvision_model(name))
    expected = supports(model, torch.rand(1, 3, *size, dtype=torch.float64), path, units)
    assert [row.interval(unit) for unit in units] == expected


@pytest.mark.parametrize(("name", "path", "length"), [("resnet18", "layer4", 480), ("mobilenet_v2", "features", 512)])
def test_unclipped_size_equals_the_support_in_a_long_image(name, path, length):
    """A strip longer than the field: the size without borders is reached, not only clipped intervals."""
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, length, 32)).row(path)
    unit = (row.units[0] // 2, 0)
    model = without_chance(torchvision_model(name))
    ((rows, _),) = supports(model, torch.rand(1, 3, length, 32, dtype=torch.float64), path, [unit])
    assert rows[1] - rows[0] + 1 == row.size[0]
    assert rows[0] == unit[0] * row.effective_stride[0] - row.effective_padding[0]
