import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision import models

import compress
from compress.errors import DataError, SparsityError
from compress.sparsity import SparsityRule, parse_pattern, sparsifier
from compress.sparsity.parametrization import from_groups, nm_mask, pattern_mask, verify_nm
from compress.sparsity.sparsifier import (
    as_matrix,
    calibration_inputs,
    prune_by_hessian,
    prune_layers,
    unfolded,
)
from tests.networks import Net, TinyResNet, unchanged, with_statistics
from tests.sparsity.nets import batch, small, sparse

NM24 = parse_pattern("2:4")


def correlated(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    return torch.randn(rows, columns // 2, generator=generator, dtype=torch.float64) @ mix[: columns // 2] + (
        0.1 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    )


@given(
    st.integers(1, 2),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([0, 1, 2, "same", "valid"]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(["zeros", "reflect", "circular", "replicate"]),
)
def test_unfolded_inputs_times_the_matrix_are_the_convolution(axes, groups, kernel, padding, stride, dilation, mode):
    if padding == "same":
        stride = 1
    if mode == "reflect" and padding == 2 and kernel == 1:
        padding = 1
    convolution = (nn.Conv1d, nn.Conv2d)[axes - 1]
    layer = convolution(8, 12, kernel, stride, padding, dilation, groups, bias=False, padding_mode=mode)
    x = torch.randn(3, 8, *(7, 6)[:axes])
    y = unfolded(layer, x) @ as_matrix(layer.weight, groups).transpose(1, 2)  # (groups, vectors, out / groups)
    expected = layer(x).movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(y.movedim(0, 1).flatten(1), expected, rtol=1e-4, atol=1e-5)
    back = from_groups(as_matrix(layer.weight, groups), layer.weight.shape)
    assert torch.equal(back, layer.weight)


def test_linear_layers_take_any_leading_axes():
    layer, x = nn.Linear(8, 4, bias=False), torch.randn(2, 5, 8)
    y = unfolded(layer, x) @ as_matrix(layer.weight, 1).transpose(1, 2)
    torch.testing.assert_close(y[0], layer(x).flatten(0, 1))


def test_columns_masked_first_leave_the_least_squares_weights():
    # If all masked columns come before all kept ones, the walk is exact: it must meet numpy's own solution.
    inputs = correlated(200, 8)
    weight = torch.randn(5, 8, dtype=torch.float64)
    weight[:, :4] *= 1e-3  # surely masked by 4:8
    pruned, mask = prune_by_hessian(weight, inputs.T @ inputs / 200, parse_pattern("4:8"), damping=1e-12)
    assert torch.equal(mask, (torch.arange(8) >= 4).expand(5, 8))
    best = torch.linalg.lstsq(inputs[:, 4:], inputs @ weight.T).solution.T
    torch.testing.assert_close(pruned[:, 4:], best, rtol=1e-5, atol=1e-7)


def test_independent_inputs_reduce_to_scaled_magnitudes():
    # With a diagonal Hessian nothing can be made up for: |w| times the input's size decides, weights stay.
    weight, scale = torch.randn(6, 16, dtype=torch.float64), torch.rand(16, dtype=torch.float64) + 0.5
    pruned, mask = prune_by_hessian(weight, torch.diag(scale**2), NM24, damping=1e-12)
    assert torch.equal(mask, nm_mask(weight, 2, 4, scores=(weight * scale).abs()))
    torch.testing.assert_close(pruned, weight * mask)


def test_inputs_that_are_always_zero_lose_their_weights_first():
    hessian = torch.diag(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    _, mask = prune_by_hessian(torch.tensor([[0.1, 9.0, 0.1, 9.0]]), hessian, NM24, damping=1e-6)
    assert mask.tolist() == [[True, False, True, False]]


NONE = [torch.full((2, 3, 8, 8), float("nan"))]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        *(
            (partial(prune_by_hessian, torch.randn(2, 4), hessian, NM24, damping=0.01), "all zero, or hold NaN")
            for hessian in (torch.zeros(4, 4), torch.full((4, 4), float("nan")))
        ),
        (
            lambda: prune_layers(model := small(), {"3": model[3]}, NONE, NM24, images=2, damping=0.01),
            "layer 3: its calibration inputs",
        ),
    ],
)
def test_hessians_and_inputs_without_meaning_are_refused(call, words):
    with pytest.raises(SparsityError, match=words):
        call()


def test_layers_are_measured_in_order_and_the_model_is_not_changed(monkeypatch):
    model = Net(
        lambda net, x: net.second(F.relu(net.first(x))),
        first=nn.Conv2d(8, 16, 3, padding=1, groups=2),
        second=nn.Conv2d(16, 8, 3, stride=2, dilation=1),
    )
    batches = [(torch.randn(6, 8, 8, 8), torch.zeros(6))] * 2
    layers = {"first": model.first, "second": model.second}
    with unchanged(model):
        together = prune_layers(model, layers, batches, NM24, images=12, damping=0.01)
    monkeypatch.setattr(sparsifier, "MEMORY_BYTES", 1)  # one layer a pass: the second sees the pruned first
    apart = prune_layers(model, layers, batches, NM24, images=12, damping=0.01)
    torch.testing.assert_close(apart["first"][0], together["first"][0])
    assert not torch.allclose(apart["second"][0], together["second"][0])
    for results in (together, apart):
        for path, (weight, mask) in results.items():
            assert verify_nm(weight.numpy(), 2, 4) == 0 and weight.shape == layers[path].weight.shape
            assert (weight[~mask] == 0).all()


@pytest.mark.parametrize(("pattern", "share"), [("2:4", 0.5), ("1:4", 0.7), ("4:8", 0.7), ("unstructured:0.5", 0.7)])
def test_pruned_network_stays_closer_than_by_magnitude(pattern, share):
    model, parsed = small(), parse_pattern(pattern)
    images = torch.randn(64, 3, 8, 8)
    layers = {path: model.get_submodule(path) for path in ("3", "6")}
    results = prune_layers(model, layers, [images], parsed, images=64, damping=0.01)
    assert all(mask.float().mean() == pytest.approx(1 - parsed.ratio, abs=1e-3) for _, mask in results.values())
    expected, outputs = model(images), []
    for weights in (
        {path: weight for path, (weight, _) in results.items()},
        {path: layer.weight * pattern_mask(layer.weight, parsed) for path, layer in layers.items()},
    ):
        pruned = small()
        for path, weight in weights.items():
            pruned.get_submodule(path).weight.data.copy_(weight)
        outputs.append((pruned(images) - expected).square().mean().item())
    assert outputs[0] < share * outputs[1]


def test_calibration_takes_no_more_images_than_asked():
    model = small()
    taken = calibration_inputs(model, iter([(batch(4), 0), batch(4), [batch(4)]]), 6)
    assert [len(x) for (x,) in taken] == [4, 2]
    with pytest.raises(SparsityError, match="no calibration batch"):
        calibration_inputs(model, [], 4)
    with pytest.raises(DataError, match="holds str"):
        calibration_inputs(model, ["image.png"], 4)


def macs_of(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda: TinyResNet(width=16), 0.6),
        (lambda: models.MobileNetV2(10, 0.5, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 1], [6, 64, 1, 2]]), 0.5),
    ],
)
def test_macs_go_down_to_the_share_asked_for(make, share):
    model, x = make().eval(), torch.randn(2, 3, 32, 32)
    macs, parameters = macs_of(model, x), sum(p.numel() for p in model.parameters())
    spec = compress.SparsitySpec(pattern=f"channel:{share}", kernels="any")
    report = compress.prune_channels(model, spec, example_inputs=x)
    assert report.macs_before == macs and report.macs_after == macs_of(model, x)
    assert report.removed == pytest.approx(share, abs=0.04)
    assert (report.parameters_before, report.parameters_after) == (
        parameters,
        sum(p.numel() for p in model.parameters()),
    )
    assert model(x).shape == (2, 10)
    shapes = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    assert {row.layer: row.after for row in report.rows} == shapes
    model.train()(x).sum().backward()  # and it still trains
    assert all(p.grad is not None for p in model.parameters())


def test_weakest_channels_go_and_counts_fit_tensor_cores():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 5))
    model[0].weight.data[::2] *= 1e-3
    model[2].weight.data[:, ::2] *= 1e-3
    strong = model[0].weight[1::2].detach().clone()
    spec = compress.SparsitySpec(pattern="channel:0.5", rules=(SparsityRule(match="2", enable=False),))
    report = compress.prune_channels(model, spec, example_inputs=torch.randn(1, 3, 8, 8))
    assert torch.equal(model[0].weight, strong)
    assert [row.after[:2] for row in report.rows] == [(16, 3), (16, 16), (5, 256)]


def branches():
    def run(net, x):
        x = net.a(x).relu()
        x = (x + net.b(x)).relu()
        return net.fc(torch.cat([net.dw(x), net.c(x)], 1).mean((2, 3)))

    a, b = (nn.Sequential(nn.Conv2d(i, 32, 3, padding=1), nn.BatchNorm2d(32)) for i in (3, 32))
    return Net(run, a=a, b=b, dw=nn.Conv2d(32, 32, 3, groups=32), c=nn.Conv2d(32, 32, 3), fc=nn.Linear(64, 5))


def test_a_pruned_network_computes_what_one_with_its_channels_zeroed_does():
    # Channels of zeros are the weakest, so the network before pruning is the oracle.
    model, x = branches().eval(), batch()
    for layer in (model.a[0], model.b[0], model.dw, model.c, model.a[1], model.b[1]):
        layer.weight.data[::2], layer.bias.data[::2] = 0, 0
    for layer in (model.b[0], model.c, model.fc):
        layer.weight.data[:, ::2] = 0
    expected = model(x)
    report = compress.prune_channels(
        model, compress.SparsitySpec(pattern="channel:0.5", kernels="any"), example_inputs=x
    )
    assert 0.4 < report.removed < 0.6 and model.a[0].out_channels < 32
    torch.testing.assert_close(model(x), expected)


def shuffled(module: bool):
    # Half of a ShuffleNet unit: a grouped convolution, and a shuffle before the next one.
    def run(net, x):
        x = net.a(x)
        n, c, *rest = x.shape
        x = net.shuffle(x) if module else x.view(n, 4, c // 4, *rest).transpose(1, 2).reshape(n, c, *rest)
        return net.fc(net.c(net.b(x).relu()).mean((2, 3)))

    a, b = nn.Conv2d(3, 64, 3, groups=1), nn.Conv2d(64, 32, 3, groups=2)
    return Net(run, a=a, b=b, c=nn.Conv2d(32, 32, 1), fc=nn.Linear(32, 5), shuffle=nn.ChannelShuffle(4))


def tied(twice: bool):
    # Two layers of one weight; if they follow each other, they lose the same channels, as on a sum.
    def run(net, x):
        x = net.a(x).relu()
        x = x + net.b(x) if twice else net.b(x).relu()
        return net.fc((x + net.c(x) if twice else net.c(x)).mean((2, 3)))

    a, b, c = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
    c.weight = b.weight
    return Net(run, a=a, b=b, c=c, fc=nn.Linear(32, 5))


def widened():
    # Each channel of a depthwise convolution makes two; a transposed convolution, and a shuffle of pixels in code.
    def run(net, x):
        x = net.gn(net.up(net.dw(net.a(x).relu()))).relu()
        n, c, h, w = x.shape
        x = x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
        y, z = net.b(x).chunk(2, 1)
        return net.fc((y * z.sigmoid()).mean((2, 3)))

    layers = {"a": nn.Conv2d(3, 16, 3), "dw": nn.Conv2d(16, 32, 3, groups=16), "up": nn.ConvTranspose2d(32, 64, 2, 2)}
    return Net(run, **layers, gn=nn.GroupNorm(64, 64), b=nn.Conv2d(16, 48, 1), fc=nn.Linear(24, 5))


def functional():
    # Layers that the network calls as functions of parameters of its own.
    def run(net, x):
        x = F.conv2d(x, net.a.weight, net.a.bias)
        x = F.batch_norm(x, net.n.running_mean, net.n.running_var, net.n.weight, net.n.bias).relu()
        return F.linear(F.linear(x.mean((2, 3)), net.b.weight), net.fc.weight)

    layers = {"a": nn.Conv2d(3, 32, 3), "n": with_statistics(nn.BatchNorm2d(32)), "b": nn.Linear(32, 24, bias=False)}
    return Net(run, **layers, fc=nn.Linear(24, 5, bias=False))


@pytest.mark.parametrize(
    "make",
    [partial(shuffled, True), partial(shuffled, False), partial(tied, True), partial(tied, False), widened, functional],
)
def test_a_pruned_network_computes_what_the_values_that_are_left_do(make):
    # Every value is another one, so the values that are left say what was removed; the rest is set to zero.
    model, x = make().eval().double(), batch().double()
    with torch.no_grad():
        for value in model.parameters():
            value += 1e-3 * torch.randn_like(value)
    pruned = copy.deepcopy(model)
    report = compress.prune_channels(
        pruned, compress.SparsitySpec(pattern="channel:0.3", kernels="any"), example_inputs=x
    )
    left = {**dict(pruned.named_parameters()), **dict(pruned.named_buffers())}
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.shape != left[name].shape:
                value.mul_(torch.isin(value, left[name]))
    assert 0.2 < report.removed < 0.4
    torch.testing.assert_close(pruned(x), model(x))
    assert report.parameters_after == sum(p.numel() for p in pruned.parameters())
    if hasattr(pruned, "c") and hasattr(model.c, "weight"):
        assert (pruned.b.weight is pruned.c.weight) == (model.b.weight is model.c.weight)
    pruned.train()(x).sum().backward()  # and it still trains


def by_number(how: str):
    # Networks whose code has sizes of its own: they run with other sizes, or do not.
    def run(net, x):
        x = net.a(x)
        if how == "split":
            y, z = x.split(16, 1)
            x = torch.cat([y.relu(), z], 1)
        elif how == "slice":
            x = torch.cat([x[:, 16:], x[:, :16].relu()], 1)
        else:
            x = x.view(len(x), 4, 8, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return net.fc(net.c(x).relu().mean((2, 3)))

    return Net(run, a=nn.Conv2d(3, 32, 3), c=nn.Conv2d(32, 64, 3), fc=nn.Linear(64, 5))


@pytest.mark.parametrize(
    ("how", "reason"), [("split", "does not run"), ("slice", "by number"), ("view", "does not run")]
)
def test_channels_that_the_code_takes_by_number_stay_and_the_report_says_so(how, reason):
    model = by_number(how).eval()
    report = compress.prune_channels(
        model, compress.SparsitySpec(pattern="channel:0.3", kernels="any"), example_inputs=batch()
    )
    whole = {row.layer: row.reason for row in report.rows if row.before[0] == row.after[0]}
    assert set(whole) == {"a", "fc"} and reason in whole["a"] and "output" in whole["fc"]
    assert report.removed == pytest.approx(0.3, abs=0.05) and model(batch()).shape == (4, 5)


def test_module_modes_survive():
    model = small().train()
    model[1].eval()
    compress.prune_channels(model, compress.SparsitySpec(pattern="channel:0.3", kernels="any"), example_inputs=batch())
    assert [m.training for m in model] == [i != 1 for i in range(11)]


HALF = compress.SparsitySpec(pattern="channel:0.5")


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (small, compress.SparsitySpec(), "call sparsify"),
        (lambda: compress.quantize(small(), batch(), [batch()]), HALF, "quantized: remove channels of the float model"),
        (sparse, HALF, "masked already"),
        (small, replace(HALF, rules=(SparsityRule(match="*", enable=False),)), r"reach is 0\.00 of the macs"),
        (small, replace(HALF, rules=(SparsityRule(match="x"),)), "matches no layer"),
        (
            lambda: Net(lambda net, x: (y := net.a(x), net.b(y)), a=nn.Conv2d(3, 16, 1), b=nn.Conv2d(16, 16, 1)),
            HALF,
            r"0\.00 of the macs \(a: its channels are the output, b: its channels are the output\)",
        ),
    ],
)
def test_misuse_is_refused(make, spec, words):
    with pytest.raises(SparsityError, match=words):
        compress.prune_channels(make(), spec, example_inputs=batch())
