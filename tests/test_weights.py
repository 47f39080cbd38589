import collections
import re

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

from compress.errors import CheckpointError
from compress.models.weights import load_weights, read_state_dict


def network(classes=3, width=4, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        collections.OrderedDict(
            conv=nn.Conv2d(3, width, 3), norm=nn.BatchNorm2d(width), flat=nn.Flatten(), head=nn.Linear(width, classes)
        )
    )


def same(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


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


def test_old_densenet_names(tmp_path):
    source, model = (torchvision.models.DenseNet(4, (1, 1), 8, num_classes=3) for _ in range(2))
    old = {re.sub(r"\.(norm|conv)([12])\.", r".\1.\2.", name): t for name, t in source.state_dict().items()}
    assert set(old) != set(source.state_dict())
    load_weights(model, saved(tmp_path / "w.pth", old))
    assert same(model, source)


def test_layers_whose_loading_asks_for_their_version(tmp_path):
    source, model = (torchvision.models.mnasnet0_5(num_classes=3) for _ in range(2))
    load_weights(model, saved(tmp_path / "w.safetensors", dict(source.state_dict())))
    assert same(model, source)


def test_a_classifier_of_other_classes_is_left_out_where_that_is_allowed(tmp_path):
    source, model, fresh = network(classes=7, seed=1), network(seed=2), network(seed=2)
    file = saved(tmp_path / "w.pth", source.state_dict())
    (note,) = load_weights(model, file, num_classes=3)
    assert "7 classes, not 3" in note
    assert "head.weight" in note
    assert same(model.head, fresh.head)
    assert same(model.conv, source.conv)
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
    state = network(seed=1).state_dict()
    change(state)
    model, fresh = network(seed=2), network(seed=2)
    with pytest.raises(CheckpointError, match=f"belongs to another model; nothing was loaded.*{message}"):
        load_weights(model, saved(tmp_path / "w.pth", state), num_classes=num_classes)
    assert same(model, fresh)


def test_other_widths_are_not_taken_for_other_classes(tmp_path):
    state = network(classes=3, width=6).state_dict()
    with pytest.raises(CheckpointError, match="of another shape"):
        load_weights(network(classes=3, width=3), saved(tmp_path / "w.pth", state), num_classes=3)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.99])
def test_a_truncated_file(tmp_path, name, kept):
    file = saved(tmp_path / name, network().state_dict())
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * kept)])
    model, fresh = network(seed=2), network(seed=2)
    with pytest.raises(CheckpointError, match=r"truncated|damaged"):
        load_weights(model, file)
    assert same(model, fresh)


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_loading_runs_no_code(tmp_path):
    torch.save({"state_dict": Exploit(tmp_path / "ran")}, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"can run code. Save model\.state_dict\(\)"):
        read_state_dict(tmp_path / "w.pth")
    assert not (tmp_path / "ran").exists()


def test_a_whole_model_is_refused(tmp_path):
    torch.save(network(), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"Save model\.state_dict"):
        read_state_dict(tmp_path / "w.pt")


@pytest.mark.parametrize("content", [{}, [1, 2], torch.zeros(3), {"lr": 0.1}, {"state_dict": {"a": 3}}])
def test_files_without_named_tensors(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="named tensors"):
        read_state_dict(tmp_path / "w.pt")


def test_a_file_that_is_not_there_or_of_another_kind(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights file .*none\.pt"):
        read_state_dict(tmp_path / "none.pt")
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"allowed endings: \.safetensors"):
        read_state_dict(tmp_path / "w.onnx")
