"""Every layer that the audit calls INT8 is INT8 in the engine, in networks of which engines compute a part in float."""

import pytest
import torch
from torch import nn

from analysis.engine_check.run import ask


def conv(inputs=16, outputs=16, kernel=3, **keys):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **keys)


def around(layer, rank=2):
    first, last = (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, 16, 3, padding=1),
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](16, 8, 3),
    )
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[rank - 1](1)
    return nn.Sequential(first, nn.ReLU(), layer, nn.ReLU(), last, pool)


NETWORKS = {
    "BatchNorm after ReLU": lambda: nn.Sequential(
        conv(3), nn.ReLU(), nn.BatchNorm2d(16), conv(), nn.ReLU(), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1)
    ),
    "transposed": lambda: around(nn.ConvTranspose2d(16, 16, 2, 2)),
    "transposed, two groups": lambda: around(nn.ConvTranspose2d(16, 16, 2, 2, groups=2)),
    "transposed, depthwise": lambda: around(nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=16)),
    "one dimension": lambda: around(nn.ConvTranspose1d(16, 16, 2, 2), 1),
    "three dimensions": lambda: around(nn.ConvTranspose3d(16, 16, 2, 2), 3),
}


@pytest.mark.parametrize("target", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_engine_computes_what_the_audit_says(name, target, tmp_path):
    torch.manual_seed(0)
    network = NETWORKS[name]().eval()
    x = torch.randn(2, 3, *(12,) * {"one dimension": 1, "three dimensions": 3}.get(name, 2))
    answer = ask(network, x, target, tmp_path)
    assert answer.int8 and not answer.lost
