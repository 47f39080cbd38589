# Attention opened and functional layers as modules: the same function of the input, and the same names of weights.

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.flop_counter import FlopCounterMode

from compress import audit_onnx, export_onnx, quantize, receptive_field, roofline, trace
from compress.errors import CompressWarning
from compress.graph.canonical import canonical_graph
from compress.graph.fold import fold_batchnorm
from compress.graph.ops import node_kind
from compress.graph.report import leaves_of
from compress.sparsity.parametrization import apply_masks, masks_of, nm_mask
from tests.exact import open_session
from tests.networks import Net, TinyResNet, with_statistics

G = torch.Generator().manual_seed(0)


def kinds(graph):
    return [node_kind(node) for node in graph.graph.nodes]


def same(model, x, more=None):
    model.eval()
    graph = canonical_graph(model, x)
    for inputs in (x, more if more is not None else torch.cat([x, x[:1]])):
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
    "learned row": ({"add_bias_kv": True, "batch_first": False}, lambda a, x: a(x, x, x), 1),
    "rows and masks": (
        {"add_bias_kv": True, "add_zero_attn": True},
        lambda a, x: a(x, x, x, attn_mask=CAUSAL, key_padding_mask=x[..., 0] > 1),
        1,
    ),
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


def pooled(net, x, **options):
    # The pool of CLIP's ResNets: torch's function with the weights of four layers.
    tokens = torch.cat([x.mean(1, keepdim=True), x], 1).transpose(0, 1)
    if "padding" in options:
        options = {"key_padding_mask": tokens[..., 0].transpose(0, 1) > 1}
    own = options.pop("own", True)
    weights = {f"{n}_proj_weight": getattr(net, n).weight for n in "qkv"} if own else {}
    parts = [getattr(net, n) for n in "qkv"]
    y, _ = F.multi_head_attention_forward(
        *(tokens, tokens, tokens, tokens.shape[-1], 4),
        None if own else torch.cat([part.weight for part in parts]),
        torch.cat([part.bias for part in parts]),
        *(None, None, False, 0.0, net.last.weight, net.last.bias),
        **{"training": net.training, "need_weights": False, "use_separate_proj_weight": own, **weights, **options},
    )
    return y[0]


@pytest.mark.parametrize("options", [{}, {"own": False}, {"padding": True}, {"attn_mask": torch.randn(6, 6)}])
def test_attention_by_torchs_function_is_opened_into_its_layers(options):
    layers = {name: nn.Linear(16, 16) for name in "qkv"}
    model = Net(lambda net, x: pooled(net, x, **options), **layers, last=nn.Linear(16, 3))
    x = torch.randn(2, 5, 16, generator=G)
    graph = same(model, x)
    assert kinds(graph).count("linear") == 4 and kinds(graph).count("matmul") == 2
    assert {key for key in graph.state_dict() if "constant" not in key} == model.state_dict().keys()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(x)
    assert roofline(model, x).macs == counted.get_total_flops() // 2


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}])
def test_a_subclass_of_torchs_attention_is_opened_and_keeps_its_names(options):
    class Own(nn.MultiheadAttention):
        pass

    model = Net(lambda net, x: net.fc(net.attn(x, x, x)[0]), attn=Own(16, 4, **options), fc=nn.Linear(16, 3))
    x = torch.randn(5, 5, 16, generator=G)
    graph = same(model, x, x.flip(0))
    assert kinds(graph).count("linear") == 3 and kinds(graph).count("matmul") == 2
    assert graph.state_dict().keys() == model.state_dict().keys()


def test_the_pool_of_clips_resnets_sees_the_whole_image():
    layers = {name: nn.Linear(16, 16) for name in "qkv"} | {"last": nn.Linear(16, 3), "conv": nn.Conv2d(3, 16, 4, 4)}
    model = Net(lambda net, x: pooled(net, net.conv(x).flatten(2).transpose(1, 2)), **layers).eval()
    image = torch.randn(1, 3, 8, 12, generator=G, requires_grad=True)
    model(image).sum().backward()
    assert image.grad.abs().sum((0, 1)).ne(0).all()
    assert list(receptive_field(model, image.detach()))[-1].size == (8, 12)


def test_attention_that_cannot_be_opened_says_why():
    model = self_attention(lambda net, x: net.attn(x, x, x)[0], batch_first=True)
    graph = same(model, torch.randn(5, 16, generator=G))
    (node,) = [node for node in graph.graph.nodes if node_kind(node) == "attention"]
    assert "no batch dimension" in node.meta["whole"]


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


@pytest.mark.parametrize(
    "shaped", [lambda w, c, x: w.view(c, c, 1, 1), lambda w, c, x: torch.reshape(w, [x.shape[1], -1, *[1, 1]])]
)
def test_weights_that_are_shaped_by_the_size_of_the_input_become_layers(shaped):
    def normalized(net, x):  # generalized divisive normalization
        y = net.conv(x)
        gamma = shaped(net.gamma.clamp_min(1e-6).square(), y.size()[1], y)
        return y * torch.rsqrt(F.conv2d(y * y, gamma, net.beta))

    parts = {"gamma": nn.Parameter(torch.rand(4, 4)), "beta": nn.Parameter(torch.ones(4))}
    graph = same(Net(normalized, conv=nn.Conv2d(3, 4, 3), **parts), torch.randn(2, 3, 8, 8, generator=G))
    assert kinds(graph).count("conv") == 2 and all(n.op == "call_module" for n in graph.graph.nodes if "conv" in n.name)
    x = torch.randn(3, 3, 9, 7, generator=G)
    assert graph(x).shape == (3, 4, 7, 5)


def test_a_module_that_is_moved_to_where_its_input_is_is_traced_into():
    def moves(net, x):
        return net.second.to(device=x.device, dtype=x.dtype)(net.first.to(x)(x).relu())

    to = nn.Module.to
    graph = same(Net(moves, first=nn.Conv2d(3, 4, 3), second=nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 8, 8, generator=G))
    assert kinds(graph).count("conv") == 2 and not leaves_of(graph) and nn.Module.to is to


def test_sizes_decide_control_flow_and_values_do_not():
    def padded(net, x, mask=None):
        height = x.shape[2]
        if height % 4 and mask is None:
            x = F.pad(x, (0, 0, 0, 4 - height % 4))
        rows = [net.conv(x[:, :, i : i + 4]) for i in range(0, len(x[0, 0]), 4)]
        return torch.cat(rows, 2)[:, :, :height].reshape(x.shape[0], -1)

    graph = same(Net(padded, conv=nn.Conv2d(3, 4, 1)), torch.randn(2, 3, 6, 6, generator=G))
    assert kinds(graph).count("conv") == 2 and not leaves_of(graph)

    def by_type(net, x):
        x = net.conv(x)
        if "Half" in x.type() or x.type() == "torch.DoubleTensor" or x.nelement() < 3 or torch.is_complex(x):
            x = x.float()
        return x * net.gate(x.mean((2, 3), keepdim=True)).sigmoid()

    gated = Net(by_type, conv=nn.Conv2d(3, 4, 1), gate=nn.Conv2d(4, 4, 1))
    graph = same(nn.Sequential(gated), torch.randn(2, 3, 6, 6, generator=G))
    assert kinds(graph).count("conv") == 2 and not leaves_of(graph)

    on_item = Net(lambda net, x: x * 2 if x.sum().item() > 0 else x)
    (leaf,) = leaves_of(trace(nn.Sequential(nn.Conv2d(3, 4, 1), on_item), torch.randn(2, 3, 4, 4)))
    assert leaf.path == "1"


def product_of(equation):
    return Called(lambda _, left, right: torch.einsum(equation, left, right), inner=None)


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
    graph = canonical_graph(product_of(equation), x)
    assert "einsum" not in kinds(graph) and "matmul" in kinds(graph)
    torch.testing.assert_close(graph(*x), torch.einsum(equation, *x))


@pytest.mark.parametrize(
    "equation", ["bij,bij->bi", "bij,bjj->bij", "bij,bjk->bk", "bcij,bc->bcij", "bcij,bcij->bc", "bi,bj->bij"]
)
def test_einsums_that_are_not(equation):
    sizes = dict(zip("bijkc", (2, 4, 4, 3, 5), strict=True))
    x = tuple(torch.randn([sizes[c] for c in side], generator=G) for side in equation.split("->")[0].split(","))
    assert "einsum" in kinds(canonical_graph(product_of(equation), x))


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


class Called(Net):
    def forward(self, *inputs):
        return self.run(self.inner, *inputs)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 1)


def transformer(**options):
    return nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True, **options)


ADDED = nn.Transformer.generate_square_subsequent_mask(5)
SHOWN = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])  # tokens of two sentences; zero is padding
TOKENS = torch.randn(2, 5, 16, generator=G)
MASKED = {
    "padding of encoders": (encoder, lambda e, x, p: e(x, src_key_padding_mask=p) * ~p.unsqueeze(-1), (SHOWN == 0,)),
    "padding as numbers": (
        encoder,
        lambda e, x, p: e(x, src_key_padding_mask=p),
        (torch.log(SHOWN[:, [4, 3, 2, 1, 0]]),),
    ),
    "constant": (encoder, lambda e, x: e(x, mask=CAUSAL), ()),
    "as an input": (encoder, lambda e, x, m: e(x, mask=m), (ADDED,)),
    "made for the size": (encoder, lambda e, x: e(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1])), ()),
    "both": (encoder, lambda e, x, p: e(x, mask=CAUSAL, src_key_padding_mask=p), (SHOWN == 0,)),
    "decoder": (lambda: transformer(norm_first=True), lambda t, x: t(x, x[:, 1:].sin()), ()),
    "decoder's": (
        transformer,
        lambda t, x, p: t(x, x.sin(), tgt_mask=CAUSAL, memory_key_padding_mask=p, tgt_key_padding_mask=p),
        (SHOWN == 0,),
    ),
}


@pytest.mark.parametrize("case", MASKED)
def test_torchs_transformers_with_masks_are_quantized(case, tmp_path):
    make, call, masks = MASKED[case]
    model, inputs = Called(call, inner=make()).eval(), (TOKENS, *masks)
    graph, products = canonical_graph(model, inputs), 6 if make is encoder else 17
    torch.testing.assert_close(graph(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert leaves_of(graph) == () and "attention" not in kinds(graph)
    if case != "decoder's":
        return
    qmodel = quantize(model, inputs, [inputs])
    path = export_onnx(qmodel, inputs, tmp_path / "m.onnx")
    assert [row.int8 for row in audit_onnx(path).rows] == [True] * products
    session = open_session(path)
    (found,) = session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)})
    torch.testing.assert_close(torch.from_numpy(found), qmodel(*inputs), rtol=1e-3, atol=1e-4)
    assert (qmodel(*inputs) - model(*inputs)).norm() < 0.03 * model(*inputs).norm()


def test_results_that_show_padding_are_those_of_training_and_said():
    model = Called(lambda e, x, p: e(x, src_key_padding_mask=p), inner=encoder()).eval()
    inputs = (TOKENS, SHOWN == 0)
    with pytest.warns(CompressWarning, match="src_key_padding_mask hides"):
        graph = canonical_graph(model, inputs)
    torch.testing.assert_close(graph(*inputs), model(*inputs))  # with gradients, torch takes no fast path
    with torch.no_grad():
        assert not model(*inputs)[1, 3:].any() and torch.backends.mha.get_fastpath_enabled()


def folded(model, x):
    graph = trace(model, x)
    return graph, fold_batchnorm(graph)


def test_outputs_stay_and_batchnorm_goes():
    model, x = with_statistics(TinyResNet()).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)
    assert len(paths) == 6
    assert not [m for m in graph.modules() if isinstance(m, nn.BatchNorm2d)]


FOLDS = {
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "transposed with groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "linear": (nn.Linear(5, 7), nn.BatchNorm1d(7), (4, 5)),
    "synchronized": (nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6), (2, 3, 7, 7)),
    "synchronized, of rows": (nn.Linear(5, 7), nn.SyncBatchNorm(7), (4, 5)),
    "weight norm": (weight_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), (2, 3, 7, 7)),
    "spectral norm": (spectral_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), (2, 3, 7, 7)),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_batchnorm_folds_into_the_layer_before_it(name):
    *parts, shape = FOLDS[name]
    model, x = with_statistics(nn.Sequential(*parts, nn.ReLU())).double(), torch.randn(shape, dtype=torch.float64)
    graph, paths = folded(model, x)
    assert paths == ("1",)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)


def test_preactivation_networks_keep_what_has_no_layer_before_it():
    model, x = with_statistics(torchvision.models.densenet121()), torch.randn(2, 3, 32, 32)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-3, atol=1e-3)
    assert "features.norm0" in paths and "features.denseblock1.denselayer1.norm1" not in paths


def test_a_mask_stays_on_the_weight_that_it_is_folded_into():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model, x = with_statistics(model).eval(), torch.randn(2, 4, 7, 7)
    apply_masks(model, {"0": nm_mask(model[0].weight.flatten(1), 2, 4).view_as(model[0].weight)})
    graph, _ = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(masks_of(graph)["0"], masks_of(model)["0"])
    qmodel = quantize(model, x, [x])  # its zeros are held through quantization, and while it trains
    assert not masks_of(qmodel)["0"].all() and torch.equal(masks_of(qmodel)["0"], masks_of(model)["0"])


def test_no_parameter_is_left_without_a_reader():
    # A BatchNorm that holds its activation, as timm's does: DistributedDataParallel waits for its gradients.
    class NormAct(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x):
            x = nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False)
            return self.act(x)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Conv2d(4, 4, 3), NormAct(4), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 9, 9)
    qmodel = quantize(with_statistics(model).eval(), x, [x])
    qmodel.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in qmodel.parameters())
    assert not [name for name in qmodel.state_dict() if "running" in name]


class _Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_channels_on_another_axis_are_not_folded():
    # Of tokens (N, L, C) BatchNorm1d normalizes the positions, and a linear layer's outputs are the last axis.
    model, x = with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).eval(), torch.randn(2, 6, 6)
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


def calls(function, norm=None, layer=None):
    return Net(function, conv=layer or nn.Conv2d(3, 3, 1), norm=norm or nn.BatchNorm2d(3))


def batch_norm(m, x):
    return nn.functional.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var)


STAY = {
    "a layer that is called twice": (lambda m, x: m.norm(m.conv(m.conv(x))), None),
    "a BatchNorm that is called twice": (lambda m, x: m.norm(m.norm(m.conv(x))), None),
    "the statistics of each batch": (lambda m, x: m.norm(m.conv(x)), nn.BatchNorm2d(3, track_running_stats=False)),
    "a function before it": (lambda m, x: m.norm(nn.functional.conv2d(x, m.conv.weight)), None),
    "the network's input": (lambda m, x: m.norm(x), None),
    "an activation between": (lambda m, x: m.norm(m.conv(x).relu()), None),
    "another normalization": (lambda m, x: m.norm(m.conv(x)), nn.InstanceNorm2d(3, track_running_stats=True)),
    "an output that is read twice": (lambda m, x: m.norm(y := m.conv(x)) + y, None),
    "a layer with a forward of its own": (lambda m, x: m.norm(m.conv(x)), None, _Doubled(3, 3, 1)),
    "a function in its place": (batch_norm, None),
}


@pytest.mark.parametrize("name", STAY)
def test_a_batchnorm_stays(name):
    model, x = calls(*STAY[name]).eval(), torch.randn(2, 3, 4, 4)
    if model.norm.track_running_stats:
        model.norm.running_mean += 1.0
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


def test_a_batchnorm_that_is_to_be_kept_stays_and_the_others_do_not():
    model = with_statistics(
        nn.Sequential(*(make for _ in range(2) for make in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    )
    graph = trace(model, torch.randn(2, 3, 4, 4))
    (kept,) = [node for node in graph.graph.nodes if node.target == "1"]
    assert fold_batchnorm(graph, keep=[kept]) == ("3",)
    assert [name for name, m in graph.named_modules() if isinstance(m, nn.BatchNorm2d)] == ["1"]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_folded_parameters_are_trained_if_the_weight_was(trained, bias):
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 1, bias=bias), nn.BatchNorm2d(4)))
    model[0].weight.requires_grad_(trained)
    graph, paths = folded(model, torch.randn(2, 3, 4, 4))
    assert paths == ("1",)
    assert [parameter.requires_grad for parameter in graph.parameters()] == [trained, trained]


@pytest.mark.parametrize("training", [True, False])
def test_a_folded_batchnorm_leaves_its_child_and_no_parameter(training):
    # The child is what another node still calls, as timm's BatchNormAct2d has it.
    norm = nn.BatchNorm2d(3)
    norm.act = nn.ReLU()
    model = with_statistics(calls(lambda m, x: m.norm.act(m.norm(m.conv(x))), norm))
    x = torch.randn(2, 3, 4, 4)
    expected, graph = model(x), trace(model, x)
    graph.train(training)
    assert fold_batchnorm(graph) == ("norm",)
    assert set(graph.state_dict()) == {"conv.weight", "conv.bias"} and graph.norm.training == training
    torch.testing.assert_close(graph.eval()(x), expected)


def test_a_folded_batchnorm_that_is_read_elsewhere_keeps_its_parameters():
    model = with_statistics(calls(lambda m, x: m.norm(m.conv(x)) * m.norm.weight.mean()))
    x = torch.randn(2, 3, 4, 4)
    graph, paths = folded(model, x)
    assert paths == ("norm",)
    torch.testing.assert_close(graph(x), model(x))
