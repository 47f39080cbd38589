import pytest
import torch

from compress import DataSpec, load_data
from compress.data.base import BatchPlan
from compress.errors import DataError

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
    ("name", "message"),
    [
        ("nothing", "has no 'nothing'"),
        ("one", r"it must return \(training, evaluation\)"),
        ("fails", "fails.*KeyError"),
        ("empty", "without examples"),
        ("flat", r"example 0 is a tensor of shape \(3,\)"),
    ],
)
def test_functions_that_do_not_work(name, message):
    with pytest.raises(DataError, match=message):
        load_data(spec(name))


def test_a_mean_of_another_number_of_channels():
    with pytest.raises(DataError, match="4 channels, data.mean has 3"):
        load_data(spec("pictures", mean=(0.0, 0.0, 0.0)))
