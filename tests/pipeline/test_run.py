# A whole run on a small network and the real digits: what it leaves, how it resumes, what it refuses.

import dataclasses
import json
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest

from compress import load_data, run
from compress.cli import main
from compress.errors import DataError, ModelError, QuantizationError, RecipeError, RunError
from compress.measure.metric import Metric
from compress.pipeline import default_folder
from compress.pipeline.run import open_run, recipe_of
from compress.pipeline.saved import bench_again, export_again, networks_of, variants_in
from compress.recipe.tree import parse_recipe
from compress.report.document import write_report
from tests.exact import WEIGHTS
from tests.fresh import finish, start, two_places
from tests.images import write_images
from tests.networks import tiny

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 200},
    "train": {"epochs": 4, "lr": 0.05},
    "quantization": {"target": "openvino", "calibration_images": 128, "weights": {"num_bits": WEIGHTS.num_bits}},
    "qat": {"epochs": 1},
    "bench": {
        "engines": ["openvino", "onnxruntime", "tensorrt"],
        "batch_sizes": [1],
        "runs": 3,
        "seconds": 0.2,
        "end_to_end": True,
    },
}
RECIPE = parse_recipe(TREE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, whole_figures):
    out = tmp_path_factory.mktemp("run") / "qat"
    with whole_figures():
        run(RECIPE, "qat", out, device="cpu")
    return out


def metrics(folder):
    rows = [Metric.from_dict(row) for row in json.loads((folder / "metrics.json").read_text())]
    return {(m.name, m.variant, m.engine, m.batch_size): m for m in rows}


def test_what_a_run_leaves(finished):
    names = {p.name for p in finished.iterdir()}
    assert names >= {
        "recipe.yaml",
        "environment.json",
        "float.safetensors",
        "ptq.safetensors",
        "qat.safetensors",
        "float.onnx",
        "ptq.onnx",
        "qat.onnx",
        "placement.csv",
        "metrics.json",
        "layers.json",
        "histograms.json",
        "block.json",
        "audit.json",
        "train.csv",
        "qat.csv",
        "figures",
        "report.md",
        "report.html",
    }
    assert recipe_of(finished) == RECIPE
    assert not [n for n in names if n.endswith(".part") or "checkpoint" in n]


def test_numbers_are_the_engines(finished):
    found = metrics(finished)
    for variant in ("float", "ptq", "qat"):
        for engine in ("openvino (f32)", "onnxruntime"):
            assert found["top1", variant, engine, None].value > 50
            assert found["agreement", variant, engine, None].value >= 99
            assert found["p50_ms", variant, engine, 1].value > 0
    missing = found["top1", "qat", "tensorrt", None]
    assert missing.status == "unavailable" and missing.value is None and "tensorrt" in missing.reason.lower()
    assert found["file_bytes", "qat", "", None].value == (finished / "qat.onnx").stat().st_size


def test_the_report_says_where_the_time_goes_from_pictures_to_classes(finished):
    document = json.loads((finished / "end_to_end.json").read_text())
    assert [row["label"].split(": ")[0] for row in document["results"]] == [
        "float",
        "float",
        "ptq",
        "ptq",
        "qat",
        "qat",
    ]
    assert all(tuple(row["stage_ms"]) == ("preprocess", "engine", "postprocess") for row in document["results"])
    assert "tensorrt" in document["unavailable"]
    report = (finished / "report.md").read_text()
    assert "## From images to classes" in report and "The engine, with its copies" in report
    assert (finished / "figures" / "end_to_end.png").read_bytes()[:4] == b"\x89PNG"


def test_a_training_that_takes_accuracy_away_is_told(finished, tmp_path):
    tree = {
        **TREE,
        "model": {"name": "tests.networks:tiny", "weights": str(finished / "float.safetensors")},
        "train": {"epochs": 0},
        "quantization": {"calibration_images": 64},
        "qat": {"epochs": 1, "optimizer": "adamw", "lr": 0.5},
        "bench": {"engines": [], "batch_sizes": []},
    }
    run(parse_recipe(tree), "qat", tmp_path / "run", device="cpu")
    for folder, lost in ((tmp_path / "run", True), (finished, False)):
        rows = metrics(folder)
        before, after = (rows["top1", v, "torch (fake quantization)", None].value for v in ("ptq", "qat"))
        report = (folder / "report.md").read_text()
        assert (after < before - 20) == lost
        assert ("qat.lr 0.5 with adamw is too high" in report and "batchnorm: keep" in report) == lost


def test_calibration_never_sees_the_evaluation_split():
    data = load_data(RECIPE.data)
    assert len(data.train) == 1348 and len(data.val) == 200
    train, val = (_pictures(split) for split in (data.train, data.val))
    assert len(train & val) <= 0.01 * len(val)  # a digit written twice alike may stand in both


def _pictures(split):
    images, _ = split.load(list(range(len(split))), epoch=None, device=torch.device("cpu"))
    return {image.numpy().tobytes() for image in images}


def test_a_finished_run_resumes_at_once_and_stays_the_same(finished):
    before = (finished / "qat.safetensors").read_bytes(), (finished / "metrics.json").read_bytes()
    run(RECIPE, "qat", finished, resume=True, device="cpu")
    assert before == ((finished / "qat.safetensors").read_bytes(), (finished / "metrics.json").read_bytes())


def test_another_recipe_or_no_resume_is_refused(finished):
    other = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, lr=0.01))
    lr = r"another recipe; it differs in train\.lr \(0\.05 there, 0\.01 here\)\. Name .*; taken: train, ptq, qat"
    with pytest.raises(RunError, match=lr):
        run(other, "qat", finished, resume=True)
    with pytest.raises(RunError, match=r"it differs in qat\. Name .*; taken: train"):
        open_run(finished, dataclasses.replace(RECIPE, qat=None), "qat", resume=True)
    before = (finished / "state.json").read_bytes()
    with pytest.raises(RunError, match="a run of `qat`, not of `ptq`"):  # its export is done
        run(RECIPE, "ptq", finished, resume=True)
    assert (finished / "state.json").read_bytes() == before


def test_files_that_cannot_be_read_are_counted_in_the_run(tmp_path):
    write_images(tmp_path)
    (tmp_path / "val" / "a" / "bad.png").write_bytes(b"no picture")
    data = {"name": "folder", "root": str(tmp_path), "image_size": 16, "workers": 0, "on_error": "skip"}
    recipe = parse_recipe({**TREE, "data": data, "train": {"epochs": 0}, "bench": {"engines": []}})
    run(recipe, "train", tmp_path / "run", device="cpu")
    (note,) = [n for n in json.loads((tmp_path / "run" / "notes.json").read_text()) if n.startswith("data: ")]
    assert "1 of the 5 files of val could not be read" in note and "bad.png" in note
    run(recipe, "train", tmp_path / "again", device="cpu", start=tmp_path / "run")
    assert [note for note in json.loads((tmp_path / "again" / "notes.json").read_text()) if "bad.png" in note]


def test_files_of_one_name_are_told_apart(tmp_path):
    files = [tmp_path / name for name in ("a/m.onnx", "b/m.onnx", "n.onnx")]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    found = {name: network.file for name, network in networks_of(files).items()}
    assert found == {str(files[0]): files[0], str(files[1]): files[1], "n": files[2]}


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"thesis\.tex"):
        open_run(tmp_path, RECIPE, "qat", resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_a_killed_process_left_is_swept_up(tmp_path):
    open_run(tmp_path / "run", RECIPE, "qat", resume=False).release()
    (tmp_path / "run" / "figures").mkdir()
    left = [tmp_path / "run" / ".qat.onnx.x1.part", tmp_path / "run" / "figures" / ".latency.png.x2.part"]
    for path in left:
        path.touch()
    (tmp_path / "run" / "recipe.yaml").unlink()
    open_run(tmp_path / "run", RECIPE, "qat", resume=True).release()
    assert not [path for path in left if path.exists()]
    assert recipe_of(tmp_path / "run") == RECIPE


def test_what_is_missing_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(RecipeError, match="needs a `qat` section"):
        run(dataclasses.replace(RECIPE, qat=None), "qat", tmp_path / "a")
    write_images(tmp_path, ["cats"])
    for error, overrides, words in (
        (DataError, {"data": {"name": "folder", "root": str(tmp_path / "nowhere")}}, "nowhere"),
        (DataError, {"data": {"name": "folder", "root": str(tmp_path)}}, "one class, 'cats'"),
        (QuantizationError, {"model": {"name": "tests.networks:halved"}}, "torch.float16"),
        (QuantizationError, {"quantization": {"rules": [{"match": "layr"}]}}, "matches no layer"),
    ):
        with pytest.raises(error, match=words):
            run(parse_recipe({**TREE, **overrides}), "ptq", tmp_path / "a", device="cpu")
    assert not (tmp_path / "a").exists()


def test_networks_of_a_run_export_again(finished, tmp_path):
    assert variants_in(finished) == ["float", "ptq", "qat"]
    path = export_again(finished, precision="fp16", out=tmp_path / "half.onnx")
    assert 0 < path.stat().st_size < (finished / "float.onnx").stat().st_size
    with pytest.raises(RunError, match="did you mean 'qat'"):
        export_again(finished, variant="qta")


def test_bench_takes_files(finished):
    rows = bench_again([finished / "qat.onnx"], dataclasses.replace(RECIPE.bench, engines=("onnxruntime",)))
    assert {m.name for m in rows} == {"p50_ms", "p90_ms", "p99_ms", "images_per_s"}
    with pytest.raises(RunError, match="not both"):
        bench_again([finished, finished / "qat.onnx"], RECIPE.bench)


def test_default_folders_never_meet(tmp_path):
    first = default_folder("resnet50.yaml", "qat", resume=False, parent=tmp_path)
    assert first.name == "resnet50-qat"
    first.mkdir()
    second = default_folder("resnet50.yaml", "qat", resume=False, parent=tmp_path)
    assert second.name == "resnet50-qat-2"
    second.mkdir()
    assert default_folder("recipes/resnet50.yaml", "qat", resume=True, parent=tmp_path) == second


def with_engines(*names):
    return dataclasses.replace(RECIPE, bench=dataclasses.replace(RECIPE.bench, engines=names, end_to_end=False))


def command_line(command, recipe, out, *options):
    sys.argv = ["compress", command, "--recipe", str(recipe), "--out", str(out), *options]
    main()


def test_kill_9_and_resume_end_with_the_same_weights(finished, tmp_path):
    # Killed in the float training; test_resume.py stops a run at later moments, and compares all that follows.
    out, recipe = tmp_path / "killed", tmp_path / "tiny.yaml"
    recipe.write_text(with_engines().to_yaml())
    process = start(tmp_path / "said", command_line, "train", recipe, out, CUDA_VISIBLE_DEVICES="")
    while process.is_alive() and not (out / "train.csv").exists():
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "said").read_text()
    assert not (out / "report.html").exists()
    run(with_engines(), "train", out, resume=True, device="cpu")
    assert (out / "report.html").exists()
    whole, resumed = (load_file(folder / "float.safetensors") for folder in (finished, out))
    torch.testing.assert_close(whole, resumed, rtol=0, atol=0)


@pytest.mark.release
def test_two_processes_give_the_metrics_of_one(finished, tmp_path):
    (tmp_path / "tiny.yaml").write_text(with_engines("onnxruntime").to_yaml())
    arguments = command_line, "qat", tmp_path / "tiny.yaml", tmp_path / "two", "--device", "cpu"
    both = [start(tmp_path / f"said-{i}", *arguments, **place) for i, place in enumerate(two_places())]
    finish(tmp_path / "said-0", *both)
    one, two = metrics(finished), metrics(tmp_path / "two")
    for variant in ("float", "qat"):
        key = ("top1", variant, "onnxruntime", None)
        assert abs(one[key].value - two[key].value) <= 8  # points; seeds of this small training differ by about that
    assert two["agreement", "qat", "onnxruntime", None].value >= 99


@pytest.mark.parametrize("command", ["train", "ptq"])
def test_weights_for_other_classes_are_refused_where_nothing_trains_their_classifier(tmp_path, command):
    torch.save(tiny(num_classes=3).state_dict(), tmp_path / "three.pth")
    tree = {**TREE, "model": {**TREE["model"], "weights": str(tmp_path / "three.pth")}, "train": {"epochs": 0}}
    with pytest.raises(ModelError, match=r"classifies 3 classes.*10.*train.epochs is 0.*random.*train.epochs of 1 or"):
        run(parse_recipe(tree), command, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_an_untrained_network_and_its_pair_are_told_in_the_report(tmp_path):
    # 18 images bound a change no closer than one in six: the oracle is the exact binomial interval.
    tree = {
        "model": {"name": "tests.networks:narrow"},
        "data": {"image_size": 16, "batch_size": 16, "val_images": 18},
        "train": {"epochs": 0},
        "quantization": {"target": "onnxruntime", "calibration_images": 16},
        "bench": {"engines": ["onnxruntime"], "batch_sizes": [1], "runs": 30, "seconds": 0.5},
    }
    run(parse_recipe(tree), "ptq", tmp_path / "run", device="cpu")
    recipe = tmp_path / "run" / "recipe.yaml"  # a network of torchvision would be measured for longer; own ones may
    recipe.write_text(recipe.read_text().replace("tests.networks:narrow", "squeezenet1_1"))  # bring their weights
    report = write_report(tmp_path / "run")[0].read_text()
    assert "The float network is untrained (random weights, train.epochs 0)" in report
    found = metrics(tmp_path / "run")
    times = {variant: found["p50_ms", variant, "onnxruntime", 1] for variant in ("float", "ptq")}
    pair = [found.get((name, "ptq", "onnxruntime", 1)) for name in ("speed", "speed_low", "speed_high")]
    if any(one.status == "partial" for one in times.values()):
        assert pair == [None] * 3 and "not measured" in report
    else:
        assert pair[1].value <= pair[0].value <= pair[2].value
        assert f"{pair[1].value:.2f}× to {pair[2].value:.2f}×" in report and "against float on onnxruntime" in report
    bound = 100 * binomtest(0, 18).proportion_ci(method="exact").high
    rows = [row for row in json.loads((tmp_path / "run" / "intervals.json").read_text()) if row["variant"] == "ptq"]
    assert rows and all(row["difference_high"] - row["difference_low"] >= bound for row in rows)


def test_a_float_network_is_taken_over_from_a_finished_run(finished, tmp_path):
    # Another quantization of the same training: no epoch is trained again, and another training is refused.
    untimed = {"quantization": {**TREE["quantization"], "calibration_images": 64}, "bench": {"engines": []}}
    folder = run(parse_recipe({**TREE, **untimed}), "ptq", tmp_path / "again", device="cpu", start=finished)
    mine, theirs = (load_file(path / "float.safetensors") for path in (tmp_path / "again", finished))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert (tmp_path / "again" / "train.csv").read_text() == (finished / "train.csv").read_text()
    assert (
        folder.facts_of("train")["top1"] == json.loads((finished / "state.json").read_text())["steps"]["train"]["top1"]
    )
    longer = parse_recipe({**TREE, "train": {"epochs": 5, "lr": 0.05}})
    with pytest.raises(RunError, match=r"differs in train\.epochs \(4 there, 5 here\)"):
        run(longer, "ptq", tmp_path / "other", device="cpu", start=finished)
    assert not (tmp_path / "other").exists()
