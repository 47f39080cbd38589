"""Parts of the search study that need no GPU: families of networks, trainings in turn, processes, intervals."""

import asyncio
import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.low_bits.step import Images, Training
from analysis.search_study.choice import Choice, Whole
from analysis.search_study.criteria import paired, within
from analysis.search_study.files import read_states, write_states
from analysis.search_study.methods import NoNetworkError, brackets, family_of, ranked
from analysis.search_study.report import interval, over_uniform
from analysis.search_study.train import Trainer
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
    whole = Whole(narrow(), IMAGES)
    family = family_of(method, whole)
    networks = [whole.make(Choice(**json.loads(json.dumps(asdict(family(share)))))) for share in (0.0, 0.5)]
    sizes = [sum(p.numel() for p in network.parameters()) for network in networks]
    assert sizes[1] < sizes[0] == sum(p.numel() for p in whole.network.parameters())
    torch.testing.assert_close(networks[0](IMAGES), whole.network(IMAGES), rtol=1e-4, atol=1e-5)


def test_channels_that_stay_are_those_of_the_choice():
    """Of one channel's worth of weight: the choice names it, and another process finds it without the scores."""
    whole = Whole(narrow(), IMAGES)
    name, group = next(iter(whole.structure.groups.items()))
    scores = {name: torch.arange(len(group.classes)).float()}
    choice = whole.choice({f"width {name}": "3"}, scores)
    assert choice.kept == {name: [len(group.classes) - 3, len(group.classes) - 2, len(group.classes) - 1]}
    small, weight = whole.make(choice), f"{name}.weight"
    torch.testing.assert_close(small.state_dict()[weight], whole.network.state_dict()[weight][-3:])


@pytest.mark.parametrize("bound", [0.9, 0.6, 0.31])
def test_the_largest_network_within_a_bound_and_the_next_are_found(bound):
    """Times fall in steps, as those of widths in multiples of eight do."""
    asked = []

    def time(share):
        asked.append(share)
        return 1 - math.floor(share * 20) / 20 * 0.8

    known = {0.0: 1.0}
    within, above = brackets(time, known, bound)
    assert known[within] <= bound < known[above]
    assert known[above] - known[within] <= 0.2
    assert len(asked) <= 7
    with pytest.raises(NoNetworkError, match="the smallest takes 0.280"):
        brackets(time, {0.0: 1.0}, 0.2)


def test_weights_of_several_networks_come_back_as_they_were_to_half_precision(tmp_path):
    states = {f"a network {i}": {"w": torch.randn(64, 64), "running_var": torch.rand(64) * 1e-7} for i in range(3)}
    write_states(tmp_path, states, file_bytes=10_000)
    assert len(list(tmp_path.iterdir())) == 3
    back = dict(read_states(tmp_path))
    assert list(back) == list(states)
    for name, state in states.items():
        torch.testing.assert_close(back[name]["w"], state["w"].half().float(), rtol=0, atol=0)
        torch.testing.assert_close(back[name]["running_var"], state["running_var"], rtol=0, atol=0)


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
        trainer, models = Trainer(16), []
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            models.append(narrow())
        await asyncio.gather(*(trainer.train(model, None, images, spec, seed=s) for s, model in enumerate(models, 1)))
        return models

    for one, other in zip(map(alone, (1, 2, 3)), asyncio.run(together()), strict=True):
        torch.testing.assert_close(one(IMAGES), other(IMAGES))


def test_points_over_uniform_are_those_at_the_same_latency():
    networks = [
        {"subject": {"seed": 0}, "method": name, "top1": top1}
        for name, top1 in (("uniform", 80.0), ("uniform x1.12", 84.0), ("search", 83.5))
    ]
    times = {"uniform": 0.6, "uniform x1.12": 0.8, "search": 0.65}
    rows = [{**row, "ratio": times[row["method"]]} for row in networks]
    assert over_uniform(rows, networks, networks[2]) == pytest.approx(83.5 - 81.0)  # a quarter of the way to 84
    assert over_uniform(rows, networks, networks[0]) is None
    assert over_uniform(rows[:2], networks, networks[2]) is None  # it was not timed


def test_an_interval_of_three_seeds_is_that_of_student():
    values = [1.0, 2.0, 4.0]
    half = 4.3027 * np.std(values, ddof=1) / math.sqrt(3)
    assert interval(values) == f"{np.mean(values):+.2f} ± {half:.2f}"


def test_blocks_of_the_least_score_go_until_the_bound_is_kept_and_none_more():
    """All blocks cost the same here, so that those that stay are the ones of the highest scores."""
    generator = torch.Generator().manual_seed(0)
    scores = {name: torch.rand(size, generator=generator) for name, size in (("a", 32), ("b", 64), ("c", 16))}

    def share(configuration):
        return sum(map(int, configuration.values())) / 112

    configuration = within(scores, 16, share, 0.6)
    assert share(configuration) <= 0.6 < share(configuration) + 16 / 112
    relative = {name: (own / own.mean()).sort().values for name, own in scores.items()}
    blocks = {name: [float(part.mean()) for part in own.split(16)] for name, own in relative.items()}
    gone = {name: (len(own) - int(configuration[f"width {name}"])) // 16 for name, own in scores.items()}
    removed = [score for name, own in blocks.items() for score in own[: gone[name]]]
    stayed = [score for name, own in blocks.items() for score in own[gone[name] : -1]]  # the last of a group stays
    assert len(removed) == 3
    assert max(removed) < min(stayed)


def test_a_paired_difference_is_that_of_the_pictures_that_differ():
    left, right = np.array([1, 1, 1, 0] * 25, bool), np.array([1, 1, 0, 0] * 25, bool)
    value, half = paired(left, right)
    assert value == pytest.approx(25)
    assert half == pytest.approx(1.96 * 100 * math.sqrt(0.25 * 0.75 / 99))
