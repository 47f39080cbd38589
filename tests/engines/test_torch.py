"""Modules as engines: the module's own results, and the module untouched."""

import numpy as np
import pytest
import torch
from torch import nn

from compress import TorchEngine
from compress.errors import EngineError, EngineUnavailableError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5))


IMAGES = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def test_results_are_those_of_evaluation_mode():
    model = network()
    engine = TorchEngine(model, (3, 8, 8))
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(IMAGES)).numpy()
    np.testing.assert_array_equal(engine.run({"input": IMAGES})["logits"], expected)
    assert engine.info.label == "torch (cpu)"
    assert engine.info.float_precision == "f32"
    assert engine.metadata == {}
    assert [(t.name, t.dtype, t.shape) for t in engine.inputs] == [("input", "float32", (-1, 3, 8, 8))]
    assert [(t.name, t.dtype, t.shape) for t in engine.outputs] == [("logits", "float32", (-1, 5))]


def test_the_callers_module_is_untouched():
    model = network().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = TorchEngine(model, (3, 8, 8), precision="bf16", label="mine")
    first = engine.run({"input": IMAGES})["logits"]
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model[0].weight.zero_()
    np.testing.assert_array_equal(engine.run({"input": IMAGES})["logits"], first)
    assert engine.info.label == "mine"


def test_precision_is_what_ran():
    seen = []

    class Dtype(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            y = self.linear(x)
            seen.append(y.dtype)
            return y

    for precision, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32), (None, torch.float32)):
        engine = TorchEngine(Dtype(), (3,), precision=precision)
        assert seen.pop() == dtype
        assert engine.info.float_precision == (precision or "f32")
        assert engine.run({"input": np.zeros((1, 3), np.float32)})["logits"].dtype == np.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        TorchEngine(Dtype(), (3,), precision="f32")
    assert seen[-1] == torch.float32


def test_other_outputs_have_names():
    class Heads(nn.Module):
        def forward(self, x):
            return {"logits": x, "double": 2 * x}

    class Pair(nn.Module):
        def forward(self, x):
            return x, 2 * x

    class Number(nn.Module):
        def forward(self, x):
            return 3

    x = np.ones((2, 4), np.float32)
    assert {k: v[0, 0] for k, v in TorchEngine(Heads(), (4,)).run({"input": x}).items()} == {"logits": 1, "double": 2}
    assert [t.name for t in TorchEngine(Pair(), (4,)).outputs] == ["output_0", "output_1"]
    with pytest.raises(EngineError, match="returned int"):
        TorchEngine(Number(), (4,))


def test_threads_are_given_back():
    class Threads(nn.Module):
        def forward(self, x):
            return x.new_full((1, 1), torch.get_num_threads())

    before = torch.get_num_threads()
    engine = TorchEngine(Threads(), (1,), threads=before + 1)
    assert engine.run({"input": np.zeros((1, 1), np.float32)})["logits"].item() == before + 1
    assert torch.get_num_threads() == before


def test_refusals():
    with pytest.raises(EngineError, match="failed to run the module"):
        TorchEngine(network(), (4, 8, 8))
    with pytest.raises(EngineError, match="not a device"):
        TorchEngine(network(), (3, 8, 8), device="gpu")
    with pytest.raises(EngineUnavailableError, match="no device 'cuda:99'"):
        TorchEngine(network(), (3, 8, 8), device="cuda:99")
    with pytest.raises(EngineError, match="did you mean 'f16'"):
        TorchEngine(network(), (3, 8, 8), precision="fp16")
    with TorchEngine(network(), (3, 8, 8)) as engine, pytest.raises(EngineError, match="is float64"):
        engine.run({"input": IMAGES.astype(np.float64)})
    with pytest.raises(EngineError, match="closed"):
        engine.run({"input": IMAGES})
