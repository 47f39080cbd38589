"""receptive-field, erf and roofline as a user meets them."""

import json

import pytest
import torch
import torchvision


def test_receptive_field_of_a_name(compress, tmp_path):
    done = compress("receptive-field", "--model", "resnet50", "--image-size", "64", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    sizes = [row["local_size"] for row in document["rows"] if row["kind"] == "conv"]
    assert max(sizes) == [427, 427]
    assert all((tmp_path / path).stat().st_size > 1000 for path in document["files"])


def test_erf_of_a_recipe_at_two_layers(compress, tmp_path):
    layers = ("--layer", "layer1.0", "--layer", "layer2.0")
    small = ("--set", "data.image_size=32", "--images", "4")
    done = compress("erf", "--recipe", "resnet18", *small, *layers, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    fields = json.loads((tmp_path / document["numbers"]).read_text())["fields"]
    assert [field["layer"] for field in fields] == ["layer1.0", "layer2.0"]
    assert "random weights" in document["weights"]
    assert 0 < fields[0]["radius_50_px"] < fields[1]["radius_50_px"]
    page = (tmp_path / document["page"]).read_text()
    assert "layer1.0" in page and 'src="http' not in page
    assert "random weights (seed 0)" in page


def test_erf_of_a_model_takes_weights_and_says_which_it_has(compress, tmp_path):
    torch.manual_seed(3)
    trained = torchvision.models.resnet18(num_classes=1000)
    torch.save(trained.state_dict(), tmp_path / "mine.pth")
    small = ("--model", "resnet18", "--image-size", "32", "--images", "2", "--layer", "layer1.0")
    fields = {}
    for weights, words in (((), "random weights (seed 0)"), (("--weights", "mine.pth"), "weights of mine.pth")):
        done = compress("erf", *small, *weights, cwd=tmp_path)
        assert done.returncode == 0 and f"network: resnet18, {words}" in done.stdout
        assert f"The network has {words}." in (tmp_path / "runs/erf/erf.html").read_text()
        document = json.loads((tmp_path / "runs/erf/erf.json").read_text())
        assert document["weights"] == words
        fields[words] = document["fields"]
    assert len({json.dumps(found) for found in fields.values()}) == 2  # the weights of the file were looked at


def test_roofline_bounds_a_network(compress, tmp_path):
    arguments = ("--model", "resnet18", "--image-size", "64", "--device", "a100", "--precision", "int8", "--json")
    done = compress("roofline", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (tmp_path / document["figure"]).is_file()
    assert "resnet18" in json.dumps(document["roofline"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("erf",), "give one of --recipe and --model"),
        (("erf", "--model", "resnet18", "--layer", "layer1.O"), "layer1.0"),
        (("erf", "--run", "nowhere"), "nowhere"),
        (("erf", "--run", "nowhere", "--model", "resnet18"), "leave out --recipe, --model and --weights"),
        (("erf", "--recipe", "resnet18", "--weights", "a.pt"), "--weights goes with --model"),
        (("erf", "--model", "resnet18", "--weights", "nowhere.pt"), "nowhere.pt"),
        (("receptive-field", "--model", "resnet5O"), "did you mean"),
        (("roofline", "--model", "resnet18", "--image-size", "32", "--device", "h20"), "did you mean"),
        (("roofline", "--model", "resnet18", "--image-size", "32", "--device", "t4", "--precision", "fp8"), "fp8"),
    ],
)
def test_refusals(compress, arguments, text, tmp_path):
    done = compress(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
