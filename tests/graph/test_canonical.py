# Attention opened and functional layers as modules: the same function of the input, and the same names of weights.

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from compress import trace
from compress.graph.canonical import canonical_graph
from compress.graph.ops import node_kind
from compress.graph.report import leaves_of
from tests.networks import Net, with_statistics

G = torch.Generator().manual_seed(0)


def kinds(graph):
    return [node_kind(node) for node in graph.graph.nodes]


def same(model, x, more=None):
    model.eval()
    graph = canonical_graph(model, x)
    for inputs in (x, more if more is not None else torch.cat([x, x[:1]])):
        with torch.no_grad():
            torch.testing.assert_close(graph(inputs), model(inputs), rtol=1e-4, atol=1e-5)
    return graph


def self_attention(run, **options):
    return Net(run, attn=nn.MultiheadAttention(16, 4, **options), fc=nn.Linear(16, 3))


def with_weights(net, x):
    y, weights = net.attn(x, x, x)
    return net.fc(y) + weights.mean()


@pytest.mark.parametrize("options", [{"batch_first": True}, {}, {"batch_first": True, "bias": False}])
def test_multihead_attention_is_opened_and_keeps_its_names(options):
    model = self_attention(with_weights, **options)
    graph = same(model, torch.randn(2, 5, 16, generator=G))
    assert "attention" not in kinds(graph) and kinds(graph).count("matmul") == 2 and kinds(graph).count("linear") == 3
    assert graph.state_dict().keys() == model.state_dict().keys()
    for twin in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert twin.state_dict().keys() == model.state_dict().keys()
    other = self_attention(with_weights, **options)
    graph.load_state_dict(other.state_dict())
    x = torch.randn(2, 5, 16, generator=G)
    torch.testing.assert_close(graph(x), other.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"need_weights": False}, {"average_attn_weights": False}])
def test_attention_whose_pair_is_a_result_of_the_network_is_opened(options):
    model = self_attention(lambda net, x: net.attn(x, x, x, **options), batch_first=True).eval()
    x = torch.randn(2, 5, 16, generator=G)
    graph = canonical_graph(model, x)
    assert "attention" not in kinds(graph)
    torch.testing.assert_close(graph(x), model(x))


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
CROSSED = {
    "query and value": ({}, lambda a, x: a(x, x * 2, x), 3),
    "memory": ({}, lambda a, x: a(x, y := x[:, 1:].sin(), y), 2),
    "widths": ({"kdim": 12, "vdim": 8}, lambda a, x: a(x, x[..., :12], x[..., 8:]), 3),
    "tokens first": ({"batch_first": False, "bias": False}, lambda a, x: [a(x.mT.mT, y := x.exp(), y)[0]], 2),
    "mask of truths": ({}, lambda a, x: a(x, x, x, attn_mask=CAUSAL), 1),
    "mask of each head": ({}, lambda a, x: a(x, x, x, attn_mask=CAUSAL.float().repeat(4 * x.shape[0], 1, 1)), 1),
    "padding": ({}, lambda a, x: a(x, x, x, key_padding_mask=(x[..., 0] > 1) & (x[..., 1] > 0)), 1),
}


@pytest.mark.parametrize("case", CROSSED)
def test_attention_between_tensors_and_with_masks_is_opened(case):
    options, call, layers = CROSSED[case]

    def crossed():
        return Net(
            lambda net, x: call(net.attn, x)[0], attn=nn.MultiheadAttention(16, 4, **{"batch_first": True, **options})
        )

    graph = same(crossed(), torch.randn(2, 5, 16, generator=G))
    assert kinds(graph).count("linear") == layers + 1 and kinds(graph).count("matmul") == 2
    assert sum(p.numel() for p in graph.parameters()) == sum(p.numel() for p in crossed().parameters())


def test_attention_that_cannot_be_opened_says_why():
    model = self_attention(lambda net, x: net.attn(x, x, x)[0], batch_first=True, add_zero_attn=True)
    graph = same(model, torch.randn(2, 5, 16, generator=G))
    (node,) = [node for node in graph.graph.nodes if node_kind(node) == "attention"]
    assert "rows added" in node.meta["whole"]


def test_attention_alone_is_a_layer_of_its_graph():
    model, x = nn.MultiheadAttention(16, 4), torch.randn(5, 2, 16, generator=G)
    for inputs in ((x, x, x), {"query": x, "key": x * 2, "value": x}):
        graph = canonical_graph(copy.deepcopy(model), inputs)
        assert kinds(graph).count("matmul") == 2
        given = inputs if isinstance(inputs, tuple) else inputs.values()
        torch.testing.assert_close(graph(*given), model(*given))


@pytest.mark.parametrize("form", ["plain", "scale", "bool", "float", "causal", "one head"])
def test_scaled_dot_product_attention_is_opened(form):
    mask = torch.rand(5, 5, generator=G) > 0.4
    mask.fill_diagonal_(True)
    options = {"scale": {"scale": 0.3}, "bool": {"attn_mask": mask}, "float": {"attn_mask": torch.randn(5, 5)}}
    options["causal"] = {"is_causal": True}

    def run(net, x):
        if form == "one head":
            return F.scaled_dot_product_attention(*net.qkv(x).chunk(3, -1), is_causal=True)
        q, k, v = net.qkv(x).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, **options.get(form, {}))

    graph = same(Net(run, qkv=nn.Linear(8, 24)), torch.randn(2, 5, 8, generator=G))
    assert kinds(graph).count("matmul") == 2


@pytest.mark.parametrize("version", [1, 2])
def test_swin_is_opened(version):
    from torchvision.models.swin_transformer import SwinTransformerBlock, SwinTransformerBlockV2

    block = (SwinTransformerBlock, SwinTransformerBlockV2)[version - 1]
    model = nn.Sequential(*(block(16, 2, [4, 4], [s, s], stochastic_depth_prob=0.0) for s in (0, 2, 0, 2)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    graph = same(model, torch.randn(2, 7, 10, 16, generator=G))  # padded to 8 by 12
    assert len({node.target for node in graph.graph.nodes if str(node.target).endswith("_mask")}) == 1  # of two layers
    assert kinds(graph).count("matmul") == 8 and "unknown" not in [k for k in kinds(graph) if k == "attention"]
    assert all(node.op == "call_module" for node in graph.graph.nodes if node_kind(node) == "linear")
    assert model.state_dict().keys() <= graph.state_dict().keys()
    x = torch.randn(2, 7, 10, 16, generator=G)
    torch.testing.assert_close(graph.to(memory_format=torch.channels_last)(x), model(x))


def test_functions_become_layers_and_batchnorm_folds_into_them():
    class Same(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, (0, 0), (1, 1), self.groups)

    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = self.weight
            weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight, self.bias)

    class NormAct(nn.BatchNorm2d):
        def forward(self, x):
            torch._assert(x.ndim == 4, "an image")
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, 1e-5).relu()

    model = nn.Sequential(Same(3, 8, 3, groups=1), NormAct(8), Standardized(8, 6, 3, bias=False), NormAct(6))
    with_statistics(model)
    graph = same(model, torch.randn(2, 3, 12, 12, generator=G))
    assert "batch_norm" not in kinds(graph) and kinds(graph).count("conv") == 2
    assert {name for name in graph.state_dict() if name.endswith("weight")} == {"0.weight", "2.weight"}


def test_sizes_decide_control_flow_and_values_do_not():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x, mask=None):
            height = x.shape[2]
            if height % 4 and mask is None:
                x = F.pad(x, (0, 0, 0, 4 - height % 4))
            rows = [self.conv(x[:, :, i : i + 4]) for i in range(0, len(x[0, 0]), 4)]
            return torch.cat(rows, 2)[:, :, :height].reshape(x.shape[0], -1)

    graph = same(Padded(), torch.randn(2, 3, 6, 6, generator=G))
    assert kinds(graph).count("conv") == 2 and not leaves_of(graph)

    on_item = Net(lambda net, x: x * 2 if x.sum().item() > 0 else x)
    (leaf,) = leaves_of(trace(nn.Sequential(nn.Conv2d(3, 4, 1), on_item), torch.randn(2, 3, 4, 4)))
    assert leaf.path == "1"


class Einsum(nn.Module):
    def __init__(self, equation):
        super().__init__()
        self.equation = equation

    def forward(self, left, right):
        return torch.einsum(self.equation, left, right)


@pytest.mark.parametrize(
    "equation",
    [
        *("bhik,bhjk->bhij", "bij,bjd->bid", "bki,bkj->bij", "nc,cd->nd", "bij,jk->bki", "bqhd,bkhd->bhqk"),
        *("bhqk,bkhd->bqhd", "bhij,bjd->bhid", "jc,bhij->bihc", "...ij,...jk->...ik", "ij,jk", "b i j, b j d -> b i d"),
    ],
)
def test_einsums_that_are_matrix_products(equation):
    sizes = dict(zip("bhijkdncq.", (2, 3, 4, 5, 6, 7, 4, 6, 5, 2), strict=True))
    sides = equation.replace(" ", "").replace("...", ".").split("->")[0].split(",")
    x = tuple(torch.randn([sizes[c] for c in side], generator=G) for side in sides)
    graph = canonical_graph(Einsum(equation), x)
    assert "einsum" not in kinds(graph) and "matmul" in kinds(graph)
    torch.testing.assert_close(graph(*x), torch.einsum(equation, *x))


@pytest.mark.parametrize(
    "equation", ["bij,bij->bi", "bij,bjj->bij", "bij,bjk->bk", "bcij,bc->bcij", "bcij,bcij->bc", "bi,bj->bij"]
)
def test_einsums_that_are_not(equation):
    sizes = dict(zip("bijkc", (2, 4, 4, 3, 5), strict=True))
    x = tuple(torch.randn([sizes[c] for c in side], generator=G) for side in equation.split("->")[0].split(","))
    assert "einsum" in kinds(canonical_graph(Einsum(equation), x))


def test_maxvit_has_no_einsum_left():
    model = torchvision.models.maxvit.MaxVit((64, 64), 8, 4, [8], [1], 8, 0.0, num_classes=4)
    graph = same(model.eval(), torch.randn(2, 3, 64, 64, generator=G))
    assert "einsum" not in kinds(graph) and kinds(graph).count("matmul") == 4


def test_torchs_transformers_are_looked_into_and_their_dropout_stays():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True), 2)
    model = Net(lambda net, x: net.fc(net.encoder(x).mean(1)), encoder=encoder, fc=nn.Linear(16, 3))
    x = torch.randn(2, 5, 16, generator=G)
    graph = same(model, x)
    assert leaves_of(graph) == () and "attention" not in kinds(graph)
    assert kinds(graph).count("linear") == 2 * 4 + 1 and kinds(graph).count("matmul") == 2 * 2
    assert graph.state_dict().keys() == model.state_dict().keys()
    attended = next(node for node in graph.graph.nodes if str(node.target).startswith("dropouts."))
    ones = torch.ones(4, 1000)
    drop = graph.get_submodule(attended.target)
    assert torch.equal(drop(ones), ones) and graph.train() and 0.4 < (drop(ones) == 0).float().mean() < 0.6
