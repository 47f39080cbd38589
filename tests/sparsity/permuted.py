"""A network permuted, and checked against itself."""

import pytest
import torch

from compress import SparsitySpec
from compress.sparsity.channel_permutation import permute_channels
from compress.sparsity.parametrization import kept_magnitude, nm_mask
from tests.networks import with_statistics

QUICK = SparsitySpec(permute_seconds=0.2)


def permuted(model, x, spec=QUICK):
    """Permute, check the outputs and that kept magnitudes are reported truly; return the report."""
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
