"""Max pools that end a fused chain: the plain path's function and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress.quantization.quantizer import quantizers
from tests.qat_fusion.common import assert_same, gradients, quantized
from tests.training.toy import CLASSES


class Pools(nn.Module):
    """Pools that end a chain, as module and as function, and pools that cannot."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(5)])
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.pool(torch.relu(self.layers[0](x)))
        x = F.max_pool2d(F.relu6(self.layers[1](x)), 2, ceil_mode=True)
        x = F.max_pool2d(self.layers[2](x), 3, 1, dilation=2, padding=1)
        x = torch.relu(self.layers[3](x))
        return self.head(
            torch.relu(self.layers[4](F.max_pool2d(x, 2, ceil_mode=True) + x[:, :, ::2, ::2])).mean((2, 3))
        )


def pools():
    torch.manual_seed(1)
    return Pools().eval()


def test_a_pool_ends_a_chain_where_it_alone_reads_it():
    qmodel, x = quantized(pools, size=33)
    fused = compress.fuse_for_training(qmodel)
    ends = [chain.nodes[-1] for chain in fused.report.chains if chain.nodes]
    assert ends == [
        "pool",
        "max_pool2d",
        "layers_2",
        "add",
        "relu_2",
    ]  # the third pool has gaps, the fourth no quantizer
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-5, atol=1e-6)
    quantizer = next(q for name, q in quantizers(qmodel) if "relu" in name)
    quantizer.enabled = False
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_pools_and_convolutions_do_the_same_whichever_gpu_is_current(device, compiled):
    if torch.device(device).index >= torch.cuda.device_count():
        pytest.skip("one GPU")
    qmodel, x = quantized(pools, size=33)
    qmodel = qmodel.to(device).to(memory_format=torch.channels_last)
    x = x.to(device).contiguous(memory_format=torch.channels_last)
    fused = compress.fuse_for_training(qmodel)
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert_same(gradients(run, qmodel, x), gradients(qmodel, qmodel, x), rtol=1e-3, atol=1e-3)
