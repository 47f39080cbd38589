"""Checkpoints and weights of every format so far, in tests/training/formats: each must load in this and later versions.

The files of a format were written by the version that introduced it, with `training(folder, stop=True)` and
`save_model(linear(), ...)`. They are never written anew; a new format adds its own.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress import TrainSpec, fit
from compress.errors import CheckpointError
from compress.support.progress import NoProgress
from compress.training.checkpoint import load_model
from tests.training.toy import linear, toy_data

FORMATS = Path(__file__).parent / "formats"
VERSIONS = sorted(int(path.stem.partition("-")[2]) for path in FORMATS.glob("checkpoint-*"))
SPEC = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0, optimizer="adamw", ema_decay=0.9)


class Stop(NoProgress):
    """Stops a training in its second epoch."""

    steps = 0

    def advance(self, task, amount=1, **fields):
        self.steps += task == "train"
        if self.steps == 4:
            raise KeyboardInterrupt


def training(folder, *, stop=False, resume=False):
    """The training that the files are of: stopped after its first epoch, resumed, or whole."""
    torch.manual_seed(0)
    model = linear()
    try:
        report = fit(
            model,
            toy_data(),
            SPEC,
            batch_size=16,
            folder=folder,
            resume=resume,
            **({"progress": Stop()} if stop else {}),
        )
    except KeyboardInterrupt:
        return None, None
    return model, report


def test_the_formats_begin_with_the_first():
    assert list(range(1, len(VERSIONS) + 1)) == VERSIONS and len(VERSIONS) >= 2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_goes_on(version, tmp_path):
    whole, _ = training(tmp_path / "whole")
    shutil.copy(FORMATS / f"checkpoint-{version}.safetensors", tmp_path / "train.checkpoint.safetensors")
    resumed, report = training(tmp_path, resume=True)
    assert report.resumed_from == 3 and report.steps == 6
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_loads(version):
    path, model = FORMATS / f"model-{version}.safetensors", linear()
    assert load_model(model, path) == {"step": "train"}
    expected = load_file(path)
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(expected[name], tensor) for name, tensor in model.state_dict().items())


def split(content):
    """The header and the data of a safetensors file: eight bytes of length, then JSON."""
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
    with pytest.raises(CheckpointError):
        training(tmp_path, resume=True)


def test_any_flipped_bit_is_found(tmp_path):
    content = (FORMATS / "model-2.safetensors").read_bytes()
    path, model = tmp_path / "model.safetensors", linear(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for position in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load_model(model, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
