import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from torch import nn
from torchvision.ops import StochasticDepth

import compress
from compress.qat_fusion.regions import Region, compile_regions, few_guards
from compress.quantization.quantizer import quantizers
from tests.families import FAMILIES
from tests.further import further
from tests.networks import Net
from tests.qat_fusion.common import assert_same, gradients, mixed, quantized
from tests.qat_fusion.test_attention import quantized as quantized_attention
from tests.qat_fusion.test_attention import vit
from tests.training.toy import CLASSES


def deep(blocks=4):
    torch.manual_seed(3)
    stem = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU()]
    return nn.Sequential(
        *stem,
        *(
            Net(
                lambda net, x: torch.relu(x + net.two(torch.relu(net.one(x)))),
                one=nn.Conv2d(8, 8, 3, padding=1),
                two=nn.Conv2d(8, 8, 3, padding=1),
            )
            for _ in range(blocks)
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    ).eval()


def counting(functions):
    def compiler(run):
        functions.append(run)
        return run

    return compiler


def regions(module):
    return [child for child in module.modules() if isinstance(child, Region)]


def test_blocks_that_are_alike_share_a_function():
    qmodel, x = quantized(deep)
    fused = compress.fuse_for_training(qmodel)
    functions = []
    parts = compile_regions(fused, counting(functions))
    alike = [region.run for region in regions(parts)]
    assert max(alike.count(run) for run in functions) >= 3
    assert len(functions) <= 4 < len(alike)
    assert_same(gradients(parts, qmodel, x), gradients(fused, qmodel, x), rtol=1e-5, atol=1e-6)


def dropping():
    torch.manual_seed(3)
    blocks = [
        Net(
            lambda net, x: torch.relu(x + net.depth(net.block(x))),
            block=nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
            depth=StochasticDepth(rate, "row"),
        )
        for rate in (0.1, 0.2, 0.3, 0.4)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    ).eval()


def test_blocks_whose_rate_of_stochastic_depth_differs_share_a_function():
    qmodel, x = quantized(dropping)
    fused = compress.fuse_for_training(qmodel).train()
    functions = []
    parts = compile_regions(fused, counting(functions)).train()
    assert len(functions) < len(regions(parts))
    found = []
    for run in (fused, parts):
        torch.manual_seed(5)
        found.append(gradients(run, qmodel, x))
    assert_same(*found, rtol=1e-5, atol=1e-6)


def test_blocks_of_other_settings_share_nothing():
    bits = compress.Rule(match="3.*", weights=compress.WeightSpec(num_bits=4))
    qmodel, x = quantized(deep, rules=(bits,))
    for graph in (qmodel, compress.fuse_for_training(qmodel)):
        parts = compile_regions(graph, counting([]))
        kinds = {}
        for region in regions(parts):
            kinds.setdefault(region.run, set()).add(
                tuple(repr(m.format) for m in region.modules() if isinstance(m, compress.Quantizer))
            )
        assert all(len(formats) == 1 for formats in kinds.values())
        assert_same(gradients(parts, qmodel, x), gradients(graph, qmodel, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [mixed, None])
def test_any_graph_computes_the_same(make):
    qmodel, x = quantized_attention(vit()) if make is None else quantized(make)
    fused = compress.fuse_for_training(qmodel)
    parts = compile_regions(fused, counting([]))
    assert_same(gradients(parts, qmodel, x), gradients(fused, qmodel, x), rtol=1e-5, atol=1e-6)
    assert {id(p) for p in parts.parameters()} <= {id(p) for p in qmodel.parameters()}


def test_the_compiler_meets_each_kind_once():
    qmodel, x = quantized(deep)
    expected = gradients(qmodel, qmodel, x)
    functions, graphs = [], []

    def backend(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module.forward

    def compiler(run):
        functions.append(run)
        return torch.compile(
            run, backend=backend, fullgraph=True, dynamic=False, options={"guard_filter_fn": few_guards}
        )

    torch.compiler.reset()
    parts = compile_regions(compress.fuse_for_training(qmodel), compiler)
    assert_same(gradients(parts, qmodel, x), expected, rtol=1e-5, atol=1e-6)
    first = len(graphs)
    gradients(parts, qmodel, x)
    assert len(graphs) == first == len(functions) < len(regions(parts))

    path, quantizer = next((name, one) for name, one in quantizers(qmodel) if name.startswith("3.two"))
    quantizer.enabled = False  # of one block; the others go on as they were
    changed = gradients(parts, qmodel, x)
    assert_same(changed, gradients(qmodel, qmodel, x), rtol=1e-5, atol=1e-6)
    assert len(graphs) == first + 1
    assert not torch.allclose(changed[0], expected[0]), path


# Training through the fused graph, eager or compiled, is training on the plain one, for every measured family.

ALL = {**FAMILIES, "MobileNetV2": lambda: zoo.MobileNetV2(4, 0.25, [[1, 8, 1, 1], [4, 8, 2, 2]], dropout=0.0)}

# Compiled too: other tests compile convolutions, BatchNorm and ConvNeXt's kernels.
COMPILED = ("ViT", "Swin", "MobileNetV3")


@pytest.mark.parametrize("family", further(ALL, set(ALL) - {"Swin", "MobileNetV3"}))
def test_losses_ranges_and_weights_are_those_of_the_plain_path(family):
    # Scales of exported activations are the ranges, those of weights follow from the weights.
    #
    # Trained in float64, where no value is so near to a tie that a sum in another order rounds to the other side.
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 4
    x += y[:, None, None, None] * torch.linspace(-0.5, 0.5, 16)
    model = ALL[family]()
    for parameter in model.parameters():
        if not bool(parameter.any()):
            torch.nn.init.normal_(parameter, std=0.02)  # a head of zeros has no range
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # its statistics become those of one batch
    with torch.no_grad():
        model.train()(x)
    start = compress.quantize(model.eval(), x[:2], [x]).double()
    x = x.double()
    runs = []
    for fused in (False, True):
        qmodel = copy.deepcopy(start).train()
        run, losses = compress.fuse_for_training(qmodel) if fused else qmodel, []
        optimizer = torch.optim.Adam(qmodel.parameters(), lr=0.01, eps=1e-3)
        for _ in range(8):
            loss = F.cross_entropy(run(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, dict(qmodel.named_parameters()), dict(qmodel.named_buffers())))
    (expected, weights, ranges), (losses, *ours) = runs
    learned = expected[0] - expected[-1]
    assert learned > 5e-3
    assert losses == pytest.approx(expected, rel=0, abs=1e-6 * learned)
    torch.testing.assert_close(ours[0], weights, rtol=0, atol=1e-06)
    torch.testing.assert_close(ours[1], ranges, rtol=0, atol=0)
    if family not in COMPILED:
        return
    torch.compiler.reset()
    F.cross_entropy(run(x), y).backward()
    eager = {name: p.grad.clone() for name, p in qmodel.named_parameters()}
    optimizer.zero_grad()
    F.cross_entropy(torch.compile(run, backend="aot_eager", fullgraph=True)(x), y).backward()
    for name, parameter in qmodel.named_parameters():
        torch.testing.assert_close(parameter.grad, eager[name], msg=f"{name}, in one compiled graph")
