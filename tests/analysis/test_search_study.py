"""Parts of the search study that need no GPU: families of networks, trainings in turn, processes, intervals."""

import asyncio
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.low_bits.step import Images, Training
from analysis.search_study.find import family_of, ranked
from analysis.search_study.report import interval, over_uniform
from analysis.search_study.train import Trainer
from analysis.search_study.workers import Workers, physical_cores
from compress.training.spec import TrainSpec
from tests.search.nets import narrow

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def pictures(count=64):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    how = SimpleNamespace(mean=(0.5,) * 3, std=(0.25,) * 3)
    split = SimpleNamespace(images=pixels, targets=torch.arange(count) % 10, preprocessing=how)
    return Images(SimpleNamespace(train=split, val=split), torch.device("cpu"))


@pytest.mark.parametrize("method", ["uniform", "magnitude", "reconstruction", "torch-pruning", "torch-pruning-global"])
def test_a_family_goes_from_the_whole_network_to_a_small_one(method):
    if method.startswith("torch-pruning"):
        pytest.importorskip("torch_pruning")
    network = narrow().eval()
    family = family_of(method, network, IMAGES)
    sizes = [sum(p.numel() for p in family(share).parameters()) for share in (0.0, 0.5)]
    assert sizes[1] < sizes[0] == sum(p.numel() for p in network.parameters())
    torch.testing.assert_close(family(0.0)(IMAGES), network(IMAGES), rtol=1e-4, atol=1e-5)


def test_ranks_are_over_the_mean_of_a_group():
    kept = ranked({"a": torch.tensor([1.0, 2.0, 3.0, 2.0]), "b": torch.tensor([100.0, 300.0])}, 0.25)
    assert kept == {"a": 0.75, "b": 0.5}  # 0.5 of the mean is the least in both


def test_trainings_in_turn_are_the_trainings_alone():
    spec, images = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0.0), pictures()

    def alone(seed):
        torch.manual_seed(seed)
        model = narrow().train()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        Training(model, None, images.fork(), spec, 16, "eager").run(state, seed, 2)
        return model.eval()

    async def together():
        trainer, models = Trainer(2, 16), []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            models.append(narrow())
        await asyncio.gather(
            *(trainer.train(model, None, images, spec, seed=s, background=s == 3) for s, model in enumerate(models, 1))
        )
        return models

    for one, other in zip(map(alone, (1, 2, 3)), asyncio.run(together()), strict=True):
        torch.testing.assert_close(one(IMAGES), other(IMAGES))


def test_workers_answer_and_say_what_fails():
    order = []

    async def calls():
        workers = Workers(1)

        async def named(name, soon):
            await workers.call(math.sqrt, 4.0, soon=soon)
            order.append(name)

        try:
            assert await workers.call(math.gcd, 12, 18) == 6
            await asyncio.gather(named("first", False), named("waits", False), named("before it", True))
            with pytest.raises(ValueError, match="math domain"):
                await workers.call(math.log, -1.0)
        finally:
            workers.close()

    before = os.sched_getaffinity(0)
    try:
        asyncio.run(calls())
    finally:
        os.sched_setaffinity(0, before)
    assert set().union(*physical_cores()) == before
    assert order == ["first", "before it", "waits"]


def test_points_over_uniform_are_those_at_the_same_latency():
    networks = [
        {"kind": "network", "subject": {"seed": 0}, "method": name, "top1": top1}
        for name, top1 in (("uniform", 80.0), ("uniform x1.12", 84.0), ("search", 83.5))
    ]
    times = {"uniform": 0.6, "uniform x1.12": 0.8, "search": 0.65}
    rows = [{**row, "kind": "latency", "ratio": times[row["method"]]} for row in networks]
    assert over_uniform(rows, networks, networks[2]) == pytest.approx(83.5 - 81.0)  # a quarter of the way to 84
    assert over_uniform(rows, networks, networks[0]) is None
    assert over_uniform(rows[:2], networks, networks[2]) is None  # it was not timed


def test_an_interval_of_three_seeds_is_that_of_student():
    values = [1.0, 2.0, 4.0]
    half = 4.3027 * np.std(values, ddof=1) / math.sqrt(3)
    assert interval(values) == f"{np.mean(values):+.2f} ± {half:.2f}"
