"""Networks, and gradients of the fused graph and of the plain path."""

import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress.quantization.quantizer import quantizers
from tests.networks import Net, network
from tests.training.toy import CLASSES

TARGETS = ("tensorrt", "openvino", "onnxruntime")


def mixed():
    # ReLU6, a depthwise convolution, an in-place add, a tensor with two readers, a linear layer on (N, L, C).
    def run(net, x):
        x = F.relu6(net.depthwise(F.relu6(net.expand(x))))
        y = net.project(x)
        z = net.again(y)
        z += y
        z = net.tokens(torch.relu(z).flatten(2).transpose(1, 2))
        return net.head(net.gelu(z).mean(1))

    torch.manual_seed(1)
    net = Net(
        run,
        expand=nn.Conv2d(3, 8, 1),
        depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
        project=nn.Conv2d(8, 8, 1, bias=False),
        again=nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        tokens=nn.Linear(8, 16),
        gelu=nn.GELU(),
        head=nn.Linear(16, CLASSES),
    )
    return net.eval()


def convolutions(count, inputs=3):
    torch.manual_seed(1)
    pairs = [(nn.Conv2d(8 if i else inputs, 8, 3, padding=1), nn.ReLU()) for i in range(count)]
    return [module for pair in pairs for module in pair] + [nn.Conv2d(8, 8, 1)]


def quantized(make=network, target="tensorrt", clip=0.6, size=12, channels=3, count=4, **spec):
    # A calibrated network whose ranges are too small, so that values saturate.
    torch.manual_seed(2)
    x = 2 * torch.randn(count, channels, size, size)
    qmodel = compress.quantize(make(), x, [x], spec=compress.QuantSpec(target=target, **spec))
    for _, quantizer in quantizers(qmodel):
        quantizer.set_amax(quantizer.amax * clip)
    return qmodel, x


def gradients(run, qmodel, x, **autocast):
    x = x.clone().requires_grad_()
    qmodel.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
        result = run(x)
    weights = torch.linspace(-1, 2, result.shape[-1], device=result.device)
    (result.float() if autocast else result).mul(weights).square().sum().backward()
    return result.detach(), x.grad, {name: p.grad.clone() for name, p in qmodel.named_parameters()}


def compiled_gradients(qmodel, x, **options):
    # Of one graph without breaks.
    torch.compiler.reset()
    fused = compress.fuse_for_training(qmodel, **options)
    return gradients(torch.compile(fused, backend="aot_eager", fullgraph=True), qmodel, x)


def assert_same(one, other, rtol=0.0, atol=0.0):
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    assert any(grad.abs().max() > 1e-3 for grad in one[2].values())


def fused_as_plain(qmodel, x, rtol=0.0, atol=0.0, **options):
    # The fused graph, after a look that its results and gradients are those of the plain path.
    fused = compress.fuse_for_training(qmodel, **options)
    assert_same(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x), rtol, atol)
    return fused


def saved_bytes(run, x):
    kept = {}

    def note(tensor):
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run(x)
    assert result.requires_grad
    return sum(size for size, _ in kept.values())
