import copy
import csv
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from compress import TrainSpec, fit
from compress.errors import CheckpointError
from compress.training.checkpoint import (
    BestWeights,
    Parts,
    WeightAverage,
    load_model,
    read_checkpoint,
    read_tensors,
    restore_checkpoint,
    save_checkpoint,
    save_model,
    write_tensors,
)
from compress.training.passes import QUIET
from tests.fresh import finish, start
from tests.networks import minimized, unchanged
from tests.training.processes import run_tasks
from tests.training.toy import convnet, linear, toy_data


class Buffers(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"tensor{i}", tensor)


def load_checkpoint(path, parts, *, identity):
    return restore_checkpoint(read_checkpoint(path, identity), parts)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@settings(max_examples=25)
@given(
    parts=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_any_state_comes_back(tmp_path_factory, parts, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [(5 * torch.randn(shape, generator=generator)).to(dtype) for dtype, shape in parts]
    path = tmp_path_factory.mktemp("state") / "model.safetensors"
    save_model(Buffers(tensors), path, {"seed": seed})
    empty = Buffers([torch.zeros_like(tensor) for tensor in tensors])
    assert load_model(empty, path) == {"seed": seed}
    assert same(empty.state_dict(), Buffers(tensors).state_dict())


def test_tied_views_and_channels_last(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "conv": nn.Conv2d(3, 4, 3)})
        model["b"].weight = model["a"].weight
        base = torch.randn(6)
        model.register_buffer("low", base[:4])
        model.register_buffer("high", base[2:])
        return model.to(memory_format=torch.channels_last)

    path = save_model(build(1), tmp_path / "model.safetensors")
    model = build(2)
    load_model(model, path)
    assert same(model.state_dict(), build(1).state_dict())
    assert model["b"].weight is model["a"].weight
    assert load_file(path)["conv.weight"].equal(model["conv"].weight)
    assert model["conv"].weight.is_contiguous(memory_format=torch.channels_last)


def trained(seed=0, optimizer=torch.optim.AdamW, steps=2, model=None):
    model = convnet(seed) if model is None else model
    optimizer = optimizer(model.parameters(), lr=0.1)
    minimized(optimizer, lambda: model(torch.randn(4, 3, 6, 6)).square().mean(), steps)
    return Parts(model=model, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False))


IDENTITY = {"lr": 0.1, "epochs": 3, "clip": None}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "train.checkpoint.safetensors"
    return save_checkpoint(path, trained(), identity=IDENTITY, position={"epoch": 1, "loss": 0.1 + 0.2})


def test_checkpoint_comes_back(checkpoint):
    fresh = trained(seed=1, steps=0)
    assert load_checkpoint(checkpoint, fresh, identity=IDENTITY) == {"epoch": 1, "loss": 0.1 + 0.2}
    states = fresh.optimizer.state_dict()["state"].values()
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 2 for state in states)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.5, -1])
def test_truncated(checkpoint, kept):
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    assert_refused(checkpoint, "no whole safetensors file")


def assert_refused(path, message, identity=IDENTITY, fresh=None):
    fresh = fresh or trained(seed=1, steps=1)
    optimizer = json.dumps(fresh.optimizer.state_dict(), default=lambda tensor: tensor.tolist())
    with unchanged(fresh.model), pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, fresh, identity=identity)
    assert json.dumps(fresh.optimizer.state_dict(), default=lambda tensor: tensor.tolist()) == optimizer


def test_foreign(checkpoint, tmp_path):
    assert_refused(tmp_path / "absent.safetensors", "there is no checkpoint at")
    assert_refused(tmp_path, "no whole safetensors file")
    (tmp_path / "text").write_text("not a checkpoint, but long enough for a header")
    assert_refused(tmp_path / "text", "no whole safetensors file")
    torch.save(convnet().state_dict(), tmp_path / "pickle")
    assert_refused(tmp_path / "pickle", "no whole safetensors file")
    save_file(convnet().state_dict(), tmp_path / "other")
    assert_refused(tmp_path / "other", "of another program, not a checkpoint")
    save_model(convnet(), tmp_path / "model")
    assert_refused(tmp_path / "model", "is a model, not a checkpoint")
    with pytest.raises(CheckpointError, match="is a checkpoint, not a model"):
        load_model(convnet(), checkpoint)


def test_other_training(checkpoint):
    words = r"epochs \(3 there, 'absent' here\), lr \(0.1 there, 0.2 here\), seed \('absent' there, 1"
    assert_refused(checkpoint, words, {"lr": 0.2, "clip": None, "seed": 1})
    assert_refused(checkpoint, r"clip \(None there, 1\.0 here\)", {**IDENTITY, "clip": 1.0})
    for same_identity in ({"lr": 0.1, "epochs": 3}, {**IDENTITY, "more": None}):  # no value, and no key, are the same
        load_checkpoint(checkpoint, trained(seed=1, steps=1), identity=same_identity)


def test_other_model(checkpoint, tmp_path):
    fresh = trained(seed=1, steps=1)
    fresh.model = linear()
    assert_refused(
        checkpoint, r"7 unexpected: 0\.bias, .* and 2 more; 2 different: 1\.weight \(.*\(8,\) there", fresh=fresh
    )
    path = save_model(linear(classes=3), tmp_path / "model")
    for model, words in (
        (linear(), r"1.bias \(torch.float32 \(3,\) there, torch.float32 \(4,\) here\)"),
        (linear(classes=3).bfloat16(), "bfloat16"),
    ):
        with unchanged(model), pytest.raises(CheckpointError, match=words):
            load_model(model, path)


def test_other_frozen_layers(checkpoint):
    fresh = trained(seed=1, steps=1)
    fresh.optimizer = torch.optim.AdamW(fresh.model[0].parameters())
    assert_refused(checkpoint, r"optimizer state optimizer\.1\.bias\.exp_avg of shape .*frozen", fresh=fresh)


def test_only_tensors_are_saved(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"_extra_state.*dict"):
        save_model(Extra(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_model(linear(), tmp_path / "file" / "model")


def test_states_of_the_optimizer_come_back_in_the_memory_format_of_their_parameters(tmp_path):
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)).to(memory_format=torch.channels_last)
    saved, loaded = (trained(model=copy.deepcopy(layers), steps=steps) for steps in (1, 0))
    path = save_checkpoint(tmp_path / "c.safetensors", saved, identity={}, position={})
    load_checkpoint(path, loaded, identity={})
    state = loaded.optimizer.state[loaded.model[0].weight]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last) and state["step"].shape == ()
    assert not state["exp_avg"].is_contiguous()


def test_states_that_are_none_are_left_out(tmp_path):
    before = trained(optimizer=torch.optim.SGD)  # without momentum, its buffer is None
    path = save_checkpoint(tmp_path / "c", before, identity={}, position={"epoch": 0})
    after = trained(seed=1, optimizer=torch.optim.SGD, steps=0)
    assert load_checkpoint(path, after, identity={}) == {"epoch": 0}
    assert same(before.model.state_dict(), after.model.state_dict())


def test_the_gradient_scaler_comes_back_and_is_missed(tmp_path):
    before, after = trained(), trained(seed=1, steps=0)
    before.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    after.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    path = save_checkpoint(tmp_path / "c", before, identity={}, position={})
    load_checkpoint(path, after, identity={})
    assert after.scaler.get_scale() == 8.0
    path = save_checkpoint(tmp_path / "none", trained(), identity={}, position={})
    with pytest.raises(CheckpointError, match="holds no state of the gradient scaler"):
        load_checkpoint(path, after, identity={})


def test_the_mean_and_the_best_weights_come_back(tmp_path):
    before, after = trained(), trained(seed=1, steps=0)
    for parts in (before, after):
        parts.average, parts.best = WeightAverage(parts.model, 0.5), BestWeights(parts.model)
    mean, best = before.average, before.best
    best.load({name: tensor + 1 for name, tensor in before.model.state_dict().items()})
    path = save_checkpoint(tmp_path / "c", before, identity={}, position={"epoch": 2})
    assert load_checkpoint(path, after, identity={}) == {"epoch": 2}
    assert same(after.average.means, mean.means) and same(after.best.state, best.state) and mean.means and best.state
    load_checkpoint(path, trained(seed=2, steps=0), identity={})  # neither is asked for


@pytest.mark.parametrize("key", ["optimizer.6.bias.exp_avg", "optimizer.6.nothing.exp_avg", "optimizer.step"])
def test_a_state_of_the_optimizer_that_fits_nothing_is_refused(checkpoint, key):
    contents = read_checkpoint(checkpoint, IDENTITY)
    write_tensors(checkpoint, "checkpoint", {**contents.tensors, key: torch.zeros(7)}, contents.data)
    assert_refused(checkpoint, rf"optimizer state {key} of shape \(7,\) that fits no trainable parameter")


def test_tensors_that_share_no_memory_are_stored_each(tmp_path):
    # Empty ones have no memory to share; equal values in other memory are two tensors.
    tensors = [torch.zeros(0), torch.zeros(0), torch.ones(3), torch.ones(3), torch.ones(3)[None].expand(2, 3)]
    path = save_model(Buffers(tensors), tmp_path / "model")
    assert set(load_file(path)) == {f"tensor{i}" for i in range(5)}
    empty = Buffers([torch.zeros(tensor.shape) for tensor in tensors])
    load_model(empty, path)
    assert same(empty.state_dict(), Buffers(tensors).state_dict())


def test_tied_tensors_are_stored_once(tmp_path):
    one = torch.randn(4, 4)
    path = save_model(Buffers([one, one, one.T, one[:2]]), tmp_path / "model")
    assert set(load_file(path)) == {"tensor0", "tensor2", "tensor3"}
    content = read_tensors(path, "model")
    assert content.version == 2 and content.tensors["tensor1"] is content.tensors["tensor0"]
    assert torch.equal(content.tensors["tensor2"], one.T) and torch.equal(content.tensors["tensor3"], one[:2])


def test_the_header_says_which_torch_wrote_it(tmp_path):
    path = save_model(linear(), tmp_path / "model", {"a": 1})
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["compress"])
    wanted = {"kind": "model", "version": 2, "torch": torch.__version__, "data": {"a": 1}}
    assert header.items() >= wanted.items()
    assert load_model(linear(seed=1), save_model(linear(), tmp_path / "bare")) == {}


# Checkpoints and weights of every format so far, in tests/training/formats: each must load in this and later
# versions.
# The files of a format were written by the version that introduced it, with `training(folder, progress=Stop(4))` and
# `save_model(linear(), ...)`. They are never written anew; a new format adds its own.

FORMATS = Path(__file__).parent / "formats"
VERSIONS = sorted(int(path.stem.partition("-")[2]) for path in FORMATS.glob("checkpoint-*"))
SPEC = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0, optimizer="adamw", ema_decay=0.9)


def training(folder, *, progress=QUIET, resume=False):
    model = linear()
    return model, fit(model, toy_data(), SPEC, batch_size=16, folder=folder, resume=resume, progress=progress)


def test_the_formats_begin_with_the_first():
    assert list(range(1, len(VERSIONS) + 1)) == VERSIONS and len(VERSIONS) >= 2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_goes_on(version, tmp_path):
    whole, _ = training(tmp_path / "whole")
    shutil.copy(FORMATS / f"checkpoint-{version}.safetensors", tmp_path / "train.checkpoint.safetensors")
    resumed, report = training(tmp_path, resume=True)
    assert report.resumed_from == 3 and report.steps == 6
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0.0001, atol=1e-05)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_loads(version):
    path, model = FORMATS / f"model-{version}.safetensors", linear()
    assert load_model(model, path) == {"step": "train"}
    assert same(load_file(path), model.state_dict())


def split(content):
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header, data):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


EDITS = {
    "no version": lambda c: c.pop("version"),
    "version as text": lambda c: c.update(version="1"),
    "version true": lambda c: c.update(version=True),
    "version 0": lambda c: c.update(version=0),
    "shared names nothing": lambda c: c.update(shared={"model.x": "nope"}),
    "shared is a list": lambda c: c.update(shared=[1]),
    "no data": lambda c: c.pop("data"),
    "data is null": lambda c: c.update(data=None),
    "unknown key": lambda c: c.update(foo=1),
    "no identity": lambda c: c["data"].pop("identity"),
    "no position": lambda c: c["data"].pop("position"),
    "no history": lambda c: c["data"]["position"].pop("history"),
    "position of a later version": lambda c: c["data"]["position"].update(foo=1),
    "row of a later version": lambda c: c["data"]["position"]["history"][0].update(foo=1),
    "row without lr": lambda c: c["data"]["position"]["history"][0].pop("lr"),
    "epoch as text": lambda c: c["data"]["position"].update(epoch="1"),
    "negative epoch": lambda c: c["data"]["position"].update(epoch=-3),
    "step 999": lambda c: c["data"]["position"].update(epoch=0, step=999, history=[]),
    "no epochs": lambda c: c["data"]["identity"].pop("epochs"),
    "other epochs": lambda c: c["data"]["identity"].update(epochs=9),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_header_is_refused_and_nothing_is_loaded(version, name, tmp_path):
    header, data = split((FORMATS / f"checkpoint-{version}.safetensors").read_bytes())
    content = json.loads(header["__metadata__"]["compress"])
    EDITS[name](content)
    header["__metadata__"]["compress"] = json.dumps(content)
    (tmp_path / "train.checkpoint.safetensors").write_bytes(joined(header, data))
    with pytest.raises(CheckpointError):
        training(tmp_path, resume=True)


@pytest.mark.parametrize("header", ["{", "null", "[" * 100_000, "9" * 5000, '{"kind": "checkpoint", "version": 99}'])
def test_a_header_that_is_none_is_refused(header, tmp_path):
    whole, data = split((FORMATS / "checkpoint-2.safetensors").read_bytes())
    whole["__metadata__"]["compress"] = header
    (tmp_path / "train.checkpoint.safetensors").write_bytes(joined(whole, data))
    with pytest.raises(CheckpointError, match="version 99" if "99}" in header else None):
        training(tmp_path, resume=True)


def test_any_flipped_bit_is_found(tmp_path):
    content = (FORMATS / "model-2.safetensors").read_bytes()
    path, model = tmp_path / "model.safetensors", linear(seed=1)
    with unchanged(model):
        for position in range(0, len(content), 5):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                load_model(model, path)


# kill -9, in real processes: see tests/training/processes.py for when each is killed.


def run(folder, *tasks):
    said = folder / "said"
    finish(said, start(said, run_tasks, folder, tasks))
    return {task: json.loads((folder / task / "ends.json").read_text()) for task in tasks}, said.read_text()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    ends, errors = run(folder, "killed")
    return folder / "killed", ends["killed"], errors


def rows(path):
    times = {"images_per_s", "seconds", "waited"}
    return [{k: v for k, v in row.items() if k not in times} for row in csv.DictReader(path.read_text().splitlines())]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_ends_with_the_same_bits(killed, optimizer):
    folder, ends, errors = killed
    assert ends[optimizer] == [-9] * 6 + [0, 0], errors
    whole, resumed = folder / optimizer / "whole", folder / optimizer / "killed"
    expected, got = (load_file(path / "final.safetensors") for path in (whole, resumed))
    assert {n: v.numpy().tobytes() for n, v in expected.items()} == {n: v.numpy().tobytes() for n, v in got.items()}
    assert any("running_var" in name for name in got)


def test_table_is_that_of_an_undisturbed_run(killed):
    folder = killed[0] / "sgd"
    whole, resumed = rows(folder / "whole" / "train.csv"), rows(folder / "killed" / "train.csv")
    assert [row["step"] for row in whole] == ["5", "10", "15"]
    assert whole == resumed


def test_nothing_is_left_lying_about_and_a_finished_training_is_not_repeated(killed):
    folder = killed[0] / "sgd" / "killed"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["final.safetensors", "train.checkpoint.safetensors", "train.csv"]
    with safe_open(folder / "final.safetensors", "pt") as file:
        assert json.loads(file.metadata()["compress"])["data"] == {"resumed_from": 15, "steps": 15}


def test_full_disk_leaves_the_last_checkpoint(killed):
    folder, ends, errors = killed
    assert ends["full disk"] == 0, errors
    facts = json.loads((folder / "full" / "facts.json").read_text())
    assert "cannot write" in facts["message"] and facts["files"] == ["train.checkpoint.safetensors"]
    whole, full = (load_file(folder / name / "final.safetensors") for name in ("sgd/whole", "full"))
    assert same(whole, full)
