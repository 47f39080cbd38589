import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress import TrainSpec
from compress.tasks.base import soft_distance
from compress.tasks.classification import classification
from compress.training.passes import training_loss

TASK = classification(5)


def logits(seed, classes=5):
    return 3 * torch.randn(6, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), temperature=st.floats(0.5, 20))
def test_distillation_is_kl_divergence(seed, temperature):
    student, teacher = logits(seed), logits(seed + 1)
    divergence = nn.KLDivLoss(reduction="batchmean")(
        torch.log(torch.softmax(student / temperature, 1)), torch.softmax(teacher / temperature, 1)
    )
    assert soft_distance(student, teacher, temperature).item() == pytest.approx(
        temperature**2 * divergence.item(), rel=1e-6, abs=1e-9
    )


def test_distillation_gradient_tends_to_hintons_limit():
    """At a high temperature the gradient is (student - teacher) / classes, for centred logits (section 2.1)."""
    student, teacher = (x - x.mean(1, keepdim=True) for x in (logits(1), logits(2)))
    student.requires_grad_()
    soft_distance(student, teacher, 1e4).backward()
    torch.testing.assert_close(student.grad * len(student), (student.detach() - teacher) / 5, rtol=1e-3, atol=1e-4)


def test_mixture():
    student, teacher, targets = logits(3).float(), logits(4).float(), torch.tensor([0, 1, 2, 3, 4, 0])
    spec = TrainSpec(distill=True, distill_weight=0.3, distill_temperature=4.0, label_smoothing=0.1)
    smoothed = torch.full((6, 5), 0.02).scatter(1, targets[:, None], 0.92)
    cross_entropy = -(smoothed * torch.log_softmax(student, 1)).sum(1).mean()
    mixed = 0.7 * cross_entropy + 0.3 * soft_distance(student, teacher, 4.0)
    torch.testing.assert_close(training_loss(TASK, student, targets, teacher, spec), mixed)
    torch.testing.assert_close(training_loss(TASK, student, targets, None, spec), cross_entropy)
    assert training_loss(TASK, student.bfloat16(), targets, teacher.bfloat16(), spec).dtype == torch.float32
