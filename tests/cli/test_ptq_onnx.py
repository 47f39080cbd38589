import json

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from PIL import Image
from torch import nn
from torchvision import transforms

import compress
from compress.cli.options import form_of
from compress.data.base import Preprocessing
from compress.data.files import ImageFolder, read_input, unlabelled
from tests.exact import open_session
from tests.onnx_ptq.files import model_of, weights


@pytest.fixture
def folder(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Softmax", ["r"], ["y"], name="softmax", axis=1),
    ]
    onnx.save(model_of(nodes, {"w": weights(4, 3, 3, 3)}, shape=("n", 3, 8, 8)), tmp_path / "net.onnx")
    pictures = tmp_path / "pictures" / "any"
    pictures.mkdir(parents=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (12, 10, 3), np.uint8)
        Image.fromarray(pixels).save(pictures / f"{i}.png")
    np.savez(tmp_path / "inputs.npz", x=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    (tmp_path / "mine.py").write_text("import numpy\n\ndef data():\n    return [numpy.ones((2, 3, 8, 8), 'float32')]\n")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "options", "images"),
    [
        ("pictures", ("--size", "8"), 3),
        ("pictures", (), 3),
        ("inputs.npz", ("--target", "openvino"), 4),
        ("mine:data", (), 2),
    ],
)
def test_a_file_is_quantized(compress, folder, monkeypatch, data, options, images):
    monkeypatch.syspath_prepend(str(folder))
    told = compress("ptq", "--onnx", "net.onnx", "--data", data, "--out", "run", "--json", *options, cwd=folder)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["images"] == images
    run = folder / "run"
    assert sorted(path.name for path in run.iterdir()) == ["net.int8.onnx", "placement.csv", "quantization.json"]
    open_session(run / "net.int8.onnx")
    assert "softmax" in (run / "placement.csv").read_text()


def test_what_stays_float_is_shown(compress, folder):
    told = compress("ptq", "--onnx", "net.onnx", "--data", "inputs.npz", "--out", "run", cwd=folder)
    assert "softmax" in told.stdout
    assert "1 of 1 weighted operations are INT8" in told.stdout
    assert "the file as it says against float, 4 images: " in told.stdout and " dB, good: " in told.stdout
    assert "warning" not in told.stdout
    for command in ("bench", "report"):
        told = compress(command, "run", cwd=folder)
        assert told.returncode == 2
        assert "is no run: `bench FLOAT.onnx run/net.int8.onnx` times it" in " ".join(told.stderr.split())


def test_notes_are_shown(compress, folder):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="first")
    onnx.save(model_of([node], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, 8, 8), opset=12), folder / "old.onnx")
    told = compress("ptq", "--onnx", "old.onnx", "--data", "inputs.npz", "--out", "run", cwd=folder)
    assert "note the opset is raised from 12 to 13" in told.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ptq",), "give --recipe, or --onnx FILE and --data"),
        (("ptq", "--onnx", "net.onnx"), "--onnx needs --data"),
        (("ptq", "--onnx", "net.onnx", "--data", "none"), "none does not exist; give a folder of images"),
        (("ptq", "--onnx", "none.onnx", "--data", "inputs.npz"), "no such file"),
        (
            ("ptq", "--onnx", "net.onnx", "--data", "inputs.npz", "--target", "cpu"),
            "--target is 'cpu' (one of: tensorrt",
        ),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "8", "--std", "0"), "--std is '0'"),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "0"), "--size is '0'"),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "9"), "takes (any, 3, 8, 8)"),
        (("ptq", "--onnx", "net.onnx", "--data", "os:nothing"), "os has no function 'nothing'"),
        (("ptq", "--onnx", "net.onnx", "--data", "net.npz"), "cannot be read as an .npz file"),
        (("ptq", "--recipe", "resnet50.yaml", "--data", "pictures"), "belong to --onnx"),
        (("ptq", "--onnx", "net.onnx", "--data", "inputs.npz", "--out", "new.onnx"), "--out names a folder"),
    ],
)
def test_refusals(compress, folder, words, text):
    told = compress(*words, cwd=folder)
    assert told.returncode == 2
    assert text in " ".join(told.stderr.split())
    assert not (folder / "run").exists()
    assert not (folder / "runs").exists()


def test_pictures_become_inputs_as_asked(folder):
    # Against numpy; a picture that has the size already is not resized.
    form = Preprocessing(
        image_size=(12, 10), mean=(0.5,) * 3, std=(0.25,) * 3, layout="NHWC", channels="BGR", resize="squash"
    )
    (batch,) = unlabelled(str(folder / "pictures"), form, limit=2, batch_size=8)
    pixels = np.asarray(Image.open(folder / "pictures" / "any" / "0.png"), np.float32)
    np.testing.assert_allclose(batch[0].numpy(), (pixels[:, :, ::-1] / 255 - 0.5) / 0.25, atol=1e-6)
    assert batch.shape == (2, 12, 10, 3)


def test_a_file_says_itself_how_pictures_become_its_inputs(tmp_path):
    # Against torchvision's transforms; a file that says nothing has ImageNet's numbers and its own size.
    said = Preprocessing(
        image_size=20, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), interpolation="bicubic", crop_ratio=0.8
    )
    net, x = nn.Sequential(nn.Conv2d(3, 2, 3)), torch.randn(1, 3, 20, 20)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    file = compress.export_onnx(net, x, tmp_path / "net.onnx", preprocessing=said)
    steps = [
        transforms.Resize(25, transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(20),
        transforms.ToTensor(),
    ]
    expected = transforms.Compose([*steps, transforms.Normalize(said.mean, said.std)])(Image.fromarray(pixels))
    found = read_input(tmp_path / "a.png", form_of(file, None, None, None, "NCHW", "RGB"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert form_of(file, "12", "0.5", None, "NCHW", "RGB").image_size == (12, 12)
    plain = compress.export_onnx(net, x, tmp_path / "plain.onnx")
    assert form_of(plain, None, None, None, "NCHW", "RGB") == Preprocessing(image_size=(20, 20), crop_ratio=0.875)


def test_hidden_files_are_no_pictures(folder):
    # macOS writes a file `._NAME` beside each on disks of another kind; it is no picture.
    (folder / "pictures" / "._0.png").write_bytes(b"attributes")
    assert len(ImageFolder(folder / "pictures", Preprocessing(image_size=8), limit=9, batch_size=1).paths) == 3


def test_a_quantized_file_begins_anew(compress, folder):
    options = ["--data", "inputs.npz", "--out", "run"]
    assert compress("ptq", "--onnx", "net.onnx", *options, cwd=folder).returncode == 0
    (folder / "run" / "net.int8.onnx").rename(folder / "q.onnx")
    refused = compress("ptq", "--onnx", "q.onnx", *options, cwd=folder)
    assert refused.returncode and "quantized already" in refused.stderr and "--again" in refused.stderr
    done = compress("ptq", "--onnx", "q.onnx", *options, "--again", "--json", cwd=folder)
    assert done.returncode == 0 and json.loads(done.stdout)["int8_share"] == 1
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(folder / "run" / "q.float.onnx").graph.node}
