# PT2E programs and ExecuTorch files: the integers of the ONNX file, and what XNNPACK computes of them.

import json
import sys

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn
from typer.testing import CliRunner

import compress
from compress.cli.app import app
from compress.data.base import Preprocessing
from compress.errors import EngineError, EngineUnavailableError, ExportError
from tests.exact import on_engine
from tests.further import further
from tests.networks import Net
from tests.onnx_ptq.files import sqnr

PAIRS = ("quantize_per_tensor", "dequantize_per_tensor")


def block():
    # A residual block, a pool, a padding and a split that move integers, a transposed convolution, a head.
    def run(net, x):
        x = F.pad(F.max_pool2d(F.relu(net.norm(net.stem(x))), 2), (0, 1, 0, 1))
        x = F.hardswish(net.a(x)) + net.b(x.chunk(2, 1)[0])
        return net.head(net.up(x).mean((2, 3)))

    layers = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "a": nn.Conv2d(8, 8, 3, 1, 1), "b": nn.Conv2d(4, 8, 1)}
    return Net(run, norm=nn.BatchNorm2d(8), up=nn.ConvTranspose2d(8, 4, 2, 2), head=nn.Linear(4, 10), **layers)


def tokens():
    # Attention over patches, whose class token is chosen before the head.
    def run(net, x):
        x = net.patches(x).flatten(2).transpose(1, 2)
        return net.head(net.layer(torch.cat([net.token.expand(len(x), -1, -1), x], 1))[:, 0])

    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, batch_first=True, norm_first=True)
    token = nn.Parameter(torch.randn(1, 1, 16))
    return Net(run, patches=nn.Conv2d(3, 16, 4, 4), token=token, layer=layer, head=nn.Linear(16, 10))


@pytest.fixture(scope="module", params=further([block, tokens], [block]))
def network(request, tmp_path_factory):
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16)
    spec = compress.QuantSpec(target="litert")
    model = compress.quantize(request.param().eval(), images[:1], [images], spec=spec)
    file = tmp_path_factory.mktemp("pt2e") / "model.onnx"
    preprocessing = Preprocessing(image_size=16)
    return model, compress.export_onnx(model, images[:1], file, labels=["a", "b"], preprocessing=preprocessing), images


def test_a_program_holds_the_integers_of_the_file(network):
    model, file, images = network
    program = compress.to_pt2e(model, images)
    assert sqnr(*(net(images).detach().numpy() for net in (model, program.module()))) > 35
    initializers = [numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer]
    weights = [array for array in initializers if array.dtype == np.int8 and array.ndim > 1]
    held = [value.numpy() for name, value in program.named_buffers() if value.dtype == torch.int8]
    wanted, got = (sorted(np.sort(array.reshape(-1)).tolist() for array in arrays) for arrays in (weights, held))
    assert got == wanted
    for node in program.graph.nodes:
        if any(pair in str(node.target) for pair in PAIRS):
            assert node.args[3:] == (-128, 127, torch.int8)
        if "dequantize" in str(node.target):
            assert len(node.users) == 1
    with pytest.raises(ExportError, match="example_inputs"):
        compress.to_pt2e(model)


def converted(model, images, **options):
    package = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    settings = package.get_symmetric_quantization_config(is_per_channel=True, **options)
    network = torch.export.export(model, (images,)).module()
    network = pt2e.prepare_pt2e(network, package.XNNPACKQuantizer().set_global(settings))
    network(images)
    return torch.export.export(pt2e.convert_pt2e(network), (images,))


def test_a_program_of_xnnpacks_quantizer_becomes_a_file_with_its_scales(tmp_path):
    model, images = block().eval(), torch.randn(4, 3, 16, 16)
    program = converted(model, images)
    file = compress.from_pt2e(program, tmp_path / "model.onnx")
    found = on_engine(file, "onnxruntime", images).numpy()
    assert sqnr(program.module()(images).detach().numpy(), found) > 30
    pairs = [node.args[1:3] for node in program.graph.nodes if f".{PAIRS[0]}." in str(node.target)]
    graph = onnx.load(file).graph
    value = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    got = {(float(value[node.input[1]]), int(value[node.input[2]])) for node in nodes}
    assert got == {(float(np.float32(scale)), zero) for scale, zero in pairs} and len(got) > 5
    assert len([array for array in value.values() if array.dtype == np.int8 and array.ndim > 1]) == 5  # weights
    for wrong, message in (
        (model, "no pair"),
        (torch.export.export(model, (images,)), "no pair"),
        (converted(nn.Sequential(nn.Linear(16, 4)), images, is_dynamic=True), "is_dynamic=False"),
        (converted(model, images, act_qmin=0, act_qmax=100), "from 0 to 100"),
    ):
        with pytest.raises(ExportError, match=message):
            compress.from_pt2e(wrong, tmp_path / "wrong.onnx")
    assert not (tmp_path / "wrong.onnx").exists()


def test_a_command_writes_what_executorch_runs_in_int8(network):
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    model, file, images = network
    with pytest.raises(EngineError, match=r"build onnx .*model.onnx --engine executorch"):
        compress.build_engine(file, "executorch")
    call = CliRunner().invoke
    assert call(app, ["build", "onnx", str(file), "--engine", "executorch"]).exit_code == 0
    with compress.build_engine(file, "executorch", threads=1) as engine, torch.no_grad():
        assert sqnr(model(images).numpy(), engine.run({"input": images.numpy()})["logits"]) > 30
        layers = [row for row in engine.runtime_layers() if row.kind in {"Conv2d", "ConvTranspose2d", "FullyConnected"}]
        assert {(row.precision, row.kernel) for row in layers} == {("i8", "XNNPACK")}
        assert "compress.labels" in engine.metadata
        with pytest.raises(EngineError, match="share their threads"):
            compress.build_engine(file, "executorch", threads=2)
    path = file.with_suffix(".pte")
    assert compress.audit_engine(path).share("int8") == 1.0
    assert "XNNPACK" in call(app, ["inspect", "engine", str(path)]).output
    path.with_name("broken.pte").write_bytes(b"no program")
    with pytest.raises(EngineError, match="not an ExecuTorch file"):
        compress.build_engine(path.with_name("broken.pte"), "executorch")


def test_a_layer_without_a_pair_before_it_runs_in_float(tmp_path):
    # XNNPACK's delegate computes a layer wrong that has integer weights and a float input.
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    images = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()).eval()
    model = compress.quantize(model, images[:1], [images], spec=compress.QuantSpec(target="litert"))
    proto = onnx.load(compress.export_onnx(model, images[:1], tmp_path / "whole.onnx"))
    second = [node for node in proto.graph.node if node.op_type == "Conv"][1]
    producer = {name: node for node in proto.graph.node for name in node.output}
    second.input[0] = producer[producer[second.input[0]].input[0]].input[0]  # what the pair reads
    onnx.save(proto, tmp_path / "model.onnx")
    path = compress.export_executorch(tmp_path / "model.onnx", tmp_path / "model.pte")
    wanted = on_engine(tmp_path / "model.onnx", "onnxruntime", images).numpy()
    with compress.build_engine(path, "executorch", threads=1) as engine:
        assert sqnr(wanted, engine.run({"input": images.numpy()})["logits"]) > 30
        convolutions = [row.precision for row in engine.runtime_layers() if row.kind == "Conv2d"]
    assert convolutions == ["f32", "f32"]  # the first has lost the pair after it


# Core ML packages, read by coremltools; torch computes their operators, because nothing else here can.


def whole(numbers):
    return [int(number) for number in numbers]


OPERATORS = {
    "add": lambda x, y: x + y,
    "batch_norm": lambda x, mean, variance, gamma, beta, epsilon: F.batch_norm(
        x, mean, variance, gamma, beta, eps=float(epsilon)
    ),
    "cast": lambda x, dtype: x,
    "constexpr_affine_dequantize": lambda quantized_data, scale, zero_point, axis: (
        quantized_data * scale.reshape([-1 if i == axis else 1 for i in range(quantized_data.dim())])
    ),
    "conv": lambda x, weight, bias, strides, pad, groups, **_: F.conv2d(
        F.pad(x, [whole(pad)[i] for i in (2, 3, 0, 1)]), weight, bias, whole(strides), groups=int(groups)
    ),
    "conv_transpose": lambda x, weight, bias, strides, **_: F.conv_transpose2d(x, weight, bias, whole(strides)),
    "dequantize": lambda input, scale, zero_point=0: (input - zero_point) * scale,
    "linear": F.linear,
    "max_pool": lambda x, kernel_sizes, strides, **_: F.max_pool2d(x, whole(kernel_sizes), whole(strides)),
    "mul": lambda x, y: x * y,
    "pad": lambda x, pad, **_: F.pad(x, [n for i in (6, 4, 2, 0) for n in whole(pad)[i : i + 2]]),
    "quantize": lambda input, scale, output_dtype, zero_point=0: (torch.round(input / scale) + zero_point).clamp(
        *((0, 255) if output_dtype == "uint8" else (-128, 127))
    ),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(whole(axes), bool(keep_dims)),
    "relu": lambda x: x.relu(),
    "sigmoid_hard": lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1),
    "split": lambda x, split_sizes, axis: x.split(whole(split_sizes), int(axis)),
    "thresholded_relu": lambda x, alpha: torch.where(x >= alpha, x, 0),
}


def computed(function, image):
    values = {next(iter(function.inputs)): image}

    def value(var):
        found = values.get(var.name, var.val)
        return found if isinstance(found, (str, torch.Tensor)) else torch.as_tensor(np.asarray(found)).float()

    for op in function.operations:
        if op.op_type != "const":
            given = {key: value(var) for key, var in op.inputs.items() if isinstance(getattr(var, "name", None), str)}
            result = OPERATORS[op.op_type](**given)
            values |= zip((o.name for o in op.outputs), result if op.op_type == "split" else [result], strict=True)
    return values[function.outputs[0].name].numpy()


def scales_of_package(function, name_of):
    # Channels of weights as (scale, integers), pairs as (scale, zero point of int8), and products outside of pairs.
    weights, pairs, apart = set(), set(), []
    for op in function.operations:
        if op.op_type == "constexpr_affine_dequantize":
            assert not op.zero_point.val.any()
            rows = np.moveaxis(op.quantized_data.val, int(op.axis.val), 0)
            weights |= {(float(s), *q.reshape(-1).tolist()) for s, q in zip(op.scale.val, rows, strict=True)}
        if op.op_type in {"quantize", "dequantize"}:
            integers = op.outputs[0] if op.op_type == "quantize" else op.input
            zero = 0 if op.zero_point is None else int(op.zero_point.val)
            pairs.add((float(op.scale.val), zero - 128 * (name_of(integers.dtype) == "uint8")))
        if op.op_type in {"conv", "conv_transpose", "linear", "matmul"}:
            sources = {var.op.op_type for key, var in op.inputs.items() if key in {"x", "y", "weight"} and var.op}
            last = op
            while len(last.outputs[0].child_ops) == 1 and last.outputs[0].child_ops[0].op_type == "relu":
                last = last.outputs[0].child_ops[0]
            after = {reader.op_type for reader in last.outputs[0].child_ops}
            if not sources <= {"dequantize", "constexpr_affine_dequantize"} or after != {"quantize"}:
                apart.append(op.name)
    return weights, pairs, apart


def scales_of_file(file, dtype):
    graph = onnx.load(file).graph
    value = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights, pairs = set(), set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in value and value[node.input[0]].dtype == np.int8:
            scale = value[node.input[1]].astype(dtype)
            (axis,) = [a.i for a in node.attribute if a.name == "axis"] or [1]
            rows = np.moveaxis(value[node.input[0]], axis, 0)
            weights |= {(float(s), *q.reshape(-1).tolist()) for s, q in zip(scale, rows, strict=True)}
        elif node.op_type == "QuantizeLinear":
            zero = value[node.input[2]]
            pairs.add((float(value[node.input[1]].astype(dtype)), int(zero) - 128 * (zero.dtype == np.uint8)))
    return weights, pairs


@pytest.mark.parametrize("precision", further(["fp32", "fp16"], ["fp32"]))
def test_a_core_ml_package_holds_the_scales_and_integers_of_the_file(network, precision, tmp_path):
    ct = pytest.importorskip("coremltools", reason="the extra coreml is not installed")
    milproto = pytest.importorskip("coremltools.converters.mil.frontend.milproto.load")
    _, file, _ = network
    path = tmp_path / "model.mlpackage"
    if precision == "fp16":
        for _ in range(2):  # the second replaces the first
            call = CliRunner().invoke(app, ["build", "onnx", str(file), "--engine", "coreml", "--out", str(path)])
            assert call.exit_code == 0, call.output
    else:
        assert compress.export_coreml(file, path, precision="fp32") == path
    package = ct.models.MLModel(str(path), skip_model_load=True)
    spec = package.get_spec()
    function = milproto.load(spec, spec.specificationVersion, package.weights_dir).functions["main"]
    weights, pairs, apart = scales_of_package(function, ct.converters.mil.mil.types.builtin_to_string)
    assert (weights, pairs) == scales_of_file(file, np.float32 if precision == "fp32" else np.float16)
    assert not apart and compress.audit_engine(path).share("int8", "uint8") == 1.0
    assert json.loads(spec.description.metadata.userDefined["compress.labels"]) == ["a", "b"]
    (given,), (result,) = spec.description.input, spec.description.output
    assert (given.name, given.type.imageType.width, result.name) == ("input", 16, "logits")
    if {op.op_type for op in function.operations} <= {"const", *OPERATORS}:
        image = torch.randint(256, (1, 3, 16, 16)).float()
        wanted = on_engine(file, "onnxruntime", Preprocessing(image_size=16).normalize(image / 255)).numpy()
        assert sqnr(wanted, computed(function, image)) > (35 if precision == "fp32" else 20)
    else:
        assert "softmax" in {op.op_type for op in function.operations}


def test_core_ml_packages_are_refused_for_other_names_and_without_coremltools(network, tmp_path, monkeypatch):
    (tmp_path / "mine.mlpackage").mkdir()
    for name in ("model.mlmodel", "mine.mlpackage"):
        with pytest.raises(ExportError, match=r"give NAME.mlpackage"):
            compress.export_coreml(network[1], tmp_path / name)
    with pytest.raises(EngineUnavailableError, match="iPhones"):
        compress.build_engine(network[1], "coreml")
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(EngineUnavailableError, match=r"compress-vision\[coreml\]"):
        compress.export_coreml(network[1], tmp_path / "model.mlpackage")
