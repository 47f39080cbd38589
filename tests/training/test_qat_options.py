import copy

import pytest
import torch
from torch import nn

import compress
from compress.errors import CheckpointError, DataError, RecipeError
from compress.quantization.quantizer import quantizers
from compress.recipe.tree import parse_recipe
from compress.training.checkpoint import WeightAverage
from tests.networks import unchanged
from tests.training.toy import Stop, ToySplit, convnet, linear, toy_data

DATA = toy_data()


def quantized(batchnorm="keep", learned=True):
    images = DATA.train.load(list(range(16)), epoch=None, device="cpu")[0]
    spec = compress.QuantSpec(
        weights=compress.WeightSpec(num_bits=4),
        activations=compress.ActivationSpec(num_bits=4, calibrator="max"),
        batchnorm=batchnorm,
    )
    qmodel = compress.quantize(convnet(), images[:2], [images], spec=spec)
    if learned:
        compress.learn_scales(qmodel)
    return qmodel


def spec_of(**options):
    return compress.QATSpec(**({"epochs": 3, "lr": 0.05, "distill": False, "fused": "off"} | options))


def train(model, spec, **options):
    return compress.fit(model, DATA, spec, batch_size=12, folder=options.pop("folder", None), device="cpu", **options)


def test_compiled_by_regions_is_the_same_training():
    plain, parts = quantized(learned=False), quantized(learned=False)
    train(plain, spec_of(fused="on"))
    with torch.compiler.set_stance("force_eager"):  # the wiring alone: compilers are slow, and not on every machine
        train(parts, spec_of(fused="on", compile="regions"))
    torch.testing.assert_close(parts.state_dict(), plain.state_dict(), rtol=0, atol=1e-05)


# ---------------------------------------------------------------------------------------------- mean of the weights


def test_the_mean_is_what_is_evaluated_and_kept():
    plain, averaged = convnet(), convnet()
    weights = []

    def remember(done, total, optimizer):
        weights.append([p.detach().clone() for p in averaged.parameters()])

    train(plain, compress.TrainSpec(epochs=3, lr=0.05))
    report = train(averaged, compress.TrainSpec(epochs=3, lr=0.05, ema_decay=0.9), after_step=remember)
    for p, last in zip(plain.parameters(), weights[-1], strict=True):
        assert torch.equal(p, last)  # the steps are the same with it and without
    mean = [p.clone() for p in convnet().parameters()]
    for step, own in enumerate(weights, start=1):
        d = min(0.9, (1 + step) / (10 + step))
        mean = [d * m + (1 - d) * w for m, w in zip(mean, own, strict=True)]
    torch.testing.assert_close(list(averaged.parameters()), mean, rtol=0.0001, atol=1e-06)
    assert compress.evaluate(averaged, DATA.val, batch_size=11).loss == pytest.approx(report.final.loss, rel=1e-5)


def test_the_mean_of_another_network_is_refused():
    with pytest.raises(CheckpointError, match="mean of"):
        WeightAverage(linear(), 0.5).load({"other": torch.zeros(1)})


# ------------------------------------------------------------------------------------------------------------ resume
@pytest.mark.parametrize("step", [3, 6])
def test_a_killed_training_resumes_to_the_same_network(tmp_path, step):
    spec = spec_of(scales="learned", ema_decay=0.9, freeze_ranges_epoch=2, freeze_batchnorm_epoch=1, checkpoint_steps=2)
    whole, killed, resumed, again = (quantized() for _ in range(4))
    train(whole, spec, folder=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(killed, spec, folder=tmp_path / "killed", progress=Stop(step))
    assert train(resumed, spec, folder=tmp_path / "killed", resume=True).resumed_from
    train(again, spec, folder=tmp_path / "killed", resume=True)  # of one that had ended
    torch.testing.assert_close(whole.state_dict(), resumed.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(whole.state_dict(), again.state_dict(), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------- what freezes when
def test_ranges_and_statistics_rest_from_their_epochs_on():
    model = quantized()
    seen = []

    def remember(done, total, optimizer):
        ranges = {name: q.amax.detach().clone() for name, q in quantizers(model)}
        norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
        seen.append((ranges, norm.running_mean.clone(), norm.weight.detach().clone()))

    train(model, spec_of(scales="learned", freeze_ranges_epoch=1, freeze_batchnorm_epoch=2), after_step=remember)
    steps = len(seen) // 3
    ranges = [s[0] for s in seen]
    assert all((ranges[0][name] != ranges[steps - 1][name]).any() for name in ranges[0])
    assert all(torch.equal(ranges[steps - 1][name], ranges[-1][name]) for name in ranges[0])
    means = [s[1] for s in seen]
    assert not torch.equal(means[steps], means[2 * steps - 1])
    assert torch.equal(means[2 * steps - 1], means[-1])
    assert not torch.equal(seen[2 * steps][2], seen[-1][2])  # its weight is still trained


def test_learned_ranges_beat_fixed_ones_that_are_wrong():
    # Ranges four times too wide at 4 bits: training finds better ones.
    losses = {}
    for scales in ("fixed", "learned"):
        model = quantized(learned=scales == "learned")
        for _, quantizer in quantizers(model):
            quantizer.amax.data.mul_(4)
        losses[scales] = train(model, spec_of(epochs=12, scales=scales)).history[-1].train_loss
    assert losses["learned"] < losses["fixed"]


# -------------------------------------------------------------------------------------------------------- the recipe
@pytest.mark.parametrize(
    ("qat", "words"),
    [
        ({"scales": "learnt"}, "learned"),
        ({"freeze_ranges_epoch": 1}, "scales: learned"),
        ({"scales": "learned", "freeze_ranges_epoch": -1}, "it must be 0 to 1,000,000,000"),
        ({"ema_decay": 1.0}, "below 1"),
        ({"freeze_batchnorm_epoch": 1}, "batchnorm: keep"),
    ],
)
def test_refusals_of_the_recipe(qat, words):
    with pytest.raises(RecipeError, match=words):
        parse_recipe({"qat": qat})


def test_the_recipe_takes_them_all():
    qat = {"scales": "learned", "freeze_ranges_epoch": 1, "freeze_batchnorm_epoch": 1, "ema_decay": 0.99}
    recipe = parse_recipe({"quantization": {"batchnorm": "keep"}, "qat": qat})
    assert recipe.qat.scales == "learned" and recipe.train.ema_decay is None


def test_a_range_that_is_not_a_number_is_found():
    model = quantized()
    next(iter(quantizers(model)))[1].amax.data.fill_(float("nan"))
    with pytest.raises(compress.CompressError, match="NaN|range"):
        train(model, spec_of(scales="learned"))


# BatchNorm recalibrated: the statistics are those that torch computes from the same activations.


def test_statistics_are_the_means_over_the_batches():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.9), nn.Conv2d(8, 4, 3))
    model = model.append(nn.BatchNorm2d(4)).eval()
    model[5].train()  # the modes come back, one by one
    batches = [torch.randn(8, 3, 10, 10) * (1 + i) for i in range(3)]
    weights = {name: p.clone() for name, p in model.named_parameters()}

    assert compress.recalibrate_batchnorm(model, [(batch, torch.zeros(8)) for batch in batches]) == 2

    first = [model[0](x) for x in batches]
    torch.testing.assert_close(model[1].running_mean, torch.stack([y.mean((0, 2, 3)) for y in first]).mean(0))
    torch.testing.assert_close(model[1].running_var, torch.stack([y.var((0, 2, 3)) for y in first]).mean(0))
    normal = [nn.functional.batch_norm(y, None, None, model[1].weight, model[1].bias, training=True) for y in first]
    second = [model[4](y.relu()) for y in normal]  # no dropout
    torch.testing.assert_close(model[5].running_mean, torch.stack([y.mean((0, 2, 3)) for y in second]).mean(0))
    assert [model[5].momentum, model[5].training, model[1].training, model.training] == [0.1, True, False, False]
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("batches", [[], [torch.randn(4, 3, 6, 6), ["no images"]]], ids=["none", "one is no batch"])
def test_bad_batches_leave_the_statistics(batches):
    model = convnet()
    with unchanged(model), pytest.raises(DataError):
        compress.recalibrate_batchnorm(model, batches)
    assert model.training


def test_a_model_without_batchnorm_is_left_alone():
    assert compress.recalibrate_batchnorm(nn.Linear(2, 2), iter([])) == 0


def test_a_masked_network_gets_its_own_statistics():
    # Recalibration restores most of the shift that a mask causes in the outputs of later layers.
    layers = [part for _ in range(6) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    dense = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = ToySplit(64, size=8).images
    compress.recalibrate_batchnorm(dense, [images])
    dense.eval()
    model = copy.deepcopy(dense)
    compress.sparsify(model, compress.SparsitySpec(kernels="any"), example_inputs=images[:2])

    def error():
        with torch.no_grad():
            return (model(images) - dense(images)).square().mean().item()

    stale = error()
    compress.recalibrate_batchnorm(model, images.split(16))
    assert error() < 0.5 * stale
