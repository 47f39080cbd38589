"""Quantizers live where their model does: ranges a channel on another device fail in the first forward pass."""

import pytest
import torch
from torch import nn

import compress
from compress.graph.canonical import canonical_graph
from compress.quantization.insert import apply_placement
from compress.quantization.placement import place

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_quantizers_are_inserted_on_the_device_of_the_model():
    """`meta` stands for any device that is not the CPU; nothing can be computed there, so placement is done before."""
    graph = canonical_graph(network(), torch.zeros(1, 3, 8, 8))
    placement = place(graph, compress.QuantSpec())
    apply_placement(graph.to("meta"), placement)
    assert len(list(graph.buffers())) == len(placement.weights) + len(placement.activations)
    assert {buffer.device.type for buffer in graph.buffers()} == {"meta"}


@gpu
@pytest.mark.parametrize("batches_on", ["cpu", "cuda"])
def test_a_model_on_a_gpu_is_quantized_there_and_agrees_with_the_cpu(batches_on):
    x = torch.randn(16, 3, 16, 16)
    spec = compress.QuantSpec(adaround=compress.AdaRoundSpec(steps=5), bias_correction="empirical")
    qmodel = compress.quantize(network().cuda(), x[:2].cuda(), [x.to(batches_on)], spec=spec)
    assert {t.device.type for t in (*qmodel.buffers(), *qmodel.parameters())} == {"cuda"}
    plain = compress.quantize(network(), x[:2], [x])
    on_gpu = compress.quantize(network().cuda(), x[:2].cuda(), [x.to(batches_on)])
    for name, amax in plain.named_buffers():
        torch.testing.assert_close(on_gpu.get_buffer(name).cpu(), amax, rtol=1e-3, atol=0)
