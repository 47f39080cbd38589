# A run for several targets: one file each, every engine measured with the file that was made for it.

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits

import compress
from compress.errors import CompressWarning, DataError, QuantizationError, RecipeError, RunError
from compress.pipeline.predict import predict, write_bundle
from compress.pipeline.saved import bench_again, export_again, networks_of
from compress.quantization.quantizer import quantizers
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from compress.records.summary import summary_table
from compress.support.progress import NoProgress
from tests.exact import WEIGHTS, on_engine, open_session
from tests.further import further
from tests.networks import tiny

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 100},
    "train": {"epochs": 3, "lr": 0.05},
    "quantization": {
        "target": ["tensorrt", "openvino"],
        "calibration_images": 64,
        "weights": {"num_bits": WEIGHTS.num_bits},
    },
    "qat": {"epochs": 1},
    "bench": {"engines": ["openvino", "torch"], "batch_sizes": [2], "warmup": 1, "runs": 2, "seconds": 0.1},
}


class CtrlC(NoProgress):
    # A user who stops the run when it calibrates for the second time: after training, for the further targets.
    def __init__(self):
        self.left = 2

    def start(self, task, total, *, done=0):
        self.left -= task == "calibrate"
        if not self.left:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("targets") / "run"
    with pytest.raises(KeyboardInterrupt):
        compress.run(parse_recipe(TREE), "qat", out, device="cpu", progress=CtrlC())
    steps = json.loads((out / "state.json").read_text())["steps"]
    assert "qat" in steps and "qat.targets" not in steps and not (out / "qat.openvino.safetensors").exists()
    compress.run(parse_recipe(TREE), "qat", out, device="cpu", resume=True)
    return out


def zero_points(path):
    graph = onnx.load(path).graph
    constants = {c.name: onnx.numpy_helper.to_array(c) for c in graph.initializer}
    return {
        constants[node.input[2]].dtype.name
        for node in graph.node
        if node.op_type == "QuantizeLinear" and constants[node.input[1]].size == 1
    }


@pytest.mark.parametrize("variant", ["ptq", "qat"])
def test_each_engine_is_measured_with_the_file_that_was_made_for_it(finished, variant):
    assert zero_points(finished / f"{variant}.onnx") == {"int8"}
    assert "uint8" in zero_points(finished / f"{variant}.openvino.onnx")
    assert (finished / "placement.openvino.csv").is_file()
    rows = {(m["name"], m["variant"], m["engine"]): m for m in json.loads((finished / "metrics.json").read_text())}
    size = (finished / f"{variant}.openvino.onnx").stat().st_size
    assert rows["file_bytes", variant, "openvino"]["value"] == size
    reference = rows["top1", variant, "torch (fake quantization, openvino)"]["value"]
    assert rows["agreement", variant, "openvino (f32)"]["value"] >= 98
    assert abs(rows["top1", variant, "openvino (f32)"]["value"] - reference) <= 2
    table = summary_table(read_run(finished).metrics)
    shown = next(row for row in table if (row.engine, row.variant) == ("openvino (f32)", variant))
    assert shown.file_bytes == size
    files = networks_of([finished])[variant]
    assert [files.of(engine).name for engine in ("tensorrt", "cuda", "openvino", "onnxruntime")] == [
        f"{variant}.onnx",
        f"{variant}.onnx",
        f"{variant}.openvino.onnx",
        f"{variant}.onnx",
    ]
    assert networks_of([finished])["float"].of("openvino").name == "float.onnx"


def test_training_is_done_once_and_its_weights_are_in_every_file(finished):
    first, other = (load_file(finished / f"qat{t}.safetensors") for t in ("", ".openvino"))
    before = load_file(finished / "ptq.openvino.safetensors")
    weights = [name for name in first if name.endswith("weight")]
    assert weights and all(torch.equal(first[name], other[name]) for name in weights)
    assert any(not torch.equal(before[name], other[name]) for name in weights)
    assert "training followed the placement for tensorrt" in " ".join(read_run(finished).notes)
    tree = {**TREE, "quantization": {**TREE["quantization"], "target": ["tensorrt", "onnxruntime"]}}
    with pytest.raises(RunError, match="quantization.target"):
        compress.run(parse_recipe(tree), "qat", finished, device="cpu", resume=True)


def test_engine_torch_times_the_module(finished):
    rows = {
        (m["variant"], m["engine"])
        for m in json.loads((finished / "metrics.json").read_text())
        if m["name"] == "p50_ms"
    }
    assert {("float", "torch"), ("ptq", "torch (fake quantization)"), ("qat", "torch (fake quantization)")} <= rows
    again = bench_again([finished], compress.BenchSpec(engines=("torch",), batch_sizes=(1,), runs=1, seconds=0.05))
    assert all(m.value for m in again) and {m.batch_size for m in again} == {1}
    (refused,) = bench_again([finished / "qat.onnx"], compress.BenchSpec(engines=("torch",), batch_sizes=(1,)))
    assert refused.value is None and "modules, not files" in refused.reason


def test_export_again_takes_a_target(finished, tmp_path):
    path = export_again(finished, variant="ptq", target="openvino", out=tmp_path / "again.onnx")
    assert zero_points(path) == zero_points(finished / "ptq.openvino.onnx")
    with pytest.raises(RunError, match="the run is for tensorrt, openvino, not for"):
        export_again(finished, target="elsewhere")


@pytest.mark.parametrize(("variant", "target"), [("float", None), ("ptq", "openvino"), ("qat", None)])
def test_a_network_is_loaded_without_its_data(finished, variant, target, monkeypatch):
    def no_data(*_):
        raise AssertionError("load reads no data")

    monkeypatch.setattr("compress.pipeline.saved.load_data", no_data)
    model = compress.load(finished, variant=variant, target=target)
    name = f"{variant}{f'.{target}' if target else ''}.onnx"
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
    torch.testing.assert_close(model(images), on_engine(finished / name, "onnxruntime", images), rtol=1e-2, atol=0.1)
    assert not model.training


def test_weights_are_saved_and_loaded(tmp_path, finished):
    model = compress.load(finished, variant="ptq")
    path = compress.save(model, tmp_path / "mine.safetensors")
    other = compress.insert_quantizers(tiny(), torch.randn(2, 3, 16, 16), compress.QuantSpec(weights=WEIGHTS))
    assert compress.load(path, into=other) is other
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(other(images), model(images))
    for match, call in (
        ("into=model", lambda: compress.load(path)),
        ("leave `into` out", lambda: compress.load(finished, into=other)),
        ("must end in .safetensors", lambda: compress.save(model, tmp_path / "mine.pt")),
        ("holds no 'qta'", lambda: compress.load(finished, variant="qta")),
    ):
        with pytest.raises(compress.CompressError, match=match):
            call()
    assert not (tmp_path / "mine.pt").exists()


def test_predict_names_the_classes_of_pictures(finished, tmp_path):
    bunch = load_digits()
    paths = []
    for i in range(6):
        paths.append(tmp_path / f"{i}.png")
        grey = (bunch.images[i] * (255 / 16)).round().astype("uint8")
        Image.fromarray(grey).resize((64, 64), Image.Resampling.BILINEAR).save(paths[-1])
    found = predict(finished, paths)
    right = sum(one.classes[0][0] == str(digit) for one, digit in zip(found, bunch.target[:6], strict=True))
    assert right >= 4 and all(len(one.classes) == 5 and sum(s for _, s in one.classes) <= 1.001 for one in found)
    (tmp_path / "no.png").write_bytes(b"no picture")
    for bad in ("no.png", "absent.png"):
        with pytest.raises(DataError, match=f"{bad} is not a readable image"):
            predict(finished, [tmp_path / bad])
    with pytest.warns(CompressWarning, match=r"^1 of 7 images are left out: .*no\.png is not a readable image"):
        assert predict(finished, [tmp_path]) == found


def test_the_card_has_the_front_matter_of_hubs_and_the_engines_numbers(finished):
    text = (finished / "model_card.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["pipeline_tag"] == "image-classification" and {"onnx", "ptq", "qat"} <= set(front["tags"])
    values = {m["name"]: m["value"] for r in front["model-index"][0]["results"] for m in r["metrics"]}
    rows = {(m["name"], m["variant"], m["engine"]): m for m in json.loads((finished / "metrics.json").read_text())}
    found = values["top-1, QAT on OpenVINO (f32)"]
    assert found == pytest.approx(rows["top1", "qat", "openvino (f32)"]["value"], abs=1e-4)
    assert yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["quantization"]["target"] == [
        "tensorrt",
        "openvino",
    ]


def test_bundles_hold_the_file_of_their_engine(finished, tmp_path):
    triton = write_bundle(finished, "triton", tmp_path / "triton", name="digits", variant="qat")
    assert [str(p.relative_to(tmp_path)) for p in triton] == [
        "triton/digits/1/model.onnx",
        "triton/digits/config.pbtxt",
    ]
    assert triton[0].read_bytes() == (finished / "qat.onnx").read_bytes()
    session = open_session(triton[0])
    text = triton[1].read_text()
    for tensor in (*session.get_inputs(), *session.get_outputs()):
        dims = ", ".join(map(str, tensor.shape[1:]))
        assert f'name: "{tensor.name}", data_type: TYPE_FP32, dims: [{dims}]' in text
    assert 'backend: "onnxruntime"' in text and 'name: "tensorrt"' in text  # which runs its Q/DQ pairs in INT8
    assert "max_batch_size: 32" in text and "dynamic_batching" in text and text.count("{") == text.count("}")
    (served,) = write_bundle(finished, "openvino", tmp_path / "ovms", variant="ptq")
    assert served.read_bytes() == (finished / "ptq.openvino.onnx").read_bytes()
    with pytest.raises(RunError, match="is there already"):
        write_bundle(finished, "triton", tmp_path / "triton", name="digits")
    with pytest.raises(RunError, match="did you mean 'triton'"):
        write_bundle(finished, "tritn", tmp_path)


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ("openvino", 'backend: "openvino"\nmax_batch_size'),
        ("onnxruntime", 'backend: "onnxruntime"\nmax_batch_size'),
        ("any", 'backend: "onnxruntime"\nmax_batch_size'),
    ],
)
def test_triton_runs_a_file_in_the_engine_that_it_is_made_for(tmp_path, target, head):
    # What a file is made for is the first target of its run; a float file suits each engine.
    folder = Path(shutil.copytree(Path(__file__).parent / "formats" / "run-1", tmp_path / "run"))
    recipe = (folder / "recipe.yaml").read_text()
    assert recipe.count("target: openvino") == 1
    (folder / "recipe.yaml").write_text(recipe.replace("target: openvino", f"target: {target}"))
    _, config = write_bundle(folder, "triton", tmp_path / "int8", variant="ptq")
    assert config.read_text().startswith(head)
    _, config = write_bundle(folder, "triton", tmp_path / "float", variant="float")
    assert config.read_text().startswith('backend: "onnxruntime"\nmax_batch_size')


class Counted:
    def __init__(self, batches):
        self.batches, self.passes = batches, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


@pytest.mark.parametrize("calibrator", further(["mse", "entropy", "max", "lsq"], ["entropy", "lsq"]))
def test_shared_calibration_gives_each_target_the_ranges_of_its_own(calibrator):
    model, batches = tiny().eval(), [torch.randn(8, 3, 16, 16) for _ in range(2)]
    spec = compress.QuantSpec(
        target=("tensorrt", "openvino", "onnxruntime"), activations=compress.ActivationSpec(calibrator=calibrator)
    )
    counted = Counted(batches)
    together = compress.quantize_targets(model, batches[0][:2], counted, spec=spec)
    assert counted.passes == 1 and list(together) == list(spec.targets)
    for target, qmodel in together.items():
        alone = compress.quantize(model, batches[0][:2], batches, spec=spec.for_target(target))
        expected = {name: q.amax for name, q in quantizers(alone)}
        found = {name: q.amax for name, q in quantizers(qmodel)}
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found, expected, rtol=1e-06, atol=0)
        assert qmodel.placement == alone.placement and qmodel.report.calibration.images == 16


def test_what_cannot_be_is_refused_in_one_sentence():
    spec = compress.QuantSpec(target=("tensorrt", "openvino"))
    with pytest.raises(
        QuantizationError,
        match=r"names tensorrt, openvino, and one network follows the rules of one: call compress.quantize_targets",
    ):
        compress.quantize(tiny(), torch.randn(1, 3, 16, 16), [torch.randn(1, 3, 16, 16)], spec=spec)
    for target, match in (
        (["openvino", "openvino"], "several that differ"),
        ([], "name one target"),
        (["openvin"], "did you mean 'openvino'"),
        ("openvin", "did you mean 'openvino'"),
    ):
        with pytest.raises(RecipeError, match=match):
            parse_recipe({"quantization": {"target": target}})


def test_the_file_of_litert_is_the_one_that_it_loads(tmp_path):
    pytest.importorskip("ai_edge_litert", reason="the extra litert is not installed")
    tree = {
        **TREE,
        "train": {"epochs": 0},
        "quantization": {**TREE["quantization"], "target": ["litert", "onnxruntime"]},
        "bench": {**TREE["bench"], "engines": ["litert", "onnxruntime"]},
    }
    listener = Mock(NoProgress)
    compress.run(parse_recipe(tree), "ptq", tmp_path / "run", device="cpu", progress=listener)
    (exported,) = (note.args[0] for note in listener.note.call_args_list if note.args[0].startswith("export: "))
    files = [part.split()[0] for part in exported.removeprefix("export: ").split(", ")]
    assert files == ["float.onnx", "ptq.onnx", "ptq.tflite", "ptq.onnxruntime.onnx"]
    sizes = {
        row.engine: row.file_bytes for row in summary_table(read_run(tmp_path / "run").metrics) if row.variant == "ptq"
    }
    assert sizes["litert"] == (tmp_path / "run" / "ptq.tflite").stat().st_size
    assert sizes["onnxruntime"] == (tmp_path / "run" / "ptq.onnxruntime.onnx").stat().st_size
