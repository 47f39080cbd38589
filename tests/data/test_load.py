import pytest

from compress import DataSpec, load_data
from compress.data.spec import DATASETS, check_data_spec
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
