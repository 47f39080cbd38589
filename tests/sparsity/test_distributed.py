"""Masks in DistributedDataParallel: two processes against one on the same batches."""

import pytest
import torch

from compress.sparsity.parametrization import verify_nm
from tests.fresh import finish, start
from tests.sparsity.two_processes import work


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finish(folder / "said-0", *[start(folder / f"said-{rank}", work, rank, folder) for rank in (0, 1)])
    return folder


@pytest.mark.parametrize("schedule", ["one-shot", "gradual", "sr-ste", "gumbel"])
def test_two_processes_train_and_mask_what_one_does(folder, schedule):
    first, second, alone = (torch.load(folder / f"{schedule}-{who}.pt") for who in (0, 1, "alone"))
    for key, value in first.items():
        assert torch.equal(second[key], value), key
        # the shares of learned masks are at a low temperature, which magnifies the rounding of sums in another order
        torch.testing.assert_close(alone[key], value, rtol=0, atol=1e-3 if key.endswith("shares") else 1e-5)
    for key in ("3", "6"):
        kept = first[f"{key}.parametrizations.weight.0.mask"]
        assert verify_nm(kept.numpy(), 2, 4) == 0
        assert kept.float().mean() == 0.5


@pytest.mark.parametrize("schedule", ["one-shot", "gradual", "sr-ste"])
def test_masks_survive_fifty_steps_in_two_processes(folder, schedule):
    first, second = (torch.load(folder / f"{schedule}-long-{rank}.pt") for rank in (0, 1))
    for key, value in first.items():
        assert torch.equal(second[key], value), key
    for key in ("3", "6"):
        mask = first[f"{key}.parametrizations.weight.0.mask"]
        assert verify_nm(mask.numpy(), 2, 4) == 0
        assert mask.float().mean() == 0.5
