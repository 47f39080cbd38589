import pytest
import torch
from torch import nn

from compress import SparsitySpec, sparsify, squash_masks
from compress.errors import SparsityError
from compress.sparsity.parametrization import masked_layers, masks_of, nm_mask, unstructured_mask, verify_nm
from compress.sparsity.spec import SparsityRule
from tests.sparsity.nets import batch, small


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


def test_unstructured_masks():
    model = small()
    weight = model[3].weight.detach().clone()
    sparsify(model, SparsitySpec(pattern="unstructured:0.9"))
    assert torch.equal(masks_of(model)["3"], unstructured_mask(weight, 0.9))


def test_hessian_masks_update_the_weights_and_need_batches():
    model, dense = small(), small()
    report = sparsify(model, SparsitySpec(saliency="hessian", calibration_images=8), batches=[batch(8)])
    assert report.masked == ("3", "6")
    weight = model[6].weight.detach()
    assert verify_nm(weight.numpy(), 2, 4) == 0
    kept = weight != 0
    assert not torch.allclose(weight[kept], dense[6].weight[kept])
    assert torch.equal(model[0].weight, dense[0].weight)
    with pytest.raises(SparsityError, match="needs calibration batches"):
        sparsify(small(), SparsitySpec(saliency="hessian"))


class Leaky(nn.Module):
    """A layer that the forward pass leaves out, and one that fx cannot trace past."""

    def __init__(self):
        super().__init__()
        self.net = small()
        self.spare = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return self.net(x) if x.sum() < 1e9 else self.net(x * 2)


def test_layers_that_never_ran_are_named():
    rules = (SparsityRule(match="spare"),)
    with pytest.raises(SparsityError, match="never ran on the calibration images: spare; disable"):
        sparsify(Leaky(), SparsitySpec(saliency="hessian", rules=rules), batches=[batch()])


def test_graph_that_cannot_be_traced_is_masked_without_permutation():
    model = Leaky()
    report = sparsify(model, SparsitySpec(permute=True), example_inputs=batch())
    assert "cannot trace Leaky.forward" in report.permutation.refused
    assert report.masked == ("net.3", "net.6")


def test_permutation_comes_before_the_masks():
    model = small()
    expected = model(batch())
    plain = sparsify(small(), SparsitySpec())
    report = sparsify(model, SparsitySpec(permute=True, permute_seconds=1.0), example_inputs=batch())
    assert report.permutation.refused == "" and report.permutation.groups == 2
    for row, other in zip(report.rows, plain.rows, strict=True):
        assert row.kept_magnitude is None or row.kept_magnitude > other.kept_magnitude
    moved = {row.layer: row.after for row in report.permutation.rows}
    assert moved == {row.layer: pytest.approx(row.kept_magnitude) for row in report.rows if row.eligible}
    with torch.no_grad():
        for layer in masked_layers(model).values():
            layer.mask.fill_(True)
    torch.testing.assert_close(model(batch()), expected)


def test_misuse_is_refused():
    model = small()
    sparsify(model, SparsitySpec())
    with pytest.raises(SparsityError, match="sparse already"):
        sparsify(model, SparsitySpec())
    squash_masks(model)
    sparsify(model, SparsitySpec())  # and again after squashing
    with pytest.raises(SparsityError, match="call compress.prune_channels"):
        sparsify(small(), SparsitySpec(pattern="channel:0.5"))
    with pytest.raises(SparsityError, match="permute needs example_inputs"):
        sparsify(small(), SparsitySpec(permute=True))
    with pytest.raises(SparsityError, match="no layer can be masked with pattern '2:7'"):
        sparsify(small(), SparsitySpec(pattern="2:7"))
    broken = small()
    with torch.no_grad():
        broken[6].weight[0, 0] = float("nan")
    with pytest.raises(SparsityError, match="layer 6: .*NaN"):
        sparsify(broken, SparsitySpec())
    assert not masked_layers(broken)


class Products(nn.Module):
    """Weights that are no layer's `weight`: of attention, of a recurrent layer, and the model's own."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, kdim=width, vdim=width)
        self.recurrent, self.own = nn.GRU(32, 32, batch_first=True), nn.Parameter(torch.randn(32, 32))
        self.gain = nn.Parameter(torch.ones(1, 32))

    def forward(self, x):
        query = self.embed(x)
        keys = x if self.attention.kdim == 16 else query
        y = self.recurrent(self.inner(self.attention(query, keys, keys)[0]) * self.gain)[0]
        return self.head(nn.functional.linear(y, self.own))


@pytest.mark.parametrize("width", [32, 16])
def test_weights_that_are_no_layers_have_a_row_each(width):
    model = Products(width).eval()
    multiplied = {name for name, p in model.named_parameters() if p.dim() > 1 and name != "gain"}
    report = sparsify(model, SparsitySpec(), example_inputs=torch.randn(2, 5, 16))
    assert {row.layer for row in report.rows} == {name.removesuffix(".weight") for name in multiplied}
    own = {row.layer: row for row in report.rows}["own"]
    assert not own.eligible and own.shape == (32, 32) and report.masked == ("inner",)
    rule = SparsityRule(match="own", enable=True)
    with pytest.raises(SparsityError, match="a rule enables own"):
        sparsify(Products(width), SparsitySpec(rules=(rule,)), example_inputs=torch.randn(2, 5, 16))
