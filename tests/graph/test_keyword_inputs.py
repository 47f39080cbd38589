"""Models called by keyword, decorated, and with results of a class of their own, as transformers' are."""

import copy
import functools
import pickle
from collections import OrderedDict
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor, nn

import compress
from compress import trace
from compress.errors import DataError, ModelError


@dataclass
class Output(OrderedDict):
    """A result like transformers' ModelOutput: a dataclass that is a mapping of what is not None."""

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
    """A check in a helper, as in transformers: calls its condition if that is a function."""
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
    graph = trace(network, {"pixel_values": IMAGES})
    for model in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        result = model(pixel_values=IMAGES)
        assert type(result) is Output and result.loss is None
        torch.testing.assert_close(result.logits, network(pixel_values=IMAGES).logits)
        assert list(result) == ["logits", "maps"]


def test_two_inputs_keep_their_order(network):
    mask = torch.rand(4, 1, 8, 8)
    graph = trace(network, {"pixel_values": IMAGES, "mask": mask})
    expected = network(pixel_values=IMAGES, mask=mask).logits
    torch.testing.assert_close(graph(IMAGES, mask).logits, expected)
    torch.testing.assert_close(graph(mask=mask, pixel_values=IMAGES).logits, expected)


def test_batches_in_another_order_reach_the_right_inputs(network):
    mask = torch.rand(4, 1, 8, 8)
    batch = {"mask": mask, "labels": torch.zeros(4), "pixel_values": IMAGES}
    example = {"pixel_values": IMAGES[:2], "mask": mask[:2]}
    qmodel = compress.quantize(network, example, [batch])
    assert qmodel.report.calibration.images == 4


def test_the_file_has_the_names_of_the_results(qmodel, tmp_path):
    file = compress.export_onnx(qmodel, {"pixel_values": IMAGES[:1]}, tmp_path / "model.onnx")
    engine = compress.build_engine(file, "onnxruntime")
    found = engine.run({"input": IMAGES.numpy()})
    assert list(found) == ["logits", "maps"]
    with torch.no_grad():
        expected = qmodel(pixel_values=IMAGES)
    torch.testing.assert_close(torch.from_numpy(found["logits"]), expected.logits, atol=0.02, rtol=0.02)
    engine.close()


def test_gradients_flow_and_quantized_results_are_near(network, qmodel):
    trained = copy.deepcopy(qmodel).train()
    trained(pixel_values=IMAGES).logits.square().mean().backward()
    assert trained.get_parameter("conv.weight").grad.abs().sum() > 0
    exact = network(pixel_values=IMAGES).logits
    assert (qmodel(pixel_values=IMAGES).logits - exact).abs().max() < 0.05 * exact.abs().max()


def test_wrong_keys_are_named(network, qmodel):
    with pytest.raises(ModelError, match="unexpected|assert|pictures"):
        trace(network, {"pictures": IMAGES})
    with pytest.raises(DataError, match="pictures.*pixel_values"):
        compress.calibrate(qmodel, [{"pictures": IMAGES}])
