import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, top_k_accuracy_score
from torch import nn

from compress import CompressError, evaluate
from compress.data.base import BatchPlan
from compress.errors import DataError, ModelError, RecipeError
from compress.tasks.base import first_tensor
from compress.training.distributed import SINGLE, Processes
from compress.training.evaluate import OutputsOf, outputs_of
from tests.training.toy import ToySplit, convnet, linear


@pytest.mark.parametrize(("classes", "batch_size", "limit"), [(9, 7, None), (9, 50, 20), (3, 1, None)])
def test_agrees_with_scikit_learn(classes, batch_size, limit):
    split, model = ToySplit(31, classes=classes), linear(1, classes)
    got = evaluate(model, split, batch_size=batch_size, limit=limit)
    ((images, targets),) = split.batches(BatchPlan(batch_size=31, limit=limit))
    scores = torch.softmax(model(images).double(), 1).detach().numpy()
    labels = np.arange(classes)
    assert got.images == (limit or 31)
    assert got.top1 == pytest.approx(top_k_accuracy_score(targets, scores, k=1, labels=labels))
    expected5 = top_k_accuracy_score(targets, scores, k=5, labels=labels) if classes > 5 else 1.0
    assert got.top5 == pytest.approx(expected5)
    assert got.loss == pytest.approx(log_loss(targets, scores, labels=labels), rel=1e-5)


def test_leaves_modes_and_statistics_as_they_were():
    model = convnet().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    evaluate(model, ToySplit(8), batch_size=4)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shares_of_three_processes_sum_to_the_whole():
    """Each share is evaluated as its process would; the sums that meet in all_reduce are compared here."""
    split, model = ToySplit(22), linear()
    whole = evaluate(model, split, batch_size=5)
    parts = [evaluate(model, split, batch_size=5, processes=Alone(rank=rank, world_size=3)) for rank in range(3)]
    assert sum(part.images for part in parts) == whole.images
    assert sum(part.top1 * part.images for part in parts) == pytest.approx(whole.top1 * whole.images)
    assert sum(part.loss * part.images for part in parts) == pytest.approx(whole.loss * whole.images)


class Alone(Processes):
    """One process of several, without the others."""

    def all_reduce_sum(self, tensor):
        return tensor

    def gather(self, value):
        return [value] * self.world_size


def test_logits_in_an_object_are_found_and_a_model_that_fails_is_named():
    class Result:
        logits = torch.ones(2, 3)

    assert first_tensor(Result()) is Result.logits
    with pytest.raises(ModelError, match=r"Conv2d fails on images of shape \(2, 3, 8, 8\)"):
        outputs_of(OutputsOf(nn.Conv2d(1, 4, 3)), torch.zeros(2, 3, 8, 8))


def test_refusals():
    split, model = ToySplit(8), linear()
    with pytest.raises(RecipeError, match="fp16"):
        evaluate(model, split, batch_size=4, precision="fp16")
    with pytest.raises(DataError, match="no image"):
        evaluate(model, split, batch_size=4, limit=0)
    with pytest.raises(ModelError, match=r"\(4, 3\) for 4 images of 4 classes"):
        evaluate(linear(classes=3), split, batch_size=4)
    with pytest.raises(ModelError, match=r"\(4, 3, 6, 6\)"):
        evaluate(nn.Identity(), split, batch_size=4)
    with pytest.raises(ModelError, match="NoneType"):
        evaluate(Nothing(), split, batch_size=4)
    with pytest.raises(CompressError, match="device is cuda and the processes were started on cpu"):
        evaluate(model, split, batch_size=4, device="cuda", processes=Processes(world_size=2))
    assert SINGLE.world_size == 1


class Nothing(nn.Module):
    def forward(self, images):
        return None


def test_bf16_is_close_to_fp32():
    split, model = ToySplit(64), linear()
    full, half = (evaluate(model, split, batch_size=16, precision=p) for p in ("fp32", "bf16"))
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert half.loss != full.loss
