# Hostile and damaged inputs, one of each kind that was ever found to be taken or to end in a traceback.
#
# Each is refused with its class of error, in a message that is one line or a list, and without much time or memory.

import contextlib
import io
import json
import os
import struct
import zipfile
import zlib

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from PIL import EpsImagePlugin, Image
from safetensors.torch import save_file

from compress import CompressError, DataSpec, audit_onnx, from_onnx, load_data, load_recipe
from compress.audit.files import onnx_beside, read_engine_layers
from compress.data.decode import read_image
from compress.engines.base import read_onnx
from compress.engines.tensorrt.metadata import read_metadata
from compress.errors import AuditError, CheckpointError, DataError, EngineError, RecipeError, RunError
from compress.models.by_name import read_state_dict
from compress.pipeline.run import open_run, recipe_of
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from compress.training.distributed import SINGLE, init_processes
from tests.images import write_images
from tests.onnx_models import onnx_model

DEEP = "[" * 100_000
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)

RECIPES = {
    "list": "- 1\n",
    "number": "5\n",
    "empty": "",
    "unclosed": "a: [\n",
    "key is a list": "? [a, b]\n: 1\n",
    "key is a mapping": "? {a: b}\n: 1\n",
    "key is a date": "model: {options: {2020-01-01: 1}}\n",
    "key is bytes": "!!binary aGk=: 1\n",
    "key is null": "null: 1\n",
    "key is true": "true: 1\n",
    "key is not a number": ".nan: 1\n",
    "key twice": "model: {name: a, name: b}\n",
    "holds itself": "model: &a {options: *a}\n",
    "list holds itself": "model: {options: {x: &a [*a]}}\n",
    "3000 deep": "model: {options: {x: " + "[" * 3000 + "]" * 3000 + "}}\n",
    "100 deep": "model: {options: {x: " + "[" * 100 + "]" * 100 + "}}\n",
    "billion laughs": LAUGHS,
    "5000 digits": "train: {seed: " + "9" * 5000 + "}\n",
    "exponent of 5000 digits": "train: {lr: 1e" + "9" * 5000 + "}\n",
    "seed 2^63": "train: {seed: 9223372036854775808}\n",
    "seed 10^25": "data: {seed: 10000000000000000000000000}\n",
    "negative seed": "data: {seed: -1}\n",
    "python object": "model: !!python/object/apply:os.system ['echo hi']\n",
    "set": "model: !!set {a, b}\n",
    "pairs": "model: {options: !!pairs [a: b, a: c]}\n",
    "date": "model: {name: 2020-01-01}\n",
    "month 13": "model: {name: 2020-13-01}\n",
    "tab": "model:\n\tname: x\n",
    "utf-16": "model: {name: resnet18}\n".encode("utf-16"),
    "latin-1": b"model: {name: \xe9}\n",
    "nul": b"model: {name: a\0b}\n",
    "two documents": "model: {name: resnet18}\n---\nmodel: {name: resnet50}\n",
    "two megabytes": "# " + "x" * 2_000_000,
    "threads": "bench: {threads: 100000}\n",
    "workers": "data: {workers: 100000}\n",
    "image size": "data: {image_size: 1000000}\n",
    "batch size": "data: {batch_size: 1000000000000}\n",
    "classes": "model: {num_classes: 1000000000000}\n",
    "infinite": "train: {lr: .inf}\n",
    "digits that are no number": "train: {lr: " + "1" * 500_000 + "x}\n",
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, tmp_path):
    text = RECIPES[name]
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "override", ["=1", "train.epochs", "train.epochs=[", "train.seed=" + "9" * 5000, "a.b=" + DEEP, "a=&x [*x]"]
)
def test_overrides(override):
    with pytest.raises(RecipeError):
        parse_recipe({}, [override])


def test_a_number_that_is_no_index():
    with pytest.raises(RecipeError, match="is a list of 1; give an index"):
        parse_recipe({"quantization": {"rules": [{"match": "a"}]}}, ["quantization.rules.²=b"])


def test_a_class_whose_name_is_no_text(tmp_path):
    write_images(tmp_path, [os.fsdecode(b"\xff")], 1)
    with pytest.raises(DataError, match="is no text in UTF-8; rename it"):
        load_data(DataSpec(name="folder", root=str(tmp_path), image_size=8))


def test_a_pipe_among_the_images_is_not_waited_for(tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        os.mkfifo(tmp_path / part / "a" / "pipe.png")
    split = load_data(DataSpec(name="folder", root=str(tmp_path), image_size=8, workers=0)).train
    with pytest.raises(DataError, match="pipe"):
        split.load([0], epoch=None, device=torch.device("cpu"))


def test_a_recipe_that_is_a_device_or_of_nobody(tmp_path):
    os.mkfifo(tmp_path / "r.yaml")  # opening it would wait for a writer
    for path in ("/dev/zero", "~nobody-of-that-name/r.yaml", tmp_path / "r.yaml", tmp_path):
        with pytest.raises(RecipeError, match="no recipe"):
            load_recipe(path)


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "gpu", ""])
def test_devices(device):
    for choose in (SINGLE.on, lambda name: init_processes(name, environment={})):
        with pytest.raises(CompressError, match="device"):
            choose(device or "none")


class Runs:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


WEIGHTS = {
    "empty.pt": b"",
    "text.pt": b"hello",
    "zip.pt": b"PK\x03\x04" + bytes(100),
    "empty.safetensors": b"",
    "short.safetensors": struct.pack("<Q", 10),
    "long.safetensors": struct.pack("<Q", 2**63) + b"{}",
    "deep.safetensors": struct.pack("<Q", len(DEEP)) + DEEP.encode(),
    "other.bmp": b"BM",
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name, tmp_path):
    (tmp_path / name).write_bytes(WEIGHTS[name])
    with pytest.raises(CheckpointError):
        read_state_dict(tmp_path / name)


def test_weights_that_hold_code_a_list_or_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = ({"a": tensor} for tensor in (torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()))
    for number, content in enumerate((Runs(), [1, 2], {"a": 1}, {}, torch.zeros(2), *tensors)):
        torch.save(content, f"{number}.pt")
        with pytest.raises(CheckpointError):
            read_state_dict(f"{number}.pt")
    assert not (tmp_path / "was-run").exists()
    torch.save({"a": torch.zeros(10**5)}, "whole.pt")
    with zipfile.ZipFile("whole.pt") as whole, zipfile.ZipFile("bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in whole.namelist():
            bomb.writestr(entry, whole.read(entry))
    assert torch.load("bomb.pt", weights_only=True)["a"].shape == (10**5,)  # torch unpacks it
    with pytest.raises(CheckpointError, match="unpacks to 40"):
        read_state_dict("bomb.pt")
    save_file({}, tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError):
        read_state_dict("/dev/zero")


def model(nodes, initializers=(), **kind):
    return onnx_model(nodes, {"x": [1, 4]}, {"y": [1, 4]}, dict(enumerate(initializers)), **kind)


def weight(**change):
    tensor = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    for key, value in change.items():
        setattr(tensor, key, value)
    return tensor


def scaled(scale):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    return model(nodes, [numpy_helper.from_array(np.array(scale, np.float32), "s")])


def product(tensor):
    return model([helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor])


MODELS = {
    "empty": b"",
    "text": b"hello",
    "zeros": bytes(10_000),
    "truncated": product(weight()).SerializeToString()[:-20],
    "no graph": onnx.ModelProto(ir_version=9).SerializeToString(),
    "tensor type 99": product(weight(data_type=99)).SerializeToString(),
    "too few bytes": product(weight(raw_data=b"1234")).SerializeToString(),
    "unfinished field": product(weight()).SerializeToString() + b"\x08",
    "unknown operator": model([helper.make_node("Frobnicate", ["x"], ["y"])]).SerializeToString(),
    "input of nothing": model([helper.make_node("Relu", ["z"], ["y"])]).SerializeToString(),
    "cycle": model(
        [helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])]
    ).SerializeToString(),
    "scale zero": scaled(0).SerializeToString(),
    "scale nan": scaled(float("nan")).SerializeToString(),
    "scale negative": scaled(-1).SerializeToString(),
}


@pytest.mark.parametrize("name", MODELS)
def test_onnx(name, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS[name])
    with pytest.raises(AuditError):
        audit_onnx(path)
    with contextlib.suppress(EngineError):  # the interface alone may be whole
        read_onnx(path)


CODE = 'open("canary", "w")'
NAMES = (
    f'x") if {CODE} else ("',
    f"x' + str({CODE}) + '",
    f"a\n{CODE}\n#",
    "$(touch canary)",
    "../canary",
    "{0.__class__}",
    *(
        "in",
        "class",
        "None",
        "a.in.b",
        "a.training",
        "x²",
        "self",
        "_self",
        "forward",
        "__class__",
        "a.b",
        ".",
        "1x",
        "torch",
    ),
)


@given(st.lists(st.sampled_from(NAMES), min_size=6, max_size=6, unique=True))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_names_of_a_file_are_never_code(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    x, w, k, conv, c, y = names
    nodes = [
        helper.make_node("Conv", [x, w], [c], name=conv, pads=[1] * 4),
        helper.make_node("Add", [c, k], [y], name=k),
    ]
    held = {w: np.random.default_rng(0).normal(size=(3, 3, 3, 3)), k: np.full((1, 3, 1, 1), 0.5)}
    held = {name: value.astype(np.float32) for name, value in held.items()}
    model = onnx_model(nodes, {x: ["N", 3, 8, 8]}, {y: ["N", 3, 8, 8]}, held)
    model.graph.name = conv
    onnx.save(model, "m.onnx")
    images = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)
    expected = onnx.reference.ReferenceEvaluator("m.onnx").run(None, {x: images})[0]
    np.testing.assert_allclose(from_onnx("m.onnx")(torch.from_numpy(images)).detach(), expected, atol=1e-4)
    assert [row.name for row in audit_onnx("m.onnx").rows] == [conv]
    assert not list(tmp_path.parent.glob("**/canary"))


def test_onnx_that_never_ends_or_points_elsewhere(tmp_path):
    for path in ("/dev/zero", tmp_path):
        with pytest.raises(AuditError):
            audit_onnx(path)
        with pytest.raises(EngineError):
            read_onnx(path)
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "models").mkdir()
    outside = weight(data_location=TensorProto.EXTERNAL, raw_data=b"")
    for key, value in (("location", "../secret"), ("length", "64")):
        outside.external_data.add(key=key, value=value)
    onnx_path = tmp_path / "models" / "m.onnx"
    onnx_path.write_bytes(product(outside).SerializeToString())
    with pytest.raises(AuditError):
        audit_onnx(onnx_path)


ENGINE = {
    "format": 1,
    "engine": "tensorrt-rtx",
    "version": "1",
    "parser_version": "1",
    "gpu": "",
    "sms": [89],
    "recipe": "",
    "variant": "",
    "onnx": "m.onnx",
    "onnx_sha256": "0",
    "engine_bytes": 1,
    "engine_sha256": "0",
    "options": {},
    "profiles": {},
    "inputs": [],
    "outputs": [],
    "float_types": ["f32"],
    "onnx_metadata": {},
    "build_seconds": 1.0,
    "notes": [],
}
NO_ENGINES = [
    ("onnx", "../x.onnx"),
    ("onnx", ""),
    ("onnx", "/etc/passwd"),
    ("onnx", 5),
    ("onnx", None),
    ("onnx", "a\0b"),
    ("engine_bytes", "abc"),
    ("engine_bytes", None),
    ("engine_sha256", 5),
    ("profiles", []),
    ("profiles", {"x": 5}),
    ("profiles", {"x": {"a": [1]}}),
    ("inputs", 5),
    ("inputs", [5]),
    ("inputs", [{"name": "x"}]),
    ("sms", 5),
    ("sms", ["a"]),
    ("options", None),
    ("engine", "foo"),
    ("engine", None),
    ("onnx_metadata", 5),
    ("format", "1"),
    ("notes", 5),
    ("float_types", None),
]


@pytest.mark.parametrize(("key", "value"), NO_ENGINES)
def test_engine_metadata(key, value, tmp_path):
    engine = tmp_path / "e.engine"
    engine.write_bytes(b"x")
    (tmp_path / "e.engine.json").write_text(json.dumps({**ENGINE, key: value}))
    with pytest.raises(EngineError, match=r"e\.engine\.json cannot be read") as refused:
        read_metadata(engine)
    assert key in str(refused.value) and "pydantic" not in str(refused.value)
    assert onnx_beside(engine) is None
    with pytest.raises(EngineError):
        read_engine_layers(engine)


@pytest.mark.parametrize("text", ["", "[]", "5", "{}", DEEP, b"\xff", "{" + '"a":' * 3])
def test_engine_metadata_that_is_none(text, tmp_path):
    (tmp_path / "e.engine").write_bytes(b"x")
    (tmp_path / "e.engine.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(EngineError):
        read_metadata(tmp_path / "e.engine")


LAYERS = {
    "list": "[]",
    "object": "{}",
    "number": "5",
    "deep": DEEP,
    "layers 5": '{"Layers":5}',
    "layers [5]": '{"Layers":[5]}',
    "no names": '{"Layers":[{}]}',
    "names only": '{"Layers":["conv1"]}',
    "inputs 5": '{"Layers":[{"Name":"a","LayerType":"b","Inputs":5,"Outputs":[]}]}',
    "dimensions are text": json.dumps(
        {
            "Layers": [
                {
                    "Name": "a",
                    "LayerType": "Convolution",
                    "Outputs": [],
                    "Inputs": [{"Name": "x", "Dimensions": "a", "Format/Datatype": "Int8"}],
                }
            ]
        }
    ),
    "names are null": json.dumps(
        {
            "Layers": [
                {
                    "Name": None,
                    "LayerType": None,
                    "Inputs": [{"Name": None}],
                    "Outputs": [{}],
                    "Weights": {"Type": 5},
                }
            ]
        }
    ),
}
MAY_BE_READ = {"dimensions are text", "names are null"}


@pytest.mark.parametrize("name", LAYERS)
def test_engine_layers(name, tmp_path):
    (tmp_path / "e.layers.json").write_text(LAYERS[name])
    try:
        read_engine_layers(tmp_path / "e.layers.json")
        assert name in MAY_BE_READ
    except AuditError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("text", ["", "\0\xff" * 1000, "[" * 200_000, "Layer(Reformat): " + "a, " * 20_000 + "\n"])
def test_engine_logs(text, tmp_path):
    (tmp_path / "e.log").write_text(text)
    os.mkfifo(tmp_path / "pipe.log")
    for name in ("e.log", "pipe.log"):
        with pytest.raises(AuditError):
            read_engine_layers(tmp_path / name)


def png(width, height, data=b"\0" * 1000):
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def encoded(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


GREY = Image.new("RGB", (30, 20), (9, 9, 9))
PICTURES = {
    "empty.png": b"",
    "text.png": b"hello",
    "truncated.png": encoded(GREY)[:60],
    "truncated.jpg": encoded(GREY, "JPEG")[:300],
    "bomb.png": png(60_000, 60_000),
    "no-pixels.gif.png": b"GIF89a\0\0\0\0\0\0\0;",
    "float.tif": encoded(Image.fromarray(np.full((9, 9), 0.5, np.float32)), "TIFF"),
    "int32.tif": encoded(Image.fromarray(np.full((9, 9), 120, np.int32)), "TIFF"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_images(name, tmp_path):
    write_images(tmp_path, count=1)
    (tmp_path / "val" / "a" / name).write_bytes(PICTURES[name])
    spec = DataSpec(name="folder", root=str(tmp_path), image_size=8, workers=0, augment=False)
    split = load_data(spec).val
    with pytest.raises(DataError, match="is not a readable image"):
        split.load(list(range(len(split))), epoch=None, device=torch.device("cpu"))


def test_a_program_for_a_printer_that_is_named_as_an_image_is_not_run(tmp_path, monkeypatch):
    ran: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: ran.append(args) or GREY.im)
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 30 20\n%%EndComments\n")
    with pytest.raises(DataError, match="is not a readable image"):
        read_image(tmp_path / "a.png")
    assert not ran


LARGE = json.dumps([{"name": "top1", "variant": "ptq", "engine": "torch", "unit": "%", "value": 10**400}])
FOLDERS = {
    "recipe.yaml": ["a: [", LAUGHS, b"\xff"],
    "metrics.json": ["{", "5", DEEP, '[{"a": 1}]', '[{"name": "top1", "value": NaN}]', b"\xff", LARGE],
    "layers.json": ["{", "[5]", DEEP, b"\xff"],
    "histograms.json": ["{", "[5]", DEEP],
    "block.json": ["{", "[5]", DEEP],
    "notes.json": ["{", "[5]", DEEP],
    "environment.json": ["{", "[5]", DEEP, "pipe", "/dev/zero"],
    "train.csv": ["pipe", "/dev/zero", "x" * 200_000],
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, texts in FOLDERS.items() for i in range(len(texts))])
def test_run_folders(name, number, tmp_path):
    open_run(tmp_path, parse_recipe({}), "qat", resume=False).release()
    text = FOLDERS[name][number]
    if text == "pipe":
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    elif text == "/dev/zero":
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(text)
    else:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((RunError, RecipeError)) as caught:
        if name == "recipe.yaml":
            recipe_of(tmp_path)
        else:
            read_run(tmp_path)
    assert name in str(caught.value)
