import pytest
import torch
from torchvision.transforms.v2 import functional as V

from compress import DataSpec
from compress.data.preprocessing import Preprocessing
from compress.errors import DataError


def test_json_round_trip():
    preprocessing = Preprocessing(image_size=224, mean=(0.1, 0.2, 0.3), crop_ratio=0.875)
    assert Preprocessing.from_json(preprocessing.to_json()) == preprocessing


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
