import pytest
import torch
import torchvision
from torch import nn

from compress import QuantSpec, Rule, insert_quantizers
from compress.detection import DetectorNetwork
from compress.errors import QuantizationError
from compress.quantization import TARGETS
from examples.yolo import BINS, Yolo
from tests.networks import Net
from tests.tiny_detectors import FAMILIES

SIZE = (32, 64)
RULES = {"last convolution of a head", "box decoding stays float", "expectation stays float", "NMS stays float"}


def placement(model, **options):
    return insert_quantizers(model.eval(), torch.rand(2, 3, *SIZE), QuantSpec(**options)).placement


def rules_of(found):
    return {row.layer: row.rule for row in found.decisions if row.rule in RULES}


def parts(model, **options):
    return rules_of(placement(model, **options))


def weights(model, **options):
    return {site.path for site in placement(model, **options).weights}


LAST = {f"{branch}.{level}.1" for branch in ("boxes", "classes") for level in range(3)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_decoding_yolo(target):
    model = Yolo(3, width=4, decoded=SIZE)
    found = placement(model, target=target)
    rules = rules_of(found)
    assert {layer for layer, rule in rules.items() if rule == "last convolution of a head"} == LAST
    assert rules["expectation"] == "expectation stays float"
    decoding = {layer for layer, rule in rules.items() if rule == "box decoding stays float"}
    assert {"softmax", "sigmoid", "sub", "mul"} <= decoding
    assert not {site.path for site in found.weights} & (LAST | {"expectation"})
    outputs = {tensor for site in found.activations for tensor, _ in site.edges}
    assert not outputs & {layer.replace(".", "_") for layer in LAST} | outputs & decoding
    every = {path for path, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert {site.path for site in found.weights} == every - LAST - {"expectation"}


@pytest.mark.parametrize("name", FAMILIES)
def test_torchvisions_detectors(name):
    network = DetectorNetwork(FAMILIES[name]())
    found = parts(network)
    assert found and set(found.values()) == {"last convolution of a head"}
    shapes = {path: tuple(m.weight.shape) for path, m in network.named_modules() if isinstance(m, nn.Conv2d)}
    expected = {path for path in shapes if any(part in path for part in ("cls_logits", "bbox_", "module_list"))}
    assert set(found) == expected
    assert weights(network) == set(shapes) - expected


def test_one_key_and_rules_switch_the_head():
    model = Yolo(3, width=4)
    assert weights(model, head="quantize") - weights(model) == LAST
    assert weights(model, rules=(Rule(match="boxes.0.1", enable=True),)) - weights(model) == {"boxes.0.1"}


def test_the_price_is_the_share_of_the_products():
    def run(net, x):
        x = net.body(x).relu()
        return net.a(x), net.b(x)

    model = Net(run, body=nn.Conv2d(3, 8, 3, padding=1), a=nn.Conv2d(8, 4, 1), b=nn.Conv2d(8, 2, 1))
    (reason,) = {row.reason for row in placement(model).decisions if row.rule == "last convolution of a head"}
    share = (8 * 4 + 8 * 2) / (3 * 8 * 9 + 8 * 4 + 8 * 2)
    assert f"all 2 together have {share:.1%}" in reason


def sum_net():
    # Two last convolutions that are summed, as in LR-ASPP.
    def run(net, x):
        x = net.body(x).relu()
        return net.low(x) + net.high(x)

    return Net(run, body=nn.Conv2d(3, 8, 3, padding=1), low=nn.Conv2d(8, 4, 1), high=nn.Conv2d(8, 4, 1))


def pyramid(decode=lambda net, fine, coarse: (fine, coarse)):
    def run(net, x):
        x = net.body(x).relu()
        return decode(net, net.fine(x), net.coarse(nn.functional.max_pool2d(x, 2)))

    return Net(run, body=nn.Conv2d(3, 8, 3, padding=1), fine=nn.Conv2d(8, 4, 1), coarse=nn.Conv2d(8, 4, 1))


def descriptor():
    # kornia's HardNet: descriptors of length one, and zeros for those without a length.
    def run(net, x):
        x = net.last(net.body(x).relu()).mean((2, 3))
        return torch.where(x.abs().amax(1, keepdim=True) == 0, torch.zeros_like(x), nn.functional.normalize(x))

    return Net(run, body=nn.Conv2d(3, 8, 3, padding=1), last=nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize(
    "make", [sum_net, pyramid, descriptor, lambda: torchvision.models.squeezenet1_1(num_classes=4)]
)
def test_other_networks_have_no_detection_head(make):
    model = make()
    assert parts(model) == {}
    if not isinstance(model, torchvision.models.SqueezeNet):
        assert len(parts(model, head="float")) == (1 if make is descriptor else 2)


def test_grids_and_anchors_are_recognized():
    # One convolution for each resolution, decoded with a grid: the form of YOLOv3 to v5.
    model = pyramid(lambda net, fine, coarse: ((fine.sigmoid() + net.grid) * 8, coarse))
    model.register_buffer("grid", torch.rand(1, 1, *SIZE))
    found = parts(model)
    assert {"fine", "coarse"} <= {layer for layer, rule in found.items() if rule == "last convolution of a head"}
    assert {"sigmoid", "add", "mul"} <= {layer for layer, rule in found.items() if rule == "box decoding stays float"}


def test_a_frozen_batchnorm_is_no_anchor():
    # A backbone may end in one: a factor and a shift for each channel.
    norm = torchvision.ops.FrozenBatchNorm2d(4)
    norm.running_var.uniform_(0.5, 2.0)
    assert parts(nn.Sequential(nn.Conv2d(3, 4, 3), norm)) == {}


def test_a_network_of_heads_alone_says_why_nothing_is_quantized():
    with pytest.raises(QuantizationError, match=r"no layer that can be quantized.*0: a last convolution of a head"):
        insert_quantizers(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.rand(2, 3, *SIZE), QuantSpec(head="float"))


def test_attention_is_no_expectation():
    def run(net, x):
        q, k, v = (layer(x).flatten(2) for layer in (net.q, net.k, net.v))
        return (q.transpose(1, 2) @ k).softmax(-1) @ v.transpose(1, 2)

    assert parts(Net(run, **{name: nn.Conv2d(3, 8, 4, 4) for name in "qkv"})) == {}


def test_talking_heads_are_no_expectation():
    # CaiT's and DeepViT's attention mixes the probabilities of its heads, and takes no mean over them.
    def run(net, x):
        q, k, v = (layer(x).flatten(2).unflatten(1, (2, 4)) for layer in (net.q, net.k, net.v))
        attention = net.mix((q.transpose(2, 3) @ k).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return net.last((attention @ v.transpose(2, 3)).transpose(2, 3).flatten(1, 2).unflatten(2, (8, 16)))

    layers = {name: nn.Conv2d(3, 8, 4, 4) for name in "qkv"}
    model = Net(run, **layers, mix=nn.Linear(2, 2), last=nn.Conv2d(8, 4, 1))
    assert parts(model) == {} and weights(model) == {"q", "k", "v", "mix", "last"}


def test_an_expectation_is_one_however_it_is_written():
    body = nn.Conv2d(3, BINS, 3, padding=1)
    model = Net(lambda net, x: net.body(x).movedim(1, -1).softmax(-1) @ net.bins, body=body)
    model.register_buffer("bins", torch.arange(float(BINS)))
    assert "expectation stays float" in parts(model, head="auto", rules=(Rule(match="body"),)).values()


def test_suppression_is_known_and_stays_float():
    def run(net, x):
        rows = net.body(x).flatten(2).transpose(1, 2)[0]
        return rows, torchvision.ops.nms(rows[:, :4], rows[:, 4], 0.5)

    model = Net(run, body=nn.Conv2d(3, 5, 1)).eval()
    found = insert_quantizers(model, torch.rand(1, 3, *SIZE), QuantSpec(head="quantize")).placement
    assert "NMS stays float" in rules_of(found).values()
