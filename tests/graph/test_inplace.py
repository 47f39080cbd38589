"""Tensors that a model changes in place: the graph reads what the model reads. The oracle is the model itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress import trace
from compress.errors import ModelError
from compress.graph.canonical import canonical_graph
from compress.graph.inplace import follow_changes


class Net(nn.Module):
    """Two convolutions and a classifier; `forward` is the test's."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 3)
        nn.init.constant_(self.a.bias, -0.3)  # most of what a ReLU sees is negative
        self.body = forward

    def forward(self, x):
        return self.fc(self.body(self, x).mean((2, 3)))


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
    model = Net(body).eval()
    x = torch.randn(8, 3, 12, 12)
    kept = x.clone()
    qmodel = compress.quantize(model, x, [x, x], spec=compress.QuantSpec(target=target))
    with torch.no_grad():
        got = qmodel(x)
        again = qmodel(x)
        expected = model(kept.clone())
    assert torch.equal(x, kept) and torch.equal(got, again)
    noise = (got - expected).norm() / expected.norm()
    assert noise < 0.02, f"8 bits lose less than {noise:.3f}"


def test_a_change_through_a_view_is_refused_where_it_would_be_read():
    def body(net, x):
        y = net.a(x)
        y.view(-1).clamp_(0)
        return net.b(y)

    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(ModelError, match=r"clamp_.*y = f\(y\)"):
        canonical_graph(Net(body), x)


def test_parts_of_one_tensor_may_be_changed_apart():
    def body(net, x):
        first, second = net.b(net.a(x)).chunk(2, dim=1)
        first.mul_(2)
        return torch.cat([second, first], 1)

    model, x = Net(body).eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(canonical_graph(model, x)(x), model(x))


def test_a_graph_without_such_readers_stays_as_it_is():
    graph = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)), torch.randn(2, 3, 9, 9))
    before = str(graph.graph)
    follow_changes(graph, torch.randn(2, 3, 9, 9))
    assert str(graph.graph) == before
