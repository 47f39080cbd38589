import json

import pytest

from compress import load_data, run
from compress.errors import AuditError, RecipeError
from compress.pipeline.run import Run, read_state
from compress.pipeline.steps.export import check_required
from compress.pipeline.studies.explore import FORMS, Form, FormResult, best, with_overrides
from compress.recipe.tree import parse_recipe

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 64, "train_images": 128},
    "train": {"epochs": 1, "lr": 0.05},
    "quantization": {"target": "openvino", "calibration_images": 64, "activations": {"calibrator": "max"}},
    "qat": None,
    "bench": {"engines": ["openvino"], "batch_sizes": [1], "runs": 1, "seconds": 0.05},
}


def recipe(*overrides):
    return parse_recipe(TREE, overrides)


def test_openvino_meets_int8(tmp_path):
    asked, folder = recipe("export.require=int8"), tmp_path / "run"
    run(asked, "ptq", folder, device="cpu")
    (row,) = json.loads((folder / "engine_audit.json").read_text())
    assert row["variant"] == "ptq" and row["engine"].startswith("openvino") and row["unmet"] == []
    (folder / "engine_audit.json").unlink()  # as of a run on engines that do not tell of their layers
    with pytest.raises(AuditError, match="no engine of this run tells"):
        check_required(Run(recipe=asked, folder=read_state(folder), data=load_data(asked.data)))


@pytest.mark.release
def test_rtx_is_audited_and_required(tmp_path):
    asked = recipe(
        "bench.engines=[tensorrt-rtx]",
        "bench.sm=[89]",
        "quantization.target=tensorrt",
        "quantization.rules=[]",
        "export.precision=fp16",
        "export.channel_scales=output",
        "export.require=int8",
    )
    folder = tmp_path / "run"
    run(asked, "ptq", folder, device="cpu")
    rows = {row["variant"]: row for row in json.loads((folder / "engine_audit.json").read_text())}
    assert set(rows) == {"float", "ptq"}
    assert rows["ptq"]["int8_share"] == 1.0 and rows["float"]["int8_share"] == 0.0
    assert rows["ptq"]["unmet"] == [] and rows["ptq"]["kernels"] == len(rows["ptq"]["layers"])
    assert "What the engines made of it" in (folder / "report.md").read_text()
    rows["ptq"]["unmet"] = ["1 of 2 layers is not"]
    (folder / "engine_audit.json").write_text(json.dumps(list(rows.values())))
    with pytest.raises(AuditError, match="ptq on tensorrt-rtx SM 89: 1 of 2 layers is not"):
        run(asked, "ptq", folder, resume=True, device="cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["export.require=int8", "quantization=null"], "nothing would be INT8"),
        (["export.require=fp16"], "export.precision is fp32"),
        (["export.require=fp8"], "export.require"),
    ],
)
def test_what_cannot_be_met_is_refused(overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe(*overrides)


def test_forms_are_overrides_that_the_recipe_takes():
    base = recipe("quantization.target=tensorrt")
    found = {form.name: with_overrides(base, form.overrides) for form in FORMS}
    assert found["fp16"].quantization is None and found["fp16"].export.precision == "fp16"
    assert found["INT8, fp16, one scale a weight"].quantization.weights.axis is None
    assert len({(r.digest(), f.where_it_pays) for r, f in zip(found.values(), FORMS, strict=True)}) == len(FORMS)
    with pytest.raises(RecipeError):
        with_overrides(base, ("export.presicion=fp16",))


def test_the_best_form():
    def row(form, moved, agreement, sm=89, share=1.0, error=""):
        return FormResult(
            form=form,
            overrides=(),
            sm=sm,
            activation_bytes=moved,
            kernels=3,
            int8_share=share,
            agreement=agreement,
            error=error,
        )

    rows = [row("a", 3.0, 1.0), row("b", 1.0, 0.5), row("c", 2.0, 0.99, share=0.0), row("d", 0.5, 1.0, error="no")]
    rows.append(row("a", 1.0, 1.0, sm=120))
    assert {sm: r.form for sm, r in best(rows).items()} == {89: "c", 120: "a"}
    assert best(rows, least_agreement=0.4)[89].form == "b"
    with pytest.raises(AuditError, match="98%"):
        best([row("b", 1.0, 0.5)])


def test_exploring_a_small_network(tmp_path):
    import torch
    from torch import nn

    from compress.engines.tensorrt.options import TensorRTOptions
    from compress.pipeline.studies.explore import Explorer

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x = torch.randn(4, 3, 16, 16)
    explorer = Explorer(
        model=model.eval(),
        recipe=recipe("quantization.target=tensorrt"),
        example=x[:2],
        calibration=[x],
        images=x,
        folder=tmp_path,
        options=TensorRTOptions(sms=(89, 120)),
    )
    chosen = [f for f in FORMS if f.name in {"fp16", "INT8, fp16, scales after"}]
    rows = explorer.explore([*chosen, Form(name="nowhere", overrides=("quantization.rules=[{match: nothing}]",))])
    assert [(r.form, r.sm) for r in rows if not r.error] == [(f.name, sm) for f in chosen for sm in (89, 120)]
    assert all(r.sqnr_db > 15 and r.least_ms is None for r in rows if not r.error)
    assert {r.int8_share for r in rows if r.form == "INT8, fp16, scales after"} == {1.0}
    assert all(r.error for r in rows if r.form == "nowhere")
    assert not list(tmp_path.glob("*.engine"))
