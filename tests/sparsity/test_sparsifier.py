import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from compress import MaskSchedule, SparsitySpec, sparsify, squash_masks
from compress.errors import CalibrationError, SparsityError
from compress.sparsity import SparsityRule
from compress.sparsity.parametrization import (
    REGULARIZATION,
    Moment,
    Selection,
    gumbel_noise,
    gumbel_softmax,
    mask_optimizer_state,
    masked_layers,
    masks_of,
    nm_mask,
    patterns,
    unstructured_mask,
    verify_nm,
)
from tests.networks import Net
from tests.sparsity.nets import batch, small, sparse


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:2", "3:16"])
def test_every_eligible_layer_gets_its_mask_and_a_row(pattern):
    n, m = map(int, pattern.split(":"))
    model = small()
    weights = {path: model.get_submodule(path).weight.detach().clone() for path in ("3", "6")}
    report = sparsify(model, SparsitySpec(pattern=pattern))
    assert report.masked == ("3", "6") and list(masked_layers(model)) == ["3", "6"]
    rows = {row.layer: row for row in report.rows}
    assert list(rows) == ["0", "3", "6", "10"]
    for path, weight in weights.items():
        expected = nm_mask(weight, n, m)
        assert torch.equal(masks_of(model)[path], expected)
        assert rows[path].density == n / m
        kept = weight[expected].abs().sum() / weight.abs().sum()
        assert rows[path].kept_magnitude == pytest.approx(kept.item(), rel=1e-5)
    assert rows["10"].kept_magnitude is None and rows["10"].density == 1.0
    sizes = {path: model.get_submodule(path).weight.numel() for path in rows}
    dense = sum(sizes.values()) - (1 - n / m) * (sizes["3"] + sizes["6"])
    assert report.density == pytest.approx(dense / sum(sizes.values()))


def test_hessian_masks_update_the_weights_and_need_batches():
    model, dense = small(), small()
    report = sparsify(model, SparsitySpec(saliency="hessian", calibration_images=8), batches=[batch(8)])
    assert report.masked == ("3", "6")
    weight = model[6].weight.detach()
    assert verify_nm(weight.numpy(), 2, 4) == 0
    kept = weight != 0
    assert not torch.allclose(weight[kept], dense[6].weight[kept])
    assert torch.equal(model[0].weight, dense[0].weight)


def leaky():
    # A layer that the forward pass leaves out, and one that fx cannot trace past.
    return Net(lambda net, x: net.net(x) if x.sum() < 1e9 else net.net(x * 2), net=small(), spare=nn.Conv2d(16, 16, 1))


def test_graph_that_cannot_be_traced_is_masked_without_permutation():
    report = sparsify(leaky(), SparsitySpec(permute=True), example_inputs=batch())
    assert "cannot trace Net.forward" in report.permutation.refused
    assert report.masked == ("net.3", "net.6")


def test_permutation_comes_before_the_masks():
    model = small()
    expected = model(batch())
    plain = sparsify(small(), SparsitySpec())
    report = sparsify(model, SparsitySpec(permute=True, permute_seconds=0.3), example_inputs=batch())
    assert report.permutation.refused == "" and report.permutation.groups == 2
    for row, other in zip(report.rows, plain.rows, strict=True):
        assert row.kept_magnitude is None or row.kept_magnitude > other.kept_magnitude
    moved = {row.layer: row.after for row in report.permutation.rows}
    assert moved == {row.layer: pytest.approx(row.kept_magnitude) for row in report.rows if row.eligible}
    for layer in masked_layers(model).values():
        layer.mask.fill_(True)
    torch.testing.assert_close(model(batch()), expected)


def test_misuse_is_refused():
    model = sparse()
    with pytest.raises(SparsityError, match="sparse already"):
        sparsify(model, SparsitySpec())
    squash_masks(model)
    sparsify(model, SparsitySpec())  # and again after squashing
    broken = small()
    broken[6].weight.data[0, 0] = float("nan")
    with pytest.raises(SparsityError, match="layer 6: .*NaN"):
        sparsify(broken, SparsitySpec())
    assert not masked_layers(broken)


SPARE = SparsitySpec(saliency="hessian", rules=(SparsityRule(match="spare"),))
SGD = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: sparsify(small(), SparsitySpec(saliency="hessian"), batches=[torch.ones(2, 1, 8, 8)]),
            r"fails on a calibration batch of \(2, 1, 8, 8\) torch.float32",
        ),
        (lambda: sparsify(leaky(), SPARE, batches=[batch()]), "never ran on the calibration images: spare; disable"),
        (lambda: sparsify(small(), SparsitySpec(saliency="hessian")), "needs calibration batches"),
        (lambda: sparsify(small(), SparsitySpec(pattern="channel:0.5")), "call compress.prune_channels"),
        (lambda: sparsify(small(), SparsitySpec(permute=True)), "permute needs example_inputs"),
        (lambda: sparsify(small(), SparsitySpec(pattern="2:7")), "no layer can be masked with pattern '2:7'"),
        (lambda: MaskSchedule(small(), SparsitySpec(schedule="gradual")), "call sparsify before"),
        (
            lambda: MaskSchedule(sparse(), SparsitySpec(schedule="gumbel")).after_step(1, 10, SGD),
            "call sparsify with the same spec",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(call, words):
    with pytest.raises((SparsityError, CalibrationError), match=words):
        call()


def products(width):
    def run(net, x):
        query = net.embed(x)
        keys = x if net.attention.kdim == 16 else query
        y = net.recurrent(net.inner(net.attention(query, keys, keys)[0]) * net.gain)[0]
        return net.head(nn.functional.linear(y, net.own))

    return Net(
        run,
        embed=nn.Linear(16, 32),
        inner=nn.Linear(32, 32),
        head=nn.Linear(32, 8),
        attention=nn.MultiheadAttention(32, 4, batch_first=True, kdim=width, vdim=width),
        recurrent=nn.GRU(32, 32, batch_first=True),
        own=nn.Parameter(torch.randn(32, 32)),
        gain=nn.Parameter(torch.ones(1, 32)),
    )


@pytest.mark.parametrize("width", [32, 16])
def test_weights_that_are_no_layers_have_a_row_each(width):
    model = products(width).eval()
    multiplied = {name for name, p in model.named_parameters() if p.dim() > 1 and name != "gain"}
    report = sparsify(model, SparsitySpec(), example_inputs=torch.randn(2, 5, 16))
    assert {row.layer for row in report.rows} == {name.removesuffix(".weight") for name in multiplied}
    own = {row.layer: row for row in report.rows}["own"]
    assert not own.eligible and own.shape == (32, 32) and report.masked == ("inner",)
    rule = SparsityRule(match="own", enable=True)
    with pytest.raises(SparsityError, match="a rule enables own"):
        sparsify(products(width), SparsitySpec(rules=(rule,)), example_inputs=torch.randn(2, 5, 16))


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
    # A plain loop over fresh noise; returns the densities after every step.
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


def scheduled(spec, steps):
    # A sparse network, after that many steps of SGD with the spec's schedule of masks.
    model = sparse(spec).train()
    train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec), steps=steps)
    return model


def densities_of(model):
    return [layer.mask.double().mean().item() for layer in masked_layers(model).values()]


def violations(model):
    return sum(verify_nm(layer.module.weight.detach().numpy(), 2, 4) for layer in masked_layers(model).values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masks_survive_fifty_steps(name):
    model = sparse().train()
    masks, before = masks_of(model), model[3].weight.detach().clone()
    train(model, OPTIMIZERS[name](model.parameters()))
    for path, layer in masked_layers(model).items():
        assert torch.equal(layer.mask, masks[path])
        assert (layer.module.weight[~masks[path]] == 0).all()
    assert not torch.equal(model[3].weight, before)
    squash_masks(model)
    assert all(verify_nm(model.get_submodule(p).weight.detach().numpy(), 2, 4) == 0 for p in masks)


def test_masks_survive_lbfgs():
    model = sparse()
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
    assert sparsify(model, spec).density == 1.0
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
    model = scheduled(spec, steps=30)
    assert violations(model) == 0
    assert set(densities_of(model)) == {0.5}


def test_gradual_unstructured_ends_at_its_share():
    model = scheduled(SparsitySpec(schedule="gradual", pattern="unstructured:0.8", end=1.0), steps=10)
    layer = masked_layers(model)["3"]
    assert torch.equal(layer.mask, unstructured_mask(layer.original, 0.8))


def test_sr_ste_step_is_the_papers():
    # w - lr (dL/d(masked w) + decay (1 - mask) w), equation 9, written out for plain SGD, up to lr^2 decay.
    spec = SparsitySpec(schedule="sr-ste", sr_ste_decay=0.1, end=1.0)
    model, reference = small(), small()
    sparsify(model, spec)
    weight, mask = reference[3].weight.detach().clone(), masks_of(model)["3"]
    for path, m in masks_of(model).items():
        reference.get_submodule(path).weight.data.mul_(m)
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
    model = sparse(spec).train()
    masks = masks_of(model)
    free = masked_layers(model)["3"].original.detach().clone()
    train(model, OPTIMIZERS["sgd"](model.parameters()), schedule=MaskSchedule(model, spec))
    layer = masked_layers(model)["3"]
    assert not torch.equal(layer.mask, masks["3"])
    stay = ~layer.mask & ~masks["3"]
    assert layer.original[stay].abs().mean() < 0.5 * free[stay].abs().mean()


@pytest.mark.parametrize("schedule", ["one-shot", "sr-ste", "gumbel"])
def test_autocast_and_loss_scaling(schedule):
    spec = SparsitySpec(schedule=schedule)
    model = sparse(spec).train()
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
    # Masks change at every step, and the straight-through gradient ends in the middle.
    spec = SparsitySpec(schedule="sr-ste", end=0.6)
    eager = sparse(spec).train()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager")
    for net, owner in ((eager, eager), (compiled, model)):
        train(net, OPTIMIZERS["sgd"](owner.parameters()), schedule=MaskSchedule(net, spec), steps=5)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert violations(model) == 0
    train(compiled, OPTIMIZERS["adamw"](model.parameters()), schedule=MaskSchedule(compiled, spec), steps=50)
    assert violations(model) == 0
    assert set(densities_of(model)) == {0.5}


# Learned n:m masks: each formula against torch's own, the update against torch's Adam, and a choice that is known.

CPU = torch.device("cpu")


@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_gumbel_softmax_is_torchs(temperature):
    logits = torch.randn(50, 6)
    torch.manual_seed(3)
    expected = nn.functional.gumbel_softmax(7.0 * logits, tau=temperature)
    torch.manual_seed(3)
    noise = gumbel_noise((50, 6), CPU)
    torch.testing.assert_close(gumbel_softmax(logits, noise, 7.0, temperature), expected)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([(2, 4), (1, 4), (1, 2), (3, 5)]), st.floats(0.5, 4), st.floats(1, 20))
def test_the_update_is_adam_on_the_papers_loss(seed, kind, temperature, scale):
    # MaskLLM's loss of the soft mask, written out with autograd, and torch's Adam on its gradient.
    torch.manual_seed(seed)
    masks, groups = patterns(*kind), 5
    logits = nn.Parameter(torch.randn(groups, len(masks)) * 0.1)
    weight, direction = torch.randn(2, groups, kind[1])
    adam = torch.optim.Adam([logits], lr=0.01, eps=1e-12)
    state = logits.detach().clone()
    noise = gumbel_noise((groups, len(masks)), CPU)
    selection = Selection(
        logits=state,
        mean=torch.zeros_like(state),
        square=torch.zeros_like(state),
        shares=gumbel_softmax(state, noise, scale, temperature),
    )
    clear = torch.ones_like(state, dtype=torch.bool)
    for step in range(1, 4):
        shares = ((scale * logits).log_softmax(1) + noise).div(temperature).softmax(1)
        hard = masks[shares.argmax(1)]
        soft = hard + shares @ masks - (shares @ masks).detach()  # straight through
        loss = (direction * weight * soft).sum() - REGULARIZATION * (weight * soft).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        clear &= logits.grad.abs() > 1e-5 * logits.grad.abs().max()  # Adam steps by the sign: of the others it is noise
        noise = gumbel_noise((groups, len(masks)), CPU)
        now = Moment(count=step, lr=0.01, scale=scale, temperature=temperature)
        drawn = selection.advance(weight, direction * weight, masks, noise, now)
        torch.testing.assert_close(selection.logits[clear], logits.detach()[clear], rtol=1e-3, atol=1e-4)
        assume(clear.float().mean() >= 0.5)  # else there is little to compare: a sharp choice has hardly a gradient
        selection.logits.copy_(logits.detach())
        expected = ((scale * logits.detach()).log_softmax(1) + noise).div(temperature).softmax(1)
        selection.shares.copy_(expected)
        assert (drawn.sum(1) == kind[0]).all()


def test_a_choice_that_magnitudes_cannot_see_is_learned():
    # Inputs whose weights are small carry the target; those of large weights are zero.
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    planted = torch.zeros(8, 16, dtype=torch.bool)
    planted.view(8, 4, 4)[..., [1, 2]] = True
    model[0].weight.data.copy_(torch.where(planted, 0.1, 1.0))
    dead = ~planted[0]
    spec = SparsitySpec(schedule="gumbel", kernels="any", rules=(SparsityRule(match="0"),), end=0.9)
    sparsify(model, spec)
    layer = masked_layers(model)["0"]
    assert torch.equal(layer.mask, ~planted)
    schedule, optimizer = MaskSchedule(model, spec), torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 201):
        x = torch.randn(32, 16).masked_fill(dead, 0.0)
        (model(x) - x @ torch.where(planted, 0.1, 0.0).T).square().sum().backward()
        optimizer.step()
        schedule.after_step(step, 200, optimizer)
        optimizer.zero_grad()
    assert (layer.mask & planted).sum() > 0.9 * planted.sum()
    squash_masks(model)
    assert (model[0].weight != 0).sum() == planted.sum()


def test_a_loop_that_has_dropped_its_gradients_is_told_what_to_do():
    spec = SparsitySpec(schedule="gumbel")
    model = sparse(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(batch()).square().mean().backward()
    optimizer.zero_grad()
    with pytest.raises(SparsityError, match="before zero_grad"):
        MaskSchedule(model, spec).after_step(1, 10, optimizer)
