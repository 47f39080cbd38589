import collections
import re
import sys

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

from compress import ModelSpec, build_model
from compress.errors import CheckpointError, ModelError
from compress.models.by_name import build_model_with_notes, fit_state, read_state_dict
from tests.data.test_cifar import Exploit
from tests.networks import unchanged

SMALL = "shufflenet_v2_x0_5"
OWN_KEYS = ("num_classes", "weights", "pretrained")


def load_weights(model, path, num_classes=None):
    return fit_state(model, read_state_dict(path), source=str(path), num_classes=num_classes).notes


def build(name, *, num_classes=5, **values):
    return build_model(ModelSpec(name=name, **values), num_classes=num_classes)


def same(model, other):
    mine, theirs = model.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def tiny(num_classes, width=4):\n"
        "    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.LazyLinear(num_classes))\n"
        "def plain():\n    return nn.Identity()\n"
        "def nothing(num_classes):\n    return 3\n"
        "class Zoo:\n    linear = staticmethod(lambda num_classes: nn.Linear(2, num_classes))\n"
        "def leaves(num_classes):\n    raise SystemExit\n"
        "def fetches(num_classes):\n    raise OSError('no route to host')\n"
        "number = 3\n"
    )
    (tmp_path / "broken_models.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("my_models", "broken_models"):
        sys.modules.pop(name, None)


# --- torchvision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [SMALL, f"torchvision:{SMALL}", "ShuffleNet_V2_x0_5"])
def test_torchvisions_model_for_the_datas_classes(name):
    model = build(name)
    torch.manual_seed(0)  # as each test begins
    assert same(model, torchvision.models.get_model(SMALL, num_classes=5))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_more_classes_than_the_data_has_but_not_fewer():
    assert build(SMALL, num_classes=5)(torch.zeros(2, 3, 32, 32)).shape[1] == 5
    wide = build_model(ModelSpec(name=SMALL, num_classes=8), num_classes=5)
    assert wide(torch.zeros(2, 3, 32, 32)).shape[1] == 8
    with pytest.raises(ModelError, match="num_classes is 4, but the data has 5"):
        build_model(ModelSpec(name=SMALL, num_classes=4), num_classes=5)


def test_options_reach_the_maker():
    model = build("squeezenet1_1", options={"dropout": 0.125})
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.125]


@pytest.mark.parametrize(("name", "size"), [("googlenet", 64), ("inception_v3", 96)])
def test_models_with_auxiliary_classifiers_train_with_plain_outputs(name, size):
    model = build(name)
    assert model.training
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 5)
    assert not model.transform_input


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("resnet500", {}, r"no classifier 'resnet500', did you mean .*'resnet50'"),
        ("fasterrcnn_resnet50_fpn", {}, "no classifier 'fasterrcnn_resnet50_fpn': it is one for task: detection"),
        ("resnet18", {"options": {"colour": 3}}, r"model\.options {'colour': 3} .*colour"),
        *((SMALL, {"options": {key: 3}}, rf"model\.options\.{key} is not an option") for key in OWN_KEYS),
        ("resnet50", {"weights": "IMAGENET1K_V3"}, r"'IMAGENET1K_V3', did you mean .*resnet50 has IMAGENET1K_V1, IM"),
        ("resnet50", {"weights": "ResNet18_Weights.IMAGENET1K_V1"}, "ResNet50_Weights"),
        ("timm:test_resnt", {}, r"timm .* has no model 'test_resnt', did you mean 'test_resnet'"),
        ("timm:test_resnet", {"weights": "DEFAULT"}, "`pretrained` or a file"),
        (
            "timm:test_resnet",
            {"weights": "pretrained"},
            r"test_resnet are not on this machine.*set model\.weights to its path",
        ),
        ("my_models:tiny", {"weights": "DEFAULT"}, "must be a file"),
    ],
)
def test_refusals(factory, offline, name, values, message):
    with pytest.raises(ModelError, match=message):
        build(name, **values)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.manual_seed(7)
    model = torchvision.models.get_model(SMALL)
    url = torchvision.models.get_model_weights(SMALL).DEFAULT.url
    torch.save(model.state_dict(), folder / url.rsplit("/", 1)[1])
    return model


@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "DEFAULT", "ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1"])
def test_torchvisions_weights(cache, weights):
    built = build_model_with_notes(ModelSpec(name=SMALL, weights=weights), num_classes=1000)
    assert built.notes == ()
    assert same(built.model, cache)


def test_torchvisions_weights_for_other_classes_keep_all_but_the_classifier(cache):
    torch.manual_seed(0)
    model, (note,), classes = build_model_with_notes(ModelSpec(name=SMALL, weights="DEFAULT"), num_classes=5)
    assert classes == 1000 and "1000 classes, not 5" in note
    torch.manual_seed(0)
    fresh = torchvision.models.get_model(SMALL, num_classes=5)
    for part, oracle in (("conv1", cache), ("stage4", cache), ("fc", fresh)):
        assert same(model.get_submodule(part), oracle.get_submodule(part))


def test_weights_that_cannot_be_fetched(cache, tmp_path):
    words = rf"SqueezeNet1_1_Weights.*squeezenet1_1-\w+\.pth failed.*put it at {tmp_path}.*or set"
    with pytest.raises(ModelError, match=words):
        build("squeezenet1_1", weights="DEFAULT")
    assert [p.name for p in (tmp_path / "hub" / "checkpoints").iterdir() if "squeeze" in p.name] == []


# --- files -----------------------------------------------------------------------------------------------------


def test_weights_from_a_file(tmp_path):
    source = torchvision.models.get_model(SMALL, num_classes=9)
    file = tmp_path / "w.pth"
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in source.state_dict().items()}}, file)
    assert same(build(SMALL, num_classes=9, weights=str(file)), source)
    _, notes, _ = build_model_with_notes(ModelSpec(name=SMALL, weights=str(file)), num_classes=5)
    assert any("9 classes, not 5" in note for note in notes)


def test_weights_from_a_function_that_returns_their_path(factory, tmp_path, monkeypatch):
    file = tmp_path / "w.pth"
    torch.save(nn.Linear(2, 5).state_dict(), file)
    (tmp_path / "my_weights.py").write_text(
        f"class File:\n    path = staticmethod(lambda: {str(file)!r})\n"
        "def fails():\n    raise OSError('no disk')\n"
        "def number():\n    return 3\n"
    )
    model = build("my_models:Zoo.linear", weights="my_weights:File.path")
    assert torch.equal(model.weight, torch.load(file)["weight"])
    for name, message in (
        ("fails", r"model.weights my_weights:fails fails \(OSError: no disk\)"),
        ("number", "returned 3, not the path of a file"),
        ("path", "has no 'path'"),
    ):
        with pytest.raises(ModelError, match=message):
            build("my_models:Zoo.linear", weights=f"my_weights:{name}")


def test_a_file_with_auxiliary_classifiers(tmp_path):
    source = torchvision.models.googlenet(num_classes=5, init_weights=False)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    spec = ModelSpec(name="googlenet", weights=str(tmp_path / "w.pth"))
    model, notes, _ = build_model_with_notes(spec, num_classes=5)
    assert any("aux1" in note for note in notes)
    assert same(model.inception5b, source.inception5b)


def test_a_file_of_another_model_or_none(tmp_path):
    torch.save(torchvision.models.get_model("squeezenet1_1").state_dict(), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="another model"):
        build(SMALL, weights=str(tmp_path / "w.pth"))
    with pytest.raises(CheckpointError, match="no weights file"):
        build(SMALL, weights=str(tmp_path / "none.safetensors"))


# --- timm ------------------------------------------------------------------------------------------------------


def test_timms_model():
    model = build("timm:test_resnet")
    torch.manual_seed(0)  # as each test begins
    assert same(model, timm.create_model("test_resnet", num_classes=5))


def test_timms_weights_from_a_file(tmp_path):
    source = timm.create_model("test_resnet", num_classes=9)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    model, notes, _ = build_model_with_notes(
        ModelSpec(name="timm:test_resnet", weights=str(tmp_path / "w.pth")), num_classes=5
    )
    assert same(model.layer1, source.layer1)
    assert "9 classes, not 5" in notes[0]


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def test_timm_without_weights_of_its_own(offline):
    pretrained = {name.split(".")[0] for name in timm.list_models("resnet*", pretrained=True)}
    name = min(set(timm.list_models("resnet*")) - pretrained)
    with pytest.raises(ModelError, match=f"no pretrained weights of {name}"):
        build(f"timm:{name}", weights="pretrained")


def test_timm_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"needs timm .*compress-vision\[timm\]"):
        build("timm:test_resnet")


# --- a function of the user's ----------------------------------------------------------------------------------


def test_a_function_of_the_users(factory):
    model = build("my_models:tiny", options={"width": 6})
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    assert model[0].out_channels == 6
    assert isinstance(build("my_models:Zoo.linear"), nn.Linear)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_models:leaves", r"my_models:leaves cannot be made .*SystemExit"),
        ("my_models:fetches", r"my_models:fetches reads or fetches a file.*no route to host.*weights_backbone: null"),
        ("no_such_package:make", "cannot import no_such_package"),
        ("broken_models:make", "cannot import broken_models .*no_such_module"),
        ("my_models:tinny", "has no 'tinny', did you mean 'tiny'"),
        ("my_models:number", "is a int, not a function"),
        ("my_models:nothing", "returned a int, not a torch.nn.Module"),
        ("my_models:", "has no ''"),
    ],
)
def test_functions_that_do_not_work(factory, name, message):
    with pytest.raises(ModelError, match=message):
        build(name)


def test_a_function_without_a_number_of_classes(factory):
    assert isinstance(build("my_models:plain"), nn.Identity)


def network(classes=3, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        collections.OrderedDict(
            conv=nn.Conv2d(3, width, 3), norm=nn.BatchNorm2d(width), flat=nn.Flatten(), head=nn.Linear(width, classes)
        )
    )


def saved(path, state):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w.bin"])
def test_a_file_of_the_model_itself(tmp_path, name):
    source, model = network(seed=1), network(seed=2)
    assert load_weights(model, saved(tmp_path / name, source.state_dict())) == ()
    assert same(model, source)


@pytest.mark.parametrize("wrap", [lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}, lambda s: s])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_wrappings_are_undone(tmp_path, wrap, prefix):
    source, model = network(seed=1), network(seed=2)
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    notes = load_weights(model, saved(tmp_path / "w.pth", wrap(state)))
    assert same(model, source)
    assert len(notes) == prefix.count(".")


def test_a_model_whose_own_names_begin_like_a_wrapping(tmp_path):
    source, model = (nn.ModuleDict({"model": network(seed=seed)}) for seed in (1, 2))
    load_weights(model, saved(tmp_path / "w.pth", source.state_dict()))
    assert same(model, source)


def test_files_from_before_batches_were_counted(tmp_path):
    source, model = network(seed=1), network(seed=2)
    state = {name: tensor for name, tensor in source.state_dict().items() if "num_batches" not in name}
    load_weights(model, saved(tmp_path / "w.safetensors", state))
    assert same(model, source)


@pytest.mark.parametrize(
    ("make", "written"),
    [
        (
            lambda: torchvision.models.DenseNet(4, (1, 1), 8, num_classes=3),  # its names were others once
            lambda name: re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", name),
        ),
        (lambda: torchvision.models.mnasnet0_5(num_classes=3), str),  # its loading asks for its version
    ],
)
def test_files_of_older_networks(tmp_path, make, written):
    source, model = make(), make()
    state = {written(name): tensor for name, tensor in source.state_dict().items()}
    load_weights(model, saved(tmp_path / "w.pth", state))
    assert same(model, source)


def test_a_classifier_of_other_classes_is_left_out_where_that_is_allowed(tmp_path):
    source, model, fresh = network(classes=7, seed=1), network(seed=2), network(seed=2)
    file = saved(tmp_path / "w.pth", source.state_dict())
    (note,) = load_weights(model, file, num_classes=3)
    assert "7 classes, not 3" in note and "head.weight" in note
    assert same(model.head, fresh.head) and same(model.conv, source.conv)
    with pytest.raises(CheckpointError, match=r"head\.weight \(7, 4\) in the file, \(3, 4\) in the model"):
        load_weights(model, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("conv.weight"), r"1 missing in the file \(conv\.weight\)"),
        (lambda s: s.update(extra=torch.zeros(2)), r"1 unexpected \(extra\)"),
        (lambda s: s.update({"conv.weight": torch.zeros(4, 3, 5, 5)}), r"conv\.weight \(4, 3, 5, 5\) in the file"),
        (lambda s: s.update({"head.weight": torch.zeros(7, 5), "head.bias": torch.zeros(7)}), "2 of another shape"),
    ],
)
@pytest.mark.parametrize("num_classes", [None, 3])
def test_a_file_of_another_model_changes_nothing(tmp_path, change, message, num_classes):
    state, model = network(seed=1).state_dict(), network(seed=2)
    change(state)
    words = f"belongs to another model; nothing was loaded.*{message}"
    with unchanged(model), pytest.raises(CheckpointError, match=words):
        load_weights(model, saved(tmp_path / "w.pth", state), num_classes=num_classes)


def test_other_widths_are_not_taken_for_other_classes(tmp_path):
    state = network(classes=3, width=6).state_dict()
    with pytest.raises(CheckpointError, match="of another shape"):
        load_weights(network(classes=3, width=3), saved(tmp_path / "w.pth", state), num_classes=3)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.99])
def test_a_truncated_file(tmp_path, name, kept):
    file = saved(tmp_path / name, network().state_dict())
    raw, model = file.read_bytes(), network(seed=2)
    file.write_bytes(raw[: int(len(raw) * kept)])
    with unchanged(model), pytest.raises(CheckpointError, match=r"truncated|damaged"):
        load_weights(model, file)


def test_loading_runs_no_code(tmp_path):
    torch.save({"state_dict": Exploit(tmp_path / "ran")}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"can run code. Save model\.state_dict\(\)"):
        read_state_dict(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (network(), r"Save model\.state_dict"),
        *((other, "named tensors") for other in ({}, [1, 2], torch.zeros(3), {"lr": 0.1}, {"state_dict": {"a": 3}})),
    ],
)
def test_files_without_named_tensors(tmp_path, content, words):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=words):
        read_state_dict(tmp_path / "w.pt")


def test_a_file_that_is_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights file .*none\.pt"):
        read_state_dict(tmp_path / "none.pt")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"allowed endings: \.safetensors"):
        read_state_dict(tmp_path / "w.onnx")
