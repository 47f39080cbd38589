import pytest
import torch
import torch.distributed as dist
from torch import nn

import compress
from compress.errors import CalibrationError
from compress.quantization.calibration.calibrators import CALIBRATORS, all_reduce_together, make_calibrator
from tests.fresh import finish, start
from tests.quantization.calibration.test_calibrators import amax_of, collected


def images(seed, scale=1.0, rows=2000):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed)) * scale


def refusal(calibrator):
    try:
        all_reduce_together([calibrator])
        calibrator.compute_amax()
    except CalibrationError as error:
        return str(error)
    return ""


def same_scale(rank):
    # Both ranks meet the same largest magnitude first, so that their bins are the same.
    x = images(rank).clamp(-2, 2)
    x[0] = 2.0
    return x


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name in CALIBRATORS:
        for case, batches, axis in (
            ("same", [same_scale(rank)], None),
            ("wide", [images(rank, 1.0 + 6 * rank)], None),
            ("channels", [images(rank, 1.0 + rank)], 1),
            ("one idle", [images(0)] if rank == 0 else [], None),
            ("one idle, channels", [images(1)] if rank == 1 else [], 1),
            ("zeros", [images(0)] if rank == 0 else [torch.zeros(500, 3)], None),
        ):
            calibrator = collected(name, *batches, axis=axis, percentile=99.0)
            all_reduce_together([calibrator])
            total = None if calibrator.histogram is None else calibrator.histogram[0].sum().item()
            found[name, case] = calibrator.compute_amax(), total
        for case, x, axis in (
            ("nan", images(0) * (torch.nan if rank else 1.0), None),
            ("other channels", images(rank)[:, : 2 + rank], 1),
        ):
            found[name, case] = refusal(collected(name, x, axis=axis))
        found[name, "all idle"] = refusal(make_calibrator(name))
    for target in ("tensorrt", "openvino"):
        batches = [images_of(0), images_of(2 * rank + 1), images_of(2 * rank + 2)]
        found["network", target] = network_amax(target, batches, all_reduce=True), None
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def images_of(seed):
    # Batch 0 holds the largest values, so that all processes have the same bins.
    return torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * (1.0 if seed == 0 else 0.2)


def network_amax(target, batches, **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 8), nn.Linear(8, 2)]
    kinds = zip(("entropy", "mse", "percentile", "max"), "0245", strict=True)
    rules = [compress.Rule(match=place, activations=compress.ActivationSpec(calibrator=kind)) for kind, place in kinds]
    spec = compress.QuantSpec(target=target, rules=rules)
    qmodel = compress.insert_quantizers(nn.Sequential(*layers).eval(), batches[0][:1], spec)
    amax = compress.calibrate(qmodel, batches, **options).amax
    return torch.cat([amax[name].reshape(-1) for name in sorted(amax)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    finish(folder / "said-0", *[start(folder / f"said-{rank}", work, rank, folder) for rank in (0, 1)])
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def single(name, *batches, axis=None):
    return amax_of(name, *batches, axis=axis, percentile=99.0)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_all_ranks_agree(ranks, name):
    for key in (key for key in ranks[0] if key[0] == name):
        first, second = ranks[0][key], ranks[1][key]
        if isinstance(first, str):
            assert first == second
        else:
            assert torch.equal(first[0], second[0]) and first[1] == second[1]


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_two_ranks_choose_the_ranges_that_one_process_chooses_from_all_images(ranks, target):
    one = network_amax(target, [images_of(0), *map(images_of, range(5))])
    assert all(torch.equal(rank["network", target][0], one) for rank in ranks)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_equal_bins_merge_as_one_process_counts(ranks, name):
    assert torch.equal(ranks[0][name, "same"][0], single(name, same_scale(0), same_scale(1)))


@pytest.mark.parametrize("name", CALIBRATORS)
def test_other_bins_merge_to_nearly_the_same(ranks, name):
    one = single(name, images(1, 7.0), images(0, 1.0))
    assert ranks[0][name, "wide"][0] == pytest.approx(one.item(), rel=0.0 if name == "max" else 0.03)
    channels = single(name, images(0), images(1, 2.0), axis=1)
    tolerance = {"max": 0.0, "percentile": 0.01, "mse": 0.05, "entropy": 0.15, "lsq": 1e-6}[name]
    torch.testing.assert_close(ranks[0][name, "channels"][0], channels, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_a_rank_without_images_adds_nothing(ranks, name):
    assert torch.equal(ranks[1][name, "one idle"][0], single(name, images(0)))
    assert torch.equal(ranks[0][name, "one idle, channels"][0], single(name, images(1), axis=1))
    assert torch.equal(ranks[1][name, "zeros"][0], single(name, images(0), torch.zeros(500, 3)))


@pytest.mark.parametrize("name", ["percentile", "entropy", "mse"])
def test_no_count_is_lost(ranks, name):
    for case, total in (("same", 12000), ("wide", 12000), ("channels", 12000), ("one idle", 6000), ("zeros", 7500)):
        assert ranks[0][name, case][1] == total


@pytest.mark.parametrize("name", CALIBRATORS)
def test_every_rank_refuses(ranks, name):
    for rank in ranks:
        assert "NaN or Inf" in rank[name, "nan"]
        assert "2 to 3 channels" in rank[name, "other channels"]
        assert "nothing was collected" in rank[name, "all idle"]


def test_alone_it_does_nothing():
    calibrator = collected("entropy", images(0))
    all_reduce_together([calibrator])
    assert torch.equal(calibrator.compute_amax(), single("entropy", images(0)))
