"""Samples of tensors in ONNX Runtime's blocked layout are those of the tensors in the file's order."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from compress import QuantSpec
from compress.onnx_ptq import calibrate, passes
from compress.onnx_ptq.blocked import BLOCKS, Blocked, BlockedSamples, blocked_session, with_block
from compress.onnx_ptq.load import load_source
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.calibration.histogram import drawn_from
from tests.onnx_ptq.files import batches, export


def blocked(plain, block):
    """Write (N, C, H, W) in blocks, value by value as the layout is defined; beyond the channels there is NaN."""
    images, channels, height, width = plain.shape
    groups = -(-channels // block)
    memory = np.full((images, groups, height, width, block), np.nan, np.float32)
    for channel in range(channels):
        memory[:, channel // block, :, :, channel % block] = plain[:, channel]
    return Blocked(values=memory.reshape(images, groups * block, height, width), channels=channels, block=block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(3, 32, 40, 41), (2, 24, 63, 64), (1, 5, 3, 7), (3, 40, 1, 1), (2, 16, 150, 151)])
def test_a_sample_holds_the_same_values(shape, block):
    plain = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    tensor, samples = blocked(plain, block), BlockedSamples()
    np.testing.assert_array_equal(tensor.plain(0, len(plain)), plain)
    for start, total in ((0, plain.size), (plain.size, 3 * plain.size), (2 * plain.size, 3 * plain.size)):
        expected = drawn_from(torch.from_numpy(plain.reshape(-1)), start=start, total=total)
        for _ in range(2):  # places that are computed, and places that are remembered
            found = samples.draw(tensor, start=start, total=total)
            assert (found.amax, found.every) == (np.abs(plain).max(), expected.every)
            for ours, theirs in ((found.values, expected.values), (found.rest, expected.rest)):
                assert torch.equal(ours.sort().values, theirs.sort().values)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("channels", [3, 8, 24, 32])
def test_a_block_of_another_size_is_found_out(channels, block):
    plain = np.random.default_rng(0).normal(size=(3, channels, 5, 5)).astype(np.float32)
    beside = with_block({"x": blocked(plain, block)}, block)
    assert passes.independent({"x": plain[1:2]}, beside, 3, ["x"])
    other = next(size for size in BLOCKS if size != block)
    assert not passes.independent({"x": plain[1:2]}, with_block(beside, other), 3, ["x"])


@pytest.mark.parametrize("channels", [24, 32])
def test_values_that_are_known_to_be_positive_need_no_minimum(channels):
    plain = np.random.default_rng(0).random((2, channels, 9, 9), np.float32)
    for start, total in ((0, plain.size), (0, 1 << 20)):
        assert BlockedSamples().draw(blocked(plain, 16), start=start, total=total, signed=False).amax == plain.max()
    plain[1, channels - 1, 8, 8] = np.nan
    assert np.isnan(BlockedSamples().draw(blocked(plain, 16), start=0, total=plain.size, signed=False).amax)


def test_a_value_that_is_no_number_is_found():
    plain = np.zeros((1, 8, 2, 2), np.float32)
    plain[0, 7, 1, 1] = np.nan
    assert np.isnan(BlockedSamples().draw(blocked(plain, 8), start=0, total=plain.size).amax)


class Wide(nn.Module):
    """Convolutions of 24 and 32 channels: of a block and a half, and of whole blocks; a sum, and a pool."""

    def __init__(self):
        super().__init__()
        self.stem, self.again = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 24, 3, 1, 1)
        self.wide, self.fc = nn.Conv2d(24, 32, 1), nn.Linear(32, 5)

    def forward(self, x):
        x = nn.functional.relu6(self.stem(x))
        x = self.again(x) + x
        return self.fc(nn.functional.max_pool2d(self.wide(x), 2).mean((2, 3)))


@pytest.fixture
def wide(tmp_path):
    return load_source(export(Wide(), tmp_path / "float.onnx", x=torch.randn(2, 3, 96, 96)))


def test_blocked_results_are_those_of_onnx_runtime(wide):
    names = [node.output[0] for node in wide.proto.graph.node if node.op_type in {"Conv", "Clip", "Add", "Concat"}]
    plain, session = blocked_session(wide, names, set(names), threads=1)
    feed = {"picture": batches(size=96)[0].numpy()}
    expected, found = plain.run(feed), session.run(feed)
    tensors = [name for name, value in found.items() if isinstance(value, Blocked)]
    if not tensors:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no blocked layout on this processor")
    same = [
        all(np.allclose(with_block(found, block)[name].plain(0, 4), expected[name][:4]) for name in tensors)
        for block in BLOCKS
        if all(found[name].values.shape[1] % block == 0 for name in tensors)
    ]
    assert any(same)


def test_ranges_do_not_depend_on_the_layout(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(passes, "_PIECE", 1)
    data = [batch.tile(4, 1, 1, 1) * torch.rand(16, 1, 1, 1) for batch in batches(size=96)]

    def ranges(name):
        out = tmp_path / f"{name}.onnx"
        return quantize_onnx_file(wide.path, data, spec=QuantSpec(target="openvino"), out=out).calibration

    drawn = []
    draw = BlockedSamples.draw
    monkeypatch.setattr(BlockedSamples, "draw", lambda *a, **k: drawn.append(1) or draw(*a, **k))
    found = ranges("blocked")
    layout = bool(drawn)
    monkeypatch.setattr(calibrate, "blocked_session", lambda *a, **k: 1 / 0)
    drawn.clear()
    expected = ranges("plain")
    assert not drawn
    for name, amax in expected.amax.items():
        torch.testing.assert_close(found.amax[name], amax, rtol=1e-6, atol=0)
    for name, (counts, _) in expected.histograms.items():
        assert torch.equal(found.histograms[name][0], counts)
    if not layout:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no blocked layout on this processor")
