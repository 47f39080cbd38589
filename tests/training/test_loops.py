# Quantization-aware training in one's own loop, Lightning's and Transformers', with the real packages if installed.

import sys

import onnx
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.quantization.learned import LearnedQuantizer
from tests.exact import on_engine
from tests.networks import unchanged


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def pictures():
    torch.manual_seed(1)
    return torch.randn(8, 3, 8, 8), torch.arange(8) % 2


def cycle(tmp_path, **qat):
    images, _ = pictures()
    options = {"scales": "learned", "ema_decay": 0.5, "freeze_batchnorm_epoch": 1, "freeze_ranges_epoch": 1, **qat}
    return compress.QuantizationCycle(
        example_inputs=images[:2],
        batches=[images],
        spec=compress.QuantSpec(batchnorm="keep"),
        qat=compress.QATSpec(**options),
        export_to=tmp_path / "out.onnx",
    )


def check_end(made, path):
    assert not any(isinstance(m, LearnedQuantizer) for m in made.model.modules()) and not made.model.training
    assert any(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)
    for name, mean in made.average.means.items():
        if not name.endswith("amax"):
            torch.testing.assert_close(made.model.get_parameter(name).data.cpu(), mean.cpu())
    images, _ = pictures()
    torch.testing.assert_close(on_engine(path, "onnxruntime", images), made.model(images), rtol=1e-3, atol=1e-2)


def test_one_s_own_loop(tmp_path):
    images, labels = pictures()
    made, float_model = cycle(tmp_path), network()
    with unchanged(float_model):
        model = made.begin(float_model)
        train_by_hand(made, model, images, labels)
    last = {n: p.detach().clone() for n, p in model.named_parameters() if not n.endswith("amax")}
    with made.averaged():
        assert any(not torch.equal(model.get_parameter(n), p) for n, p in last.items())
    assert all(torch.equal(model.get_parameter(n), p) for n, p in last.items())
    check_end(made, made.end())


def train_by_hand(made, model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        model.train()
        made.epoch(epoch)
        frozen = {n: b.clone() for n, b in model.named_buffers() if "running" in n}
        ranges = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith("amax")}
        nn.functional.cross_entropy(model(images), labels).backward()
        made.before_step(epoch)
        optimizer.step()
        optimizer.zero_grad()
        made.after_step(epoch + 1)
        moved = any(not torch.equal(b, frozen[n]) for n, b in model.named_buffers() if n in frozen)
        assert moved == (epoch == 0)
        assert all(torch.equal(model.get_parameter(n), r) for n, r in ranges.items()) == (epoch == 1)


def test_the_cycle_begins_before_it_goes_on(tmp_path):
    with pytest.raises(RuntimeError, match="begin was not called"):
        cycle(tmp_path).epoch(0)


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_lightning(tmp_path, monkeypatch, name):
    # In either package, the older one without the newer.
    lightning = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "pytorch_lightning":
        monkeypatch.setitem(sys.modules, "lightning", None)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "compress.training.loops.lightning", raising=False)
    from compress.training.loops.lightning import QuantizationCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = network()

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=0.1)

    made, loader = cycle(tmp_path), DataLoader(TensorDataset(*pictures()), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[QuantizationCallback(made)],
    )
    trainer.fit(Module(), loader, loader)
    assert trainer.global_step == 4
    check_end(made, tmp_path / "out.onnx")


def test_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    from compress.training.loops.transformers import ClassifierForTrainer, QuantizationTrainerCallback

    made = cycle(tmp_path)
    images, labels = pictures()
    data = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=0.1,
    )
    trainer = transformers.Trainer(
        model=ClassifierForTrainer(made.begin(network())),
        args=arguments,
        train_dataset=data,
        callbacks=[QuantizationTrainerCallback(made)],
    )
    trainer.train()
    assert trainer.state.global_step == 4
    check_end(made, tmp_path / "out.onnx")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_a_recorded_step_gives_the_gradients_of_the_loop(fused, to_none):
    # Two batches to a step, a smaller one at the end; with gradients kept as zeros, too.
    images, labels = pictures()
    weights = []
    for recorded in (False, True):
        qmodel = compress.quantize(network().eval(), images[:2], [images]).train()
        run = compress.fuse_for_training(qmodel) if fused else qmodel

        def loss(x, y, run=run):
            return nn.functional.cross_entropy(run(x), y)

        step = compress.record_step(qmodel, loss) if recorded else None
        optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.1, momentum=0.9)
        for size in (4, 4, 3):
            for part in (slice(0, size), slice(4, 4 + size)):
                value = loss(images[part], labels[part])
                if step is None:
                    value.backward()
                else:
                    assert torch.equal(step(images[part], labels[part]), value)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        weights.append(qmodel.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)


def test_what_cannot_be_a_recorded_step_is_refused():
    with pytest.raises(compress.CompressError, match="without parameters"):
        compress.record_step(nn.ReLU(), lambda x: x.sum())
    model = network()
    with pytest.raises(compress.CompressError, match="takes tensors, and got"):
        compress.record_step(model, lambda x: model(x).sum())([pictures()[0]])
