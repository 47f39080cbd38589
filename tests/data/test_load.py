import pytest
import torch
from torchvision.transforms.v2 import functional as V

from compress import DataSpec, load_data
from compress.data import DATASETS, check_data_spec
from compress.data.base import BatchPlan, Preprocessing
from compress.errors import DataError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "digit"}, "did you mean 'digits'"),
        ({"image_size": 7}, "image_size is 7: it must be 8 to 8,192"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"train_images": 0}, "train_images is 0"),
        ({"val_images": -3}, "val_images is -3"),
        ({"on_error": "ignore"}, "raise, skip"),
        ({"crop_ratio": 0.0}, "crop_ratio is 0.0"),
        ({"crop_ratio": 1.5}, "crop_ratio is 1.5"),
        ({"mean": (0.5,)}, "mean has 1 values"),
        ({"std": (0.5, 0.5, 0.0)}, r"std\.2 is 0.0.*above 0"),
        ({"std": (0.5, 0.5, float("nan"))}, r"std\.2 is nan: it must be a finite number, above 0"),
        ({"mean": (0.5, float("inf"), 0.0)}, r"mean\.1 is inf: it must be a finite number"),
        ({"name": "folder"}, "root is missing"),
        ({"name": "cifar10", "root": ""}, "root is missing"),
        ({"num_classes": 9}, "num_classes is 9, but digits has 10"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(DataError, match=message):
        load_data(DataSpec(**values))


def test_defaults_are_accepted_and_every_data_set_is_known():
    check_data_spec(DataSpec())
    for name in DATASETS:
        check_data_spec(DataSpec(name=name, root="somewhere", classes=("a", "b") if name in ("masks", "voc") else None))


CODE = """
import torch

class Pictures:
    def __init__(self, count, channels=4):
        self.count, self.channels = count, channels
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.full((self.channels, 8, 12), float(index)) + torch.rand(1), index % 3

class Pixels(Pictures):
    def __getitem__(self, index):
        return torch.full((3, 8, 8), index, dtype=torch.uint8), torch.tensor([index, 0.5])

def pictures(spec):
    return Pictures(7), Pictures(spec.val_images)
def pixels(spec):
    return Pixels(4), Pixels(2)
def one(spec):
    return Pictures(7)
def fails(spec):
    raise KeyError("x")
def empty(spec):
    return Pictures(0), Pictures(0)
def flat(spec):
    return [(torch.zeros(3), 0)], [(torch.zeros(3), 0)]
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_data_parts.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))


def spec(name, **options):
    return DataSpec(name=f"own_data_parts:{name}", **{"classes": ("a", "b", "c"), "val_images": 4, **options})


def test_a_function_makes_the_splits_with_any_channels_and_rectangular_images():
    data = load_data(spec("pictures"))
    assert (len(data.train), len(data.val)) == (7, 4)
    assert data.val.preprocessing.input_shape == (4, 8, 12)
    images, targets = data.val.load([1, 3], epoch=None, device=torch.device("cpu"))
    assert images.shape == (2, 4, 8, 12)
    assert targets.tolist() == [1, 0]


def test_random_items_follow_from_epoch_and_index_alone():
    split = load_data(spec("pictures")).train
    whole = {e: list(split.batches(BatchPlan(batch_size=3, epoch=e))) for e in (0, 1)}
    torch.rand(3)
    (late,) = split.batches(BatchPlan(batch_size=3, epoch=0, first=2))
    assert torch.equal(late[0], whole[0][2][0])
    indices = split.order(BatchPlan(batch_size=3, epoch=0))
    assert indices != split.order(BatchPlan(batch_size=3, epoch=1))
    state = torch.get_rng_state()
    list(split.batches(BatchPlan(batch_size=3, epoch=0)))
    assert torch.equal(torch.get_rng_state(), state)


def test_pixels_are_normalized():
    data = load_data(spec("pixels", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)))
    images, targets = data.train.load([3], epoch=None, device=torch.device("cpu"))
    torch.testing.assert_close(images, torch.full((1, 3, 8, 8), (3 / 255 - 0.5) / 0.25))
    assert targets.tolist() == [[3, 0.5]]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "has no 'nothing'"),
        ("one", {}, r"it must return \(training, evaluation\)"),
        ("fails", {}, "fails.*KeyError"),
        ("empty", {}, "without examples"),
        ("flat", {}, r"example 0 is a tensor of shape \(3,\)"),
        ("pictures", {"mean": (0.0, 0.0, 0.0)}, "4 channels, data.mean has 3"),
    ],
)
def test_functions_that_do_not_work(name, options, message):
    with pytest.raises(DataError, match=message):
        load_data(spec(name, **options))


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '{"size": 3}', "null", "{}"])
def test_other_text_is_refused(text):
    with pytest.raises(DataError, match="metadata"):
        Preprocessing.from_json(text)


def test_differences_name_the_fields():
    one, other = Preprocessing(image_size=224), Preprocessing(image_size=192, std=(1.0, 1.0, 1.0))
    assert one.differences(one) == []
    assert [line.split(":")[0] for line in one.differences(other)] == ["image_size", "std"]


def test_the_recipe_overrides_the_data_sets_own_numbers():
    own = {"mean": (0.1,) * 3, "std": (0.2,) * 3}
    assert Preprocessing.of(DataSpec(), **own).mean == (0.1,) * 3
    assert Preprocessing.of(DataSpec(std=(1.0, 2.0, 3.0)), **own).std == (1.0, 2.0, 3.0)


def test_normalization_is_torchvisions():
    preprocessing = Preprocessing(image_size=4, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    images = torch.rand(2, 3, 4, 4)
    kept = images.clone()
    expected = V.normalize(images, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    torch.testing.assert_close(preprocessing.normalize(images), expected)
    assert torch.equal(images, kept)


def test_grey_is_repeated():
    preprocessing = Preprocessing(image_size=4, mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0))
    grey = torch.rand(2, 1, 4, 4)
    torch.testing.assert_close(preprocessing.normalize(grey)[:, 2:], grey - 0.3)
