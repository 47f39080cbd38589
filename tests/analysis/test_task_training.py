"""The packing of trained networks: what comes back is the network that was quantized."""

from pathlib import Path

import torch
from torch import nn

import compress
from analysis.task_training.pack import Packer, narrowed, unpack, widened
from compress.pipeline.state import State, read_state_file
from compress.training import load_model, save_model


def quantized() -> tuple[nn.Module, torch.Tensor]:
    """Return a small quantized network and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    images = torch.randn(2, 3, 8, 8)
    return compress.quantize(model, images, [images], spec=compress.QuantSpec(target="openvino")), images


def test_codes_are_the_same_quantized_network() -> None:
    qmodel, images = quantized()
    state = qmodel.state_dict()
    small = narrowed(state)
    assert {t.dtype for name, t in small.items() if name.endswith(".weight")} == {torch.int8}
    with torch.no_grad():
        before = qmodel(images)
        qmodel.load_state_dict(widened(small))
        torch.testing.assert_close(qmodel(images), before, rtol=1e-6, atol=1e-6)


def test_matrices_of_a_float_network_come_back_as_float16() -> None:
    weight, bias = torch.randn(4, 3), torch.randn(4)
    back = widened(narrowed({"fc.weight": weight, "fc.bias": bias}))
    assert torch.equal(back["fc.weight"], weight.half().float())
    assert torch.equal(back["fc.bias"], bias)


def test_a_run_folder_comes_back_with_ptq_still_to_be_done(tmp_path: Path) -> None:
    qmodel, images = quantized()
    folder = tmp_path / "runs" / "net"
    folder.mkdir(parents=True)
    save_model(qmodel, folder / "qat.safetensors")
    State(format=2, command="qat", recipe="x", steps={"train": {}, "ptq": {}, "qat": {}}).write(folder)
    packer = Packer(tmp_path / "runs", tmp_path / "out", None)
    packer.small()
    packer.weights(["net"])
    assert unpack(tmp_path / "out", tmp_path / "back") == [tmp_path / "back" / "net" / "qat.safetensors"]
    assert list(read_state_file(tmp_path / "back" / "net").steps) == ["train", "qat"]
    with torch.no_grad():
        before = qmodel(images)
        load_model(qmodel, tmp_path / "back" / "net" / "qat.safetensors")
        torch.testing.assert_close(qmodel(images), before, rtol=1e-6, atol=1e-6)
