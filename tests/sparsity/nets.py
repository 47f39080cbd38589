"""Networks that the sparsity tests share."""

import pytest
import torch
from torch import nn

from compress import SparsitySpec, sparsify
from compress.sparsity.channel_permutation import permute_channels
from compress.sparsity.parametrization import kept_magnitude, nm_mask
from tests.networks import with_statistics


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return with_statistics(layers)


def sparse(spec: SparsitySpec | None = None) -> nn.Module:
    model = small()
    sparsify(model, spec or SparsitySpec())
    return model


def batch(count: int = 4, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


# A network permuted, and checked against itself.

QUICK = SparsitySpec(permute_seconds=0.1)


def permuted(model, x, spec=QUICK):
    model = with_statistics(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
        report = permute_channels(model, spec, example_inputs=x)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    for row in report.rows:
        for share, weight in (
            (row.before, before[f"{row.layer}.weight"]),
            (row.after, model.state_dict()[f"{row.layer}.weight"]),
        ):
            assert share == pytest.approx(kept_magnitude(weight, nm_mask(weight, 2, 4)), rel=1e-5)
    moved = any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert moved == any(row.after != row.before for row in report.rows)
    return report
