import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import compress
from compress import trace
from compress.errors import CheckpointError, ModelError
from compress.graph.report import leaves_of
from tests.networks import TinyResNet


class DependsOnValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.inner = inner

    def forward(self, x):
        return self.inner(self.conv(x))


def test_graph_computes_what_the_model_does_and_carries_shapes():
    model, x = TinyResNet().eval(), torch.randn(2, 3, 16, 16)
    graph = trace(model, x)
    torch.testing.assert_close(graph(x), model(x))
    shapes = {n.name: n.meta["shape"] for n in graph.graph.nodes}
    assert shapes["maxpool"] == (2, 8, 8, 8)
    assert shapes["fc"] == (2, 10)
    assert graph.state_dict().keys() == model.state_dict().keys()


def copied(graph, ways):
    """`graph` after each of `ways` in turn."""
    for way in ways.split():
        graph = {"copy": copy.deepcopy, "shallow": copy.copy, "pickle": lambda g: pickle.loads(pickle.dumps(g))}[way](
            graph
        )
    return graph


def test_what_fx_cannot_trace_becomes_a_leaf_with_its_reason():
    model = Holder(nn.Sequential(nn.ReLU(), DependsOnValues()))
    graph = trace(model, torch.randn(2, 3, 8, 8))
    (leaf,) = leaves_of(graph)
    assert (leaf.path, leaf.kind) == ("inner.1", "DependsOnValues")
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
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            x = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))(self.second(nn.ReLU6()(self.first(x))))
            return nn.Softmax(dim=1)(nn.Flatten()(x))

    class Anew(Net):
        def forward(self, x):
            return nn.BatchNorm2d(8)(self.first(x))

    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 12, 12)
    assert torch.equal(compress.trace(model, x)(x), model(x))
    assert len(compress.quantize(model, x, [x]).placement.weights) == 2
    with pytest.raises(ModelError, match=r"makes a BatchNorm2d with weights of its own.*__init__"):
        compress.trace(Anew().eval(), x)


def test_a_forward_that_cannot_be_traced_at_all_is_refused():
    with pytest.raises(ModelError, match="DependsOnValues.forward itself"):
        trace(DependsOnValues(), torch.randn(2, 3))


def test_a_graph_that_computes_something_else_is_refused():
    class Chance(nn.Module):
        def forward(self, x):
            return x * torch.rand(1).item()

    with pytest.raises(ModelError, match="something else"):
        trace(Chance(), torch.ones(2, 3))


def test_wrong_inputs_are_named():
    with pytest.raises(ModelError, match=r"\(2, 1, 16, 16\)"):
        trace(TinyResNet(), torch.randn(2, 1, 16, 16))
    for wrong in ([], None, {"x": 1}, {}):
        with pytest.raises(ModelError, match="example_inputs"):
            trace(TinyResNet(), wrong)
    with pytest.raises(ModelError, match="nowhere"):
        trace(TinyResNet(), torch.randn(2, 3, 16, 16), leaves=["nowhere"])


def test_what_is_no_module_and_names_that_graphs_keep_are_refused():
    with pytest.raises(ModelError, match="is a function: it must be"):
        trace(lambda x: x, torch.zeros(1))
    for name in ("graph", "code", "meta", "placement", "report"):
        model = nn.Sequential()
        model.add_module(name, nn.ReLU())
        with pytest.raises(ModelError, match=f"'{name}', a name that graph modules use"):
            trace(model, torch.zeros(1))


def test_the_model_is_left_as_it_was():
    model = TinyResNet().train()
    before = copy.deepcopy(model.state_dict())
    trace(model, torch.randn(2, 3, 16, 16))
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_an_autocast_for_the_inputs_device_is_passed_through():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            with torch.autocast(device_type=x.device.type, enabled=False):
                x = self.conv(x)
            return x + torch.ones(4, 1, 1, device=x.device)

    model, x = nn.Sequential(Casts(), nn.ReLU()), torch.randn(2, 3, 8, 8)
    graph = trace(model, x)
    torch.testing.assert_close(graph(x), model(x))
    assert not leaves_of(graph) and "0.conv" in {node.target for node in graph.graph.nodes}


def net_of(forward):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.token = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.randn(1, 1, 8))

    Net.forward = forward
    return Net().eval()


def made_of_sizes(self, x):
    b, _, h, w = x.shape
    return self.conv(x) + torch.ones(b, 1, h, w)


def length_of_a_batch(self, x):
    return torch.cat([self.token.expand(len(x), -1, -1), self.conv(x).flatten(2).transpose(1, 2)], 1)


def asks_for_types(self, x):
    if not isinstance(x, torch.Tensor) or not torch.is_tensor(x):
        raise TypeError("not a tensor")
    return self.conv(x)


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


FORWARDS = [
    *(made_of_sizes, length_of_a_batch, asks_for_types, shifts_channels, divides_by_a_size),
    *(takes_another_way_without_a_tensor, sizes_as_an_array, numbers_of_numpy),
]


@pytest.mark.parametrize("forward", FORWARDS)
def test_what_python_asks_of_tensors_is_answered_and_holds_for_any_batch(forward, capfd):
    model = net_of(forward)
    graph = pickle.loads(pickle.dumps(trace(model, torch.randn(2, 3, 5, 7))))
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
    graph = pickle.loads(pickle.dumps(trace(model, given)))
    others = [torch.randn(4, 3, 5, 7) for _ in range(count)]
    torch.testing.assert_close(graph(*others), model(*others))
    for wrong in (others[1:], [*others, others[0]]):
        with pytest.raises(TypeError):
            graph(*wrong)


def test_a_refusal_names_the_line():
    with pytest.raises(ModelError, match=r"test_trace.py:\d+: return x \* 2 if x.sum\(\) > 0 else x"):
        trace(DependsOnValues(), torch.randn(2, 3))
    resizes = GeneralizedRCNNTransform(8, 8, [0.0], [1.0])  # torchvision's own code is not torch's
    with pytest.raises(ModelError, match=r"detection.transform.py:\d+: "):
        trace(resizes, torch.rand(2, 3, 8, 8))


def test_the_code_of_a_graph_needs_objects_alone():
    """Torch 2.11 imports each global of the code by its name when a graph is pickled; a text has none."""
    graph = trace(TinyResNet(), torch.randn(2, 3, 16, 16))
    assert not [name for name, value in graph.graph.python_code("self").globals.items() if isinstance(value, str)]


def test_a_refusal_names_the_parts_that_may_do():
    class Detector(Holder):
        def forward(self, x):
            return [y for y in self.inner(x) if y.sum() > 0]

    with pytest.raises(ModelError, match="a part of the model alone: inner$"):
        trace(Detector(nn.Sequential(nn.ReLU())), torch.rand(2, 3, 8, 8))


def test_a_refusal_gives_the_reason_of_the_trace_that_got_furthest():
    def changes_a_view(self, x):
        y = self.conv(x)
        part = y[:, :4]
        part *= 2
        y[:, 7] = 0
        return self.conv(y[:, :3])

    with pytest.raises(ModelError, match=r"reads a tensor by another name after \+= changed it"):
        trace(net_of(changes_a_view), torch.randn(2, 3, 5, 7))


def half_loaded():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).to("meta"))


@pytest.mark.parametrize("model", [half_loaded(), half_loaded().to("meta")])
def test_weights_that_have_no_values_are_named(model, tmp_path):
    x = torch.randn(2, 3, 6, 6)
    for use in (
        lambda: trace(model, x),
        lambda: compress.quantize(model, x, [x]),
        lambda: compress.export_onnx(model, x, tmp_path / "m.onnx"),
        lambda: compress.save(model, tmp_path / "m.safetensors"),
        lambda: trace(model.to("meta"), x.to("meta")),
    ):
        with pytest.raises(ModelError, match=r"[01]\.weight is on the meta device"):
            use()
    with pytest.raises(CheckpointError, match=r"0\.weight has no shape yet"):
        compress.save(nn.Sequential(nn.LazyConv2d(4, 3)), tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="it was scripted or traced from"):
        compress.receptive_field(torch.jit.freeze(torch.jit.script(nn.Conv2d(3, 4, 3).eval())), x)
    with pytest.raises(ModelError, match=r"is a OptimizedModule, which cannot be traced: give its \._orig_mod"):
        compress.receptive_field(torch.compile(nn.Conv2d(3, 4, 3).eval()), x)
    assert not list(tmp_path.iterdir())
