# JPEG files decoded by the device that uses them; here by the CPU's decoder in its place, against the usual path.

import io
import shutil
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from compress import DataSpec, load_data, load_recipe
from compress.data.base import BatchPlan
from compress.data.decode import check_decoder, decode_jpegs, nvjpeg
from compress.data.workers import ahead
from compress.errors import DataError
from compress.pipeline.run import Run, open_run

CPU = torch.device("cpu")


def smooth(seed, size=None):
    rng = np.random.default_rng(seed)
    size = size or tuple(rng.integers(40, 90, 2).tolist())
    return Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("jpeg")
    for part in ("train", "val"):
        for number, name in enumerate("ab"):
            (root / part / name).mkdir(parents=True)
            for i in range(5):
                size = (60, 700) if i == 4 else None  # a strip, of which only the middle is resized
                image = smooth(10 * number + i, size)
                image.save(root / part / name / f"{i}.jpg", quality=95, subsampling=0, progressive=i == 1)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "images")


def split(root, part="train", **values):
    values = {"name": "folder", "root": str(root), "image_size": 32, "workers": 0, "decode": "gpu", **values}
    return getattr(load_data(DataSpec(**values)), part)


def both(one, **plan):
    plan = BatchPlan(**{"batch_size": 4, **plan})
    return list(one.device_batches(plan, CPU)), list(one.batches(plan))


def pixels(one, images):
    return one.preprocessing.pixels(images).int()


@pytest.mark.parametrize(
    ("epoch", "values"),
    [(None, {}), (3, {}), (3, {"image_size": (24, 40)}), (None, {"image_size": (24, 40), "crop_ratio": 1.0})],
)
def test_pictures_are_those_of_the_usual_path(made, epoch, values):
    one = split(made, **values)
    for (found, targets), (expected, expected_targets) in zip(*both(one, epoch=epoch, first=1), strict=True):
        assert torch.equal(targets, expected_targets)
        apart = (pixels(one, found) - pixels(one, expected)).abs()
        assert apart.max() <= 4
        assert apart.float().mean() < 0.7
    assert one.notes() == []


def test_workers_and_processes_change_nothing(made):
    alone = [images for images, _ in split(made).device_batches(BatchPlan(batch_size=4, epoch=1), CPU)]
    helped = [images for images, _ in split(made, workers=2).device_batches(BatchPlan(batch_size=4, epoch=1), CPU)]
    assert all(torch.equal(one, other) for one, other in zip(alone, helped, strict=True))
    plans = [BatchPlan(batch_size=4, epoch=1, rank=rank, world_size=2) for rank in range(2)]
    first, second = ([images for images, _ in split(made).device_batches(plan, CPU)] for plan in plans)
    torch.testing.assert_close([(whole[::2], whole[1::2]) for whole in alone], list(zip(first, second, strict=True)))


def test_what_the_decoder_does_not_take_is_decoded_as_usual_and_said(root):
    exif = Image.Exif()
    exif[274] = 6
    others = root / "train" / "b"
    smooth(1).save(others / "png.png")
    smooth(2).convert("L").save(others / "grey.jpg")
    smooth(3).convert("CMYK").save(others / "cmyk.jpg")
    smooth(4).save(others / "turned.jpg", exif=exif)
    smooth(5).save(others / "rgb.jpg", keep_rgb=True)
    (others / "tail.jpg").write_bytes((root / "train" / "b" / "0.jpg").read_bytes() + b"more")
    one = split(root)
    names = [file.name for file in one.files]
    given = ("png.png", "grey.jpg", "cmyk.jpg", "turned.jpg", "rgb.jpg", "tail.jpg")
    found, expected = (torch.cat([images for images, _ in batches]) for batches in both(one, batch_size=5))
    assert len(found) == 16
    for name in given:
        assert torch.equal(found[names.index(name)], expected[names.index(name)]), name
    notes = one.notes()
    reasons = ("PNG files", "grey or CMYK", "EXIF data turn", "hold RGB", "without an end")
    assert len(notes) == len(reasons)
    assert all(any(reason in note for note in notes) for reason in reasons)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "tables"])
def test_an_unreadable_file_is_named_or_left_out(root, damage):
    file = root / "train" / "b" / "0.jpg"
    whole = file.read_bytes()
    tables = whole.replace(b"\xff\xdb", b"\xff\xfe")  # quantization tables as comments; the header is whole
    file.write_bytes({"truncated": whole[:-200], "text": b"hello", "empty": b"", "tables": tables}[damage])
    with pytest.raises(DataError, match=r"b.0\.jpg is not a readable image .*on_error: skip"):
        list(split(root).device_batches(BatchPlan(batch_size=4), CPU))
    one = split(root, on_error="skip")
    for (found, targets), (expected, expected_targets) in zip(*both(one), strict=True):
        assert torch.equal(targets, expected_targets)
        assert (pixels(one, found) - pixels(one, expected)).abs().max() <= 4
    assert one.skipped == [str(file)]
    assert any("fails on" in note for note in one.notes()) == (damage == "tables")


def test_the_decoder_of_this_machine_is_tried_once():
    check_decoder(CPU)
    if not torch.cuda.is_available():
        with pytest.raises(DataError, match=r"data\.decode is gpu.*cuda:0.*data\.decode: cpu"):
            check_decoder(torch.device("cuda", 0))


def test_only_folders_are_decoded_by_the_gpu(made):
    with pytest.raises(DataError, match=r"data\.decode is gpu.*data\.name is cifar10"):
        load_data(DataSpec(name="cifar10", root=str(made), decode="gpu"))


def test_a_run_says_once_what_the_cpu_decoded(root):
    smooth(1).save(root / "train" / "b" / "png.png")
    data = load_data(DataSpec(name="folder", root=str(root), image_size=32, workers=0, decode="gpu"))
    list(data.train.device_batches(BatchPlan(batch_size=4), CPU))
    recipe = load_recipe("resnet50")
    run = Run(recipe=recipe, folder=open_run(root / "run", recipe, "ptq", resume=False), data=data)
    run.finish("float")
    run.finish("ptq")
    assert sum("PNG files" in note and "decoded on the CPU" in note for note in run.all_notes()) == 1


def numbered(count, fails_at=None):
    for i in range(count):
        if i == fails_at:
            raise DataError(f"batch {i} cannot be read")
        yield torch.full((2,), float(i)), torch.tensor([i])


def making():
    return [thread for thread in threading.enumerate() if thread.name == "compress-pictures"]


def test_batches_ahead_come_in_order():
    assert [int(targets) for _, targets in ahead(numbered(9), CPU)] == list(range(9))
    assert not making()


def test_an_exception_ahead_is_raised_in_its_place():
    found = []
    with pytest.raises(DataError, match="batch 3 cannot be read"):
        found.extend(int(targets) for _, targets in ahead(numbered(9, fails_at=3), CPU))
    assert not making()


def test_batches_ahead_end_where_nobody_takes_them():
    batches = ahead(numbered(1000), CPU)
    assert int(next(batches)[1]) == 0
    batches.close()
    assert not making()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("epoch", [None, 2])
def test_a_gpu_decodes_what_the_cpu_does(made, epoch):
    plan = BatchPlan(batch_size=4, epoch=epoch)
    one = split(made)
    runs = [list(one.batches(plan, device="cuda")) for _ in range(2)]
    for (found, targets), (again, _), (expected, expected_targets) in zip(*runs, one.batches(plan), strict=True):
        assert torch.equal(found, again)
        assert torch.equal(targets.cpu(), expected_targets)
        assert (pixels(one, found).cpu() - pixels(one, expected)).abs().float().mean() < 1.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_decoders_in_a_gpu_give_what_torchvision_gives():
    device = torch.device("cuda", torch.cuda.current_device())
    files, taken = [], []
    for seed in range(12):
        file = io.BytesIO()
        smooth(seed, (33 + 57 * seed, 40 + 31 * seed)).save(
            file, "JPEG", quality=90, subsampling=seed % 3, progressive=seed == 5
        )
        files.append(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
        taken.append(seed != 5)
    expected = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        found = decode_jpegs(files, device)
        torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    decoder = nvjpeg(device)
    if decoder is not None:
        assert [image is not None for image in decoder.decode(files)] == taken
