import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress import TrainSpec
from compress.errors import RecipeError
from compress.training.optim import learning_rate, make_optimizer, parameter_groups
from compress.training.spec import check_train_spec


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 500),
    warmup=st.integers(0, 500),
    peak=st.floats(1e-5, 10),
    schedule=st.sampled_from(["cosine"]),
)
def test_cosine_is_torchs_after_a_linear_rise(steps, warmup, peak, schedule):
    warmup = min(warmup, steps)
    rates = [learning_rate(s, steps=steps, warmup_steps=warmup, peak=peak, schedule=schedule) for s in range(steps)]
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=peak)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup))
    for step in range(warmup, steps):
        assert rates[step] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-9 * peak)
        optimizer.step()
        cosine.step()
    assert rates[:warmup] == pytest.approx(torch.linspace(peak / 100, peak, warmup + 1)[:warmup].tolist(), rel=1e-5)


def test_closed_form_and_constant():
    options = {"steps": 110, "warmup_steps": 10, "peak": 0.4}
    assert learning_rate(10, **options, schedule="cosine") == 0.4
    assert learning_rate(60, **options, schedule="cosine") == pytest.approx(0.2)
    assert learning_rate(35, **options, schedule="cosine") == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert learning_rate(110, **options, schedule="cosine") == pytest.approx(0, abs=1e-15)
    assert learning_rate(109, **options, schedule="constant") == 0.4


def test_decay_is_for_weights_only():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model[3].bias.requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in decayed["params"]] == [id(model[0].weight), id(model[3].weight)]
    assert [id(p) for p in plain["params"]] == [id(model[0].bias), id(model[1].weight), id(model[1].bias)]
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def reference_step(name, weight, gradient, state, step, *, lr, decay):
    """Nesterov SGD (Sutskever et al. 2013, as torch writes it) and AdamW (arXiv 1711.05101, algorithm 2)."""
    if name == "sgd":
        gradient = gradient + decay * weight
        state["v"] = 0.9 * state["v"] + gradient if "v" in state else gradient
        return weight - lr * (gradient + 0.9 * state["v"])
    weight = weight * (1 - lr * decay)
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    mean, square = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)
    return weight - lr * mean / (square.sqrt() + 1e-8)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_steps_are_the_formulas(name):
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = make_optimizer(model, TrainSpec(optimizer=name, lr=0.1, weight_decay=0.05))
    expected = {
        key: (value.detach().clone(), {}, 0.05 if value.ndim == 2 else 0.0) for key, value in model.named_parameters()
    }
    for step in range(1, 5):
        model(torch.randn(7, 5, dtype=torch.float64)).square().mean().backward()
        for key, parameter in model.named_parameters():
            value, state, decay = expected[key]
            value = reference_step(name, value, parameter.grad.clone(), state, step, lr=0.1, decay=decay)
            expected[key] = (value, state, decay)
        optimizer.step()
        optimizer.zero_grad()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[key][0], rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
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


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))


def test_learning_rates_by_name():
    model = network()
    model(torch.zeros(2, 3, 6, 6))
    groups = parameter_groups(model, 0.1, {"*": 2.0, "0.*": 0.5})
    rates = {id(p): g.get("lr_scale", 1.0) for g in groups for p in g["params"]}
    assert [rates[id(p)] for p in model.parameters()] == [0.5, 0.5, 2, 2, 2, 2]
    assert sum(len(g["params"]) for g in groups) == 6
    assert {g["weight_decay"] for g in groups if g["params"][0].ndim < 2} == {0.0}


def test_an_optimizer_of_the_users():
    model = nn.Linear(2, 2)
    made = make_optimizer(model, TrainSpec(optimizer="torch.optim:RAdam", optimizer_options={"betas": [0.8, 0.9]}))
    assert type(made) is torch.optim.RAdam
    assert made.param_groups[0]["betas"] == [0.8, 0.9]
    with pytest.raises(RecipeError, match="cannot be made with .*momentumm"):
        make_optimizer(model, TrainSpec(optimizer="torch.optim:SGD", optimizer_options={"momentumm": 1}))
    with pytest.raises(RecipeError, match="has no 'RAdm', did you mean 'RAdam'"):
        make_optimizer(model, TrainSpec(optimizer="torch.optim:RAdm"))
    with pytest.raises(RecipeError, match=r"lr_scale 'wieght' matches no parameter, did you mean 'weight'"):
        make_optimizer(model, TrainSpec(lr_scale={"wieght": 0.5}))
    with pytest.raises(RecipeError, match="optimizer is 'adam', did you mean 'adamw'"):
        check_train_spec(TrainSpec(optimizer="adam"))
