"""Quantizers live where their model does: ranges a channel on another device fail in the first forward pass."""

import pytest
import torch
from torch import nn
from torchvision.models.swin_transformer import SwinTransformerBlock

import compress
from compress import trace
from compress.graph.attention import open_attention
from compress.graph.canonical import canonical_graph
from compress.quantization.placement.insert import apply_placement
from compress.quantization.placement.place import place
from compress.quantization.placement.read_fx import read_fx

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_quantizers_are_inserted_on_the_device_of_the_model():
    """`meta` represents any device that is not the CPU; nothing can be computed there, so placement is done before."""
    graph = canonical_graph(network(), torch.zeros(1, 3, 8, 8))
    placement = place(read_fx(graph), compress.QuantSpec())
    apply_placement(graph.to("meta"), placement)
    assert len(list(graph.buffers())) == len(placement.weights) + len(placement.activations)
    assert {buffer.device.type for buffer in graph.buffers()} == {"meta"}


def windows():
    """Attention in shifted windows, whose mask is made while the graph is."""
    torch.manual_seed(0)
    return SwinTransformerBlock(16, 2, [4, 4], [2, 2]).eval()


def test_masks_of_shifted_windows_are_made_on_the_device_of_the_model():
    graph = trace(windows(), torch.zeros(1, 8, 8, 16)).to("meta")
    assert open_attention(graph)
    assert {buffer.device.type for buffer in graph.buffers()} == {"meta"}


@gpu
def test_attention_in_windows_is_quantized_on_a_gpu():
    x = torch.randn(2, 8, 8, 16, device="cuda")
    qmodel = compress.quantize(windows().cuda(), x, [x])
    assert qmodel(x).isfinite().all()


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
