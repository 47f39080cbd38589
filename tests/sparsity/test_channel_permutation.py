import copy
import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchvision import models

from compress import SparsitySpec
from compress.errors import SparsityError
from compress.sparsity import SparsityRule, channel_permutation
from compress.sparsity.channel_permutation import kept_by_order, permute_channels, search_permutation
from compress.support.progress import NoProgress
from tests.further import further
from tests.networks import Net, unchanged
from tests.sparsity.nets import QUICK, batch, permuted, small, sparse


def conv(inputs, outputs, kernel=1, **kwargs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **kwargs), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def around(middle, width=32, **layers):
    def run(net, x):
        return net.fc(middle(net, net.stem(x)).mean((2, 3)))

    return Net(run, stem=conv(3, 16, 3), **layers, fc=nn.Linear(width, 10))


def maxout(net, x):
    x = torch.maximum(net.a(x), net.b(x)).square().sqrt()
    return net.c(torch.minimum(x, x.exp().log()))


def depthwise(net, x):
    x = net.b(net.a(x))
    return net.c(net.d(x) + x)


def excited(net, x):
    x = net.a(x)
    gate = torch.sigmoid(net.up(F.relu(net.down(x.mean((2, 3), keepdim=True)))))
    return net.c(x * gate)


def shuffled(net, x):
    left, right = net.a(x).chunk(2, 1)
    x = torch.cat([net.b(left), F.silu(net.c(right))], 1)
    n, c, h, w = x.shape
    x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return net.e(net.d(x))


def half_activated(net, x):
    # One half of a tensor passes another activation, so the halves may not mix though one layer reads both.
    x = net.a(x)
    return net.c(torch.cat([x[:, :16] * 2, torch.tanh(x[:, 16:])], 1))


def looped(net, x):
    x = net.a(x)
    for _ in range(2):
        x = F.relu(net.loop(x))
    return net.c(x)


def flattened():
    def run(net, x):
        x = net.slope(net.b(net.a(x))) * net.scale
        return net.fc(F.gelu(net.norm(net.hidden(F.adaptive_avg_pool2d(x, 4).flatten(1)))))

    slope, norm = nn.PReLU(32), nn.LayerNorm(64)
    nn.init.uniform_(slope.weight)
    nn.init.uniform_(norm.weight)
    linear = {"hidden": nn.Linear(32 * 16, 64), "fc": nn.Linear(64, 10)}
    scale = nn.Parameter(torch.rand(32, 1, 1))
    return Net(run, a=conv(3, 16, 3), b=conv(16, 32, 3), scale=scale, slope=slope, norm=norm, **linear)


def normed():
    g, i = nn.GroupNorm(2, 32), nn.InstanceNorm2d(32, affine=True, track_running_stats=True)
    for norm in (g, i):
        nn.init.uniform_(norm.weight)
    layers = {"a": conv(16, 32), "b": conv(32, 32), "t": nn.ConvTranspose2d(32, 32, 2, 2), "c": conv(32, 32)}
    return around(lambda net, x: net.c(net.t(net.i(net.b(net.g(net.a(x)))))), **layers, g=g, i=i)


STRUCTURES = {
    "residual": lambda: around(
        lambda net, x: net.c(F.relu(net.b(net.a(x)) + net.short(x))),
        a=conv(16, 32),
        b=nn.Conv2d(32, 32, 3, padding=1),
        short=nn.Conv2d(16, 32, 1),
        c=conv(32, 32),
    ),
    "maxout": lambda: around(maxout, a=conv(16, 32), b=conv(16, 32), c=conv(32, 32)),
    "concat": lambda: around(
        lambda net, x: net.d(net.c(torch.cat([net.a(x), net.b(x), x], 1))),
        a=conv(16, 16),
        b=conv(16, 32),
        c=conv(64, 32),
        d=conv(32, 32),
    ),
    "misaligned": lambda: around(  # at offset 18: the second branch is in whole groups nowhere
        lambda net, x: net.d(net.c(torch.cat([net.a(x), net.b(x)], 1))),
        a=conv(16, 18),
        b=conv(16, 30),
        c=conv(48, 32),
        d=conv(32, 32),
    ),
    "depthwise": lambda: around(
        depthwise,
        a=conv(16, 64),
        b=conv(64, 64, 3, groups=64),
        c=conv(64, 32),
        d=nn.Conv2d(64, 64, 3, 1, 1, groups=64),
    ),
    "grouped": lambda: around(
        lambda net, x: net.c(net.b(net.a(x))), a=conv(16, 64), b=conv(64, 64, 3, groups=4), c=conv(64, 32)
    ),
    "excited": lambda: around(
        excited, a=conv(16, 64), down=nn.Conv2d(64, 16, 1), up=nn.Conv2d(16, 64, 1), c=conv(64, 32)
    ),
    "shuffled": lambda: around(
        shuffled, 64, a=conv(16, 64), b=conv(32, 32), c=conv(32, 32), d=conv(64, 64), e=conv(64, 64)
    ),
    "half activated": lambda: around(half_activated, a=conv(16, 32), c=conv(32, 32)),
    "looped": lambda: around(looped, a=conv(16, 32), loop=nn.Conv2d(32, 32, 3, padding=1), c=conv(32, 32)),
    "flattened": flattened,
    "normed": normed,
}


@pytest.mark.parametrize(
    ("name", "groups", "searched"),
    [
        ("residual", 3, {"a.0": 16, "b": 32, "short": 16, "c.0": 32}),
        ("maxout", 2, {"a.0": 16, "b.0": 16, "c.0": 32}),
        ("concat", 4, {"a.0": 16, "b.0": 16, "c.0": 64, "d.0": 32}),
        ("misaligned", 2, {"a.0": 16, "b.0": 16, "c.0": 0, "d.0": 32}),
        ("depthwise", 2, {"a.0": 16, "c.0": 64}),
        ("grouped", 5, {"a.0": 16, "c.0": 64}),
        ("excited", 3, {"a.0": 16, "down": 64, "up": 16, "c.0": 64}),
        ("shuffled", 4, {"a.0": 16, "b.0": 32, "c.0": 32, "d.0": 0, "e.0": 64}),
        ("half activated", 3, {"a.0": 16, "c.0": 32}),
        ("looped", 2, {"a.0": 16, "loop": 32, "c.0": 32}),
        ("flattened", 1, {"b.0": 16, "hidden": 0}),
        ("normed", 4, {"a.0": 16, "b.0": 32, "c.0": 32}),
    ],
)
def test_structures(name, groups, searched):
    torch.manual_seed(1)
    report = permuted(STRUCTURES[name](), batch(2), SparsitySpec(permute_seconds=0.1, kernels="any"))
    assert {row.layer: row.searched for row in report.rows} == searched
    assert report.groups == groups
    for row in report.rows:
        assert (row.searched == row.channels) == (row.reason == "")
        assert row.after > row.before or row.searched == 0
        assert row.searched or "whole groups of 4" in row.reason


def counting(pick):
    # Reads channels by number, which no permutation may hide: fx sees the numbers, a leaf does not show them.
    def run(net, x):
        x = net.pick(net.a(x))
        return net.fc(net.c(x - x[:, 3:4]).mean((2, 3)))

    return Net(run, a=conv(3, 16, 3), pick=pick, c=conv(16, 32), fc=nn.Linear(32, 4))


def test_channels_that_are_read_by_number_stay():
    spec = SparsitySpec(permute_seconds=0.1, kernels="any", rules=(SparsityRule(match="*"),))
    seen = permute_channels(counting(nn.Identity()), spec, example_inputs=batch())
    assert {row.layer: row.searched for row in seen.rows} == {"c.0": 0, "fc": 32}  # 15 that are alike
    pick = Net(lambda net, x: x * torch.arange(x.shape[1]).view(1, -1, 1, 1) if x.sum() > -1e9 else x)
    opaque = permute_channels(counting(pick), spec, example_inputs=batch())
    rows = {row.layer: row for row in opaque.rows}
    assert rows["c.0"].searched == 0 and "pick (unknown), which cannot be followed" in rows["c.0"].reason


class Sneaky(nn.Conv2d):
    def forward(self, x):
        return super().forward(x * torch.arange(x.shape[1]).view(1, -1, 1, 1))


def test_network_that_would_change_is_put_back_and_refused(monkeypatch):
    model = nn.Sequential(*conv(3, 16, 3), Sneaky(16, 32, 1), nn.ReLU(), nn.Conv2d(32, 32, 1)).eval()
    monkeypatch.setattr(channel_permutation, "trace", lambda model, inputs: leafy(model))
    with unchanged(model), pytest.raises(SparsityError, match="would compute|so the permutation was undone"):
        permute_channels(model, SparsitySpec(permute_seconds=0.1), example_inputs=batch())


def leafy(model):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, Sneaky) or super().is_leaf_module(m, name)

    twin = copy.deepcopy(model)
    return torch.fx.GraphModule(twin, Tracer().trace(twin)).eval()


def test_optimizer_and_modes_survive():
    model = small().train()
    model[1].eval()
    parameters = list(model.parameters())
    torch.set_num_threads(2)
    permute_channels(model, QUICK, example_inputs=batch())
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [m.training for m in model] == [i != 1 for i in range(11)]


@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (sparse, QUICK, "3 is parametrized already: permute channels before masking"),
        (lambda: nn.Sequential(small(), QUANTIZER), QUICK, "permute channels before quantizing"),
        (small, SparsitySpec(pattern="unstructured:0.5"), "not 'unstructured:0.5'"),
    ],
)
def test_masked_and_quantized_models_and_other_patterns_are_refused(make, spec, words):
    with pytest.raises(SparsityError, match=words):
        permute_channels(make(), spec, example_inputs=batch())


QUANTIZER = nn.Identity()
QUANTIZER.is_quantizer = True


def test_progress_is_advanced_at_every_group():
    listener = Mock(NoProgress)
    permute_channels(small(), QUICK, example_inputs=batch(), progress=listener)
    assert [name for name, _, _ in listener.mock_calls] == ["start", "advance", "advance", "finish"]
    assert [sorted(call.kwargs) for call in listener.advance.call_args_list] == [["gap_closed"]] * 2
    assert listener.start.call_args.args == ("permute", 2) and listener.finish.call_args.args == ("permute",)


def kept(matrix, n, m, order):
    groups = np.sort(np.abs(matrix.double().numpy())[:, order].reshape(len(matrix), -1, m), axis=-1)
    return groups[..., m - n :].sum()


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 4), (1, 4), (3, 4), (1, 2), (4, 8), (2, 3)]), st.integers(1, 5), st.integers(1, 4), st.data()
)
def test_kept_and_bound_are_numpys_and_never_fall(nm, rows, stripes, data):
    n, m = nm
    values = data.draw(st.lists(st.integers(-3, 3), min_size=rows * stripes * m, max_size=rows * stripes * m))
    matrix = torch.tensor(values, dtype=torch.float32).view(rows, -1)
    found = search_permutation(matrix, n, m, seconds=0.02)
    assert sorted(found.order.tolist()) == list(range(stripes * m))
    assert found.before == pytest.approx(kept(matrix, n, m, list(range(stripes * m))))
    assert found.after == pytest.approx(kept(matrix, n, m, found.order.tolist()))
    assert found.before <= found.after <= found.bound + 1e-6
    assert kept_by_order(matrix, n, m, order=found.order) == pytest.approx(found.after)
    rows_best = np.sort(np.abs(matrix.numpy()), axis=1)[:, stripes * m - stripes * n :].sum()
    assert found.bound == pytest.approx(rows_best)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 4)])
def test_two_stripes_end_at_the_best_of_all_orders(n, m):
    for seed in range(5):
        matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed))
        splits = [(0, *rest) for rest in itertools.combinations(range(1, 8), 3)]
        best = max(kept(matrix, n, m, [*left, *sorted(set(range(8)) - set(left))]) for left in splits)
        assert search_permutation(matrix, n, m, seconds=600).after == pytest.approx(best)


def test_apexs_own_matrix_is_ordered_at_least_as_well_as_by_apex():
    # The matrix of apex's table (64 columns, 128 rows, seed 1): its best, three stripes at a time, closes 36.6 %.
    np.random.seed(1)
    matrix = torch.from_numpy(np.random.rand(128, 64)).float()
    tries = [search_permutation(matrix, 2, 4, seconds=600, rounds=3000, seed=seed) for seed in range(2)]
    found = max(tries, key=lambda result: result.after)
    assert (found.before, found.bound) == (pytest.approx(2852.377, abs=2e-3), pytest.approx(3042.332, abs=2e-3))
    assert found.gap_closed > 0.36


def test_order_that_cannot_be_improved_is_left_alone():
    matrix = torch.eye(4).repeat(1, 4)
    matrix[:, 4:] = 0
    assert search_permutation(matrix, 2, 4, seconds=0.1).order.tolist() == list(range(16))
    assert search_permutation(torch.ones(3, 4), 2, 4, seconds=0.1).gap_closed == 0.0


@pytest.mark.parametrize(
    ("matrix", "n", "m", "match"),
    [
        (torch.ones(4, 6), 2, 4, "m must divide"),
        (torch.ones(4, 8, 1), 2, 4, "m must divide"),
        (torch.ones(0, 8), 2, 4, "m must divide"),
        (torch.ones(4, 8), 4, 4, "4:4"),
        (torch.full((4, 8), float("nan")), 2, 4, "NaN"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(matrix, n, m, match):
    with pytest.raises(SparsityError, match=match):
        search_permutation(matrix, n, m, seconds=0.1)


# Permuted networks compute the same as before: every family of torchvision's CNNs, and a transformer.


def with_small_classifier(make, features):
    # The network with a classifier of 64 instead of 4,096 channels, which is most of its time.
    with torch.device("meta"):
        model = make()
        model.classifier = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


def vgg():
    return models.VGG(models.vgg.make_layers([32, "M", 64, 64, "M", 64], batch_norm=False))


def resnet(block, layers, **kwargs):
    return models.ResNet(block, layers, num_classes=16, **kwargs)


def convnext():
    widths = ((32, 64), (64, 128), (128, None))
    return models.ConvNeXt([models.convnext.CNBlockConfig(c, out, 1) for c, out in widths], layer_scale=0.5)


FAMILIES = {
    "alexnet": (lambda: with_small_classifier(models.AlexNet, 256 * 36), 64),
    "vgg": (lambda: with_small_classifier(vgg, 64 * 49), 32),
    "resnet18": (lambda: resnet(models.resnet.BasicBlock, [2, 1, 1, 1]), 32),
    "resnet50": (lambda: resnet(models.resnet.Bottleneck, [2, 1, 1, 1]), 32),
    "resnext": (lambda: resnet(models.resnet.Bottleneck, [1, 1, 1, 1], groups=16, width_per_group=8), 32),
    "densenet": (lambda: models.DenseNet(32, (3, 3, 3), 64), 32),
    "googlenet": (lambda: models.googlenet(init_weights=False), 32),
    "inception_v3": (lambda: models.inception_v3(init_weights=False), 75),
    "squeezenet": (models.squeezenet1_1, 32),
    "mobilenet_v2": (models.mobilenet_v2, 32),
    "mobilenet_v3": (models.mobilenet_v3_small, 32),
    "mnasnet": (models.mnasnet0_5, 32),
    "shufflenet_v2": (models.shufflenet_v2_x0_5, 32),
    "efficientnet": (models.efficientnet_b0, 32),
    "regnet": (models.regnet_y_400mf, 32),
    "convnext": (convnext, 32),
}


@pytest.mark.parametrize(
    "family", further(FAMILIES, ["alexnet", "resnet18", "mobilenet_v2", "shufflenet_v2", "convnext"])
)
def test_families_of_torchvision(family):
    make, size = FAMILIES[family]
    report = permuted(make(), torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(3)))
    assert report.groups > 0
    assert sum(row.after for row in report.rows) > sum(row.before for row in report.rows)
    if family not in {"alexnet", "vgg", "shufflenet_v2"}:  # flattened pictures, interleaved halves
        assert all(row.reason == "" for row in report.rows)


def test_transformer_blocks_are_permuted_inside_and_say_why_not_between():
    model = models.VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=8)
    nn.init.normal_(model.heads.head.weight)
    x = torch.randn(1, 3, 16, 16)
    rows = {row.layer: row for row in permuted(model, x).rows}
    mlp = "encoder.layers.encoder_layer_0.mlp"
    assert rows[f"{mlp}.3"].reason == "" and rows[f"{mlp}.3"].searched == 64
    assert "encoder.pos_embedding of (1, 5, 32), which cannot be followed" in rows[f"{mlp}.0"].reason
