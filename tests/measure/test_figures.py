import pytest
import torch
from sklearn.metrics import jaccard_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compress import TorchEngine, build_engine, export_onnx, measure_metric
from compress.errors import DataError, EngineError
from compress.measure.accuracy import compare_figures
from compress.support.meters import task_metric
from compress.tasks.segmentation import segmentation

IMAGES = torch.randn(7, 2, 8, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, 3, (7, 8, 12), generator=torch.Generator().manual_seed(2))


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x):
        return {"out": self.conv(x), "aux": self.conv(x) * 2}


def expected(model):
    predicted = model(IMAGES)["out"].argmax(1)
    return jaccard_score(TARGETS.flatten(), predicted.flatten(), average="macro")


def test_an_engine_is_judged_by_a_task_over_a_loader(tmp_path):
    torch.manual_seed(0)
    model = Maps().eval()
    metric = segmentation(("a", "b", "c")).metric
    loader = DataLoader(TensorDataset(IMAGES, TARGETS), batch_size=3)
    reference = measure_metric(TorchEngine(model, (2, 8, 12)), loader, metric, keep=4)
    path = export_onnx(model, IMAGES[:2], tmp_path / "maps.onnx")
    with build_engine(path, "onnxruntime") as engine:
        seen = measure_metric(engine, loader, metric, keep=4)
    assert seen.values["miou"] == pytest.approx(expected(model))
    assert (seen.images, len(seen.outputs)) == (7, 2)
    parity = compare_figures(reference, seen, metric)
    assert parity.agreement == 1
    assert parity.sqnr_db > 80
    assert parity.images == 6


def test_mapping_batches_and_a_function_as_the_metric():
    model = Maps().eval()
    batches = [{"pixel_values": IMAGES[:4], "labels": TARGETS[:4]}, {"pixel_values": IMAGES[4:], "labels": TARGETS[4:]}]

    def share(outputs, targets):
        return (outputs["out"].argmax(1) == targets).float().mean()

    seen = measure_metric(TorchEngine(model, (2, 8, 12)), batches, share)
    right = (model(IMAGES)["out"].argmax(1) == TARGETS).float().mean().item()
    assert seen.values == {"share": pytest.approx(right)}
    assert measure_metric(TorchEngine(model, (2, 8, 12)), batches, share, limit=5).images == 5


def test_refusals():
    engine = TorchEngine(Maps().eval(), (2, 8, 12))
    metric = task_metric(lambda outputs, targets: 1.0)
    with pytest.raises(DataError, match="no image to evaluate"):
        measure_metric(engine, [], metric)
    with pytest.raises(DataError, match="its targets must be its 'labels'"):
        measure_metric(engine, [{"pixel_values": IMAGES}], metric)
    with pytest.raises(DataError, match="7 images and 3 targets"):
        measure_metric(engine, [(IMAGES, TARGETS[:3])], metric)
    with pytest.raises(EngineError, match="out of image 0 is not finite"):
        measure_metric(engine, [(IMAGES * float("inf"), TARGETS)], metric)
