# Contributions of images: the metric of the whole split is the task's own, and intervals are those of theory.

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from torchmetrics.classification import MulticlassJaccardIndex
from torchmetrics.regression import MeanSquaredError

from compress.errors import DataError
from compress.measure.accuracy import compare_evidence
from compress.pipeline.steps.evaluate import Answers, _keep_intervals
from compress.records.files import INTERVALS
from compress.tasks.base import everything
from compress.tasks.classification import classification
from compress.tasks.detection import detection
from compress.tasks.load import make_task
from compress.tasks.segmentation import segmentation
from compress.variants import Variant


def identity(outputs):
    return outputs[0]


def boxes(generator, count, *, scored):
    corner = torch.rand(count, 2, generator=generator) * 80
    row = {"boxes": torch.cat([corner, corner + 5 + 30 * torch.rand(count, 2, generator=generator)], 1)}
    row["labels"] = torch.randint(0, 3, (count,), generator=generator)
    if scored:
        return row | {"scores": torch.rand(count, generator=generator)}
    return row | {"ignored": torch.rand(count, generator=generator) < 0.15}


def detections(seed, images=12):
    generator = torch.Generator().manual_seed(seed)
    truths, found = [], []
    for _ in range(images):
        truth = boxes(generator, int(torch.randint(0, 9, (), generator=generator)), scored=False)
        near = {"boxes": truth["boxes"] + 2 * torch.randn(len(truth["boxes"]), 2, generator=generator).repeat(1, 2)}
        near |= {"labels": truth["labels"], "scores": torch.rand(len(truth["labels"]), generator=generator)}
        other = boxes(generator, 6, scored=True)
        found.append({name: torch.cat([near[name], other[name]]) for name in ("boxes", "labels", "scores")})
        truths.append(truth)
    return found, truths


TASKS = {
    "classification": classification(4),
    "segmentation": segmentation(("a", "b", "c")),
    "detection": detection(("x", "y", "z"), loss=None, decode=identity),
}


def batch(name, seed):
    generator = torch.Generator().manual_seed(seed)
    if name == "detection":
        found, truths = detections(seed)
        return (found,), truths
    if name == "classification":
        return torch.randn(30, 4, generator=generator), torch.randint(0, 4, (30,), generator=generator)
    targets = torch.randint(0, 3, (6, 5, 7), generator=generator)
    targets[:, 0] = 255
    return torch.randn(6, 3, 5, 7, generator=generator), targets


def doubled(outputs, targets, weights):
    order = np.repeat(np.arange(len(weights)), weights).tolist()
    if isinstance(targets, list):
        return ([outputs[0][i] for i in order],), [targets[i] for i in order]
    return outputs[order], targets[order]


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize("seed", [0, 1])
def test_a_resample_has_the_value_of_the_tasks_own_metric(name, seed):
    # The oracle of detection is COCO's evaluation, that of segmentation torchmetrics' confusion matrix.
    task, (outputs, targets) = TASKS[name], batch(name, seed)
    evidence = task.evidence()
    evidence.update(outputs, targets)
    weights = np.random.default_rng(seed).multinomial(len(targets), [1 / len(targets)] * len(targets), size=2)
    for row in (everything(evidence)[0], *weights):
        meter = task.metric.make()
        meter.update(*doubled(outputs, targets, row))
        expected = task.metric.figures(meter)[task.metric.name]
        assert evidence.values(row[None])[0] == pytest.approx(expected, abs=1e-6)
    assert len(evidence) == len(targets)


def test_precision_by_recall_falls():
    for seed in range(2, 5):
        evidence = TASKS["detection"].evidence()
        evidence.update(*batch("detection", seed))
        for _, precision in evidence.curves():
            assert len(precision) == 101 and all(a >= b for a, b in pairwise(precision))


def hits(right):
    evidence = TASKS["classification"].evidence()
    logits = torch.zeros(len(right), 4)
    logits[torch.arange(len(right)), torch.where(torch.tensor(right), 0, 1)] = 1
    evidence.update(logits, torch.zeros(len(right), dtype=torch.int64))
    return evidence


def test_the_interval_of_a_share_is_the_binomials():
    right = [i % 4 != 0 for i in range(400)]
    seen = compare_evidence(hits(right), hits(right), resamples=4000)
    width = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert (seen.low, seen.high) == pytest.approx((0.75 - width, 0.75 + width), abs=0.006)
    bound = binomtest(0, 400).proportion_ci(method="exact").high
    assert seen.difference == 0 and not seen.measurable
    assert (seen.difference_low, seen.difference_high) == pytest.approx((-bound, bound))


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_few_images_with_equal_answers_bound_the_difference_exactly(share):
    # 45 images of which none differs say that less than 7.9 % of all images would, and not that none does.
    right = [i < round(45 * share) for i in range(45)]
    seen = compare_evidence(hits(right), hits(right))
    exact = binomtest(sum(right), 45).proportion_ci(method="exact")
    assert (seen.low, seen.high) == pytest.approx((exact.low, exact.high))
    assert -seen.difference_low == pytest.approx(binomtest(0, 45).proportion_ci(method="exact").high)
    assert seen.difference_high == pytest.approx(0.0787, abs=1e-4)


@given(gained=st.integers(0, 12), lost=st.integers(0, 12), both=st.integers(1, 40))
def test_a_change_that_the_sign_test_does_not_find_is_not_called_measurable(gained, lost, both):
    base = [False] * gained + [True] * lost + [True] * both
    other = [True] * gained + [False] * lost + [True] * both
    seen = compare_evidence(hits(base), hits(other), resamples=200)
    differ = gained + lost
    if differ == 0 or binomtest(gained, differ).pvalue > 0.05:
        assert not seen.measurable
    assert seen.difference_low < seen.difference < seen.difference_high
    assert seen.difference == pytest.approx((gained - lost) / len(base))


def test_the_interval_of_a_difference_holds_it_in_at_least_95_of_100_small_splits():
    # The truth is drawn: 4 % of all images are gained, 1 % lost, and splits have 40 images.
    generator, held = np.random.default_rng(0), 0
    for _ in range(400):
        kinds = generator.choice(3, size=40, p=[0.95, 0.04, 0.01])
        seen = compare_evidence(hits((kinds != 1).tolist()), hits((kinds != 2).tolist()), resamples=100)
        held += seen.difference_low <= 0.03 <= seen.difference_high
    assert held >= 380


def test_equal_answers_of_another_task_have_an_interval_too():
    outputs, targets = batch("segmentation", 0)
    evidence = TASKS["segmentation"].evidence()
    evidence.update(outputs, targets)
    seen = compare_evidence(evidence, evidence)
    bound = binomtest(0, len(targets)).proportion_ci(method="exact").high
    assert (seen.difference_low, seen.difference_high) == pytest.approx((-bound, bound))


def test_three_pictures_of_449_are_no_measurable_change_and_thirty_are():
    base = [i % 10 != 0 for i in range(449)]
    few = [True if i in (0, 10, 20) else (False if i == 5 else value) for i, value in enumerate(base)]
    many = [value or i < 300 for i, value in enumerate(base)]
    assert not compare_evidence(hits(base), hits(few)).measurable
    seen = compare_evidence(hits(base), hits(many))
    assert seen.measurable and seen.difference_low > 0 and seen.difference == pytest.approx(30 / 449)
    with pytest.raises(DataError, match="449 and 3 images"):
        compare_evidence(hits(base), hits([True] * 3))


def test_a_metric_of_ones_own_has_evidence_where_it_knows_each_image():
    assert make_task("classification", ("a", "b"), metric=lambda outputs, targets: 1.0).evidence is None
    generator = torch.Generator().manual_seed(0)
    logits, grid = (torch.randn(6, 4, 5, 5, generator=generator), torch.randint(0, 4, (6, 5, 5), generator=generator))
    weights = np.array([[1, 0, 2, 1, 0, 3]])
    for name, outputs, targets, oracle in (
        ("points:Miou", logits, grid, lambda x, y: MulticlassJaccardIndex(4, average=None)(x, y)[1:].mean()),
        ("depth:Rmse", logits[:, :1], grid + 1.0, lambda x, y: MeanSquaredError(squared=False)(x[:, 0].exp(), y)),
    ):
        task = make_task("own", (), loss="examples.depth:loss", metric=f"examples.{name}")
        evidence, meter = task.evidence(), task.metric.make()
        for one in (evidence, meter):
            one.update(outputs[:4], targets[:4])
            one.update(outputs[4:], targets[4:])
        assert task.metric.figures(meter)[task.metric.name] == pytest.approx(float(oracle(outputs, targets)), abs=1e-6)
        repeated = doubled(outputs, targets, weights[0])
        assert evidence.values(weights)[0] == pytest.approx(float(oracle(*repeated)), abs=1e-6)


def test_an_engine_without_float_is_compared_with_torch(tmp_path):
    seen = {(variant, label): Answers(evidence=hits(right)) for variant, label, right in ROWS}
    run = SimpleNamespace(task=classification(2), folder=SimpleNamespace(path=tmp_path), notes=[])
    _keep_intervals(run, seen)
    found = {row.engine: row.difference for row in INTERVALS.read(tmp_path)}
    assert found == {"torch": 0, "torch (fake quantization)": -25, "onnxruntime": 0, "cuda": -50}


ROWS = (
    (Variant.FLOAT, "torch", [True] * 4),
    (Variant.PTQ, "torch (fake quantization)", [True, True, True, False]),
    (Variant.FLOAT, "onnxruntime", [True, False, True, True]),
    (Variant.PTQ, "onnxruntime", [True, True, True, False]),
    (Variant.PTQ, "cuda", [True, True, False, False]),
)
