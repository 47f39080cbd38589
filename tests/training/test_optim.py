import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress import QATSpec, TrainSpec
from compress.errors import RecipeError
from compress.tasks.base import soft_distance
from compress.tasks.classification import classification
from compress.training import check_train_spec, identity_of
from compress.training.optim import learning_rate, make_optimizer, parameter_groups
from compress.training.passes import training_loss


@given(steps=st.integers(1, 500), warmup=st.integers(0, 500), peak=st.floats(1e-5, 10))
def test_cosine_is_torchs_after_a_linear_rise(steps, warmup, peak):
    warmup = min(warmup, steps)
    rates = [learning_rate(s, steps=steps, warmup_steps=warmup, peak=peak, schedule="cosine") for s in range(steps)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    for step in range(warmup, steps):
        assert rates[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-9 * peak)
        optimizer.step()
        cosine.step()
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
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=steps)
    for step in range(steps):
        got = learning_rate(step, steps=steps, warmup_steps=0, peak=peak, schedule="one_cycle")
        assert got == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        optimizer.step()
        cycle.step()


def test_step_is_torchs_multi_step():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[60, 80])
    for step in range(90):
        rate = learning_rate(step, steps=90, warmup_steps=0, peak=0.4, schedule="step")
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        decay.step()


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
