import pickle
import struct

import numpy as np
import pytest
import torch

from compress import DataSpec, load_data
from compress.errors import DataError

CPU = torch.device("cpu")
NAMES10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def pixels(seed, count):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def python2_pickle(data, targets, key):
    # Return a file as Python 2 wrote it: protocol 2, bytes as short texts, the array through numpy.core.multiarray.
    def text(raw):
        return (b"U" + bytes([len(raw)]) if len(raw) < 256 else b"T" + struct.pack("<I", len(raw))) + raw

    def number(value):
        return b"J" + struct.pack("<i", value)

    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85"
        + text(b"b")
        + b"tR("
        + number(1)
        + number(data.shape[0])
        + number(data.shape[1])
        + b"\x86"
        + b"cnumpy\ndtype\n("
        + text(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + text(b"|")
        + b"NNN"
        + number(-1)
        + number(-1)
        + b"K\x00tb\x89"
        + text(data.tobytes())
        + b"tb"
    )
    labels = b"](" + b"".join(number(t) for t in targets) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key) + labels + b"u."


@pytest.fixture
def cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i in range(1, 6):
        (folder / f"data_batch_{i}").write_bytes(python2_pickle(pixels(i, 20), list(range(10)) * 2, b"labels"))
    (folder / "test_batch").write_bytes(python2_pickle(pixels(9, 10), list(range(10)), b"labels"))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES10}, protocol=2))
    return tmp_path


def spec(root, **values):
    return DataSpec(**{"name": "cifar10", "root": str(root), "image_size": 32, **values})


def test_the_test_files_are_what_python_2_wrote(cifar10):
    content = pickle.loads((cifar10 / "cifar-10-batches-py" / "test_batch").read_bytes(), encoding="latin1")
    assert np.array_equal(content["data"], pixels(9, 10))
    assert content["labels"] == list(range(10))


@pytest.mark.parametrize("inside", [False, True])
def test_images_and_labels(cifar10, inside):
    root = cifar10 / "cifar-10-batches-py" if inside else cifar10
    data = load_data(spec(root, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert data.train.labels == tuple(NAMES10)
    assert (len(data.train), len(data.val)) == (100, 10)
    images, targets = data.val.load(list(range(10)), epoch=None, device=CPU)
    expected = pixels(9, 10).reshape(-1, 3, 32, 32) / 255
    np.testing.assert_allclose(images, expected, atol=1e-6)
    assert targets.tolist() == list(range(10))


def test_cifar100_written_by_python_3(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, seed in (("train", 1), ("test", 2)):
        content = {b"data": pixels(seed, 4), b"fine_labels": [3, 1, 99, 0], b"coarse_labels": [0, 0, 1, 0]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [f"c{i}" for i in range(100)]}, protocol=2))
    data = load_data(DataSpec(name="cifar100", root=str(tmp_path), image_size=32, mean=(0,) * 3, std=(1,) * 3))
    images, targets = data.train.load([2], epoch=None, device=CPU)
    np.testing.assert_allclose(images[0], pixels(1, 4)[2].reshape(3, 32, 32) / 255, atol=1e-6)
    assert targets.tolist() == [99]
    assert data.train.num_classes == 100


def test_training_images_are_shifted_whole_pixels_and_mirrored(cifar10):
    split = load_data(spec(cifar10, mean=(0.0,) * 3, std=(1.0,) * 3)).train
    still = split.load([3], epoch=None, device=CPU)[0][0]
    seen = set()
    for epoch in range(8):
        moved = split.load([3], epoch=epoch, device=CPU)[0][0]
        padded = {
            mirrored: torch.nn.functional.pad(still.flip(-1) if mirrored else still, (4,) * 4) for mirrored in (0, 1)
        }
        found = [
            (mirrored, y, x)
            for mirrored in (0, 1)
            for y in range(9)
            for x in range(9)
            if torch.allclose(padded[mirrored][:, y : y + 32, x : x + 32], moved, atol=1e-4)
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 4


def test_missing_files_are_named(cifar10, tmp_path):
    (cifar10 / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(DataError, match=r"data_batch_3 missing in .*cifar-10-batches-py.*never downloads"):
        load_data(spec(cifar10))
    with pytest.raises(DataError, match=r"train, test, meta missing in .*cifar-100-python"):
        load_data(DataSpec(name="cifar100", root=str(tmp_path)))


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("where", ["data", "labels"])
def test_loading_runs_no_code(cifar10, tmp_path, where):
    trace = tmp_path / "ran"
    content = {"data": pixels(9, 10), "labels": list(range(10)), where: Exploit(trace)}
    (cifar10 / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=r"test_batch: it asks for .*open.*nothing of it was run"):
        load_data(spec(cifar10))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({"labels": [1]}, "no data and labels"),
        ({"data": pixels(0, 2), "labels": [1]}, r"shape \(2, 3072\) for 1 targets"),
        ({"data": pixels(0, 1)[:, :300], "labels": [1]}, r"shape \(1, 300\)"),
        ({"data": pixels(0, 1).astype(np.float32), "labels": [1]}, "not whole 8-bit images"),
        ({"data": pixels(0, 1), "labels": [10]}, "from 10 to 10, but 10 classes"),
        ({"data": pixels(0, 1), "labels": [-1]}, "from -1 to -1"),
        ({"data": pixels(0, 1), "labels": ["cat"]}, "no data and labels"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "encoding 'rot13'"),  # code
    ],
)
def test_files_of_something_else(cifar10, content, message):
    raw = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    (cifar10 / "cifar-10-batches-py" / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match=f"test_batch.*{message}"):
        load_data(spec(cifar10))


@pytest.mark.parametrize("name", ["test_batch", "data_batch_2", "batches.meta"])
@pytest.mark.parametrize("kept", [0, 1, 0.5, 0.97])
def test_a_truncated_file(cifar10, name, kept):
    file = cifar10 / "cifar-10-batches-py" / name
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * kept) if kept != 1 else 1])
    with pytest.raises(DataError, match=rf"{name}.*truncated"):
        load_data(spec(cifar10))


def test_fortran_order_is_kept(cifar10):
    data = np.asfortranarray(pixels(9, 10))
    content = pickle.dumps({"data": data, "labels": list(range(10))}, protocol=2)
    (cifar10 / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    images, _ = load_data(spec(cifar10, mean=(0.0,) * 3, std=(1.0,) * 3)).val.load([4], epoch=None, device=CPU)
    np.testing.assert_allclose(images[0], data[4].reshape(3, 32, 32) / 255, atol=1e-6)
