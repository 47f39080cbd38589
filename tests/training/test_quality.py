# The best epoch, early ends, augmentation, own schedules and features of a teacher; each resumed to the bit.

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import v2

from compress import QATSpec, TrainSpec, evaluate, fit
from compress.data.base import DataSet, Preprocessing
from compress.errors import RecipeError
from compress.recipe.tree import parse_recipe
from compress.support.progress import NoProgress
from compress.tasks.base import soft_distance
from compress.tasks.classification import classification
from compress.tasks.segmentation import segmentation
from compress.training import check_train_spec, identity_of
from compress.training.augment import make_augment
from compress.training.optim import learning_rate, make_optimizer, parameter_groups
from compress.training.passes import FeaturePairs, feature_distance, training_loss
from tests.networks import Net, unchanged
from tests.training.toy import CLASSES, Stop, ToySplit, convnet, toy_data

FAST = TrainSpec(epochs=4, lr=0.05, warmup_epochs=0, checkpoint_steps=2)


def halves(step, steps):
    return 0.5 if 2 * step >= steps else 1.0


def negative(step, steps):
    return -1.0


def brighter(images, targets):
    return images + 0.1 * torch.rand(()), targets


def cropped(images, targets):
    return images[..., 1:], targets


class Pixels(ToySplit):
    def __init__(self, count, **options):
        super().__init__(count, **options)
        self.images = self.preprocessing.normalize(
            (40 * self.images + 128).round().clamp(0, 255).to(torch.uint8).float() / 255
        )

    def load(self, indices, *, epoch, device):
        return self.images[indices].to(device), self.targets[indices].to(device)


PIXELS = DataSet(train=Pixels(32), val=Pixels(12))


@pytest.mark.parametrize(
    "changes",
    [
        {"keep_best": True, "lr": 0.4},
        {"keep_best": True, "ema_decay": 0.9},
        {"augment": ("randaugment", "random_erasing", "mixup", "cutmix"), "augment_options": {"mixup": {"alpha": 0.4}}},
        {"augment": (f"{__name__}:brighter",), "schedule": f"{__name__}:halves"},
        {"distill": True, "distill_features": {"0": "0"}},
    ],
    ids=["best", "best of the mean", "mixed", "own", "features"],
)
def test_resumed_to_the_bit(tmp_path, changes):
    spec = replace(FAST, **changes)

    def train(folder, progress, resume):
        model, options = convnet(), {"teacher": convnet(3), "resume": resume, "progress": progress}
        fit(model, PIXELS, spec, batch_size=8, folder=folder, **options)
        return model.state_dict()

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train(tmp_path / "whole", NoProgress(), False)
    for at in (7, 4):  # in the middle of an epoch, and once more
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "cut", Stop(at), at != 7)
    again = train(tmp_path / "cut", NoProgress(), True)
    ended = train(tmp_path / "cut", NoProgress(), True)  # of a training that has ended
    torch.testing.assert_close([again, ended], [whole, whole], rtol=0, atol=0)


def test_keeps_the_best_epoch():
    # A rate that is far too high at the end destroys what was learned; its epochs are not the best.
    data, model = toy_data(noise=0.5), convnet()
    spec, kept = replace(FAST, epochs=5, schedule=f"{__name__}:late_jump", lr=0.02), convnet()
    report = fit(kept, data, replace(spec, keep_best=True), batch_size=8, folder=None)
    last = fit(model, data, spec, batch_size=8, folder=None)
    values = [row.val_top1 for row in report.history]
    assert values == [row.val_top1 for row in last.history] and values[-1] < max(values)
    assert report.final.top1 == max(values) == evaluate(kept, data.val, batch_size=8).top1
    assert report.best.epoch == 1 + values.index(max(values))
    assert last.final.top1 == values[-1] == evaluate(model, data.val, batch_size=8).top1


def late_jump(step, steps):
    return 1.0 if step < 0.7 * steps else 400.0


def test_stops_within_points_of_the_reference_and_when_nothing_is_gained():
    data = toy_data(noise=0.5)
    near = replace(FAST, epochs=9, stop_within=5.0)
    report = fit(convnet(), data, near, batch_size=8, folder=None, reference=0.5)
    values = [row.val_top1 for row in report.history]
    assert values[-1] >= 0.45 and all(value < 0.45 for value in values[:-1]) and len(values) < 9
    assert "within 5 of the reference, 50.00 %" in report.stopped
    still = replace(FAST, epochs=9, lr=1e-9, stop_after=2, stop_within=0.0)
    report = fit(convnet(), data, still, batch_size=8, folder=None, reference=1.0)
    assert len(report.history) == 3 and "2 evaluations gave no better top-1" in report.stopped
    with pytest.raises(RecipeError, match="stop_within is set without a reference"):
        fit(convnet(), data, still, batch_size=8, folder=None)


def test_mixup_and_cutmix_are_torchvisions():
    images, targets = PIXELS.train.images[:8], PIXELS.train.targets[:8]
    for name, kind, alpha in (("mixup", v2.MixUp, 0.3), ("cutmix", v2.CutMix, 1.0)):
        spec = TrainSpec(augment=(name,), augment_options={name: {"alpha": alpha}})
        augment = make_augment(
            spec, num_classes=CLASSES, preprocessing=PIXELS.train.preprocessing, images=images, targets=targets
        )
        torch.manual_seed(5)
        got, shares = augment(images, targets)
        torch.manual_seed(5)
        expected, expected_shares = kind(num_classes=CLASSES, alpha=alpha)(images, targets)
        assert got.equal(expected) and shares.equal(expected_shares)
        assert torch.allclose(shares.sum(1), torch.ones(8))


def test_randaugment_is_torchvisions_for_each_image():
    split, prepared = PIXELS.train, PIXELS.train.preprocessing
    spec = TrainSpec(augment=("randaugment",), augment_options={"randaugment": {"magnitude": 12}})
    augment = make_augment(spec, num_classes=CLASSES, preprocessing=prepared, images=split.images[:2])
    torch.manual_seed(1)
    got, _ = augment(split.images[:4], split.targets[:4])
    torch.manual_seed(1)
    transform = v2.RandAugment(magnitude=12)
    pixels = torch.stack([transform(row) for row in prepared.pixels(split.images[:4])])
    assert got.equal(prepared.normalize(pixels.float() / 255)) and not got.equal(split.images[:4])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"augment": ("randaug",)}, "did you mean 'randaugment'"),
        ({"augment": ("mixup", "mixup")}, "names a change twice"),
        ({"augment_options": {"mixup": {"alpha": 1.0}}}, "its keys are named changes"),
        ({"distill_features": {"0": "0"}}, "train.distill is false"),
        ({"distill": True, "distill_features": {"0": "0"}, "compile": True}, "which train.compile replaces"),
        ({"stop_after": 4}, "it would never end the training"),
        ({"schedule": "halves"}, "package.module:function"),
    ],
)
def test_refused_by_the_keys_alone(changes, words):
    with pytest.raises(RecipeError, match=words):
        check_train_spec(replace(FAST, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"augment": ("nowhere:nothing",)}, "cannot import nowhere"),
        ({"augment": (f"{__name__}:cropped",)}, "it must keep their shape"),
        ({"augment": ("mixup",), "augment_options": {"mixup": {"beta": 1}}}, "augment_options.mixup"),
        ({"schedule": f"{__name__}:negative"}, "returned -1.0 at"),
        ({"distill": True, "distill_features": {"9": "0"}}, "the student has no such module"),
        ({"distill": True, "distill_features": {"0": "5"}}, "cannot be compared"),
    ],
)
def test_refused_before_the_first_step(changes, words):
    model = convnet()
    with unchanged(model), pytest.raises(RecipeError, match=words):
        fit(model, PIXELS, replace(FAST, **changes), batch_size=8, folder=None, teacher=convnet(3))


def test_named_changes_need_pixels_and_a_class_for_each_image():
    with pytest.raises(RecipeError, match="8-bit pixels"):
        fit(convnet(), toy_data(), replace(FAST, augment=("augmix",)), batch_size=8, folder=None)
    tree = {"task": "segmentation", "model": {"name": "fcn_resnet50"}}
    tree["data"] = {"name": "masks", "root": "x", "classes": ["a", "b"]}
    for train, words in (({"augment": ["mixup"]}, "without their masks or"), ({"stop_within": 0.5}, "section trains")):
        with pytest.raises(RecipeError, match=words):
            parse_recipe({**tree, "train": train})
    labels = ToySplit(4).targets[:2].view(2, 1, 1).expand(2, 6, 6)
    with pytest.raises(RecipeError, match="one class for each image"):
        make_augment(
            TrainSpec(augment=("mixup",)),
            num_classes=len(segmentation(("a", "b")).name),
            preprocessing=Preprocessing(image_size=6),
            images=torch.zeros(2, 3, 6, 6),
            targets=labels.float(),
        )


def test_feature_distance_by_its_formula():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 4, 5, generator=generator), torch.randn(2, 3, 4, 5, generator=generator)
    assert feature_distance(a, b).item() == pytest.approx(((a - b).square().sum() / b.square().sum()).item(), rel=1e-5)
    wide = torch.cat([b, b], 1)  # the same attention map from twice the channels
    assert feature_distance(b, wide).item() == pytest.approx(0, abs=1e-6)
    maps = [F.normalize(one.square().sum(1).flatten(1), dim=1) for one in (a, wide)]
    assert feature_distance(a, wide).item() == pytest.approx(
        (maps[0] - maps[1]).square().sum(1).mean().item(), rel=1e-5
    )
    with pytest.raises(RecipeError, match="cannot be compared"):
        feature_distance(torch.zeros(2, 3), torch.zeros(2, 4))


def test_features_draw_the_student_to_the_teacher():
    data, teacher = PIXELS, convnet(3)

    def distance(model):
        pairs = FeaturePairs(model.eval(), teacher.eval(), {"0": "0"})
        with pairs.watched(), torch.no_grad():
            model(data.val.images)
            teacher(data.val.images)
            return pairs.distance().item()

    spec = replace(FAST, distill=True, distill_weight=0.9, epochs=6)
    plain, taught = convnet(), convnet()
    fit(plain, data, spec, batch_size=8, folder=None, teacher=teacher)
    fit(
        taught,
        data,
        replace(spec, distill_features={"0": "0"}, distill_feature_weight=5.0),
        batch_size=8,
        folder=None,
        teacher=teacher,
    )
    assert distance(taught) < 0.5 * distance(plain)
    assert not any(module._forward_hooks for module in [*taught.modules(), *teacher.modules()])


def test_a_layer_that_is_not_called_is_named():

    spec = replace(FAST, distill=True, distill_features={"block": "0"})
    with pytest.raises(RecipeError, match=r"not called as a module.*such as block.0"):
        fit(
            Net(lambda net, x: net.block[0](x).mean((2, 3)), block=nn.Sequential(nn.Conv2d(3, 4, 3))),
            PIXELS,
            spec,
            batch_size=8,
            folder=None,
            teacher=convnet(3),
        )


def test_own_schedule_follows_the_warm_up():
    rates = rates_of(f"{__name__}:halves", 0.2, 12, warmup=2)
    assert rates[:2] == pytest.approx([0.002, 0.101])
    assert rates[2:7] == [0.2] * 5 and rates[7:] == [0.1] * 5


def test_checkpoints_of_every_second_epoch_are_gone_on_with_to_the_bit(tmp_path):
    spec = replace(FAST, checkpoint_steps=None, checkpoint_every=2)

    whole, again = convnet(), convnet()
    fit(whole, PIXELS, spec, batch_size=8, folder=None)
    with pytest.raises(KeyboardInterrupt):  # in the fourth epoch of four steps
        fit(convnet(), PIXELS, spec, batch_size=8, folder=tmp_path, progress=Stop(15))
    report = fit(again, PIXELS, spec, batch_size=8, folder=tmp_path, resume=True)
    assert report.resumed_from == 8
    assert [row.epoch for row in report.history] == [1, 2, 3, 4]
    torch.testing.assert_close(whole.state_dict(), again.state_dict(), rtol=0, atol=0)


def rates_of(schedule, peak, steps, warmup=0):
    return [learning_rate(s, steps=steps, warmup_steps=warmup, peak=peak, schedule=schedule) for s in range(steps)]


def rates_of_torch(kind, peak, steps, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler, rates = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@given(steps=st.integers(1, 500), warmup=st.integers(0, 500), peak=st.floats(1e-5, 10))
def test_cosine_is_torchs_after_a_linear_rise(steps, warmup, peak):
    warmup = min(warmup, steps)
    rates = rates_of("cosine", peak, steps, warmup)
    expected = rates_of_torch("CosineAnnealingLR", peak, steps - warmup, T_max=max(1, steps - warmup))
    assert rates[warmup:] == pytest.approx(expected, rel=1e-6, abs=1e-9 * peak)
    assert rates[:warmup] == pytest.approx(torch.linspace(peak / 100, peak, warmup + 1)[:warmup].tolist(), rel=1e-5)


def test_a_constant_rate():
    assert learning_rate(109, steps=110, warmup_steps=10, peak=0.4, schedule="constant") == 0.4


def test_decay_is_for_weights_only():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[3].bias.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[3].weight)]
    assert [id(p) for p in plain["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


@settings(max_examples=20)
@given(steps=st.integers(10, 300), peak=st.floats(1e-4, 1))
def test_one_cycle_is_torchs(steps, peak):
    expected = rates_of_torch("OneCycleLR", peak, steps, max_lr=peak, total_steps=steps)
    assert rates_of("one_cycle", peak, steps) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_step_is_torchs_multi_step():
    assert rates_of("step", 0.4, 90) == pytest.approx(rates_of_torch("MultiStepLR", 0.4, 90, milestones=[60, 80]))


def test_learning_rates_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    groups = parameter_groups(model, 0.1, {"*": 2.0, "0.*": 0.5})
    rates = {id(p): g.get("lr_scale", 1.0) for g in groups for p in g["params"]}
    assert [rates[id(p)] for p in model.parameters()] == [0.5, 0.5, 2, 2, 2, 2]
    assert sum(len(g["params"]) for g in groups) == 6
    assert {g["weight_decay"] for g in groups if g["params"][0].ndim < 2} == {0.0}


def test_an_optimizer_of_the_users():
    spec = TrainSpec(optimizer="torch.optim:RAdam", optimizer_options={"betas": [0.8, 0.9]})
    made = make_optimizer(nn.Linear(2, 2), spec)
    assert type(made) is torch.optim.RAdam
    assert made.param_groups[0]["betas"] == [0.8, 0.9]
    assert type(make_optimizer(nn.Linear(2, 2), TrainSpec(optimizer="adamw"))) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"optimizer": "torch.optim:SGD", "optimizer_options": {"momentumm": 1}}, "cannot be made with .*momentumm"),
        ({"optimizer": "torch.optim:RAdm"}, "has no 'RAdm', did you mean 'RAdam'"),
        ({"lr_scale": {"wieght": 0.5}}, r"lr_scale 'wieght' matches no parameter, did you mean 'weight'"),
    ],
)
def test_optimizers_that_cannot_be_made(keys, words):
    with pytest.raises(RecipeError, match=words):
        make_optimizer(nn.Linear(2, 2), TrainSpec(**keys))


TASK = classification(5)


def logits(seed, classes=5):
    return 3 * torch.randn(6, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), temperature=st.floats(0.5, 20))
def test_distillation_is_kl_divergence(seed, temperature):
    student, teacher = logits(seed), logits(seed + 1)
    divergence = nn.KLDivLoss(reduction="batchmean")(
        torch.log(torch.softmax(student / temperature, 1)), torch.softmax(teacher / temperature, 1)
    )
    assert soft_distance(student, teacher, temperature).item() == pytest.approx(
        temperature**2 * divergence.item(), rel=1e-6, abs=1e-9
    )


def test_mixture():
    student, teacher, targets = logits(3).float(), logits(4).float(), torch.tensor([0, 1, 2, 3, 4, 0])
    spec = TrainSpec(distill=True, distill_weight=0.3, distill_temperature=4.0, label_smoothing=0.1)
    smoothed = torch.full((6, 5), 0.02).scatter(1, targets[:, None], 0.92)
    cross_entropy = -(smoothed * torch.log_softmax(student, 1)).sum(1).mean()
    mixed = 0.7 * cross_entropy + 0.3 * soft_distance(student, teacher, 4.0)
    torch.testing.assert_close(training_loss(TASK, student, targets, teacher, spec), mixed)
    torch.testing.assert_close(training_loss(TASK, student, targets, None, spec), cross_entropy)
    assert training_loss(TASK, student.bfloat16(), targets, teacher.bfloat16(), spec).dtype == torch.float32


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("warmup_epochs", -0.5),
        ("warmup_epochs", 9.0),
        ("label_smoothing", 1.0),
        ("clip_grad_norm", 0.0),
        ("grad_accumulation", 0),
        ("distill_weight", 1.5),
        ("distill_temperature", 0.0),
        ("seed", -1),
        ("checkpoint_steps", 0),
        ("evaluate_every", 0),
        ("optimizer", "adam"),
        ("schedule", "steps"),
        ("precision", "fp8"),
    ],
)
@pytest.mark.parametrize("section", ["train", "qat"])
def test_refuses_out_of_range_and_names_the_key(key, value, section):
    spec = {"train": TrainSpec, "qat": QATSpec}[section](**{key: value})
    with pytest.raises(RecipeError, match=rf"{section}\.{key} is {value}|{section}\.{key} is '{value}'"):
        check_train_spec(spec)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (TrainSpec(schedule="cosin"), "did you mean 'cosine'"),
        (TrainSpec(optimizer="adam"), "optimizer is 'adam', did you mean 'adamw'"),
        (QATSpec(cuda_graphs=True, damping=0.1), "qat.damping grows from step to step"),
    ],
)
def test_says_what_is_near_and_what_a_cuda_graph_cannot_hold(spec, words):
    with pytest.raises(RecipeError, match=words):
        check_train_spec(spec)


@pytest.mark.parametrize(
    "spec", [TrainSpec(), QATSpec(), TrainSpec(epochs=0), TrainSpec(epochs=1), TrainSpec(momentum=0, clip_grad_norm=1)]
)
def test_accepts(spec):
    check_train_spec(spec)


def test_a_training_is_the_same_with_another_speed_and_with_keys_of_later_versions_at_their_defaults():
    assert identity_of(TrainSpec(cuda_graphs=True)) == identity_of(TrainSpec())
    assert "damping" not in identity_of(QATSpec())
    assert identity_of(QATSpec(damping=0.1))["damping"] == 0.1
