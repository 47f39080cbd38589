"""A masked model in DistributedDataParallel, two processes over gloo.

Each saves what its model ended as; process 0 also saves what one process makes of the same batches.
"""

import torch
from torch import nn

from compress import MaskSchedule, SparsitySpec, sparsify
from compress.sparsity.parametrization import masked_layers
from tests.sparsity.nets import small

STEPS = 6


def train(schedule, share, wrap):
    spec = SparsitySpec(schedule=schedule, update_steps=1)
    model = small()  # evaluation mode: BatchNorm would see the shares differently
    sparsify(model, spec)
    if share == 1:
        with torch.no_grad():  # DistributedDataParallel must bring this process in line, masks included
            for layer in masked_layers(model).values():
                layer.original.zero_()
                layer.mask.fill_(False)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    masks = MaskSchedule(wrapped, spec)
    for step in range(1, STEPS + 1):
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        images, targets = (images, torch.arange(8)) if share is None else (images[share::2], torch.arange(8)[share::2])
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(images), targets).backward()
        optimizer.step()
        masks.after_step(step, STEPS, optimizer)
    return model.state_dict()


def work(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    parallel = nn.parallel.DistributedDataParallel
    for schedule in ("one-shot", "gradual", "sr-ste", "gumbel"):
        torch.save(train(schedule, rank, parallel), folder / f"{schedule}-{rank}.pt")
        if rank == 0:
            torch.save(train(schedule, None, lambda model: model), folder / f"{schedule}-alone.pt")
    torch.distributed.destroy_process_group()
