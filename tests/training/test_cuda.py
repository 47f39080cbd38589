import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import compress
from tests.training.test_loop import explodes
from tests.training.toy import convnet, linear, smooth, toy_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def train(model, folder=None, *, resume=False, teacher=None, **spec):
    spec = compress.TrainSpec(**{"epochs": 4, "warmup_epochs": 0.5, "lr": 0.1, **spec})
    options = {"folder": folder, "resume": resume, "teacher": teacher, "device": "cuda"}
    return compress.fit(model, toy_data(train=96), spec, batch_size=8, **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_learns_as_on_the_cpu(tmp_path, precision, optimizer):
    lr = {"sgd": 0.1, "adamw": 0.01}[optimizer]
    report = train(convnet(), tmp_path, precision=precision, optimizer=optimizer, lr=lr, clip_grad_norm=5.0)
    assert report.final.top1 > 0.9


def test_same_weights_as_the_cpu():
    here, there = smooth(), smooth()
    train(there)
    compress.fit(
        here, toy_data(train=96), compress.TrainSpec(epochs=4, warmup_epochs=0.5, lr=0.1), batch_size=8, folder=None
    )
    for name, value in here.state_dict().items():
        torch.testing.assert_close(there.state_dict()[name].cpu(), value, rtol=0, atol=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_goes_on_from_a_checkpoint(tmp_path, precision, optimizer, monkeypatch):
    options = {"precision": precision, "optimizer": optimizer, "lr": 0.01, "checkpoint_steps": 5}
    whole = smooth()
    expected = train(whole, **options)
    stopping = smooth()
    stopping.register_forward_hook(stop_after(33))
    with pytest.raises(KeyboardInterrupt):
        train(stopping, tmp_path, **options)
    resumed = smooth(9)
    report = train(resumed, tmp_path, resume=True, **options)
    assert report.resumed_from == 30
    assert report.steps == expected.steps
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0.01)


def stop_after(calls):
    def hook(module, arguments, output):
        nonlocal calls
        calls -= module.training
        if calls < 0:
            raise KeyboardInterrupt

    return hook


def test_divergence_names_its_step_though_it_is_read_later(tmp_path):
    with pytest.raises(compress.CompressError, match="loss is nan at epoch 1, step 9"):
        train(explodes(9), tmp_path)


def test_compiled_is_the_same_function():
    eager, compiled = smooth(), smooth()
    train(eager, distill=True, teacher=linear(3))
    train(compiled, distill=True, teacher=linear(3), compile=True)
    torch.testing.assert_close(eager[0].weight, compiled[0].weight, rtol=0, atol=5e-3)
    accuracy = compress.evaluate(compiled, toy_data().val, batch_size=8, device="cuda", precision="bf16")
    assert math.isfinite(accuracy.loss)


def test_compiled_by_regions_is_the_same_function():
    models = []
    for compiled in (False, "regions"):
        model, data = convnet().eval(), toy_data(train=96)
        images = data.train.load(list(range(16)), epoch=None, device=torch.device("cpu"))[0]
        models.append(compress.quantize(model, images[:1], [images], spec=compress.QuantSpec()))
        spec = compress.QATSpec(epochs=2, lr=0.02, distill=False, fused="on", compile=compiled)
        compress.fit(models[-1], data, spec, batch_size=8, folder=None, device="cuda")
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0.02)


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("fp32", 3), ("fp16", 1)])
def test_recorded_passes_are_the_passes_one_by_one(tmp_path, precision, accumulation):
    plain, recorded = convnet(), convnet()  # with dropout, whose random numbers are the same
    options = {"precision": precision, "clip_grad_norm": 5.0, "lr": 0.02, "ema_decay": 0.9}
    options["grad_accumulation"] = accumulation
    train(plain, **options)
    train(recorded, tmp_path, cuda_graphs=True, **options)
    torch.testing.assert_close(recorded.state_dict(), plain.state_dict(), rtol=0, atol=0.005)


@pytest.mark.parametrize(
    ("batchnorm", "options"),
    [
        ("keep", {"scales": "learned", "freeze_ranges_epoch": 2, "freeze_batchnorm_epoch": 1}),
        ("fold", {"fused": "on"}),
        ("fold", {"fused": "int8", "precision": "bf16"}),
    ],
)
def test_recorded_passes_of_quantization_aware_training(batchnorm, options):
    models = []
    for recorded in (False, True):
        model, data = convnet().eval(), toy_data(train=96)
        images = data.train.load(list(range(16)), epoch=None, device=torch.device("cpu"))[0]
        qmodel = compress.quantize(model, images[:1], [images], spec=compress.QuantSpec(batchnorm=batchnorm))
        if "scales" in options:
            compress.learn_scales(qmodel)
        spec = compress.QATSpec(epochs=3, lr=0.02, distill=False, cuda_graphs=recorded, **options)
        compress.fit(qmodel, data, spec, batch_size=8, folder=None, device="cuda")
        models.append(qmodel)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0.02)


class ReadsItsLoss(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * float(x.mean() > -1e9)


def cannot_be_recorded():
    with pytest.raises(compress.CompressError, match="cannot be recorded as a CUDA graph"):
        train(ReadsItsLoss(*linear()), cuda_graphs=True)


def test_passes_that_cannot_be_recorded():
    # In a process of its own: after a failed recording torch's generator of a GPU cannot be used any more.
    code = "from tests.training.test_cuda import cannot_be_recorded; cannot_be_recorded()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
