import copy
import functools
import pickle
import random
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, is_tensor, nn, ones
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import compress
from compress.errors import CalibrationError, DataError, ModelError
from compress.graph.canonical import canonical_graph, follow_changes
from compress.graph.inputs import batch_inputs, bound_to_size, model_inputs
from compress.graph.report import leaves_of
from compress.quantization.sensitivity import sqnr
from compress.sparsity.sparsifier import calibration_inputs
from compress.training.passes import OutputsOf, outputs_of
from tests.exact import on_engine
from tests.networks import Net, Opaque, TinyResNet, unchanged


def test_graph_computes_what_the_model_does_and_carries_shapes():
    model, x = TinyResNet().eval(), torch.randn(2, 3, 16, 16)
    graph = compress.trace(model, x)
    torch.testing.assert_close(graph(x), model(x))
    shapes = {n.name: n.meta["shape"] for n in graph.graph.nodes}
    assert shapes["maxpool"] == (2, 8, 8, 8)
    assert shapes["fc"] == (2, 10)
    assert graph.state_dict().keys() == model.state_dict().keys()


def copied(graph, ways):
    for way in ways.split():
        graph = {"copy": copy.deepcopy, "shallow": copy.copy, "pickle": lambda g: pickle.loads(pickle.dumps(g))}[way](
            graph
        )
    return graph


def test_what_fx_cannot_trace_becomes_a_leaf_with_its_reason():
    inner = nn.Sequential(nn.ReLU(), Opaque())
    model = Net(lambda net, x: net.inner(net.conv(x)), conv=nn.Conv2d(3, 4, 3), inner=inner)
    graph = compress.trace(model, torch.randn(2, 3, 8, 8))
    (leaf,) = leaves_of(graph)
    assert (leaf.path, leaf.kind) == ("inner.1", "Opaque")
    assert "control flow" in leaf.reason
    for ways in ("copy", "pickle", "pickle copy"):
        assert leaves_of(copied(graph, ways)) == leaves_of(graph)


@pytest.mark.parametrize("ways", ["copy", "shallow", "pickle", "pickle copy", "pickle pickle copy", "copy pickle copy"])
def test_a_quantized_model_keeps_its_placement_in_any_order_of_pickling_and_copying(ways):
    x = torch.randn(2, 3, 16, 16)
    qmodel = compress.quantize(TinyResNet().eval(), x, [x], spec=compress.QuantSpec(target="openvino"))
    for model in (qmodel, compress.fuse_for_training(qmodel)):
        twin = copied(model, ways)
        assert twin.report == model.report and torch.equal(twin(x), model(x))
    twin = copied(qmodel, ways)
    assert twin.placement.to_csv() == qmodel.placement.to_csv() and twin.placement.target == "openvino"
    (next(twin.parameters()) if ways != "shallow" else torch.zeros(1)).data.fill_(7)
    assert not (next(qmodel.parameters()) == 7).any()


def test_a_graph_module_of_the_users_own_keeps_its_placement_too():
    x = torch.randn(2, 3, 16, 16)
    qmodel = compress.quantize(torch.fx.symbolic_trace(TinyResNet().eval()), x, [x])
    assert copied(qmodel, "pickle copy").placement == qmodel.placement


def test_modules_that_forward_makes_are_their_functions():
    def run(net, x):
        x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))(net.second(nn.ReLU6()(net.first(x))))
        return nn.Softmax(dim=1)(nn.Flatten()(x))

    layers = {"first": nn.Conv2d(3, 8, 3), "second": nn.Conv2d(8, 8, 3)}
    model, x = Net(run, **layers).eval(), torch.randn(2, 3, 12, 12)
    assert torch.equal(compress.trace(model, x)(x), model(x))
    assert len(compress.quantize(model, x, [x]).placement.weights) == 2
    with pytest.raises(ModelError, match=r"makes a BatchNorm2d with weights of its own.*__init__"):
        compress.trace(Net(lambda net, x: nn.BatchNorm2d(8)(net.first(x)), **layers).eval(), x)


def drawn(draw):
    return Net(lambda net, x: net.fc(draw(x)), fc=nn.Linear(3, 4))


ROWS = torch.ones(2, 3)
PICTURES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
# Draws in evaluation, also those that change nothing here.
DRAWS = (lambda x: F.dropout(x, 1e-4), lambda x: nn.Dropout(1e-4)(x), torch.bernoulli)
KEPT_NAMES = ("graph", "code", "meta", "placement", "report")


@pytest.mark.parametrize(
    ("model", "inputs", "options", "words"),
    [
        (Opaque(), ROWS, {}, "Opaque.forward itself"),
        (Net(lambda net, x: x * torch.rand(1).item()), ROWS, {}, "something else"),
        *((drawn(draw), ROWS, {}, "draws random numbers in evaluation too") for draw in DRAWS),
        (TinyResNet(), PICTURES[:, :1], {}, r"\(2, 1, 16, 16\)"),
        *((TinyResNet(), wrong, {}, "example_inputs") for wrong in ([], None, {"x": 1}, {})),
        (TinyResNet(), (PICTURES, None), {}, r"got Tensor, NoneType.* leave None out"),
        (TinyResNet(), PICTURES, {"leaves": ["nowhere"]}, "nowhere"),
        (lambda x: x, ROWS, {}, "is a function: it must be"),
        *(
            (nn.Sequential(OrderedDict({name: nn.ReLU()})), ROWS, {}, f"'{name}', a name that graph modules use")
            for name in KEPT_NAMES
        ),
    ],
)
def test_what_cannot_be_traced_is_refused(model, inputs, options, words):
    with pytest.raises(ModelError, match=words):
        compress.trace(model, inputs, **options)


@pytest.mark.parametrize("slots", ["factor", ("factor",), ["other", "factor"]])
def test_attributes_that_copies_lose_are_named(slots):
    kind = type("Scaled", (Net,), {"__slots__": slots})
    model = kind(lambda net, x: net.fc(x) * net.factor, fc=nn.Linear(3, 4))
    model.factor = 2.0
    with pytest.raises(ModelError, match="Scaled keeps factor in __slots__"):
        compress.quantize(nn.Sequential(model), torch.ones(2, 3), [torch.ones(2, 3)])


def test_the_model_is_left_as_it_was():
    model = TinyResNet().train()
    with unchanged(model):
        compress.trace(model, torch.randn(2, 3, 16, 16))
    assert model.training


class Held(nn.Module):
    # Attributes that cannot be copied, among them a tensor that a gradient flows through, and draws in training.
    def __init__(self):
        super().__init__()
        self.conv, self.lock = nn.Conv2d(3, 4, 3), threading.Lock()
        self.register_buffer("spread", torch.ones(1).expand(4))
        self.cache, self.factors = {"weight": self.conv.weight * 2}, (factor for factor in (1.0, 2.0))

    def forward(self, **images):
        if self.training:
            images = {name: x * (1 + random.random() * np.random.rand()) for name, x in images.items()}
        with self.lock:
            x = F.dropout(self.conv(images["left"] - images["right"]), 0.5, self.training)
            return F.conv2d(x, self.conv.weight.mean(1, keepdim=True), self.spread, groups=4)


def test_what_cannot_be_copied_and_random_numbers_stay_as_they_are():
    model, pair = Held().train(), {"left": torch.randn(2, 3, 8, 8), "right": torch.randn(2, 3, 8, 8)}
    cached, states = model.cache["weight"], (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    qmodel = compress.quantize(model, pair, [pair])
    assert sqnr(model.eval()(**pair), qmodel(**pair)) > 20
    assert model.cache["weight"] is cached and next(model.factors) == 1.0
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])


def test_an_autocast_that_changes_values_is_named():
    def casts(net, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net.b(net.a(x))

    model = Net(casts, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 8, 3))
    with pytest.raises(ModelError, match="first at a: its forward computes within an autocast"):
        compress.trace(model, torch.randn(2, 3, 8, 8))


def test_an_autocast_for_the_inputs_device_is_passed_through():
    def casts(net, x):
        with torch.autocast(device_type=x.device.type, enabled=False):
            x = net.conv(x)
        return x + torch.ones(4, 1, 1, device=x.device)

    model = nn.Sequential(Net(casts, conv=nn.Conv2d(3, 4, 3)), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    graph = compress.trace(model, x)
    torch.testing.assert_close(graph(x), model(x))
    assert not leaves_of(graph) and "0.conv" in {node.target for node in graph.graph.nodes}


def net_of(forward):
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.token = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(1, 1, 8))
            self.heads = nn.ModuleDict({"class": nn.Conv2d(9, 4, 1)})

    Called.forward = forward
    return Called().eval()


def made_of_sizes(self, x):
    b, _, h, w = x.shape
    return self.conv(x) + torch.ones(b, 1, h, w)


def length_of_a_batch(self, x):
    return torch.cat([self.token.expand(len(x), -1, -1), self.conv(x).flatten(2).transpose(1, 2)], 1)


def asks_for_types(self, x):
    if not isinstance(x, torch.Tensor) or not torch.is_tensor(x):
        raise TypeError("not a tensor")
    return self.conv(x) * {3: 1.0, 4: 2.0}[x.ndim]  # as einops finds its recipe


def functions_imported_by_name(self, x):
    # vit-pytorch's layers take a tensor or its parts: with a batch of as many images as parts, no error shows it.
    parts = x.split((1, 2), dim=1) if is_tensor(x) else x
    assert len(parts) == 2
    return self.conv(torch.cat([2 * parts[0], parts[1]], 1)) * ones(len(x), 1, 1, 1)


def shifts_channels(self, x):  # as a temporal shift module does
    y = self.conv(x)
    out = torch.zeros_like(y)
    out[:, :2] = y[:, 6:]
    out[1:, 2:] = y[:-1, 2:]
    return out


def divides_by_a_size(self, x):  # as correlations of optical flow do
    y = self.conv(x)
    return y / torch.sqrt(torch.tensor(y.shape[1]))


def takes_another_way_without_a_tensor(self, x):  # as MONAI's UNets do with an optional skip connection
    if torch.jit.isinstance(x, torch.Tensor) and isinstance(x, torch.Tensor):
        return self.conv(x)
    return x


def sizes_as_an_array(self, x):  # as MONAI's SwinUNETR does
    if (np.array(x.shape[2:]) % 2 == 0).all():
        return x
    return self.conv(x)


def numbers_of_numpy(self, x):  # as published attention code has them
    y = np.float32(2) * self.conv(x) / np.sqrt(self.conv.in_channels) - np.float64(0.5)
    y = y * torch.from_numpy(np.linspace(1, 2, 8, dtype=np.float32).reshape(8, 1, 1))
    return y.clamp(np.float32(-3), np.float16(3)).reshape(len(x), np.prod(y.shape[1:]))[:, : np.int64(40)]


def new_tensors_and_words_of_python(self, x):  # as detection heads have them
    y, grid = self.conv(x), torch.linspace(-1, 1, x.shape[3]).view(1, 1, 1, -1)
    return {name: head(torch.cat([y, grid.expand(len(x), 1, *y.shape[2:])], 1)) for name, head in self.heads.items()}


def numbers_for_each_image(self, x):
    b = x.shape[0]
    return self.conv(x) * torch.tensor([[2.0, 3.0]]).expand(b, 2)[:, 1, None, None, None] + torch.empty(1).zero_()


def sizes_as_plain_numbers(self, x):  # as published backbones have them
    b, _, h, w = map(int, x.shape)
    return (self.conv(x).view(b, 8, h * w) + int(w / 2)).view(int(x.size(0)), -1)


def counts_its_windows_in_fractions(self, x):  # as the first Swin does
    rows, h = torch.as_tensor(self.conv(x)).flatten(0, 1), x.shape[2]
    return rows.reshape(int(rows.shape[0] / (h * 8 / h)), -1)


def takes_lists_and_nested_tensors_too(self, x):  # as DETR does
    if hasattr(x, "tensors") or type(x) is not torch.Tensor:
        x = x.tensors
    return self.conv(x)


def asks_for_classes(self, x):  # by the attribute and by patterns
    if x.__class__ is not torch.Tensor or x.relu().__class__.__name__ != "Tensor":
        return x
    match x:
        case torch.Tensor(ndim=4):
            y = self.conv(x)
        case (first, *_):
            y = self.conv(first)
    match y.size(), x.shape[1:]:
        case (_, int(channels), *_), [_, height, width]:
            return y.reshape(-1, channels * height * width)


def parts_of_a_sequence_and_texts(self, x):  # as losses on features take the first layers of a VGG
    y = nn.Sequential(self.conv, nn.ReLU(), self.heads)[:2](x)
    name = f"{y.shape[1]:02d} channels, mean {y.mean():.2f}"
    return y.flatten(1) if name.startswith("08") else x


@torch.jit.script
def compiled_swish(x, beta: float):
    return x * torch.sigmoid(beta * x)


def compiled_functions_and_methods_of_the_class(self, x):
    y = compiled_swish(self.conv(x), 1.5)
    return torch.Tensor.flatten(torch.Tensor.add(torch.Tensor.relu(y), y), 1)


FORWARDS = [
    compiled_functions_and_methods_of_the_class,
    *(asks_for_classes, parts_of_a_sequence_and_texts),
    *(sizes_as_plain_numbers, counts_its_windows_in_fractions, takes_lists_and_nested_tensors_too),
    new_tensors_and_words_of_python,
    *(made_of_sizes, length_of_a_batch, asks_for_types, functions_imported_by_name, shifts_channels, divides_by_a_size),
    *(takes_another_way_without_a_tensor, sizes_as_an_array, numbers_of_numpy),
    numbers_for_each_image,
]


@pytest.mark.parametrize("forward", FORWARDS)
def test_what_python_asks_of_tensors_is_answered_and_holds_for_any_batch(forward, capfd):
    model = net_of(forward)
    graph = pickle.loads(pickle.dumps(compress.trace(model, torch.randn(2, 3, 5, 7))))
    assert leaves_of(graph) == () and torch.is_tensor(torch.zeros(1)) and "_" not in torch.zeros.__name__
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 5, 7)
        torch.testing.assert_close(graph(x), model(x))
    assert capfd.readouterr() == ("", "")


def views(self, x, *others, scale=2.0, **options):
    for other in others:
        x = x + other.mean()
    return scaled(self.conv(x), scale=scale, **options)


def one_view(self, x, mask=None, *others):
    return self.conv(x if mask is None else x * mask) + len(others)


def scaled(x, *, scale, shift=1.0):
    return x * scale + shift


@pytest.mark.parametrize(("forward", "count"), [(views, 1), (views, 3), (one_view, 1), (one_view, 2), (one_view, 4)])
def test_a_forward_of_any_number_of_arguments_takes_as_many_as_the_example(forward, count):
    model, given = net_of(forward), [torch.randn(2, 3, 5, 7) for _ in range(count)]
    graph = pickle.loads(pickle.dumps(compress.trace(model, given)))
    others = [torch.randn(4, 3, 5, 7) for _ in range(count)]
    torch.testing.assert_close(graph(*others), model(*others))
    for wrong in (others[1:], [*others, others[0]]):
        with pytest.raises(TypeError):
            graph(*wrong)


def weighed(self, x):
    x = self.conv(x)
    for row in self.shares.softmax(-1):
        x = sum(share * layer(x) for share, layer in zip(row, self.layers, strict=True))
    return torch.stack([part.relu() for part in x.transpose(0, 1)], 1)


def test_a_loop_over_a_tensor_of_known_length_is_followed():
    model = net_of(weighed)
    model.shares, model.layers = nn.Parameter(torch.randn(2, 2)), nn.ModuleList([nn.Conv2d(8, 8, 1), nn.AvgPool2d(1)])
    graph, others = compress.trace(model, torch.randn(2, 3, 5, 7)), torch.randn(4, 3, 5, 7)
    torch.testing.assert_close(graph(others), model(others))


def test_a_refusal_names_the_line():
    with pytest.raises(ModelError, match=r"networks.py:\d+: return x \* 2 if x.sum\(\) > 0 else x"):
        compress.trace(Opaque(), torch.randn(2, 3))
    resizes = GeneralizedRCNNTransform(8, 8, [0.0], [1.0])  # torchvision's own code is not torch's
    with pytest.raises(ModelError, match=r"detection.transform.py:\d+: "):
        compress.trace(resizes, torch.rand(2, 3, 8, 8))
    for forward, advice in (
        (lambda self, x: x.flatten(x.__getattribute__("ndim") - 1), "write x.shape for"),
        (lambda self, x: (part for part in (x, x)), "return a list"),
    ):
        with pytest.raises(ModelError, match=advice):
            compress.trace(Net(forward), torch.randn(2, 3))


def test_the_code_of_a_graph_needs_objects_alone():
    # Torch 2.11 imports each global of the code by its name when a graph is pickled; a text has none.
    graph = compress.trace(TinyResNet(), torch.randn(2, 3, 16, 16))
    assert not [name for name, value in graph.graph.python_code("self").globals.items() if isinstance(value, str)]


def test_a_refusal_names_the_parts_that_may_do():
    layers = {"conv": nn.Conv2d(3, 4, 3), "inner": nn.Sequential(nn.ReLU())}
    detector = Net(lambda net, x: [y for y in net.inner(x) if y.sum() > 0], **layers)
    with pytest.raises(ModelError, match="a part of the model alone: inner$"):
        compress.trace(detector, torch.rand(2, 3, 8, 8))


def test_a_refusal_gives_the_reason_of_the_trace_that_got_furthest():
    def changes_a_view(self, x):
        y = self.conv(x)
        part = y[:, :4]
        part *= 2
        y[:, 7] = 0
        return self.conv(y[:, :3])

    with pytest.raises(ModelError, match=r"reads a tensor by another name after \+= changed it"):
        compress.trace(net_of(changes_a_view), torch.randn(2, 3, 5, 7))


def test_images_packed_as_the_model_was_told_are_traced():
    # As vision towers of language models do: another batch is not theirs to take.
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x):
            lengths = (torch.tensor([4, 10]) - torch.tensor([0, 4])).tolist()
            parts = [torch.split(y, lengths) for y in self.linear(x.reshape(10, 8)).reshape(10, 3, 8).unbind(1)]
            return torch.cat([(q @ k.T).softmax(-1) @ v for q, k, v in zip(*parts, strict=True)])

    model, x = Packed().eval(), torch.randn(2, 5, 8)
    qmodel = compress.quantize(model, x, [x, torch.randn(2, 5, 8)])
    assert [site.path for site in qmodel.placement.weights] == ["linear"]
    torch.testing.assert_close(compress.trace(model, x)(x), model(x))


def test_a_loop_over_a_batch_is_named():
    def image_by_image(self, x):
        return torch.cat([self.conv(x[i : i + 1]) for i in range(len(x))])

    with pytest.raises(ModelError, match="makes a plain number of its batch size"):
        compress.trace(net_of(image_by_image), torch.randn(2, 3, 5, 7))


def half_loaded():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).to("meta"))


@pytest.mark.parametrize("model", [half_loaded(), half_loaded().to("meta")])
def test_weights_that_have_no_values_are_named(model, tmp_path):
    x = torch.randn(2, 3, 6, 6)
    for use in (
        lambda: compress.trace(model, x),
        lambda: compress.quantize(model, x, [x]),
        lambda: compress.export_onnx(model, x, tmp_path / "m.onnx"),
        lambda: compress.save(model, tmp_path / "m.safetensors"),
        lambda: compress.trace(model.to("meta"), x.to("meta")),
    ):
        with pytest.raises(ModelError, match=r"[01]\.weight is on the meta device"):
            use()
    for use in (lambda lazy: compress.save(lazy, tmp_path / "m.safetensors"), lambda lazy: compress.trace(lazy, x)):
        with pytest.raises(ModelError, match=r"0\.weight has no shape yet"):
            use(nn.Sequential(nn.LazyConv2d(4, 3)))
    with pytest.raises(ModelError, match="it was scripted or traced from"):
        compress.receptive_field(torch.jit.freeze(torch.jit.script(nn.Conv2d(3, 4, 3).eval())), x)
    with pytest.raises(ModelError, match=r"is a OptimizedModule, which cannot be traced: give its \._orig_mod"):
        compress.receptive_field(torch.compile(nn.Conv2d(3, 4, 3).eval()), x)
    assert not list(tmp_path.iterdir())


# Tensors that a model changes in place: the graph reads what the model reads. The oracle is the model itself.


def classifier_after(body):
    layers = {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 8, 3, padding=1), "relu": nn.ReLU(inplace=True)}
    nn.init.constant_(layers["a"].bias, -0.3)  # most inputs of the ReLU are negative
    return Net(lambda net, x: net.fc(body(net, x).mean((2, 3))), **layers, fc=nn.Linear(8, 3)).eval()


def skip_of_the_changed(net, x):
    y = net.a(x)
    return y + net.b(net.relu(y))


def unassigned(net, x):
    y = net.a(x)
    y.clamp_(0)
    F.relu(y, inplace=True)
    return net.b(y)


def added_to(net, x):
    y = net.a(x)
    z = net.b(y)
    z.add_(y).mul_(2)
    return net.b(z)


def read_before_and_after(net, x):
    y = net.a(x)
    before = net.b(y)
    net.relu(y)
    return before + net.b(y)


def changed_input(net, x):
    x.sub_(0.5).div_(2)
    return net.b(net.a(x))


BODIES = [skip_of_the_changed, unassigned, added_to, read_before_and_after, changed_input]


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
@pytest.mark.parametrize("body", BODIES)
def test_a_quantized_model_reads_what_was_changed(body, target):
    model = classifier_after(body)
    x = torch.randn(8, 3, 12, 12)
    kept = x.clone()
    qmodel = compress.quantize(model, x, [x, x], spec=compress.QuantSpec(target=target))
    got, expected = qmodel(x), model(kept.clone())
    assert torch.equal(x, kept) and torch.equal(got, qmodel(x))
    noise = (got - expected).norm() / expected.norm()
    assert noise < 0.02, f"8 bits lose less than {noise:.3f}"


def test_a_change_through_a_view_is_refused_where_it_would_be_read():
    def body(net, x):
        y = net.a(x)
        y.view(-1).clamp_(0)
        return net.b(y)

    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ModelError, match=r"clamp_.*y = f\(y\)"):
        canonical_graph(classifier_after(body), x)


def test_parts_of_one_tensor_may_be_changed_apart():
    def body(net, x):
        first, second = net.b(net.a(x)).chunk(2, dim=1)
        first.mul_(2)
        return torch.cat([second, first], 1)

    model, x = classifier_after(body), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(canonical_graph(model, x)(x), model(x))


def test_a_graph_without_such_readers_stays_as_it_is():
    graph = compress.trace(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 9, 9)
    )
    before = str(graph.graph)
    follow_changes(graph, torch.randn(2, 3, 9, 9))
    assert str(graph.graph) == before


# Models called by keyword, decorated, and with results of a class of their own, as transformers' are.


@dataclass
class Output(OrderedDict):
    # A result like transformers' ModelOutput: a dataclass that is a mapping of what is not None.
    loss: Tensor | None = None
    logits: Tensor | None = None
    maps: Tensor | None = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        kwargs.pop("return_dict", None)
        return function(self, *args, **kwargs)

    return wrapper


def holds(condition, message):
    # A check in a helper, as in transformers: calls its condition if that is a function.
    torch._check_with(ValueError, condition() if callable(condition) else condition, lambda: message)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    @decorated
    def forward(self, input_ids=None, pixel_values=None, mask=None, **kwargs):
        assert input_ids is None and not kwargs
        x = self.conv(pixel_values).relu()
        if mask is not None:
            x = x * mask
        smallest = torch.finfo(x.dtype).min
        holds(x.shape[1] == 8, "eight channels")
        x = torch.maximum(x, torch.zeros_like(x) + smallest)
        return Output(logits=self.head(x.mean((2, 3))), maps=x)


IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="module")
def qmodel(network):
    return compress.quantize(network, {"pixel_values": IMAGES[:2]}, [{"pixel_values": IMAGES, "labels": 1}])


def test_keywords_and_the_class_of_the_result_are_kept(network):
    graph = compress.trace(network, {"pixel_values": IMAGES})
    for model in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        result = model(pixel_values=IMAGES)
        assert type(result) is Output and result.loss is None
        torch.testing.assert_close(result.logits, network(pixel_values=IMAGES).logits)
        assert list(result) == ["logits", "maps"]


def test_two_inputs_keep_their_order(network):
    mask = torch.rand(4, 1, 8, 8)
    graph = compress.trace(network, {"pixel_values": IMAGES, "mask": mask})
    expected = network(pixel_values=IMAGES, mask=mask).logits
    torch.testing.assert_close(graph(IMAGES, mask).logits, expected)
    torch.testing.assert_close(graph(mask=mask, pixel_values=IMAGES).logits, expected)


def test_batches_in_another_order_reach_the_right_inputs(network):
    mask = torch.rand(4, 1, 8, 8)
    batch = {"mask": mask, "labels": torch.zeros(4), "pixel_values": IMAGES}
    example = {"pixel_values": IMAGES[:2], "mask": mask[:2]}
    assert compress.quantize(network, example, [batch]).report.calibration.images == 4


def test_the_file_has_the_names_of_the_results(qmodel, tmp_path):
    file = compress.export_onnx(qmodel, {"pixel_values": IMAGES[:1]}, tmp_path / "model.onnx")
    with compress.build_engine(file, "onnxruntime") as engine:
        found = engine.run({"input": IMAGES.numpy()})
    assert list(found) == ["logits", "maps"]
    expected = qmodel(pixel_values=IMAGES).logits
    torch.testing.assert_close(torch.from_numpy(found["logits"]), expected, atol=0.02, rtol=0.02)


def test_gradients_flow_and_quantized_results_are_near(network, qmodel):
    trained = copy.deepcopy(qmodel).train()
    trained(pixel_values=IMAGES).logits.square().mean().backward()
    assert trained.get_parameter("conv.weight").grad.abs().sum() > 0
    exact = network(pixel_values=IMAGES).logits
    assert (qmodel(pixel_values=IMAGES).logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_wrong_keys_are_named(network, qmodel):
    with pytest.raises(ModelError, match="unexpected|assert|pictures"):
        compress.trace(network, {"pictures": IMAGES})
    with pytest.raises(DataError, match="pictures.*pixel_values"):
        compress.calibrate(qmodel, [{"pictures": IMAGES}])


# Batches of any loader, and models of several inputs: what goes in is what the model's signature asks for.

X, Y = torch.randn(4, 3, 8, 8), torch.randn(4, 1, 8, 8)
TARGET = torch.zeros(4)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(16, 4)

    def forward(self, x, y, scale=1.0):
        return self.fc(scale * torch.cat([self.a(x).relu(), self.b(y).relu()], 1).mean((2, 3)))


@pytest.mark.parametrize("batch", [X, (X,), [X, TARGET], (X, TARGET, "name"), ((X,), TARGET)])
def test_the_first_tensor_is_the_input(batch):
    assert [x is X for x in batch_inputs(batch)] == [True]


@pytest.mark.parametrize("batch", [(X, Y), (X, Y, TARGET), ([X, Y], TARGET)])
def test_as_many_as_the_model_has_no_default_for(batch):
    assert [tuple(x.shape) for x in model_inputs(TwoInputs(), batch)] == [tuple(X.shape), tuple(Y.shape)]


@pytest.mark.parametrize("batch", [X, (X,), ("a.png", Y), ((X,), TARGET), (), {"x": X}])
def test_what_does_not_hold_the_inputs_is_refused(batch):
    with pytest.raises(DataError, match="takes 2 inputs: give a tuple that begins with 2 tensors"):
        model_inputs(TwoInputs(), batch)


@pytest.mark.parametrize("more", [{}, {"bias_correction": "empirical"}, {"adaround": compress.AdaRoundSpec(steps=2)}])
def test_a_model_of_two_inputs_is_quantized(more):
    model = TwoInputs().eval()
    spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"), **more)
    qmodel = compress.quantize(model, (X, Y), [(X, Y, TARGET)], spec=spec)
    expected = model(X, Y).detach()
    assert float((qmodel(X, Y).detach() - expected).norm() / expected.norm()) < 0.1
    assert qmodel.placement.activations


def test_hessians_take_no_more_images_than_asked_of_each_input():
    (first, second) = calibration_inputs(TwoInputs(), [(X, Y), (X, Y)], 6)
    assert [len(x) for x in (*first, *second)] == [4, 4, 2, 2]


# Networks bound to an image size: said when they are quantized, and where they get another.

SIZES_X = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


def convolution_and(after):
    layers = {"conv": nn.Conv2d(3, 4, 3, padding=1), "head": nn.Linear(4 * 8 * 12, 2)}
    points = nn.Buffer(torch.rand(1, 4, 8, 12))
    return Net(lambda net, x: after(net, net.conv(x)), **layers, points=points).eval()


BOUND = {
    "points": lambda s, x: x + s.points,
    "linear": lambda s, x: s.head(x.flatten(1)),
    "reshape": lambda s, x: x.reshape(x.shape[0], 4, 96).mean(1),
}
FREE = {
    "pool": lambda s, x: x.mean((2, 3)),
    "resize": lambda s, x: F.interpolate(x, scale_factor=2.0),
    "half": lambda s, x: F.max_pool2d(x, 2).flatten(2).transpose(1, 2),
}


@pytest.mark.parametrize("name", BOUND)
def test_a_network_bound_to_a_size_says_so_and_fails_at_another(name):
    model = convolution_and(BOUND[name])
    found = bound_to_size(compress.trace(model, SIZES_X), (SIZES_X,))
    assert "images of 8 x 12 pixels alone" in found
    assert {"points": "points", "linear": "head", "reshape": "reshape"}[name] in found
    with pytest.raises(RuntimeError):
        model(torch.rand(2, 3, 16, 24))


@pytest.mark.parametrize("name", FREE)
def test_a_network_of_any_size_says_nothing(name):
    model = convolution_and(FREE[name])
    assert bound_to_size(compress.trace(model, SIZES_X), (SIZES_X,)) == ""
    model(torch.rand(2, 3, 16, 24))


def test_the_size_is_named_where_another_one_comes():
    qmodel = compress.quantize(
        convolution_and(BOUND["points"]), SIZES_X, [SIZES_X], spec=compress.QuantSpec(head="quantize")
    )
    assert any("8 x 12 pixels alone" in note for note in qmodel.report.notes())
    wrong = torch.rand(2, 3, 16, 24)
    with pytest.raises(CalibrationError, match="8 x 12 pixels alone"):
        compress.calibrate(qmodel, [wrong])
    with pytest.raises(ModelError, match="8 x 12 pixels alone"):
        outputs_of(OutputsOf(qmodel), wrong)


# Networks of the package transformers, through the public functions with their own inputs and results.

transformers = pytest.importorskip("transformers", reason="the extra compress-vision[transformers] is not installed")

TRANSFORMERS_IMAGES = torch.randn(8, 3, 32, 48, generator=torch.Generator().manual_seed(0))  # rectangular
BATCHES = [{"pixel_values": part, "labels": torch.tensor([0, 1, 2, 0])} for part in TRANSFORMERS_IMAGES.split(4)]


def accuracy(logits, targets):
    return (logits.argmax(1) == targets).float().mean()


def vit():
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=(32, 48),
        patch_size=8,
        num_labels=3,
    )
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config).eval()


def segformer():
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    return transformers.SegformerForSemanticSegmentation(config).eval()


@pytest.mark.parametrize("make", [vit, segformer])
def test_quantize_train_export(make, tmp_path):
    model = make()
    qmodel = compress.quantize(model, BATCHES[0], BATCHES, spec=compress.QuantSpec(target="onnxruntime"))
    exact, expected = model(pixel_values=TRANSFORMERS_IMAGES), qmodel(pixel_values=TRANSFORMERS_IMAGES)
    assert type(expected) is type(exact)
    assert (exact.logits - expected.logits).norm() < 0.1 * exact.logits.norm()
    file = compress.export_onnx(qmodel, BATCHES[0], tmp_path / "model.onnx")
    found = on_engine(file, "onnxruntime", TRANSFORMERS_IMAGES)
    assert (found - expected.logits).norm() < 0.03 * expected.logits.norm()
    qmodel.train()(**{"pixel_values": TRANSFORMERS_IMAGES}).logits.square().mean().backward()
    gradients = [p.grad for name, p in qmodel.named_parameters() if "weight" in name and p.grad is not None]
    assert len(gradients) > 8 and all(bool(g.isfinite().all()) for g in gradients)


def test_the_public_functions_take_vit(tmp_path):
    model = vit()
    found = compress.sensitivity(model, {"pixel_values": TRANSFORMERS_IMAGES[:2]}, BATCHES, BATCHES)
    assert {"vit.layers.0.mlp.fc1", "classifier"} <= {row.layer for row in found.rows}
    share = sum(int((model(b["pixel_values"]).logits.argmax(1) == b["labels"]).sum()) for b in BATCHES) / 8
    assert found.float_score == pytest.approx(share)
    loader = torch.utils.data.DataLoader([{k: v[i] for k, v in b.items()} for b in BATCHES for i in range(4)], 4)
    before = model.classifier.weight.clone()
    report = compress.fit(model, loader, compress.TrainSpec(epochs=1, lr=0.01))
    assert 0 < report.final.loss < 2 and not torch.equal(before, model.classifier.weight)
    file = compress.export_onnx(model, {"pixel_values": TRANSFORMERS_IMAGES[:1]}, tmp_path / "float.onnx")
    with compress.build_engine(file, "onnxruntime") as engine:
        values = compress.measure_metric(engine, loader, accuracy).values
    assert values["accuracy"] == pytest.approx(report.final.top1)


def test_a_name_that_is_taken_is_refused_and_the_model_keeps_its_layers():
    # A layer whose name is a word of Python, beside one of the name that it would get.
    heads = nn.ModuleDict({"class": nn.Linear(3, 4), "class_": nn.Linear(4, 5)})
    model = Net(lambda net, x: net.heads["class_"](net.heads["class"](x)), heads=heads).eval()
    x = torch.randn(2, 3)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(ModelError, match="named class and class_"):
        compress.trace(model, x)
    assert before == {name: id(module) for name, module in model.named_modules()}
    assert model(x).shape == (2, 5)
