import copy

import pytest
import torch
from torch import nn

from compress import MaskSchedule, SparsitySpec, sparsify, squash_masks
from compress.errors import SparsityError
from compress.sparsity.parametrization import masked_layers, masks_of, nm_mask, unstructured_mask, verify_nm
from compress.sparsity.schedule import mask_optimizer_state
from tests.sparsity.nets import batch, small

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=1e-1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def train(model, optimizer, *, steps=50, schedule=None, total=None, first=1):
    """A plain loop over fresh noise; returns the densities after every step."""
    generator = torch.Generator().manual_seed(first)
    densities = []
    for step in range(first, first + steps):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        loss = nn.functional.cross_entropy(model(x), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.after_step(step, total or steps, optimizer)
        densities.append(densities_of(model)[0])
    return densities


def densities_of(model):
    return [layer.mask.double().mean().item() for layer in masked_layers(model).values()]


def violations(model):
    return sum(verify_nm(layer.module.weight.detach().numpy(), 2, 4) for layer in masked_layers(model).values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masks_survive_fifty_steps(name):
    model = small().train()
    sparsify(model, SparsitySpec())
    masks, before = masks_of(model), model[3].weight.detach().clone()
    train(model, OPTIMIZERS[name](model.parameters()))
    for path, layer in masked_layers(model).items():
        assert torch.equal(layer.mask, masks[path])
        assert (layer.module.weight[~masks[path]] == 0).all()
    assert not torch.equal(model[3].weight, before)
    squash_masks(model)
    assert all(verify_nm(model.get_submodule(p).weight.detach().numpy(), 2, 4) == 0 for p in masks)


def test_masks_survive_lbfgs():
    model = small().eval()
    sparsify(model, SparsitySpec())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
    assert violations(model) == 0


def test_an_older_optimizer_forgets_what_is_masked():
    model = small().train()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model(batch()).square().sum().backward()
    optimizer.step()
    sparsify(model, SparsitySpec())
    layer = masked_layers(model)["3"]
    assert (optimizer.state[layer.original]["exp_avg"][~layer.mask] != 0).any()
    assert mask_optimizer_state(optimizer, model) == 4  # two moments of two layers
    for moment in ("exp_avg", "exp_avg_sq"):
        assert (optimizer.state[layer.original][moment][~layer.mask] == 0).all()
        assert (optimizer.state[layer.original][moment][layer.mask] != 0).any()
    assert optimizer.state[layer.original]["step"] == 1


def test_gradual_masks_follow_the_cubic_schedule():
    spec = SparsitySpec(schedule="gradual", begin=0.1, end=0.6, update_steps=5)
    model = small().train()
    report = sparsify(model, spec)
    assert report.density == 1.0
    densities = train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec), steps=50)
    for step, density in enumerate(densities, start=1):
        time = min(1.0, max(0.0, (step - step % 5 - 5) / 25))
        assert density == pytest.approx(1 - 0.5 * (1 - (1 - time) ** 3), abs=1e-3)
    assert violations(model) == 0


@pytest.mark.parametrize(
    ("begin", "end", "update"), [(0.0, 0.8, None), (0.03, 0.501, 7), (0.9, 1.0, 1), (0.0, 0.05, 40)]
)
@pytest.mark.parametrize("schedule", ["gradual", "sr-ste", "gumbel"])
def test_masks_are_the_patterns_own_at_the_end(schedule, begin, end, update):
    spec = SparsitySpec(schedule=schedule, begin=begin, end=end, update_steps=update)
    model = small().train()
    sparsify(model, spec)
    train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec), steps=30)
    assert violations(model) == 0
    assert set(densities_of(model)) == {0.5}


def test_gradual_unstructured_ends_at_its_share():
    spec = SparsitySpec(schedule="gradual", pattern="unstructured:0.8", end=1.0)
    model = small().train()
    sparsify(model, spec)
    train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec), steps=10)
    layer = masked_layers(model)["3"]
    assert torch.equal(layer.mask, unstructured_mask(layer.original, 0.8))


def test_sr_ste_step_is_the_papers():
    """w - lr (dL/d(masked w) + decay (1 - mask) w), equation 9, written out for plain SGD, up to lr^2 decay."""
    spec = SparsitySpec(schedule="sr-ste", sr_ste_decay=0.1, end=1.0)
    model, reference = small(), small()
    sparsify(model, spec)
    weight, mask = reference[3].weight.detach().clone(), masks_of(model)["3"]
    with torch.no_grad():
        for path, m in masks_of(model).items():
            reference.get_submodule(path).weight.mul_(m)
    reference(batch()).square().mean().backward()
    expected = weight - 0.01 * (reference[3].weight.grad + 0.1 * ~mask * weight)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(batch()).square().mean().backward()
    optimizer.step()
    MaskSchedule(model, spec).after_step(1, 100, optimizer)
    layer = masked_layers(model)["3"]
    torch.testing.assert_close(layer.original.detach(), expected, rtol=0, atol=1e-6)
    assert torch.equal(layer.mask, nm_mask(layer.original, 2, 4))


def test_sr_ste_masks_move_and_decay_draws_masked_weights_in():
    spec = SparsitySpec(schedule="sr-ste", sr_ste_decay=5.0)
    model = small().train()
    sparsify(model, spec)
    masks = masks_of(model)
    free = masked_layers(model)["3"].original.detach().clone()
    train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec))
    layer = masked_layers(model)["3"]
    assert not torch.equal(layer.mask, masks["3"])
    stay = ~layer.mask & ~masks["3"]
    assert layer.original[stay].abs().mean() < 0.5 * free[stay].abs().mean()


@pytest.mark.parametrize("schedule", ["gradual", "sr-ste", "gumbel"])
def test_resumed_training_ends_as_the_undisturbed(schedule):
    spec = SparsitySpec(schedule=schedule, update_steps=3)
    whole, start = small().train(), small().train()
    for model in (whole, start):
        sparsify(model, spec)
    optimizer = OPTIMIZERS["adamw"](whole.parameters())
    for first in (1, 11):
        train(whole, optimizer, schedule=MaskSchedule(whole, spec), steps=10, total=20, first=first)
    optimizer = OPTIMIZERS["adamw"](start.parameters())
    train(start, optimizer, schedule=MaskSchedule(start, spec), steps=10, total=20)
    resumed = small().train()
    sparsify(resumed, spec)
    again = OPTIMIZERS["adamw"](resumed.parameters())
    resumed.load_state_dict(start.state_dict())
    again.load_state_dict(optimizer.state_dict())
    train(resumed, again, schedule=MaskSchedule(resumed, spec), steps=10, total=20, first=11)
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


def test_averaged_model_follows_changing_masks():
    spec = SparsitySpec(schedule="gradual", end=0.5)
    model = small().train()
    sparsify(model, spec)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer, schedule = OPTIMIZERS["sgd"](model.parameters()), MaskSchedule(model, spec)
    for step in range(1, 21):
        train(model, optimizer, schedule=schedule, steps=1, total=20, first=step)
        average.update_parameters(model)
    assert violations(average) == 0
    assert not torch.equal(average.module[3].weight, model[3].weight)


@pytest.mark.parametrize("schedule", ["one-shot", "sr-ste", "gumbel"])
def test_autocast_and_loss_scaling(schedule):
    spec = SparsitySpec(schedule=schedule)
    model = small().train()
    sparsify(model, spec)
    optimizer, masks = OPTIMIZERS["sgd"](model.parameters()), MaskSchedule(model, spec)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(1, 11):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch()), torch.arange(4))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        masks.after_step(step, 10, optimizer)
    assert violations(model) == 0
    assert model[3].weight.dtype == torch.float32 and model[3].weight.isfinite().all()


def test_compiled_models_train_as_eager_ones():
    """Masks change at every step, and the straight-through gradient ends in the middle."""
    spec = SparsitySpec(schedule="sr-ste", end=0.6)
    eager = small().train()
    sparsify(eager, spec)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager")
    for net, owner in ((eager, eager), (compiled, model)):
        train(net, OPTIMIZERS["sgd"](owner.parameters()), schedule=MaskSchedule(net, spec), steps=5)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)
    assert violations(model) == 0
    train(compiled, OPTIMIZERS["adamw"](model.parameters()), schedule=MaskSchedule(compiled, spec), steps=50)
    assert violations(model) == 0
    assert set(densities_of(model)) == {0.5}


def test_schedule_needs_masks():
    with pytest.raises(SparsityError, match="call sparsify before"):
        MaskSchedule(small(), SparsitySpec(schedule="gradual"))
