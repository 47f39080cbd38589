# `prune` on a small network: zeros in the files, masks held through QAT, and a stop in the middle.

import dataclasses
import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from compress import build_model, evaluate, load_data, run
from compress.audit.onnx import audit_sparsity
from compress.data.memory import MemorySplit
from compress.errors import AuditError, RecipeError
from compress.pipeline.saved import export_again
from compress.recipe.tree import parse_recipe
from tests.further import further

TREE = {
    "model": {"name": "tests.networks:tiny", "options": {"width": 16}},
    "data": {"image_size": 16, "batch_size": 64, "train_images": 512, "val_images": 200},
    "train": {"epochs": 2, "lr": 0.05},
    "sparsity": {"pattern": "2:4", "kernels": "any", "permute": True, "permute_seconds": 0.2},
    "finetune": {"epochs": 1, "lr": 0.02},
    "quantization": {"target": "tensorrt", "calibration_images": 128},
    "qat": {"epochs": 1, "lr": 0.01},
    "bench": {
        "engines": ["onnxruntime", "tensorrt-rtx"],
        "batch_sizes": [1],
        "runs": 3,
        "seconds": 0.2,
        "sm": [89, 120],
    },
}
RECIPE = parse_recipe(TREE)
UNTIMED = {"bench": {"engines": [], "batch_sizes": []}}
MASKED = ("block1.conv1", "block1.conv2", "block2.conv1", "block2.conv2")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    out, epochs, draw = tmp_path_factory.mktemp("prune") / "run", [], MemorySplit.draw

    def watched(self, indices, *, epoch, device):
        if epoch is not None and epochs[-1:] != [epoch]:
            epochs.append(epoch)
        return draw(self, indices, epoch=epoch, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemorySplit, "draw", watched)
        run(RECIPE, "prune", out, device="cpu")
    return out, epochs


@pytest.fixture(scope="module")
def finished(finished_run):
    return finished_run[0]


def constant(path, layer):
    # The weight of a layer in a file, integers where it is quantized; read without our own code.
    model = onnx.load(path)
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    producers = {n.output[0]: n for n in model.graph.node}
    node = next(n for n in model.graph.node if n.name == f"/{layer.replace('.', '/')}/Conv")
    name = node.input[1]
    return arrays[producers[name].input[0] if name in producers else name]


@pytest.mark.parametrize("variant", ["sparse", "sparse-ptq", "sparse-qat"])
@pytest.mark.parametrize("layer", MASKED)
def test_two_of_four_in_the_files(variant, layer, finished):
    weight = constant(finished / f"{variant}.onnx", layer)
    assert weight.dtype == (np.float32 if variant == "sparse" else np.int8)
    assert (np.count_nonzero(np.moveaxis(weight, 1, -1).reshape(-1, 4), axis=1) <= 2).all()
    assert np.count_nonzero(weight) > 0.35 * weight.size


def test_no_phase_sees_images_in_an_order_that_another_has_seen(finished_run):
    # Two epochs of the baseline, one of fine-tuning, one of QAT: each shuffles and augments by a number of its own.
    assert finished_run[1] == [0, 1, 2, 3]


def test_the_rest_stays_dense(finished):
    assert np.count_nonzero(constant(finished / "sparse.onnx", "conv1")) > 0.9 * 16 * 3 * 9
    rows = json.loads((finished / "sparsity.json").read_text())["rows"]
    assert all(row["reason"] for row in rows if not row["eligible"])
    assert {row["layer"] for row in rows if row["eligible"]} >= set(MASKED)


def test_the_report_says_how_little_there_is_to_gain(finished):
    (note,) = [n for n in json.loads((finished / "notes.json").read_text()) if n.startswith("2:4 makes")]
    assert "times as fast (a100, int8" in note and "1.00 where layers of fewer than 256 channels stay dense" in note
    assert note in (finished / "report.md").read_text()


def test_qat_trained_with_the_zeros_held(finished):
    before, after = (constant(finished / f"sparse-{v}.onnx", "block2.conv2") for v in ("ptq", "qat"))
    assert (before != after).any()
    assert (after[before == 0] == 0).mean() > 0.9  # what rounded to zero may come back; what was masked may not


def test_a_stopped_run_takes_the_masks_that_it_had_found(finished, tmp_path):
    # A timed search does not find the same permutation twice, so the second half must not search again.
    #
    # Measurements are kept: only the networks after the masks are made again.
    out = shutil.copytree(finished, tmp_path / "again")
    state = json.loads((out / "state.json").read_text())
    again = {"sparse", "sparse-ptq", "sparse-qat"}
    assert again < state["steps"].keys()
    state["steps"] = {k: v for k, v in state["steps"].items() if k not in again}
    (out / "state.json").write_text(json.dumps(state))
    for name in ("sparse.safetensors", "sparse-qat.safetensors"):
        (out / name).unlink()
    (out / "notes.json").unlink()
    run(RECIPE, "prune", out, resume=True, device="cpu")
    at_most = [n for n in json.loads((finished / "notes.json").read_text()) if n.startswith("2:4 makes")]
    assert len(at_most) == 1 and at_most[0] in json.loads((out / "notes.json").read_text())
    here, there = (load_file(folder / "sparse.safetensors") for folder in (out, finished))
    torch.testing.assert_close(here, there, rtol=0, atol=0)  # the order of a file's metadata is random


@pytest.mark.parametrize("variant", further(["sparse", "sparse-ptq", "sparse-qat"], ["sparse-qat"]))
def test_a_sparse_network_is_written_again_as_it_was(variant, finished, tmp_path):
    path = export_again(finished, variant=variant, out=tmp_path / "again.onnx")
    for layer in MASKED:
        np.testing.assert_array_equal(constant(path, layer), constant(finished / f"{variant}.onnx", layer))


def test_engines_for_gpus_that_are_not_here_and_what_is_known_of_their_zeros(finished):
    built = {row["variant"]: row for row in json.loads((finished / "engines.json").read_text())}
    assert {(row["status"], *row["sms"]) for row in built.values()} == {("built", 89, 120)} and len(built) == 5
    audits = {row["variant"]: row for row in json.loads((finished / "engine_audit.json").read_text())}
    assert all((finished / built[variant]["file"]).is_file() for variant in audits)
    for variant in ("sparse-ptq", "sparse-qat"):
        row = audits[variant]
        assert row["int8_share"] == 1.0
        masked = {node for layer in row["layers"] if layer["role"] == "weighted" for node in layer["onnx_nodes"]}
        assert {f"/{layer.replace('.', '/')}/Conv" for layer in MASKED} <= masked
        count = len([r for r in audit_sparsity(finished / f"{variant}.onnx") if r.violations == 0 and r.zeros >= 0.5])
        assert row["sparse_kernels"] == f"{count}, kernels chosen when it runs" and count >= len(MASKED)
    assert audits["float"]["sparse_kernels"] == ""
    assert "layers with 2:4 weights" in (finished / "report.md").read_text()


def test_audit_finds_a_broken_pattern(finished, tmp_path):
    rows = {row.name: row for row in audit_sparsity(finished / "sparse-qat.onnx")}
    assert rows["/block1/conv1/Conv"].violations == 0 and rows["/block1/conv1/Conv"].dtype == "int8"
    assert rows["/conv1/Conv"].violations is None  # three input channels are no groups of four
    model = onnx.load(finished / "sparse.onnx")
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.ndim == 4 and value.shape[1] % 4 == 0:
            tensor.CopyFrom(numpy_helper.from_array(np.ones_like(value), tensor.name))
    onnx.save(model, tmp_path / "dense.onnx")
    broken = {row.name: row for row in audit_sparsity(tmp_path / "dense.onnx")}
    assert broken["/block1/conv1/Conv"].violations == 16 * 16 * 9 // 4
    with pytest.raises(AuditError, match="does not exist"):
        audit_sparsity(tmp_path / "none.onnx")


def pruned(finished, out, finetune=TREE["finetune"], **sparsity):
    # A run that only prunes the float network of another one: its recipe, and its weights before and after.
    model = {**TREE["model"], "weights": str(finished / "float.safetensors")}
    tree = {**TREE, "model": model, "train": {"epochs": 0}, "finetune": finetune, "quantization": None, "qat": None}
    done = parse_recipe({**tree, **UNTIMED, "sparsity": {"kernels": "any", **sparsity}})
    run(done, "prune", out, device="cpu")
    return done, *(load_file(out / name) for name in ("float.safetensors", "sparse.safetensors"))


def test_without_fine_tuning_batchnorm_is_recalibrated(finished, tmp_path):
    # From the same float network: masks alone, and masks with the statistics measured again.
    out = tmp_path / "r"
    done, before, after = pruned(finished, out, {"epochs": 0}, pattern="2:4")
    assert all((before[k] != after[k]).any() for k in before if k.endswith("running_mean"))
    assert torch.equal(before["block1.bn1.weight"], after["block1.bn1.weight"])
    notes = json.loads((out / "notes.json").read_text())
    assert sum("finetune.epochs is 0" in note for note in notes) == 1

    model = build_model(done.model, num_classes=10)
    data = load_data(done.data)
    model.load_state_dict(after)
    again = evaluate(model, data.val, batch_size=64)
    model.load_state_dict({**after, **{k: v for k, v in before.items() if "running" in k}})
    assert again.loss < evaluate(model, data.val, batch_size=64).loss

    run(done, "prune", out, resume=True, device="cpu")
    assert json.loads((out / "notes.json").read_text()) == notes


def test_second_order_keeps_the_statistics_that_its_weights_fit(finished, tmp_path):
    spec = {"pattern": "2:4", "saliency": "hessian", "calibration_images": 64}
    _, before, after = pruned(finished, tmp_path / "r", {"epochs": 0}, **spec)
    assert all(torch.equal(before[k], after[k]) for k in before if "running" in k)
    assert (after["block2.conv2.weight"].unflatten(1, (-1, 4)) != 0).sum(2).max() <= 2


def test_channels_go_through_the_same_command(finished, tmp_path):
    pruned(finished, tmp_path / "c", pattern="channel:0.4")
    report = json.loads((tmp_path / "c" / "sparsity.json").read_text())
    assert report["macs_after"] < 0.75 * report["macs_before"]
    assert (tmp_path / "c" / "sparse.onnx").stat().st_size < (tmp_path / "c" / "float.onnx").stat().st_size


def test_masks_that_nothing_would_close_are_refused():
    tree = {**TREE, "sparsity": {"pattern": "2:4", "schedule": "gradual"}, "finetune": {"epochs": 0}}
    with pytest.raises(RecipeError, match=r"gradual.*finetune\.epochs is 0"):
        parse_recipe(tree)


def test_prune_needs_its_section(tmp_path):
    with pytest.raises(RecipeError, match="needs a `sparsity` section"):
        run(dataclasses.replace(RECIPE, sparsity=None), "prune", tmp_path / "x")
