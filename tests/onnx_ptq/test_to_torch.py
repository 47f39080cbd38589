# ONNX files as torch networks: the torch model that a file was exported from is the oracle.

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import compress
from compress.errors import ModelError, QuantizationError
from compress.onnx_ptq import calibrate
from compress.onnx_ptq.calibrate import BLOCKS, Blocked, BlockedSamples, blocked_session, with_block
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.onnx_ptq.source import load_source
from compress.quantization import TARGETS
from compress.quantization.calibration.histogram import drawn_from
from compress.quantization.report import placement_of
from tests.exact import compute
from tests.networks import Net, TinyResNet, minimized, with_statistics
from tests.onnx_ptq.files import attention, batches, export, gated_net, model_of, run, shuffled, weights

NETWORKS = {"resnet": TinyResNet, "gated": gated_net, "attention": attention, "shuffled": shuffled}


def made(name):
    torch.manual_seed(0)
    return with_statistics(NETWORKS[name]())


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_computes_what_the_model_does(tmp_path, name, folded):
    model = made(name)
    network = compress.from_onnx(export(model, tmp_path / "m.onnx", folded=folded), torch.randn(2, 3, 16, 16))
    x = torch.randn(5, 3, 16, 16)  # of another batch size than the example
    torch.testing.assert_close(network(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NETWORKS)
def test_gets_the_quantizers_of_the_model(tmp_path, name, target):
    model, x, spec = made(name), torch.randn(2, 3, 16, 16), compress.QuantSpec(target=target)
    network = compress.from_onnx(export(model, tmp_path / "m.onnx"), x)
    ours, theirs = (placement_of(compress.insert_quantizers(net, x, spec)) for net in (network, model))
    assert sorted(str(s.format) for s in ours.activations) == sorted(str(s.format) for s in theirs.activations)
    assert [site.format for site in ours.weights] == [site.format for site in theirs.weights]
    nodes = {node.name for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {site.path for site in ours.weights} <= nodes


def test_a_file_is_fine_tuned_in_int8_and_exported(tmp_path):
    x = torch.randn(16, 3, 16, 16)
    spec = compress.ModelSpec(name=str(export(made("resnet"), tmp_path / "float.onnx")), options={"size": [16, 16]})
    network = compress.build_model(spec, num_classes=10)
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target="onnxruntime"))
    optimizer, targets = torch.optim.SGD(qmodel.parameters(), 0.05), torch.arange(16) % 10
    losses = minimized(optimizer, lambda: nn.functional.cross_entropy(qmodel.train()(x), targets), 8)
    assert losses[-1] < losses[0]
    file = compress.export_onnx(qmodel.eval(), x, tmp_path / "int8.onnx")
    np.testing.assert_allclose(run(file, x.numpy()), qmodel(x).detach(), atol=0.05)
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(file).graph.node}


def test_a_file_is_pruned(tmp_path):
    file = export(with_statistics(TinyResNet(width=64)), tmp_path / "m.onnx")
    network = compress.from_onnx(file, torch.randn(2, 3, 16, 16))
    compress.sparsify(network, compress.SparsitySpec(pattern="2:4"), example_inputs=torch.randn(2, 3, 16, 16))
    compress.squash_masks(network)
    groups = network.get_submodule("/block1/conv1/Conv").weight.detach().permute(0, 2, 3, 1).reshape(-1, 4)
    assert int((groups != 0).sum(1).max()) == 2


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (helper.make_node("NonZero", ["x"], ["y"], name="odd"), "operator NonZero at 'odd'"),
        (helper.make_node("DepthToSpace", ["x"], ["y"], name="odd", blocksize=1), "operator DepthToSpace .* DCR"),
    ],
)
def test_refusals_name_the_operator(tmp_path, node, words):
    onnx.save(model_of([node], {}), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=words):
        compress.from_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize("operator", ["Ceil", "Round", "Softsign", "Tan", "Atan", "And", "Or", "Xor"])
def test_plain_operators_compute_what_onnx_runtime_does(tmp_path, operator):
    nodes, constants = [helper.make_node(operator, ["x"], ["y"])], {}
    if operator in {"And", "Or", "Xor"}:
        nodes = [
            *(helper.make_node(name, ["x", "one"], [name]) for name in ("Greater", "Less")),
            helper.make_node(operator, ["Greater", "Less"], ["both"]),
            helper.make_node("Cast", ["both"], ["y"], to=TensorProto.FLOAT),
        ]
        constants = {"one": np.ones((), np.float32)}
    onnx.save(model_of(nodes, constants, shape=(2, 3, 4, 4)), tmp_path / "m.onnx")
    x = torch.arange(-48, 48).reshape(2, 3, 4, 4) / 4  # halves too, which are rounded to even
    found = compress.from_onnx(tmp_path / "m.onnx", x)(x)
    np.testing.assert_allclose(found.numpy(), run(tmp_path / "m.onnx", x.numpy()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["double", "float16", "bfloat16"])
def test_casts_of_inputs_and_to_half_and_back(tmp_path, dtype):
    # The network takes the types of the file, and rounds where it does.
    other = TensorProto.DataType.Value(dtype.upper())
    types = (TensorProto.FLOAT, other) if dtype == "bfloat16" else (other, TensorProto.FLOAT)
    casts = [helper.make_node("Cast", ["x"], ["a"], to=types[1]), helper.make_node("Cast", ["a"], ["b"], to=1)]
    conv = helper.make_node("Conv", ["b", "w"], ["y"], name="conv")
    model = model_of([*casts, conv], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, 8, 8))
    model.graph.input[0].type.tensor_type.elem_type = types[0]
    onnx.save(model, tmp_path / "m.onnx")
    x = torch.randn(2, 3, 8, 8).to(torch.float32 if dtype == "bfloat16" else getattr(torch, dtype))
    expected = torch.from_numpy(compute(tmp_path / "m.onnx", x.numpy()))
    torch.testing.assert_close(compress.from_onnx(tmp_path / "m.onnx")(x).detach(), expected, atol=1e-5, rtol=1e-5)
    out = compress.quantize_onnx(tmp_path / "m.onnx", [x], spec=compress.QuantSpec(head="quantize"))
    assert compress.audit_onnx(out).int8_share == 1


def test_a_running_sum_is_read(tmp_path):
    model = Net(lambda net, x: net.b(net.a(x).cumsum(-1)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(4, 4, 1)).eval()
    x = torch.randn(2, 3, 5, 6)
    torch.testing.assert_close(compress.from_onnx(export(model, tmp_path / "m.onnx", x=x), x)(x), model(x))


def test_a_file_with_constants_of_the_exporter_is_exported_again(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.GroupNorm(1, 8)).eval()
    x = torch.randn(2, 3, 16, 16)
    network = compress.from_onnx(compress.export_onnx(model, x, tmp_path / "m.onnx"), x)
    assert any(name.startswith("val_") for name, _ in network.named_buffers())
    again = compress.export_onnx(network, x, tmp_path / "again.onnx")
    torch.testing.assert_close(torch.from_numpy(compute(again, x.numpy())), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_sides_that_the_file_leaves_open(tmp_path):
    conv = helper.make_node("Conv", ["x", "w"], ["y"], name="a.b")
    onnx.save(model_of([conv], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, "h", "w")), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="open sides"):
        compress.from_onnx(tmp_path / "m.onnx")
    network = compress.from_onnx(tmp_path / "m.onnx", size=(8, 8))
    assert network(torch.zeros(3, 3, 8, 8)).shape == (3, 4, 6, 6)
    assert isinstance(network.get_submodule("a.b"), nn.Conv2d)


def test_a_recipe_with_a_file_takes_no_other_weights():
    with pytest.raises(ModelError, match="its own weights"):
        compress.build_model(compress.ModelSpec(name="net.onnx", weights="w.safetensors"), num_classes=10)


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fine_tuned_network_returns_into_its_file(tmp_path, name, target):
    torch.manual_seed(1)
    x, spec, file = torch.randn(8, 3, 16, 16), compress.QuantSpec(target=target), tmp_path / "float.onnx"
    export(made(name), file, folded=name != "resnet")
    qmodel = compress.quantize(compress.from_onnx(file, x), x, [x], spec=spec)
    minimized(torch.optim.SGD(qmodel.parameters(), 0.01), lambda: qmodel.train()(x).square().mean(), 3)
    compress.calibrate(qmodel.eval(), [x])
    out = compress.quantize_onnx(file, [x], spec=spec, out=tmp_path / "int8.onnx", trained=qmodel)
    before, after = (onnx.load(path).graph for path in (file, out))
    assert [v.name for v in after.input] == [v.name for v in before.input]
    assert [v.name for v in after.output] == [v.name for v in before.output]
    layers = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
    assert {n.name for n in after.node if n.op_type in layers} == {n.name for n in before.node if n.op_type in layers}
    x = torch.randn(8, 3, 16, 16)
    expected, untrained = (network.eval()(x).detach().numpy() for network in (qmodel, made(name)))
    error = np.square(run(out, x.numpy()) - expected).mean()
    assert error < 1e-3 * np.square(expected).mean()  # 30 dB: engines round the sums of INT8 in another order
    assert error < 0.05 * np.square(untrained - expected).mean()  # and it is the trained network


def test_a_trained_network_of_another_file_or_specification_is_refused(tmp_path):
    x, file = torch.randn(2, 3, 16, 16), tmp_path / "float.onnx"
    network = compress.from_onnx(export(made("shuffled"), file), x)
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target="tensorrt"))
    for spec, other, text in (
        (compress.QuantSpec(target="onnxruntime"), qmodel, "Give the specification"),
        (compress.QuantSpec(target="tensorrt"), compress.quantize(made("gated"), x, [x]), "Train the network"),
        (compress.QuantSpec(target="tensorrt"), network, "not a model that compress quantized"),
    ):
        with pytest.raises(QuantizationError, match=text):
            compress.quantize_onnx(file, [x], spec=spec, trained=other)
    assert [path.name for path in tmp_path.iterdir()] == ["float.onnx"]


# Samples of tensors in ONNX Runtime's blocked layout are those of the tensors in the file's order.


def blocked(plain, block):
    # Write (N, C, H, W) in blocks, value by value as the layout is defined; beyond the channels there is NaN.
    images, channels, height, width = plain.shape
    groups = -(-channels // block)
    memory = np.full((images, groups, height, width, block), np.nan, np.float32)
    for channel in range(channels):
        memory[:, channel // block, :, :, channel % block] = plain[:, channel]
    return Blocked(values=memory.reshape(images, groups * block, height, width), channels=channels, block=block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(3, 32, 40, 41), (2, 24, 63, 64), (1, 5, 3, 7), (3, 40, 1, 1), (2, 16, 150, 151)])
def test_a_sample_holds_the_same_values(shape, block):
    plain = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tensor, samples = blocked(plain, block), BlockedSamples()
    np.testing.assert_array_equal(tensor.plain(0, len(plain)), plain)
    for start, total in ((0, plain.size), (plain.size, 3 * plain.size), (2 * plain.size, 3 * plain.size)):
        expected = drawn_from(torch.from_numpy(plain.reshape(-1)), start=start, total=total)
        for _ in range(2):  # places that are computed, and places that are remembered
            found = samples.draw(tensor, start=start, total=total)
            assert (found.amax, found.every) == (np.abs(plain).max(), expected.every)
            for ours, theirs in ((found.values, expected.values), (found.rest, expected.rest)):
                assert torch.equal(ours.sort().values, theirs.sort().values)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("channels", [3, 8, 24, 32])
def test_a_block_of_another_size_is_found_out(channels, block):
    plain = np.random.default_rng(0).normal(size=(3, channels, 5, 5)).astype(np.float32)
    beside = with_block({"x": blocked(plain, block)}, block)
    assert calibrate.independent({"x": plain[1:2]}, beside, 3, ["x"])
    other = next(size for size in BLOCKS if size != block)
    assert not calibrate.independent({"x": plain[1:2]}, with_block(beside, other), 3, ["x"])


@pytest.mark.parametrize("channels", [24, 32])
def test_values_that_are_known_to_be_positive_need_no_minimum(channels):
    plain = np.random.default_rng(0).random((2, channels, 9, 9), np.float32)
    for start, total in ((0, plain.size), (0, 1 << 20)):
        assert BlockedSamples().draw(blocked(plain, 16), start=start, total=total, signed=False).amax == plain.max()
    plain[1, channels - 1, 8, 8] = np.nan
    assert np.isnan(BlockedSamples().draw(blocked(plain, 16), start=0, total=plain.size, signed=False).amax)


def test_a_value_that_is_no_number_is_found():
    plain = np.zeros((1, 8, 2, 2), np.float32)
    plain[0, 7, 1, 1] = np.nan
    assert np.isnan(BlockedSamples().draw(blocked(plain, 8), start=0, total=plain.size).amax)


def wide_net():
    # Convolutions of 24 and 32 channels: of a block and a half, and of whole blocks; a sum, and a pool.
    def run(net, x):
        x = nn.functional.relu6(net.stem(x))
        x = net.again(x) + x
        return net.fc(nn.functional.max_pool2d(net.wide(x), 2).mean((2, 3)))

    return Net(
        run,
        stem=nn.Conv2d(3, 24, 3, 2, 1),
        again=nn.Conv2d(24, 24, 3, 1, 1),
        wide=nn.Conv2d(24, 32, 1),
        fc=nn.Linear(32, 5),
    )


@pytest.fixture
def wide(tmp_path):
    return load_source(export(wide_net(), tmp_path / "float.onnx", x=torch.randn(2, 3, 96, 96)))


def test_blocked_results_are_those_of_onnx_runtime(wide):
    names = [node.output[0] for node in wide.proto.graph.node if node.op_type in {"Conv", "Clip", "Add", "Concat"}]
    plain, session = blocked_session(wide, names, set(names), threads=1)
    feed = {"picture": batches(size=96)[0].numpy()}
    expected, found = plain.run(feed), session.run(feed)
    tensors = [name for name, value in found.items() if isinstance(value, Blocked)]
    if not tensors:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no blocked layout on this processor")
    same = [
        all(np.allclose(with_block(found, block)[name].plain(0, 4), expected[name][:4]) for name in tensors)
        for block in BLOCKS
        if all(found[name].values.shape[1] % block == 0 for name in tensors)
    ]
    assert any(same)


def test_ranges_do_not_depend_on_the_layout(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_PIECE", 1)
    data = [batch.tile(4, 1, 1, 1) * torch.rand(16, 1, 1, 1) for batch in batches(size=96)]

    def ranges(name):
        out = tmp_path / f"{name}.onnx"
        return quantize_onnx_file(wide.path, data, spec=compress.QuantSpec(target="openvino"), out=out).calibration

    drawn = []
    draw = BlockedSamples.draw
    monkeypatch.setattr(BlockedSamples, "draw", lambda *a, **k: drawn.append(1) or draw(*a, **k))
    found = ranges("blocked")
    layout = bool(drawn)
    monkeypatch.setattr(calibrate, "blocked_session", lambda *a, **k: 1 / 0)
    drawn.clear()
    expected = ranges("plain")
    assert not drawn
    torch.testing.assert_close(found.amax, expected.amax, rtol=1e-06, atol=0)
    for name, (counts, _) in expected.histograms.items():
        assert torch.equal(found.histograms[name][0], counts)
    if not layout:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no blocked layout on this processor")
