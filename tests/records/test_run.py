import json

import numpy as np
import pytest

from compress.errors import RunError
from compress.records import read_run
from tests.report.sample import sample_epochs, sample_layers, sample_metrics, sample_placement


def test_reads_everything_that_the_sample_holds(run_folder):
    run = read_run(run_folder)
    assert [m.to_dict() for m in run.metrics] == sample_metrics()
    assert [row.tensor for row in run.placement] == [row["tensor"] for row in sample_placement()]
    assert {row.num_bits for row in run.placement if row.decision == "float"} == {None}
    assert {(row.axis, row.signed) for row in run.placement if row.decision == "quantize"} == {(None, True), (0, True)}
    assert [row.val_top1 for row in run.qat] == [
        r["val_top1"] for r in sample_epochs(2, lr=1, start=0.9806, end=0.9833)
    ]
    assert run.train[2].val_top1 is None  # an empty cell: not evaluated after the third epoch
    assert [row.activation_sqnr_db for row in run.layers] == [r["activation_sqnr_db"] for r in sample_layers()]
    assert len(run.histograms) == 54
    assert sum(row.int8 for row in run.operations) == 106
    assert run.environment is not None and run.environment["cores"] == 2
    assert run.recipe is not None and "resnet50" in run.recipe
    assert not run.absent


def test_every_part_may_be_missing_and_says_so(tmp_path):
    (tmp_path / "metrics.json").write_text("[]")
    run = read_run(tmp_path)
    assert (run.recipe, run.environment) == (None, None)
    assert (run.metrics, run.layers, run.train, run.histograms) == ((), (), (), ())
    assert set(run.absent) == {
        "recipe.yaml",
        "environment.json",
        "placement.csv",
        "train.csv",
        "qat.csv",
        "layers.json",
        "histograms.json",
        "audit.json",
        "notes.json",
    }
    assert all(name in reason for name, reason in run.absent.items())


def test_refuses_what_is_no_run_folder(tmp_path):
    with pytest.raises(RunError, match="not a folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"holds none of a run's files"):
        read_run(tmp_path)


def block(edges, kind="int8"):
    boxes = {name: {"title": name, "detail": "", "kind": kind} for name in ("a", "b")}
    return json.dumps({"block": "", "target": "tensorrt", "boxes": boxes, "edges": edges})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.json", "[{", "not JSON"),
        ("metrics.json", "{}", "list of objects"),
        ("metrics.json", '[{"name": "top1"}]', "missing variant"),
        ("layers.json", '[{"kind": "conv"}]', "row 1: name"),
        (
            "layers.json",
            '[{"name": "a", "kind": "conv"}, {"name": "b", "kind": "conv", "macs": "many"}]',
            "row 2: macs",
        ),
        ("environment.json", "[]", "one object"),
        ("train.csv", "epoch,step,lr\n1,2,0.1\n", "row 1: train_loss"),
        ("train.csv", "epoch,step,lr,train_loss,train_top1\nfirst,2,0.1,1,1\n", "row 1: epoch"),
        ("placement.csv", "tensor,layer,decision,num_bits\nx,y,quantize,eight\n", "row 1: num_bits"),
        ("histograms.json", '[{"name": "a", "counts": [1, 2], "bin_edges": [0, 1, 2, 3], "amax": 1}]', "bin edges"),
        ("histograms.json", '[{"name": "a", "counts": [], "bin_edges": [0, 1], "amax": 1}]', "bin edges"),
        ("notes.json", '{"a": 1}', "list of texts"),
        ("block.json", "[]", "an object with `boxes`"),
        ("block.json", '{"block": "", "target": "tensorrt", "boxes": {}, "edges": []}', "must hold boxes"),
        ("block.json", block([["b", "a"]]), "edges from one to a later one"),
        ("block.json", block([["a", "c"]]), "edges from one to a later one"),
        ("block.json", block([], kind="round"), "boxes.a.kind"),
        ("audit.json", '[{"variant": "qat", "name": "a", "op_type": "Conv"}]', "row 1: int8"),
    ],
)
def test_refuses_a_file_that_is_something_else_with_its_path(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=message) as caught:
        read_run(tmp_path)
    assert name in str(caught.value)


def test_refuses_bytes_that_are_no_text(tmp_path):
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match=r"train.csv cannot be read"):
        read_run(tmp_path)


def test_columns_and_keys_of_later_versions_do_no_harm(tmp_path):
    (tmp_path / "layers.json").write_text(json.dumps([{"name": "a", "kind": "conv", "colour": "red"}]))
    (tmp_path / "qat.csv").write_text(
        "epoch,step,lr,train_loss,train_top1,images_per_s,seconds,mood\n1,2,0.1,0.5,0.9,80,9,good\n"
    )
    run = read_run(tmp_path)
    assert run.layers[0].name == "a"
    assert run.qat[0].train_top1 == 0.9


def test_infinite_sqnr_is_a_number(tmp_path):
    row = {"name": "a", "kind": "conv", "weight_sqnr_db": "inf", "activation_sqnr_db": None}
    (tmp_path / "layers.json").write_text(json.dumps([row]))
    layer = read_run(tmp_path).layers[0]
    assert layer.weight_sqnr_db is not None and np.isinf(layer.weight_sqnr_db)
    assert layer.activation_sqnr_db is None
