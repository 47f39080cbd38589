# Eight architectures and every shipped recipe, exported, built with TensorRT-RTX for GPUs of two generations.
#
# Networks are narrow and images small: what is placed where, and what the builder makes of it, does not depend on
# width. The oracle is the ONNX file read with onnx, and the builder's own list of layers read with two regular
# expressions.

import dataclasses
import re

import onnx
import pytest
import torch
from torch import nn
from torchvision import models as tv
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.inception import BasicConv2d, InceptionA, InceptionC

import compress
from compress.audit.engine import audit_listing, unmet_by_audit
from compress.audit.files import parse_build_log
from compress.audit.onnx import audit_sparsity
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import EngineError
from compress.recipe.tree import recipe_names
from compress.sparsity.parametrization import nm_mask
from tests.further import further
from tests.networks import TinyResNet

SMS = (80, 120)  # test_build.py builds for every GPU
SIDE = 32
WEIGHTED = {"Conv", "Gemm", "MatMul"}
PASSING = {"Reshape", "Transpose", "Flatten", "MaxPool", "Concat", "Slice", "Gather"}


def resnet():
    model = tv.ResNet(tv.resnet.Bottleneck, [1, 1, 1, 1], width_per_group=16)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(512, 10)
    return model


def vgg():
    features = tv.vgg.make_layers([16, "M", 32, "M", 32, "M"], batch_norm=True)
    classifier = (nn.Linear(32 * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *classifier)


def mobilenet():
    rows = [[1, 16, 1, 1], [6, 24, 2, 2]]
    return tv.MobileNetV2(num_classes=10, width_mult=0.5, inverted_residual_setting=rows)


def densenet():
    return tv.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=10)


def inception():
    stem = BasicConv2d(3, 16, kernel_size=3, stride=2)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 10))
    return nn.Sequential(stem, InceptionA(16, 16), InceptionC(240, 16), *head)


def efficientnet():
    return EfficientNet([MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(6, 5, 2, 16, 40, 1)], 0.1, num_classes=10)


def convnext():
    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=10)


def vit():
    return tv.VisionTransformer(SIDE, 8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=10)


NETWORKS = (resnet, vgg, mobilenet, densenet, inception, efficientnet, convnext, vit)
# For the model of a recipe: the same family, narrow, with the layer names that its rules match.
STAND_INS = {
    "resnet18": TinyResNet,
    "resnet50": TinyResNet,
    "vgg16_bn": vgg,
    "mobilenet_v2": mobilenet,
    "efficientnet_lite_pytorch:EfficientNet.from_name": mobilenet,
}


SPEC = compress.QuantSpec(target="tensorrt", activations=compress.ActivationSpec(calibrator="max"))


def made(network):
    torch.manual_seed(0)
    model, x = network(width=16) if network is TinyResNet else network(), torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        model.train()(x)  # BatchNorm statistics of these images
    return model.eval(), x


def prune(model):
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.weight.shape[1] % 4 == 0]
    for layer in layers:
        layer.weight.data *= nm_mask(layer.weight.data.abs(), 2, 4)
    return len(layers)


def build(path, sms=SMS, **options):
    # An engine at the lowest effort, its audit, and {ONNX node: input types} of the layers that it came into.
    options = TensorRTOptions(sms=sms, batch=(1, 4, 4), optimization_level=0, **options)
    out = path.with_name(f"{path.stem}-{'-'.join(map(str, sms))}-{options.sparse}.engine")
    built = compress.build_tensorrt(path, options=options, out=out)
    assert built.metadata.sms == sms and out.stat().st_size > 5_000
    sparse = [row.name for row in audit_sparsity(path) if row.violations == 0 and row.zeros >= 0.5]
    return built, audit_listing(parse_build_log(built.log), onnx=path, sparse_nodes=sparse), listed(built.log)


def listed(log):
    # {ONNX node: types of the activations that the layers read in which it was put}, from the builder's list.
    found = {}
    for line in log[log.rindex("Layers:") :].splitlines():
        if "LayerType: " in line:
            read = re.findall(r"Datatype: (\w+)", re.split(r"Constants: |Outputs: ", line)[0])
            for node in re.findall(r"\[ONNX Layer: (.+?)\]", line):
                found.setdefault(node, set()).update(read)
    return found


def names_in(path):
    return {node.name for node in onnx.load(path).graph.node}


def quantized_in(path):
    graph = onnx.load(path).graph
    made_by = {name: node for node in graph.node for name in node.output}

    def through(name):
        node = made_by.get(name)
        while node is not None and node.op_type in PASSING:
            node = made_by.get(node.input[0])
        return node is not None and node.op_type == "DequantizeLinear"

    weighted = [node for node in graph.node if node.op_type in WEIGHTED]
    return {n.name for n in weighted if through(n.input[0]) and through(n.input[1])}, {n.name for n in weighted}


def check_traced(path, audit, nodes):
    assert nodes.keys() <= names_in(path)
    assert audit.weighted and all(layer.onnx_nodes for layer in audit.weighted)


@pytest.mark.parametrize(
    ("network", "precision"),
    further([(resnet, "fp32"), (vit, "fp32"), *((n, "fp16") for n in NETWORKS)], [(resnet, "fp32"), (vit, "fp16")]),
)
def test_float(network, precision, tmp_path):
    model, x = made(network)
    path = compress.export_onnx(model, x, tmp_path / "float.onnx", precision=precision)
    _, audit, nodes = build(path)
    check_traced(path, audit, nodes)
    assert {layer.precision for layer in audit.weighted} == {precision}
    assert unmet_by_audit(audit, "fp16", ()) == () or precision == "fp32"
    assert not {"Int8"} & set().union(*nodes.values())
    assert quantized_in(path)[1] <= nodes.keys()


@pytest.mark.parametrize("network", further(NETWORKS, [resnet, vit]))
def test_int8_and_two_of_four(network, tmp_path):
    model, x = made(network)
    count = prune(model)
    qmodel = compress.quantize(model, x, [x], spec=SPEC)
    path = compress.export_onnx(qmodel, x, tmp_path / "int8.onnx", precision="fp16")
    quantized, weighted = quantized_in(path)
    assert quantized == weighted  # the recipe's defaults leave no weighted layer of these networks in floating point
    for sm in SMS:
        built, audit, nodes = build(path, (sm,))
        check_traced(path, audit, nodes)
        assert all("Int8" in nodes[name] for name in quantized), sm
        assert unmet_by_audit(audit, "int8", quantized) == (), sm
        assert {layer.precision for layer in audit.weighted} == {"int8"}, sm
        assert built.metadata.options["sparse"] is False
    built, audit, _ = build(path, sparse=True)
    assert built.metadata.options["sparse"] is True
    assert unmet_by_audit(audit, "int8", quantized) == ()
    masked = {row.name for row in audit_sparsity(path) if row.violations == 0 and row.zeros >= 0.5}
    assert len(masked) == count
    (silent,) = [f for f in audit.findings if f.kind == "unknown" and "2:4" in f.text]
    found = {node for layer in audit.weighted if layer.name in silent.layers for node in layer.onnx_nodes}
    assert masked <= found  # whether its kernel is sparse is said of every masked layer: here, that it cannot be known


def distinct_recipes():
    found = {}
    for name in recipe_names():
        recipe = compress.load_recipe(name)
        if recipe.task == "classification" and not recipe.model.name.startswith("examples."):  # of clips
            spec = dataclasses.replace(recipe.quantization, target="tensorrt", calibration_images=1)
            found.setdefault((STAND_INS[recipe.model.name], repr(spec), repr(recipe.sparsity)), name)
    return list(found.values())


@pytest.mark.parametrize("name", further(distinct_recipes(), ["resnet50-sparse"]))
def test_recipes(name, tmp_path):
    # The Q/DQ of every shipped classifier, for TensorRT: calibrators, rules and masks; another target is refused.
    recipe = compress.load_recipe(name)
    model, x = made(STAND_INS[recipe.model.name])
    if recipe.sparsity is not None:
        compress.sparsify(model, dataclasses.replace(recipe.sparsity, permute=False, kernels="any"), example_inputs=x)
        compress.squash_masks(model)
    for target in set(recipe.quantization.targets) - {"tensorrt"}:
        other = compress.quantize(model, x, [x], spec=recipe.quantization.for_target(target))
        with pytest.raises(EngineError, match=r"zero points: quantize with target: tensorrt"):
            build(compress.export_onnx(other, x, tmp_path / "other.onnx"))
    spec = dataclasses.replace(recipe.quantization, target="tensorrt")
    qmodel = compress.quantize(model, x, [x], spec=spec)
    variant = "sparse-ptq" if recipe.sparsity else "ptq"
    path = compress.export_onnx(
        qmodel, x, tmp_path / "ptq.onnx", precision="fp16", metadata={"compress.variant": variant}
    )
    quantized, _ = quantized_in(path)
    built, audit, nodes = build(path)
    check_traced(path, audit, nodes)
    assert len(quantized) >= 5 and {row.name for row in compress.audit_onnx(path).rows if row.int8} == quantized
    assert unmet_by_audit(audit, "int8", quantized) == ()
    assert built.metadata.options["sparse"] is (recipe.sparsity is not None)
